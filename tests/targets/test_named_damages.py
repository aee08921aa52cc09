"""Damages that people met on the way of a mixture between frameworks, made as the code made them: what is
refused, what is told by name, and what only a reference shows.

NVIDIA/Megatron-LM#5844 is in ``tests/real_megatron/test_experts_left.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepseek_maker
import delta_maker
import pytest
import torch
from helpers import ask_transformers_here, cli, edit_pt, load_pt
from megatron_trips import convert
from safetensors.torch import load_file, save_file
from test_long_names import measured
from transformers import (
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

State = dict[str, torch.Tensor]
MIB = 1 << 20


def filled(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


# NVIDIA-NeMo/Megatron-Bridge#1716 and #1883: an export gathers the experts of one rank alone


TEXT: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True},
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
LOCAL = TEXT["num_experts"] // 2


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl") / "hf"
    config = Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION)
    filled(Qwen3VLMoeForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def gather(kind: str, state: State) -> State:
    """The tensors of an export whose ranks of experts were not gathered."""
    out: State = {}
    for name, tensor in state.items():
        begin, _, last = name.rpartition("experts.")
        if not begin:
            out[name] = tensor
        elif kind == "local":
            out[name] = tensor[:LOCAL].clone()
        elif kind == "last":
            # Each expert overwrites the one before under one name.
            out[name] = tensor[-1].clone()
        elif kind == "empty":
            out[name] = torch.cat([tensor[:LOCAL], torch.zeros_like(tensor[LOCAL:])])
        elif kind == "own_for_all":
            out[name] = torch.cat([tensor[:LOCAL], tensor[:LOCAL]])
        elif kind == "apart":
            # Each rank numbers its experts from 0.
            for number in range(LOCAL):
                parts = dict(zip(("gate", "up"), tensor[number].chunk(2), strict=True))
                parts = {"down": tensor[number]} if last == "down_proj" else parts
                for part, matrix in parts.items():
                    out[f"{begin}experts.{number}.{part}_proj.weight"] = matrix.clone()
        else:
            assert kind == "none", kind
    return out


def write(folder: Path, state: Mapping[str, torch.Tensor], config: Path) -> Path:
    folder.mkdir()
    shutil.copy(config / "config.json", folder)
    save_file(dict(state), folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "exit", "code"),
    [
        ("local", 1, "FS208"),
        ("last", 1, "FS201"),
        ("none", 3, "FS102"),
        ("apart", 3, "FS102"),
        ("empty", 0, "FS313"),
        ("own_for_all", 0, "FS304"),
    ],
)
def test_experts_that_an_export_dropped(
    kind: str, exit: int, code: str, tower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_transformers_here(monkeypatch, tmp_path / "cache")
    state = load_file(tower / "model.safetensors")
    folder = write(tmp_path / "in", gather(kind, state), tower)
    for command in (("verify", folder), ("merge", folder, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == exit and ran.having(code, tensor=".mlp.experts."), ran.out
        assert (tmp_path / "out").exists() == (command[0] == "merge" and not exit)
    if not exit:
        ran = cli("diff", tower, folder)
        assert ran.code == 1 and all(".mlp.experts." in found["tensor"] for found in ran.errors)
    assert cli("verify", tower).code == 0 and not cli("verify", tower).having(code)


@pytest.mark.parametrize("kind", ["local", "apart"])
def test_experts_that_are_fewer_than_the_router_s_rows_are_told_without_transformers(
    kind: str, tower: Path, tmp_path: Path
) -> None:
    state = load_file(tower / "model.safetensors")
    folder = write(tmp_path / "in", gather(kind, state), tower)
    ran = cli("verify", folder)
    assert ran.having("FS201" if kind == "local" else "FS102", tensor="layers.0.mlp.experts."), ran.out
    assert cli("verify", folder, "--fail-on", "warning").code != 0
    good = cli("verify", tower)
    assert good.code == 0 and not good.having("FS201") and not good.having("FS102")


# NVIDIA-NeMo/Megatron-Bridge#4188: a model without MTP layers is exported by the shards of one that has them


def shards(state: State) -> list[State]:
    """The files of a model in the order of its layers, as hubs have them; the last one holds an MTP layer and
    what ends the model."""

    def place(name: str) -> tuple[int, str]:
        parts = name.split(".")
        return (int(parts[2]) if parts[1] == "layers" else -1 if "embed_tokens" in name else 99, name)

    names = sorted(state, key=place)
    size = -(-len(names) // 6)
    return [{name: state[name] for name in names[at : at + size]} for at in range(0, len(names), size)]


def write_shards(folder: Path, files: list[State], config: Path, keeps: Callable[[State], bool]) -> Path:
    """Writes the files that are complete, and an index of these alone."""
    folder.mkdir()
    shutil.copy(config / "config.json", folder)
    index: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        if keeps(tensors):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            save_file(tensors, folder / name, {"format": "pt"})
            index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.mark.parametrize("listed", [True, False], ids=["transformers", "alone"])
def test_shards_that_were_dropped_for_an_mtp_layer(
    listed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listed:
        ask_transformers_here(monkeypatch, tmp_path / "cache")
    config = Glm4MoeLiteConfig(**deepseek_maker.SIZES | {"num_nextn_predict_layers": 1})
    filled(Glm4MoeLiteForCausalLM(config)).save_pretrained(tmp_path / "hf")
    state = deepseek_maker.add_further_layers(tmp_path / "hf", 1)
    further = f"model.layers.{config.num_hidden_layers}."

    def is_whole(tensors: State) -> bool:
        return not any(name.startswith(further) for name in tensors)

    files = shards(state)
    assert cli("verify", write_shards(tmp_path / "good", files, tmp_path / "hf", bool)).code == 0
    lost = write_shards(tmp_path / "lost", files, tmp_path / "hf", is_whole)
    assert 0 < len(list(lost.glob("*.safetensors"))) < len(files)
    for command in (("verify", lost), ("merge", lost, tmp_path / "out")):
        ran = cli(*command)
        assert ran.code == 3 and ran.having("FS102") and ran.having("FS116"), ran.out
    assert not (tmp_path / "out").exists()
    rest = [{name: t for name, t in one.items() if not name.startswith(further)} for one in files]
    ran = cli("verify", write_shards(tmp_path / "rest", [r for r in rest if r], tmp_path / "hf", bool))
    (found,) = ran.having("FS116", severity="warning")
    assert ran.code == 0 and "promises 1 MTP layer (num_nextn_predict_layers)" in found["message"], ran.out


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_a_run_without_the_mtp_layers_of_its_config_is_told(form: str, tmp_path: Path) -> None:
    """A converter built the model without them, so the run never held them."""
    deepseek_maker.save_with_further_layers(tmp_path / "hf", 1)
    deepseek_maker.model().save_pretrained(tmp_path / "bare")
    convert(tmp_path / "bare", tmp_path / "run", form, "--tp", 2)
    convert(tmp_path / "hf", tmp_path / "with", form, "--tp", 2)
    command = ("--to", "hf", "--vocab-size", 250, "--config", tmp_path / "hf/config.json")
    ran = cli("convert", tmp_path / "run", tmp_path / "out", *command)
    (found,) = ran.having("FS116")
    assert ran.code == 0 and found["severity"] == "warning", ran.out
    assert found["message"].startswith("--config promises 1 MTP layer (num_nextn_predict_layers)")
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    ran = cli("convert", tmp_path / "run", tmp_path / "no", *command, "--error", "FS116")
    assert ran.code == 1 and not (tmp_path / "no").exists()
    ran = cli("convert", tmp_path / "with", tmp_path / "all", *command)
    assert ran.code == 0 and not ran.having("FS116"), ran.out
    ran = cli("diff", tmp_path / "hf", tmp_path / "out")
    assert ran.code == 1 and all(found["tensor"].startswith("model.layers.4.") for found in ran.errors)


def test_rank_files_that_lost_the_mtp_layers_are_refused(tmp_path: Path) -> None:
    deepseek_maker.save_with_further_layers(tmp_path / "hf", 1)
    convert(tmp_path / "hf", tmp_path / "run", "legacy", "--tp", 2)

    def drop(content: dict[str, Any]) -> None:
        for name in [name for name in content["model"] if name.startswith("mtp.")]:
            del content["model"][name]

    for file in (tmp_path / "run").rglob("*.pt"):
        edit_pt(file, drop)
    (tmp_path / "run/fastshard.manifest.json").unlink()
    ran = cli("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code == 3 and ran.having("FS103", message="layer 4 is missing"), ran.out
    assert not (tmp_path / "out").exists()


# NVIDIA-NeMo/Megatron-Bridge#2013: the ranks' parts of a delta net are put one after another


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_delta_net_whose_parts_were_concatenated_is_found_with_a_reference(
    kind: str, tmp_path: Path
) -> None:
    """Each rank holds its heads of q, k, v, z, b and a. Concatenated, the rows have the shape of the whole in
    another order, and random rows do not say whose they are: only the original does."""
    delta_maker.model(kind=kind).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ranks", "legacy", "--tp", 2)
    convert(tmp_path / "hf", tmp_path / "one", "legacy")
    parts = [load_pt(file)["model"] for file in sorted((tmp_path / "ranks").rglob("*.pt"))]

    def concatenate(content: dict[str, Any]) -> None:
        for name, tensor in content["model"].items():
            if name.endswith(("in_proj.weight", "conv1d.weight")):
                joined = torch.cat([part[name] for part in parts])
                assert joined.shape == tensor.shape and not torch.equal(joined, tensor)
                content["model"][name] = joined

    (file,) = (tmp_path / "one").rglob("*.pt")
    edit_pt(file, concatenate)
    (tmp_path / "one/fastshard.manifest.json").unlink()
    to_hf = ("--to", "hf", "--vocab-size", 250, "--config", tmp_path / "hf/config.json")
    assert cli("verify", tmp_path / "one").code == 0
    assert cli("convert", tmp_path / "one", tmp_path / "wrong", *to_hf).code == 0
    ran = cli("diff", tmp_path / "hf", tmp_path / "wrong")
    assert ran.code == 1 and ran.having("FS309", tensor="conv1d"), ran.out
    assert all(
        ".linear_attn.in_proj_" in found["tensor"] or ".linear_attn.conv1d." in found["tensor"]
        for found in ran.errors
    )
    assert cli("manifest", tmp_path / "hf", "-o", tmp_path / "good.json").code == 0
    # As the hub has the experts of Qwen3.5 in one tensor, the manifest's names are not those of the result.
    if kind == "qwen3_next":
        ran = cli("verify", tmp_path / "wrong", "--expect", tmp_path / "good.json")
        assert ran.code == 1 and ran.having("FS308", tensor="conv1d"), ran.out
    # fastshard's own way from the same ranks.
    assert cli("convert", tmp_path / "ranks", tmp_path / "right", *to_hf).code == 0
    assert cli("diff", tmp_path / "hf", tmp_path / "right").code == 0


# AI-Hypercomputer/maxtext#4071: a converter held all tensors of Kimi-K2 at once


#: MiB that a conversion may hold.
LIMIT = 160


def test_a_mixture_goes_to_maxtext_in_less_memory_than_it_takes(tmp_path: Path) -> None:
    """Within a limit that is far below the model's bytes, and the same for twice the layers."""
    sizes = {
        "n_routed_experts": 64,
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "intermediate_size": 64,
    }
    for layers in (4, 8):
        folder = tmp_path / f"hf_{layers}"
        deepseek_maker.model(num_hidden_layers=layers, **sizes).save_pretrained(folder)
        size = (folder / "model.safetensors").stat().st_size
        assert size > 35 * MIB * layers and (layers == 4 or size > 2 * LIMIT * MIB)
        code, took, output = measured(
            "convert",
            str(folder),
            str(tmp_path / f"maxtext_{layers}"),
            "--to",
            "maxtext",
            "--memory",
            f"{LIMIT}MiB",
            "--transformers",
            "off",
        )
        assert code == 0, output[-2000:]
        assert took < LIMIT, (took, size / MIB)
