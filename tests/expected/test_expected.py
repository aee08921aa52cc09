"""``fastshard expected``: the tensors that a config promises, by the transformers that is installed; and
``--like`` such a list."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from fastshard.checkpoint.promised import beside_list
from fastshard.common.errors import Finding
from fastshard.expected import expected_list, from_transformers, transformers_process, transformers_worker
from helpers import cli
from holding import HANG
from safetensors.torch import load_file, save_file

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
MODELS = {
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "llava": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**SIZES),
            vision_config=transformers.CLIPVisionConfig(**VISION),
        )
    ),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/fastshard/expected"


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(4)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    return folder


def in_process(config: dict[str, Any]) -> fastshard.ExpectedTensors:
    """The worker's list, without a process of its own: an import of torch takes seconds."""
    told = transformers_worker.listed(
        {"config": from_transformers.cleaned(config), "class": config["architectures"][0]}
    )
    return expected_list.from_document(expected_list.document_of(told), "memory")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lists are made in this process; what was asked of it."""
    asked: list[dict[str, Any]] = []

    def told(question: dict[str, Any], *_: object) -> dict[str, Any]:
        if "stored" in question:
            return transformers_worker.loading(question)
        asked.append(question)
        return json.loads(json.dumps(transformers_worker.listed(question)))  # type: ignore[no-any-return]

    monkeypatch.setattr(transformers_process, "answer_of", told)
    return asked


# --- what is listed


@pytest.mark.parametrize("name", MODELS)
def test_a_list_is_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    listed = in_process(config)
    files = load_file(folder / "model.safetensors")
    assert {t.name: (t.dtype, t.shape) for t in listed} == {
        name: ("F32", tuple(tensor.shape)) for name, tensor in files.items()
    }
    assert listed.parameters == sum(tensor.numel() for tensor in files.values())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder)
    memory = {t.name: t.shape for t in listed.in_memory}
    assert memory == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # Each name on disk has its own in memory.
    reached = {disk for name in memory for disk in listed.mapping.get(name, (name,))}
    assert files.keys() <= reached


def test_a_list_is_made_in_a_process_of_its_own_and_kept(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("phi", tmp_path / "phi")
    ran = cli("expected", folder)
    want = in_process(json.loads((folder / "config.json").read_text()))
    assert ran.code == 0 and json.loads(ran.out)["tensors"] == want.to_document()["tensors"], ran.out
    (kept,) = own_cache.iterdir()
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700 and stat.S_IMODE(kept.stat().st_mode) == 0o600
    monkeypatch.setattr(transformers_process.subprocess, "Popen", lambda *_, **__: pytest.fail("made again"))
    assert fastshard.expected_tensors(folder / "config.json") == want
    done = cli("expected", folder, "-o", tmp_path / "list.json")
    assert done.code == 0 and json.loads((tmp_path / "list.json").read_text()) == want.to_document()
    assert "PhiForCausalLM" in repr(want) and len(want) == len(list(want))


# --- what it may not do

PLANTED = 'from pathlib import Path\nPath(r"{mark}").write_text("executed")\n'


def test_nothing_of_the_checkpoint_or_the_working_directory_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's code, a hub's kernel, and modules that would stand before the installed ones."""
    folder = saved("phi", tmp_path / "phi")
    mark = tmp_path / "mark"
    for name in (
        "torch",
        "transformers",
        "sitecustomize",
        "usercustomize",
        "kernels",
        "modeling_phi",
        "json",
        "numpy",
    ):
        (folder / f"{name}.py").write_text(PLANTED.format(mark=mark))
    packages = tmp_path / "packages"
    (packages / "kernels").mkdir(parents=True)
    (packages / "kernels/__init__.py").write_text(PLANTED.format(mark=mark))
    (packages / "sitecustomize.py").write_text(PLANTED.format(mark=mark))
    config = json.loads((folder / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": "modeling_phi.Config", "AutoModelForCausalLM": "modeling_phi.Model"},
        "attn_implementation": "kernels-community/flash-attn",
        "_attn_implementation": "kernels-community/flash-attn",
        "use_kernels": True,
        "custom_generate": "somebody/theirs",
        "_name_or_path": "somebody/theirs",
        "quantization_config": {"quant_method": "fp8"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{packages}")
    monkeypatch.setenv("PYTHONSTARTUP", str(folder / "torch.py"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])
    listed = fastshard.expected_tensors(folder, cache=False)
    assert len(listed) == len(load_file(folder / "model.safetensors")) and not mark.exists()


def test_what_shapes_a_model_is_left_of_its_config() -> None:
    part = {"hidden_size": 8, "attn_implementation": "a/b", "auto_map": {}, "_attn_implementation": "a/b"}
    config = {"model_type": "x", "text_config": part, "list": [part], "kernel_size": 3, "use_kernels": True}
    limit = {"limit": [0.0, {"__float__": "Infinity"}]}
    assert from_transformers.cleaned(config | limit) == {
        "model_type": "x",
        "text_config": {"hidden_size": 8},
        "list": [{"hidden_size": 8}],
        "kernel_size": 3,
        **limit,
    }
    assert transformers_worker.decoded(limit) == {"limit": [0.0, float("inf")]}


def test_the_worker_has_no_secrets_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_TOKEN",
        "MY_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "PYTHONPATH",
        "HF_ENDPOINT",
        "LD_PRELOAD",
    ):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    given = transformers_process._environment("/home")
    assert not [name for name, value in given.items() if value == "x"]
    assert given["HF_HUB_OFFLINE"] == "1" and given["LD_LIBRARY_PATH"] == "/somewhere"
    with pytest.raises(PermissionError, match="network"):
        transformers_worker.refuse_network("socket.connect", (None, ("1.2.3.4", 80)))


# --- bad input


def refused(config: dict[str, Any], folder: Path, **limits: Any) -> fastshard.Finding:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.expected_tensors(folder, **limits)
    (finding,) = caught.value.findings
    assert finding.help and caught.value.exit_code in (1, 2)
    return finding


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "nobody_knows"}, "does not know this model: model_type 'nobody_knows'"),
        ({"model_type": "llama", "architectures": ["Theirs"], "auto_map": {}}, "and fastshard never runs it"),
        ({"architectures": ["LlamaForCausalLM"]}, "has no model_type"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "cannot build this model"),
    ],
)
def test_a_config_that_cannot_be_built(
    config: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(question: dict[str, Any], *_: object) -> dict[str, Any]:
        where = {name: tmp_path / f"{name}.json" for name in ("asked", "answer")}
        where["asked"].write_text(json.dumps(question | {"path": [], "memory": -1, "processor_seconds": 0}))
        transformers_worker.main(*map(str, where.values()))
        return json.loads(where["answer"].read_text())  # type: ignore[no-any-return]

    # The audit hook would stay in this process.
    monkeypatch.setattr(transformers_worker.sys, "addaudithook", lambda hook: None)
    monkeypatch.setattr(transformers_process, "answer_of", answer)
    finding = refused(config, tmp_path / "ckpt")
    assert finding.code == "FS514" and told in str(finding), str(finding)


def test_a_worker_that_takes_too_long_or_too_much_is_ended(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert "it takes longer than 0.1 s" in str(refused(config, tmp_path / "a", timeout=0.01))
    # An import of torch takes more than a second of a processor.
    assert "it takes more than 1 s of CPU time" in str(refused(config, tmp_path / "a", timeout=1))
    assert refused(config, tmp_path / "a", memory=32 << 20).code == "FS514"
    assert fastshard.expected_tensors(tmp_path / "a", timeout=float("inf")).tensors


def test_files_that_are_no_config(tmp_path: Path) -> None:
    for text, code in (("{", "FS211"), ("[]", "FS211"), ('{"a": 1}', "FS211")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(fastshard.FastshardError) as caught:
            fastshard.expected_tensors(tmp_path)
        assert caught.value.findings[0].code == code
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.expected_tensors(tmp_path / "nothing")
    assert caught.value.findings[0].code == "FS501"


def test_without_transformers_it_is_said_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    finding = refused({"model_type": "llama"}, tmp_path / "a")
    assert (
        finding.code == "FS514" and "not installed" in str(finding) and "pip install" in str(finding.advice)
    )


# --- the cache


@pytest.fixture
def listed_once(tmp_path: Path, own_cache: Path, quick: list[dict[str, Any]]) -> Iterator[Path]:
    folder = saved("phi", tmp_path / "phi")
    fastshard.expected_tensors(folder)
    assert len(quick) == 1
    fastshard.expected_tensors(folder)
    assert len(quick) == 1
    yield folder
    fastshard.expected_tensors(folder)
    assert len(quick) == 2


def test_a_damaged_list_is_made_again(listed_once: Path, own_cache: Path) -> None:
    (kept,) = own_cache.iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"[120,32]", b"[120,31]"))


def test_a_list_in_a_folder_that_others_can_write_to_is_not_read(listed_once: Path, own_cache: Path) -> None:
    own_cache.chmod(0o777)


def test_a_list_that_is_a_link_is_not_followed(listed_once: Path, own_cache: Path, tmp_path: Path) -> None:
    (kept,) = own_cache.iterdir()
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")


def test_another_config_has_a_list_of_its_own(listed_once: Path) -> None:
    config = json.loads((listed_once / "config.json").read_text())
    (listed_once / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


def test_a_development_version_is_not_kept(
    tmp_path: Path, quick: list[dict[str, Any]], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("phi", tmp_path / "phi")
    monkeypatch.setattr(from_transformers, "installed_version", lambda file: "6.0.0.dev0")
    for _ in range(2):
        fastshard.expected_tensors(folder)
    assert len(quick) == 2 and not own_cache.exists()


# --- a checkpoint against a list


@pytest.fixture
def olmoe(tmp_path: Path, quick: list[dict[str, Any]]) -> tuple[Path, Path]:
    folder = saved("olmoe", tmp_path / "olmoe")
    assert cli("expected", folder, "-o", tmp_path / "list.json").code == 0
    return folder, tmp_path / "list.json"


def damaged(folder: Path, **changed: Any) -> None:
    """Replaces tensors; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changed
    save_file(
        {n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"}
    )


UP = "model.layers.1.mlp.experts.2.up_proj.weight"


DAMAGES = [
    ({UP: None}, "FS102"),
    ({UP: torch.ones(24, 32)}, "FS208"),
    ({UP: torch.randn(32, 48)}, "FS201"),
    ({"model.norm.weight": None}, "FS102"),
    ({f"model.layers.2.mlp.experts.3.{part}_proj.weight": None for part in ("up", "gate", "down")}, "FS102"),
]


@pytest.mark.parametrize(
    ("change", "code"), [*DAMAGES, ({"model.of_another.weight": torch.ones(3)}, "FS207")]
)
@pytest.mark.parametrize("by", ["list", "config"])
def test_damages_are_found_by_name(
    by: str, change: dict[str, Any], code: str, olmoe: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, document = olmoe
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    like = document if by == "list" else tmp_path / "config.json"
    assert cli("verify", folder, "--like", like).code == 0
    damaged(folder, **change)
    ran = cli("verify", folder, "--like", like)
    assert ran.code in (1, 3) and ran.having(code, severity="error", tensor=next(iter(change))), ran.out
    out = cli("merge", folder, tmp_path / "out", "--like", like)
    assert out.code in (1, 3) and not (tmp_path / "out").exists()


def test_tied_tensors_and_what_a_class_accepts_are_no_finding(olmoe: tuple[Path, Path]) -> None:
    folder, document = olmoe
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    damaged(folder, **{"lm_head.weight": embedding.clone()})
    assert cli("verify", folder, "--like", document).code == 0
    content = json.loads(document.read_text())
    document.write_text(json.dumps(content | {"may_be_unexpected": [r"of_another\.", "(", "x" * 9]}))
    damaged(folder, **{"model.of_another.weight": torch.ones(3)})
    assert cli("verify", folder, "--like", document).code == 0


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "fastshard.expected.v9"},
        {"tensors": None},
        {"tensors": [["a", "F99", [1]]]},
        {"tensors": [["a", "F32", [-1]]]},
        {"tensors": [["a", "F32", [1]], ["a", "F32", [1]]]},
        {"ties": [[1]]},
        {"made": []},
        {"class": 3},
    ],
)
def test_a_list_that_is_none(change: dict[str, Any], olmoe: tuple[Path, Path]) -> None:
    folder, document = olmoe
    document.write_text(json.dumps(json.loads(document.read_text()) | change))
    ran = cli("verify", folder, "--like", document)
    assert ran.code in (1, 2) and ran.having("FS211", severity="error"), ran.out


def test_a_quantised_model_or_one_of_no_class_is_not_judged_by_its_config(
    olmoe: tuple[Path, Path], tmp_path: Path
) -> None:
    """Scales would be unexpected; a head may belong to the model or not."""
    folder, document = olmoe
    config = json.loads((folder / "config.json").read_text())
    for changed in (
        config | {"quantization_config": {"quant_method": "fp8"}},
        config | {"architectures": None},
    ):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        ran = cli("verify", folder, "--like", tmp_path / "config.json")
        assert ran.code == 2 and ran.having("FS514", severity="error"), ran.out
    document.unlink()
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert cli("expected", tmp_path, "-o", document).code == 0
    assert cli("verify", folder, "--like", document).having("FS514", severity="error")


def test_a_list_is_written_over_a_list_and_nothing_else(olmoe: tuple[Path, Path], tmp_path: Path) -> None:
    folder, document = olmoe
    assert cli("expected", folder, "-o", document).code == 0
    for name in ("config.json", "model.safetensors"):
        before = (folder / name).read_bytes()
        ran = cli("expected", folder, "-o", folder / name)
        assert ran.code == 2 and ran.having("FS504") and (folder / name).read_bytes() == before
    assert cli("expected", folder, "-o", tmp_path / "no/such/folder").having("FS507")


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_limit_that_is_none(value: str, olmoe: tuple[Path, Path]) -> None:
    assert cli("expected", olmoe[0], "--timeout", value).having("FS515")


# --- without being asked


@pytest.fixture
def auto(
    tmp_path: Path, quick: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[dict[str, Any]]]:
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    return saved("olmoe", tmp_path / "olmoe"), quick


CALLED = f"OlmoeForCausalLM of transformers {transformers.__version__}"


@pytest.mark.parametrize(("change", "code"), DAMAGES)
def test_what_the_config_promises_is_looked_for_by_itself(
    change: dict[str, Any], code: str, auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, asked = auto
    good = cli("verify", folder)
    assert good.code == 0 and good.doc["checked"]["by"].startswith(CALLED), good.out
    assert cli("merge", folder, tmp_path / "good").code == 0
    values = json.loads((tmp_path / "good/fastshard.manifest.json").read_text())["values"]
    assert values["expected_tensors"].startswith(CALLED) and len(asked) == 1
    damaged(folder, **change)
    for verb in (
        ("verify", folder),
        ("merge", folder, tmp_path / "out"),
        ("convert", folder, tmp_path / "out", "--to", "hf"),
    ):
        ran = cli(*verb)
        assert ran.code in (1, 3) and ran.having(code, severity="error", tensor=next(iter(change))), ran.out
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", [False, True])
def test_of_several_ranks_one_asks_and_what_it_finds_stops_all(
    broken: bool, auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, asked = auto
    if broken:
        damaged(folder, **{UP: None})

    def run(rank: int) -> list[str]:
        try:
            fastshard.merge(folder, tmp_path / "out", rank=rank, world=2, timeout=HANG)
        except fastshard.FastshardError as error:
            return [f.code for f in error.findings]
        return []

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, range(2)))
    assert len(asked) == 1 and (tmp_path / "out").exists() is not broken
    assert all(map(bool, ended)) is broken and ("FS102" in ended[0]) is broken, ended


@pytest.mark.parametrize("by", ["environment", "option"])
def test_it_is_turned_off(
    by: str, auto: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = auto
    if by == "environment":
        monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    damaged(folder, **{UP: None})
    assert (
        cli("verify", folder, *(["--transformers", "off"] if by == "option" else [])).code == 0 and not asked
    )


def test_who_only_looks_asks_nobody(auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, asked = auto
    assert cli("inspect", folder).code == cli("ls", folder).code == 0 and not asked
    assert len(fastshard.open(folder)) == 65 and not asked
    # A table of fastshard's own says more.
    assert cli("verify", saved("mixtral", tmp_path / "mixtral")).code == 0 and not asked


def test_the_plan_follows_the_list_that_is_given_and_none_that_is_installed(
    auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """What is written, and which run goes on, never depends on what happens to be installed."""
    folder, _ = auto
    digests = {cli("plan", folder, "--transformers", how).doc["digest"] for how in ("auto", "off")}
    assert len(digests) == 1
    assert cli("expected", folder, "-o", tmp_path / "list.json").code == 0
    document = json.loads((tmp_path / "list.json").read_text())
    (tmp_path / "later.json").write_text(json.dumps(document | {"transformers": "99.0"}))
    given = {
        cli("plan", folder, "--like", tmp_path / name).doc["digest"] for name in ("list.json", "later.json")
    }
    assert len(given | digests) == 3
    assert fastshard.plan(folder, like=tmp_path / "list.json").to_dict()["expected"].startswith(CALLED)


def test_where_layers_and_list_disagree_a_warning_names_both() -> None:
    """A model whose layers are not alike, as its class has them."""
    seen = [
        Finding.of("FS103", "layer 1 lacks what the others have", severity="error", tensor="model.layers.1.a")
    ]
    by_list = [Finding.of("FS109", "checked", severity="note", evidence=f"{CALLED} (65 tensors)")]
    (found,) = beside_list(seen, by_list)
    assert (
        found.severity == "warning"
        and CALLED in found.message
        and "the checkpoint's other layers" in found.message
    )
    assert beside_list(seen, []) == seen


def test_an_unexpected_tensor_is_a_note(auto: tuple[Path, list[dict[str, Any]]]) -> None:
    damaged(auto[0], **{"model.of_another.weight": torch.ones(3)})
    ran = cli("verify", auto[0])
    assert ran.code == 0 and ran.having("FS207", severity="note", tensor="model.of_another.weight"), ran.out


@pytest.mark.parametrize("told", ["unknown", "limit", "import"])
def test_a_list_that_cannot_be_made_changes_no_exit_code(
    told: str, auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_process, "answer_of", lambda *_: {"error": "it fell over", "kind": told})
    for verb in (("verify", auto[0]), ("merge", auto[0], tmp_path / "out")):
        ran = cli(*verb)
        assert ran.code == 0 and "it fell over" in ran.out, ran.out


def test_names_in_memory_are_compared_with_those_in_memory(
    auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """A trainer saves the state of a model of transformers 5, whose experts are one tensor."""
    state = transformers.AutoModelForCausalLM.from_pretrained(auto[0]).state_dict()
    for name, left_out in (("good", ""), ("bad", "model.layers.1.mlp.experts.down_proj")):
        at = tmp_path / name
        dcp.save({"model": {n: t for n, t in state.items() if n != left_out}}, checkpoint_id=at, no_dist=True)
        shutil.copy(auto[0] / "config.json", at)
        ran = cli("verify", at)
        assert ran.code == (3 if left_out else 0), ran.out
        assert bool(ran.having("FS102", severity="error", tensor=left_out)) == bool(left_out)


def test_names_that_the_class_does_not_load_are_an_error(
    auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """A config beside tensors under names that the class has not: of a research codebase, say."""
    tensors = load_file(auto[0] / "model.safetensors")
    renamed = {
        name.replace("self_attn", "mixer").replace("mlp", "ffn").replace("model.", "net."): t
        for name, t in tensors.items()
    }
    save_file(renamed, auto[0] / "model.safetensors", {"format": "pt"})
    ran = cli("verify", auto[0])
    assert ran.code == 1 and [f["code"] for f in ran.errors] == ["FS119"], ran.out


def test_spellings_of_earlier_versions_are_no_loss(
    quick: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT's norms were `gamma` and `beta`, GPT-2 was published without its prefix and with its masks: both
    load."""
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    bert = saved("bert", tmp_path / "bert")
    tensors = load_file(bert / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in tensors.items()
    }
    assert old.keys() != tensors.keys()
    save_file(old, bert / "model.safetensors", {"format": "pt"})
    ran = cli("verify", bert)
    assert ran.code == 0 and ran.doc["checked"]["by"].startswith("BertForMaskedLM"), ran.out
    lost = next(name for name in sorted(old) if name.endswith("intermediate.dense.weight"))
    damaged(bert, **{lost: None})
    assert cli("verify", bert).having("FS102", severity="error", tensor=lost)
    config = transformers.GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=24)
    torch.manual_seed(4)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "gpt2")
    bare = {
        n.removeprefix("transformer."): t for n, t in load_file(tmp_path / "gpt2/model.safetensors").items()
    }
    bare |= {f"h.{n}.attn.bias": torch.ones(24, 24).tril().view(1, 1, 24, 24).clone() for n in range(2)}
    save_file(bare, tmp_path / "gpt2/model.safetensors", {"format": "pt"})
    ran = cli("verify", tmp_path / "gpt2")
    assert ran.code == 0 and ran.doc["checked"]["by"].startswith("GPT2LMHeadModel"), ran.out


def names_of(folder: Path) -> list[str]:
    return sorted(load_file(folder / "model.safetensors"))


VL = {
    "text_config": SIZES
    | {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("spelling", ["on disk", "in memory"])
def test_losses_are_found_where_no_name_is_the_same_on_disk_and_in_memory(
    spelling: str, count: int, quick: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of pictures has another prefix in memory: the spelling that does not fit has one finding, the
    other one several."""
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    torch.manual_seed(4)
    model = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(**VL))
    folder = tmp_path / "model"
    if spelling == "on disk":
        model.save_pretrained(folder)
        names = [n for n in names_of(folder) if "layers.1." in n][:count]
        assert cli("verify", folder).code == 0
        damaged(folder, **dict.fromkeys(names))
    else:
        state = model.state_dict()
        names = [n for n in sorted(state) if "language_model.layers.1." in n][:count]
        dcp.save(
            {"model": {n: t for n, t in state.items() if n not in names}}, checkpoint_id=folder, no_dist=True
        )
        model.config.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]}))
    ran = cli("verify", folder)
    assert ran.code == 3 and ran.having("FS102", severity="error"), ran.out


@pytest.mark.parametrize("report", [None, from_transformers.LoadReport((UP,), "model")])
def test_a_loss_is_an_error_whether_a_load_can_be_asked_or_not(
    report: from_transformers.LoadReport | None,
    auto: tuple[Path, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else is there that an earlier version could have called otherwise."""
    monkeypatch.setattr(from_transformers, "try_load", lambda *_: report)
    damaged(auto[0], **{UP: None})
    assert cli("verify", auto[0]).having("FS102", severity="error", tensor=UP)
    # What is there besides has another shape.
    damaged(auto[0], **{"model.of_another.weight": torch.ones(3)})
    ran = cli("verify", auto[0])
    assert ran.code == 3 and ran.having("FS102", severity="error", tensor=UP), ran.out


@pytest.mark.parametrize("named", ["OlmoeForCausalLM", {"a": "b"}, [3], []])
def test_a_class_that_no_list_names_is_not_asked_for(
    named: object, auto: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, asked = auto
    config = json.loads((folder / "config.json").read_text()) | {"architectures": named}
    (folder / "config.json").write_text(json.dumps(config))
    assert cli("verify", folder).code == 0 and not asked


def test_good_checkpoints_of_other_kinds_are_not_refused(
    auto: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = auto
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())

    def dcp_of(name: str, state: dict[str, Any]) -> Path:
        dcp.save({"model": state}, checkpoint_id=tmp_path / name, no_dist=True)
        shutil.copy(folder / "config.json", tmp_path / name)
        return tmp_path / name

    # Two copies of a model.
    both = {f"{copy}.{n}": t for copy in ("student", "teacher") for n, t in tensors.items()}
    # A model that an adapter is being trained on.
    peft = {f"base_model.model.{n.replace('q_proj.', 'q_proj.base_layer.')}": t for n, t in tensors.items()}
    # What was trained of a model whose embedding and first layers were frozen.
    part = {n: t for n, t in tensors.items() if n.startswith(("model.layers.2.", "model.norm."))}
    for name, state in {"both": both, "peft": peft, "part": part}.items():
        ran = cli("verify", dcp_of(name, state))
        assert ran.code == 0, (name, ran.out)
    # Some of a trained layer is an error all the same.
    part.pop("model.layers.2.self_attn.q_proj.weight")
    assert cli("verify", dcp_of("lost", part)).having("FS102", severity="error")
    # A model of its own code, whose class is called as one of transformers.
    own = {n.replace("self_attn.q_proj", "self_attn.Wq"): t for n, t in tensors.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    )
    assert cli("verify", folder).code == 0


@pytest.mark.parametrize("failing", ["folder", "interpreter"])
def test_where_no_process_can_be_started_all_goes_on(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    folder = saved("olmoe", tmp_path / "olmoe")
    if failing == "folder":
        monkeypatch.setattr(transformers_process.tempfile, "gettempdir", lambda: str(Path.cwd()))
    else:
        monkeypatch.setattr(sys, "executable", "")
    ran = cli("verify", folder)
    assert ran.code == 0 and ran.doc["checked"]["ending"] == "partly_checked", ran.out


def test_the_worker_refuses_the_network_before_it_imports_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[object] = []
    monkeypatch.setattr(transformers_worker.sys, "addaudithook", hooks.append)
    with pytest.raises(FileNotFoundError):
        transformers_worker.main(str(tmp_path / "nothing"), str(tmp_path / "answer"))
    assert hooks == [transformers_worker.refuse_network]
