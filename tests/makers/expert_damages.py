"""A tiny Qwen3-MoE with damaged experts, in each container: by transformers, by Megatron-LM's rules, and as
MaxText and torchtitan hold it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import maxtext_mixtures
import moe_maker
import torch
import torch.distributed.checkpoint as dcp
import yaml
from helpers import cli
from names_maker import titan_moe
from safetensors.torch import save_file

State = dict[str, torch.Tensor]
LAYERS, EXPERTS, HEAD = 4, 8, 16
#: Of each of the two matrices of an expert.
MATRICES = ("gate_up_proj", "down_proj")
#: The value that a constant expert holds.
CONSTANT = 0.02


@cache
def _made() -> tuple[State, str]:
    """The tensors as transformers has them in memory, experts stacked, and the text of config.json."""
    model = moe_maker.qwen(
        3, norm_topk_prob=True, num_experts=EXPERTS, num_hidden_layers=LAYERS, head_dim=HEAD
    )
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return dict(model.state_dict()), (Path(folder) / "config.json").read_text()


def config() -> dict[str, Any]:
    """What config.json says."""
    described: dict[str, Any] = json.loads(_made()[1])
    return described


def good() -> State:
    """The tensors of the good model."""
    return {name: tensor.clone() for name, tensor in _made()[0].items()}


def stack(state: State, layer: int, matrix: str) -> torch.Tensor:
    """One matrix of all experts of a layer: [E, ...]."""
    return state[f"model.layers.{layer}.mlp.experts.{matrix}"]


def damage(kind: str) -> State:
    """The tensors with damaged experts."""
    state = good()
    for name in MATRICES:
        first, second = stack(state, 1, name), stack(state, 2, name)
        if kind == "copied":
            first[5] = first[3]
        elif kind == "copied_across":
            second[5] = first[3]
        elif kind == "swapped":
            first[[3, 5]] = first[[5, 3]]
        elif kind == "zeros":
            first[3] = 0
        elif kind == "constant":
            first[3] = CONSTANT
        elif kind == "all_zeros":
            for layer in range(LAYERS):
                stack(state, layer, name).zero_()
        elif kind == "made_of_one":
            for layer in range(LAYERS):
                stack(state, layer, name)[:] = stack(state, layer, name)[:1].clone()
        elif kind == "rank_as_another":
            for layer in range(LAYERS):
                stack(state, layer, name)[EXPERTS // 2 :] = stack(state, layer, name)[: EXPERTS // 2]
        else:
            assert kind == "good", kind
    return state


def take_apart(state: State) -> State:
    """The same with a tensor for each matrix of each expert, as transformers writes it."""
    out: State = {}
    for name, tensor in state.items():
        begin, _, last = name.rpartition("experts.")
        if last == "gate_up_proj":
            for number, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                out[f"{begin}experts.{number}.gate_proj.weight"] = gate.clone()
                out[f"{begin}experts.{number}.up_proj.weight"] = up.clone()
        elif last == "down_proj":
            for number, matrix in enumerate(tensor):
                out[f"{begin}experts.{number}.down_proj.weight"] = matrix.clone()
        else:
            out[name] = tensor
    return out


def _save_hf(state: State, folder: Path) -> Path:
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(_made()[1])
    return folder


def save_fused(state: State, folder: Path) -> Path:
    """Hugging Face, the experts of a layer in one tensor."""
    return _save_hf(state, folder)


def save_apart(state: State, folder: Path) -> Path:
    """Hugging Face, a tensor for each expert."""
    return _save_hf(take_apart(state), folder)


def _save_ranks(form: str) -> Callable[[State, Path], Path]:
    def save(state: State, folder: Path) -> Path:
        """Megatron-LM's rank files, the experts on two ranks."""
        made = {"num_layers": LAYERS, "num_experts": EXPERTS, "qk_layernorm": True, "kv_channels": HEAD}
        made["moe_grouped_gemm"] = form != "sequential"
        return moe_maker.save_legacy(folder, state, (1, 1, 2), form, LAYERS, **made)

    return save


def save_torch_dist(state: State, folder: Path) -> Path:
    """Megatron-LM's torch_dist, the experts on two ranks."""
    source = save_apart(state, folder.with_name(f"{folder.name}_source"))
    ran = cli("convert", source, folder, "--to", "megatron:torch_dist", "--ep", "2")
    assert ran.code == 0, ran.out
    (folder / "fastshard.manifest.json").unlink()
    shutil.rmtree(source)
    return folder


def _save_maxtext(scan: int | None) -> Callable[[State, Path], Path]:
    def save(state: State, folder: Path) -> Path:
        """MaxText: the layers in one array, or apart."""
        tensors = {name: tensor.numpy().copy() for name, tensor in take_apart(state).items()}
        shape = moe_maker.Qwen3MoeConfig(**config())
        maxtext_mixtures.saved_orbax(maxtext_mixtures.arrange(tensors, shape, scan), folder)
        stated = maxtext_mixtures.yml_of("qwen3_moe") | {
            "num_experts": EXPERTS,
            "base_num_decoder_layers": LAYERS,
            "scan_layers": scan is not None,
        }
        (folder / "maxtext_model.yml").write_text(yaml.safe_dump(stated))
        return folder

    return save


def save_titan(state: State, folder: Path) -> Path:
    """DCP of torchtitan."""
    dcp.save(titan_moe(take_apart(state), config(), age=0, halves=False), checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(_made()[1])
    return folder


CONTAINERS: dict[str, Callable[[State, Path], Path]] = {
    "hf_fused": save_fused,
    "hf_apart": save_apart,
    "megatron_sequential": _save_ranks("sequential"),
    "megatron_grouped": _save_ranks("grouped"),
    "megatron_flat": _save_ranks("flat"),
    "torch_dist": save_torch_dist,
    "maxtext": _save_maxtext(1),
    "maxtext_first_axis": _save_maxtext(0),
    "maxtext_apart": _save_maxtext(None),
    "torchtitan": save_titan,
}
