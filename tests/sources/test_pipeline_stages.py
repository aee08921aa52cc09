"""A model in pipeline stages, each with a state dict of its own in one DCP checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from helpers import cli
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
LAYERS = 4
CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def divide(state: Tensors, count: int) -> list[Tensors]:
    """The state dicts of stages with the same number of layers; the first has the embedding."""
    stages: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in state.items():
        parts = name.split(".")
        layer = int(parts[2]) if "layers" in parts else 0 if "embed_tokens" in name else LAYERS - 1
        stages[layer * count // LAYERS][name] = tensor
    return stages


def save(folder: Path, content: dict[str, Any], llama: Any) -> Path:
    dcp.save(content, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(llama.config.to_json_string(use_diff=False))
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FORMS = {
    "list": lambda stages: {"model": stages, "step": torch.tensor(7)},
    "dict": lambda stages: {"model": {f"stage_{n}": stage for n, stage in enumerate(stages)}},
    "top": lambda stages: {f"part{n}": stage for n, stage in enumerate(stages)},
    "numbers": lambda stages: {str(n): stage for n, stage in enumerate(stages)},
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_stages_are_one_model(form: str, count: int, llama: Any, tmp_path: Path) -> None:
    ckpt = save(tmp_path / "ckpt", FORMS[form](divide(llama.state_dict(), count)), llama)
    assert cli("verify", ckpt).code == 0
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf")
    assert ran.code == 0 and ran.having("FS212", severity="note"), ran.out
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), report
    ids = torch.arange(1, 9)[None]
    assert torch.equal(loaded(ids).logits, llama(ids).logits)
    ran = cli("merge", ckpt, tmp_path / "merged")
    assert ran.code == 0, ran.out
    merged = load_file(tmp_path / "merged/model.safetensors")
    # The config names the class, so the result has the class's names.
    assert {name: tensor for name, tensor in merged.items() if name != "step"}.keys() == load_file(
        tmp_path / "out/model.safetensors"
    ).keys()


def test_without_a_config_a_merge_leaves_out_the_stage(llama: Any, tmp_path: Path) -> None:
    state = llama.state_dict()
    ckpt = save(tmp_path / "ckpt", FORMS["list"](divide(state, 2)), llama)
    (ckpt / "config.json").unlink()
    assert cli("merge", ckpt, tmp_path / "out").code == 0
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == {f"model.{name}" for name in state} | {"step"}
    assert all(torch.equal(got[f"model.{name}"], tensor) for name, tensor in state.items())


def test_a_stage_may_be_chosen(llama: Any, tmp_path: Path) -> None:
    stages = divide(llama.state_dict(), 2)
    ckpt = save(tmp_path / "ckpt", FORMS["list"](stages), llama)
    (ckpt / "config.json").unlink()
    assert cli("merge", ckpt, tmp_path / "out", "--prefix", "model.1").code == 0
    assert load_file(tmp_path / "out/model.safetensors").keys() == stages[1].keys()


def test_layers_that_no_stage_has_are_missing(llama: Any, tmp_path: Path) -> None:
    stages = divide(llama.state_dict(), 4)
    ckpt = save(tmp_path / "ckpt", {"model": [*stages[:2], stages[3]]}, llama)
    for command in (("verify", ckpt), ("convert", ckpt, tmp_path / "out", "--to", "hf")):
        ran = cli(*command)
        assert ran.code == 3 and ran.having("FS103", severity="error"), ran.out
    assert not (tmp_path / "out").exists()


def linear(*names: str) -> Tensors:
    return {f"{name}.weight": torch.randn(4, 4) for name in names}


APART: dict[str, dict[str, Any]] = {
    "generator and discriminator": {"generator": linear("up.0", "up.1"), "discriminator": linear("down.0")},
    "vae and unet": {"vae": linear("encoder.0", "encoder.1"), "unet": linear("blocks.0", "blocks.1")},
    "actor and critic": {"actor": linear("layers.0", "layers.1"), "critic": linear("layers.0", "head")},
    "a model and its average": {"model": linear("layers.0"), "ema": linear("layers.0")},
    "stages that count their own layers": {
        "model": [linear("layers.0", "embed"), linear("layers.0", "head")]
    },
    "items of a nested module": {"net": {"0": {"weight": torch.ones(4)}, "1": {"scale": torch.ones(4)}}},
    "a gap between layers": {"model": {"a": linear("layers.0"), "b": linear("layers.2")}},
}


@pytest.mark.parametrize("kind", APART)
def test_what_is_no_stage_keeps_its_container(kind: str, tmp_path: Path) -> None:
    content = APART[kind]
    dcp.save(content, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    got = load_file(tmp_path / "out/model.safetensors")
    expected: Tensors = {}
    for key, value in content.items():
        parts = enumerate(value) if isinstance(value, list) else value.items()
        for inner, tensors in parts:
            if isinstance(tensors, dict):
                expected |= {f"{key}.{inner}.{name}": tensor for name, tensor in tensors.items()}
            else:
                expected[f"{key}.{inner}"] = tensors
    assert got.keys() == expected.keys() and all(torch.equal(got[n], t) for n, t in expected.items())


def test_every_file_is_needed(llama: Any, tmp_path: Path) -> None:
    ckpt = save(tmp_path / "ckpt", FORMS["list"](divide(llama.state_dict(), 2)), llama)
    for file in sorted(path for path in ckpt.iterdir() if path.name != "config.json"):
        content = file.read_bytes()
        file.unlink()
        ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf")
        assert ran.code and ran.errors and not (tmp_path / "out").exists(), (file.name, ran.out)
        file.write_bytes(content)
    assert cli("convert", ckpt, tmp_path / "out", "--to", "hf").code == 0


def test_of_models_in_a_list_none_is_taken_for_the_model(llama: Any, tmp_path: Path) -> None:
    """Stages that count their own layers have names in common: the first of them is no model."""
    stages = divide(llama.state_dict(), 2)
    stages[1] = {
        name.replace("layers.2", "layers.0").replace("layers.3", "layers.1"): t
        for name, t in stages[1].items()
    }
    ckpt = save(tmp_path / "ckpt", {"model": stages}, llama)
    config = json.loads((ckpt / "config.json").read_text())
    (ckpt / "config.json").write_text(
        json.dumps(config | {"model_type": "unheard", "architectures": ["Unheard"]})
    )
    ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf")
    (found,) = ran.having("FS106", severity="error")
    assert ran.code and "model.0." in found["got"] and "model.1." in found["got"]
    assert not (tmp_path / "out").exists()
