"""``--fill-from``: parts of which a checkpoint holds nothing, taken from the model that training began
with."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from families_maker import made, results, same_results
from fastshard.expected import transformers_process, transformers_worker
from helpers import cli
from safetensors.torch import load_file, save_file
from test_families_hf import further, saved, tensors

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are made in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def answered(asked: dict[str, Any], *_: object) -> dict[str, Any]:
        of = transformers_worker.loading if "stored" in asked else transformers_worker.listed
        return json.loads(json.dumps(of(asked)))  # type: ignore[no-any-return]

    monkeypatch.setattr(transformers_process, "answer_of", answered)


def deepseek(folder: Path, of: Tensors | None = None) -> Path:
    """A model whose config promises a layer that predicts one more token."""
    at = saved("deepseek", folder, of)
    config = json.loads((at / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (at / "config.json").write_text(json.dumps(config))
    return at


@pytest.fixture
def mtp(tmp_path: Path) -> tuple[Path, Path]:
    """A model without its MTP layer, as transformers saves it after training, and the one that it was."""
    trained = {name: tensor + 1 for name, tensor in tensors("deepseek").items()}
    return deepseek(tmp_path / "trained", trained), deepseek(
        tmp_path / "original", tensors("deepseek") | further("deepseek")
    )


def content(folder: Path) -> Tensors:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("verb", [("merge",), ("convert", "--to", "hf")])
def test_layers_that_predict_tokens_are_taken(
    verb: tuple[str, ...], mtp: tuple[Path, Path], tmp_path: Path
) -> None:
    trained, original = mtp
    assert cli("verify", trained).having("FS116")
    ran = cli(verb[0], trained, tmp_path / "out", *verb[1:], "--fill-from", original, "--fail-on", "warning")
    assert ran.code == 0 and not ran.having("FS116"), ran.out
    got, layer = content(tmp_path / "out"), further("deepseek")
    have = content(original)
    for name in layer:
        assert torch.equal(got[name], have[name]), name
    assert all(torch.equal(got[name], tensor) for name, tensor in content(trained).items())
    assert got.keys() == tensors("deepseek").keys() | layer.keys()
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    ((part, names),) = manifest["values"]["filled"]["parts"].items()
    assert part.startswith("1 MTP layer") and set(names) == layer.keys()
    ids = torch.arange(1, 9)[None]
    logits = []
    for folder in (trained, tmp_path / "out"):
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, experts_implementation="eager"
        )
        # transformers leaves the layer out.
        assert not told["missing_keys"] and not told["mismatched_keys"], told
        logits.append(model(ids).logits)
    assert torch.equal(*logits)
    ran = cli("trace", trained, next(iter(layer)), "--fill-from", original)
    assert ran.code == 0 and "model.safetensors" in ran.out


@pytest.mark.parametrize("kind", ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
@pytest.mark.parametrize("container", ["disk", "dcp"])
def test_a_frozen_tower_is_taken(kind: str, container: str, tmp_path: Path) -> None:
    """Under the names on disk, and, as trainers save it, under those in memory."""
    model = made(kind)
    model.config.architectures = [kind]
    model.save_pretrained(tmp_path / "original")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision" not in name and "visual" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    want = results(model)
    model.save_pretrained(tmp_path / "whole")
    words = ["vision_tower", "visual"]
    trained = tmp_path / "trained"
    if container == "disk":
        trained.mkdir()
        kept = {n: t for n, t in content(tmp_path / "whole").items() if not any(word in n for word in words)}
        save_file(kept, trained / "model.safetensors", {"format": "pt"})
    else:
        kept = {n: t for n, t in model.state_dict().items() if not any(word in n for word in words)}
        dcp.save({"model": kept}, checkpoint_id=trained, no_dist=True)
    shutil.copy(tmp_path / "original/config.json", trained)
    like = ["--like", tmp_path / "original/config.json"]
    assert cli("convert", trained, tmp_path / "out", "--to", "hf", *like).code != 0
    ran = cli("convert", trained, tmp_path / "out", "--to", "hf", *like, "--fill-from", tmp_path / "original")
    assert ran.code == 0 and ran.having("FS117", severity="note"), ran.out
    got, whole = content(tmp_path / "out"), content(tmp_path / "whole")
    assert got.keys() == whole.keys() and all(torch.equal(got[name], whole[name]) for name in whole)
    loaded, told = getattr(transformers, kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), told
    assert same_results(loaded, want)


def test_what_may_have_been_lost_is_not_taken(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    trained, original = mtp
    layer = sorted(further("deepseek"))
    # A part of which something is there, a tensor of the model, and all of a layer.
    for n, left in enumerate(
        (
            lambda name: name in layer[2:],
            lambda name: name == "model.norm.weight",
            lambda name: ".layers.2." in name,
        )
    ):
        whole = content(trained) | further("deepseek")
        base = deepseek(tmp_path / str(n), {k: t for k, t in whole.items() if not left(k)})
        ran = cli("merge", base, tmp_path / "out", "--fill-from", original)
        assert ran.code in (1, 3) and not (tmp_path / "out").exists(), ran.out


def test_a_part_that_an_index_calls_for_is_not_taken(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    """Its file was lost, and what training made of it with it."""
    trained, original = mtp
    names = dict.fromkeys(content(trained), "model.safetensors")
    lost = dict.fromkeys(further("deepseek"), "model-00002.safetensors")
    index = {"metadata": {}, "weight_map": names | lost}
    (trained / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("merge", trained, tmp_path / "out", "--fill-from", original)
    assert ran.code == 3 and ran.having("FS101", severity="error") and not (tmp_path / "out").exists()


def test_single_tensors_are_taken_by_name_alone(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    trained, original = mtp
    lost = [
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.gate.e_score_correction_bias",
    ]
    base = deepseek(tmp_path / "base", {n: t for n, t in content(trained).items() if n not in lost})
    words = ("--fill-from", original, "--fill-only", "*.e_score_correction_bias")
    assert cli("merge", base, tmp_path / "out", "--fill-from", original).code == 3
    ran = cli("merge", base, tmp_path / "out", *words)
    warned = [f["tensor"] for f in ran.findings if f["code"] == "FS117" and f["severity"] == "warning"]
    assert ran.code == 0 and sorted(warned) == lost, ran.out
    got, have = content(tmp_path / "out"), content(original)
    assert all(torch.equal(got[name], have[name]) for name in lost)
    # What the checkpoint holds stays its own.
    assert torch.equal(got["model.norm.weight"], content(trained)["model.norm.weight"])
    assert cli("merge", base, tmp_path / "no", *words, "--fail-on", "warning").code == 1


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--fill-only", "*"), "FS515", 2),
        (("--fill-from", "ORIGINAL", "--fill-only", "nothing.*"), "FS515", 2),
        (("--fill-from", "nowhere"), "FS501", 2),
        (("--fill-from", "OTHER"), "FS514", 2),
        (("--fill-from", "WIDER"), "FS201", 1),
        (("--fill-from", "HALF"), "FS202", 1),
        (("--fill-from", "BROKEN"), "FS312", 1),
        (("--fill-from", "SHARDED"), "FS514", 2),
    ],
)
def test_models_that_do_not_fit_are_refused(
    words: tuple[str, ...], code: str, exit_code: int, mtp: tuple[Path, Path], tmp_path: Path
) -> None:
    trained, original = mtp
    whole = content(original)
    for name, of in {
        "OTHER": {f"other.{name}": tensor for name, tensor in whole.items()},
        "WIDER": {name: t.repeat(2, *[1] * (t.ndim - 1)) for name, t in whole.items()},
        "HALF": {name: tensor.half() for name, tensor in whole.items()},
        "BROKEN": whole,
    }.items():
        at = tmp_path / name
        shutil.copytree(original, at)
        save_file(of, at / "model.safetensors", {"format": "pt"})
    (tmp_path / "BROKEN/model.safetensors").write_bytes((original / "model.safetensors").read_bytes()[:-99])
    assert cli("convert", original, tmp_path / "SHARDED", "--to", "tp-safetensors", "--tp", 2).code == 0
    given = [str(tmp_path / w) if w.isupper() and w != "ORIGINAL" else w for w in words]
    ran = cli("merge", trained, tmp_path / "out", *(str(original) if w == "ORIGINAL" else w for w in given))
    assert ran.code == exit_code and ran.having(code, severity="error"), ran.out
    assert not (tmp_path / "out").exists()


def test_a_model_that_has_no_more_is_said_to_have_none(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    _, original = mtp
    ran = cli("merge", original, tmp_path / "out", "--fill-from", original)
    assert ran.code == 0 and ran.having("FS117", severity="warning"), ran.out


def test_added_tokens_do_not_make_another_model(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    trained, original = mtp
    more = content(trained)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more[name] = torch.cat([more[name], torch.ones(8, more[name].shape[1])])
    base = deepseek(tmp_path / "base", more)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": more["lm_head.weight"].shape[0]}))
    ran = cli("merge", base, tmp_path / "out", "--fill-from", original)
    # The layer that is taken has an embedding of its own, of fewer tokens.
    assert ran.code == 1 and ran.having("FS201"), ran.out


@pytest.mark.parametrize("verb", [("merge",), ("convert", "--to", "hf"), ("split", "--parts", "2")])
def test_a_result_is_not_written_over_the_model_that_it_is_made_of(
    verb: tuple[str, ...], mtp: tuple[Path, Path], tmp_path: Path
) -> None:
    """That one may be a result itself, which --overwrite replaces."""
    trained, original = mtp
    older = tmp_path / "older"
    assert cli("merge", original, older).code == 0
    before = content(older)
    (tmp_path / "link").symlink_to(older)
    for given, out in ((older, older), (tmp_path / "link", older), (older / "model.safetensors", older)):
        ran = cli(verb[0], trained, out, *verb[1:], "--fill-from", given, "--overwrite")
        assert ran.code == 2 and ran.having("FS505", severity="error"), ran.out
        kept = content(older)
        assert kept.keys() == before.keys() and all(torch.equal(kept[n], t) for n, t in before.items())


def test_codes_are_not_taken_into_a_checkpoint_that_is_not_quantised(
    mtp: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its config says nothing of them, and what is written would be read as values."""
    trained, original = mtp
    whole = content(original)
    for name in [n for n in further("deepseek") if n.endswith("_proj.weight")]:
        whole[name] = whole[name].to(torch.float8_e4m3fn)
        whole[f"{name}_scale_inv"] = torch.ones(1, 1)
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (original / "config.json").write_text(json.dumps(config))
    save_file(whole, original / "model.safetensors", {"format": "pt"})
    ran = cli("merge", trained, tmp_path / "out", "--fill-from", original)
    assert ran.code == 1 and ran.having("FS202", severity="error"), ran.out
    assert not (tmp_path / "out").exists()


def test_parts_are_made_from_another_folder(
    mtp: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = cli("split", "trained", "out", "--parts", 2, "--fill-from", "original")
    (run,) = set(re.findall(r"--run (\w+)", begun.out))
    monkeypatch.chdir("/")
    for part in range(2):
        assert cli("make-part", part, tmp_path / "out", "--run", run).code == 0
    assert cli("commit", tmp_path / "out", "--run", run).code == 0
    assert content(tmp_path / "out").keys() == tensors("deepseek").keys() | further("deepseek").keys()


@pytest.mark.parametrize("renamed", [False, True], ids=["of_the_same_names", "of_other_names"])
def test_files_of_the_model_are_not_those_of_the_manifest(
    renamed: bool, mtp: tuple[Path, Path], tmp_path: Path
) -> None:
    """The manifest of a checkpoint says nothing of the files that parts are taken from."""
    trained, original = mtp
    assert cli("merge", trained, tmp_path / "published").code == 0
    if renamed:
        index = {
            "metadata": {},
            "weight_map": dict.fromkeys(content(original), "model-00001-of-00001.safetensors"),
        }
        (original / "model.safetensors").rename(original / "model-00001-of-00001.safetensors")
        (original / "model.safetensors.index.json").write_text(json.dumps(index))
    ran = cli("merge", tmp_path / "published", tmp_path / "out", "--fill-from", original)
    assert ran.code == 0, ran.out
    assert content(tmp_path / "out").keys() == content(original).keys()
    file = next((tmp_path / "published").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    ran = cli("merge", tmp_path / "published", tmp_path / "bad", "--fill-from", original)
    assert ran.code == 1 and ran.having("FS308") and not (tmp_path / "bad").exists(), ran.out


def test_what_is_taken_is_what_the_manifest_of_the_model_says(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    """A tensor that is taken has the hash that it was published with; others of the model are not read."""
    trained, original = mtp
    base = tmp_path / "base"
    assert cli("merge", original, base, "--transformers", "off").code == 0
    (file,) = base.glob("*.safetensors")
    good = file.read_bytes()
    size = int.from_bytes(good[:8], "little")
    header = {n: at for n, at in json.loads(good[8 : 8 + size]).items() if n != "__metadata__"}
    places = {name: 8 + size + at["data_offsets"][0] for name, at in header.items()}
    for number, (name, code) in enumerate(
        {
            "model.layers.4.eh_proj.weight": 1,
            # It is the checkpoint's own.
            "model.layers.1.self_attn.o_proj.weight": 0,
        }.items()
    ):
        at = places[name]
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        ran = cli("merge", trained, tmp_path / f"out{number}", "--fill-from", base)
        assert ran.code == code, ran.out
        if code:
            (finding,) = ran.errors
            assert finding["code"] == "FS308" and finding["tensor"] == name
            assert finding["message"].startswith(f"the model {base} (--fill-from): content differs")
            assert not (tmp_path / f"out{number}").exists()


def test_another_file_of_the_model_may_have_changed(mtp: tuple[Path, Path], tmp_path: Path) -> None:
    """Nothing is taken from it."""
    trained, original = mtp
    base = tmp_path / "base"
    size = "40KB"
    assert cli("merge", original, base, "--transformers", "off", "--max-shard-size", size).code == 0
    taken = {
        file
        for name, file in json.loads((base / "model.safetensors.index.json").read_text())[
            "weight_map"
        ].items()
        if ".layers.4." in name
    }
    other = next(file for file in sorted(base.glob("*.safetensors")) if file.name not in taken)
    tensors = load_file(other)
    save_file(tensors, other, {"format": "pt", "note": "saved again"})
    assert cli("merge", trained, tmp_path / "out", "--fill-from", base).code == 0
    changed = base / min(taken)
    save_file({name: tensor + 1 for name, tensor in load_file(changed).items()}, changed, {"format": "pt"})
    ran = cli("merge", trained, tmp_path / "bad", "--fill-from", base)
    assert ran.code == 1 and ran.having("FS308"), ran.out
