"""``--fill-from``: a part of a composite model that was trained alone, under names of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from families_maker import made, results, same_results
from helpers import cli
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

#: Configs of small text models.
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "pad_token_id": 0,
}
OMNI = {
    "text_config": {**TEXT, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
    },
    "audio_config": {
        "d_model": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "output_dim": 32,
        "num_mel_bins": 8,
    },
}


def content(folder: Path) -> Tensors:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def trained_text(kind: str, root: Path) -> Any:
    """Save a composite model, its text model trained alone, and the whole as it then is; return the whole."""
    whole = made(kind)
    whole.config.architectures = [kind]
    whole.save_pretrained(root / "original")
    text = transformers.AutoModelForCausalLM.from_config(whole.config.text_config)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    with torch.no_grad():
        for parameter in text.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    text.save_pretrained(root / "trained")
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(root / "whole")
    return whole


@pytest.fixture
def llava(tmp_path: Path) -> Any:
    return trained_text("LlavaForConditionalGeneration", tmp_path)


def merge(root: Path, *more: object) -> Any:
    given = ("--fill-from", root / "original", *more)
    return cli("merge", root / "trained", root / "out", *given)


def assert_is_whole(root: Path, kind: str, want: list[torch.Tensor]) -> None:
    """The result has the trained tensors and the original's, and computes what the whole computes."""
    got, expected = content(root / "out"), content(root / "whole")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    loaded, report = getattr(transformers, kind).from_pretrained(root / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), report
    assert same_results(loaded, want)


@pytest.mark.parametrize("like", [True, False], ids=["like", "alone"])
def test_a_text_model_is_put_back(like: bool, llava: Any, tmp_path: Path) -> None:
    ran = merge(tmp_path, *(["--like", tmp_path / "original"] if like else []))
    assert ran.code == 0 and ran.having("FS117", severity="note"), ran.out
    assert_is_whole(tmp_path, "LlavaForConditionalGeneration", results(llava.eval()))
    values = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())["values"]
    assert set(values["filled"]["parts"]) == {"vision_tower", "multi_modal_projector"}
    assert values["moved"] == {"": "language_model."}
    assert cli("verify", tmp_path / "out").code == 0


def test_a_text_model_in_a_dcp_is_put_back(llava: Any, tmp_path: Path) -> None:
    state = content(tmp_path / "trained")
    shutil.rmtree(tmp_path / "trained")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "trained", no_dist=True)
    ran = cli(
        "convert", tmp_path / "trained", tmp_path / "out", "--to", "hf", "--fill-from", tmp_path / "original"
    )
    assert ran.code == 0, ran.out
    assert_is_whole(tmp_path, "LlavaForConditionalGeneration", results(llava.eval()))


def trained_thinker(root: Path) -> tuple[Tensors, Tensors]:
    """Save a thinker trained alone, and a model with another one; return its tensors and the talker's."""
    kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    thinker = kind(kind.config_class(**OMNI))
    thinker.save_pretrained(root / "trained")
    trained = content(root / "trained")
    talker = {f"talker.model.layers.0.{n}.weight": torch.randn(8, 8) for n in ("up_proj", "down_proj")}
    before = {f"thinker.{name}": torch.randn_like(tensor) for name, tensor in trained.items()}
    config = {
        "model_type": "qwen2_5_omni",
        "architectures": ["Qwen2_5OmniForConditionalGeneration"],
        "thinker_config": json.loads((root / "trained/config.json").read_text()),
        "talker_config": {"model_type": "qwen2_5_omni_talker", "hidden_size": 8},
    }
    save(root / "original", {**before, **talker}, config)
    return trained, talker


def test_a_thinker_is_put_back(tmp_path: Path) -> None:
    """All its names move below one module, beside which the talker stays as it was."""
    trained, talker = trained_thinker(tmp_path)
    ran = merge(tmp_path, "--like", tmp_path / "original")
    assert ran.code == 0, ran.out
    expected = {f"thinker.{name}": tensor for name, tensor in trained.items()} | talker
    got = content(tmp_path / "out")
    assert got.keys() == expected.keys() and all(torch.equal(got[n], t) for n, t in expected.items())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["model_type"] == "qwen2_5_omni"


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("text_config", "num_attention_heads", 8),
        ("text_config", "rms_norm_eps", 0.3),
        ("text_config", "rope_parameters", {"rope_type": "default", "rope_theta": 123456.0}),
    ],
)
def test_settings_of_the_parts_of_a_part_are_compared(
    part: str, key: str, value: Any, tmp_path: Path
) -> None:
    """A thinker is composite itself: the settings of its text model are one level deeper."""
    trained_thinker(tmp_path)
    file = tmp_path / "trained/config.json"
    config = json.loads(file.read_text())
    config[part][key] = value
    file.write_text(json.dumps(config))
    for like in ((), ("--like", tmp_path / "original")):
        ran = merge(tmp_path, *like)
        (error,) = ran.errors
        assert ran.code == 1 and error["code"] == "FS215" and not (tmp_path / "out").exists(), ran.out
        assert error["message"].startswith(f"thinker_config.{part}.")


@pytest.mark.parametrize("like", [True, False], ids=["like", "alone"])
def test_a_tensor_of_the_part_is_never_taken_from_the_original(
    like: bool, llava: Any, tmp_path: Path
) -> None:
    """Each tensor of the part, left out once."""
    state = content(tmp_path / "trained")
    for name in sorted(state):
        kept = {other: tensor for other, tensor in state.items() if other != name}
        save_file(kept, tmp_path / "trained/model.safetensors", {"format": "pt"})
        ran = merge(tmp_path, *(["--like", tmp_path / "original"] if like else []))
        assert ran.code == 3 and not (tmp_path / "out").exists(), (name, ran.out)
        assert [f["tensor"] for f in ran.having("FS102")] == [f"language_model.{name}"], ran.out


def test_a_tensor_is_taken_on_request(llava: Any, tmp_path: Path) -> None:
    state = content(tmp_path / "trained")
    original = content(tmp_path / "original")
    (place,) = (name for name in original if name.endswith("lm_head.weight"))
    del state["lm_head.weight"]
    save_file(state, tmp_path / "trained/model.safetensors", {"format": "pt"})
    (missing,) = merge(tmp_path).having("FS102", severity="error")
    assert missing["tensor"] == place
    assert merge(tmp_path, "--fill-only", place).code == 0
    assert torch.equal(content(tmp_path / "out")[place], original[place])


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"rope_theta": 123456.0}, "FS215"),
        ({"rms_norm_eps": 0.1}, "FS215"),
        ({"model_type": "mistral"}, "FS515"),
    ],
)
def test_a_part_with_other_settings_is_refused(
    changed: dict[str, Any], code: str, llava: Any, tmp_path: Path
) -> None:
    file = tmp_path / "trained/config.json"
    config = json.loads(file.read_text())
    if "rope_theta" in changed:
        config.pop("rope_parameters", None)
    file.write_text(json.dumps({**config, **changed}))
    ran = merge(tmp_path)
    assert ran.code and ran.having(code, severity="error"), ran.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_a_setting_that_the_part_alone_states_is_told(base: float, tmp_path: Path) -> None:
    """The result has the model's config, which says nothing of it."""
    part = text_names()
    inner = {"model_type": "some_text", "num_attention_heads": 4}
    save(tmp_path / "trained", part, {**inner, "rope_theta": base, "hidden_size": 8, "vocab_size": 8})
    before = {name.replace("model.", "model.text."): torch.randn(8, 8) for name in part}
    others = {"model.visual.proj.weight": torch.randn(8, 8)}
    original = {"model_type": "some", "text_config": inner}
    save(tmp_path / "original", {**before, **others}, original)
    ran = merge(tmp_path)
    (found,) = ran.having("FS215", severity="warning")
    assert ran.code == 0 and found["got"] == f"rope_theta {base}" and "text_config" in found["message"]
    original["text_config"] = {**inner, "rope_theta": base}
    (tmp_path / "original/config.json").write_text(json.dumps(original))
    ran = merge(tmp_path, "--overwrite")
    assert ran.code == 0 and not ran.having("FS215"), ran.out


def test_a_part_that_fits_two_places_is_refused(tmp_path: Path) -> None:
    part = {f"layers.{n}.weight": torch.randn(4, 4) for n in range(2)}
    for folder, tensors, config in (
        ("trained", part, {"model_type": "tower"}),
        (
            "original",
            {f"{side}.{name}": tensor.clone() for side in ("left", "right") for name, tensor in part.items()},
            {"model_type": "pair", "one_config": {"model_type": "tower"}},
        ),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    ran = merge(tmp_path)
    (found,) = ran.having("FS106", severity="error")
    assert ran.code and "'left.'" in found["got"] and "'right.'" in found["got"]


def test_a_part_of_other_shapes_is_refused(llava: Any, tmp_path: Path) -> None:
    state = content(tmp_path / "trained")
    state["model.embed_tokens.weight"] = torch.cat(
        [
            state["model.embed_tokens.weight"],
            torch.ones(8, 32)[:, : state["model.embed_tokens.weight"].shape[1]],
        ]
    )
    save_file(state, tmp_path / "trained/model.safetensors", {"format": "pt"})
    ran = merge(tmp_path)
    assert ran.code and ran.errors and not (tmp_path / "out").exists(), ran.out


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def text_names(layers: int = 2) -> Tensors:
    names = [f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(layers) for p in "qkvo"]
    return {name: torch.randn(8, 8) for name in ["model.embed_tokens.weight", *names, "lm_head.weight"]}


def test_modules_move_to_places_of_their_own(tmp_path: Path) -> None:
    """The head stays, or goes to the only one that the model has."""
    part = text_names()
    for number, (model, head) in enumerate(
        (("model.language_model.", ""), ("thinker.model.text.", "thinker."))
    ):
        root = tmp_path / str(number)
        root.mkdir()
        expected = {
            model + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
            for name, tensor in part.items()
        }
        others = {"model.visual.proj.weight": torch.randn(8, 8)}
        before = {name: torch.randn(8, 8) for name in expected}
        save(root / "trained", part, {"model_type": "some_text"})
        inner = {"text_config": {"model_type": "some_text"}}
        save(root / "original", {**before, **others}, {"model_type": "some", **inner})
        ran = merge(root, "--like", root / "original")
        assert ran.code == 0, ran.out
        got, expected = content(root / "out"), {**expected, **others}
        assert got.keys() == expected.keys() and all(torch.equal(got[n], t) for n, t in expected.items())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_head_of_the_original_is_not_taken(tied: bool, tmp_path: Path) -> None:
    """A part without a head was trained with the model's, or its embedding is the head."""
    part = {name: tensor for name, tensor in text_names().items() if name != "lm_head.weight"}
    before = {name.replace("model.", "model.text."): torch.randn(8, 8) for name in part}
    head = before["model.text.embed_tokens.weight"].clone() if tied else torch.randn(8, 8)
    others = {"model.visual.proj.weight": torch.randn(8, 8), "lm_head.weight": head}
    config = {"model_type": "some", "tie_word_embeddings": tied, "text_config": {"model_type": "some_text"}}
    save(tmp_path / "trained", part, {"model_type": "some_text"})
    save(tmp_path / "original", {**before, **others}, config)
    ran = merge(tmp_path)
    if tied:
        assert ran.code == 0 and "lm_head.weight" not in content(tmp_path / "out"), ran.out
    else:
        assert ran.code == 3 and ran.having("FS102", tensor="lm_head.weight"), ran.out


@pytest.mark.parametrize(
    "file", ["trained/config.json", "original/config.json", "original/model.safetensors"]
)
def test_a_file_that_is_not_there_changes_no_result(file: str, llava: Any, tmp_path: Path) -> None:
    (tmp_path / file).unlink()
    ran = merge(tmp_path)
    if file.startswith("trained"):
        assert ran.code == 0
        assert_is_whole(tmp_path, "LlavaForConditionalGeneration", results(llava.eval()))
    else:
        assert ran.code and ran.errors and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize("model_type", [["llama"], {"of": "llama"}, 3])
def test_a_model_type_that_is_no_text_is_that_of_no_part(
    model_type: object, llava: Any, tmp_path: Path
) -> None:
    path = tmp_path / "original/config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = model_type
    path.write_text(json.dumps(config))
    ran = merge(tmp_path)
    assert ran.code != 0 and not ran.having("FS520") and not (tmp_path / "out").exists(), ran.out
