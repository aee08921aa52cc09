"""Megatron-LM checkpoints of models that no table describes: merged by what the files themselves prove, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, cli, read_result
from megatron_optimizer_maker import Run, Tensors, write_dcp

State = dict[str, torch.Tensor]


def drawn(shapes: dict[str, list[int]]) -> State:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def cut(tensor: torch.Tensor, dimension: int, ranks: int = 2) -> tuple[list[int], list[Any]]:
    """Shape, and a chunk for each rank along a dimension."""
    each = tensor.shape[dimension] // ranks
    starts = [[rank * each if d == dimension else 0 for d in range(tensor.dim())] for rank in range(ranks)]
    return list(tensor.shape), list(zip(starts, tensor.chunk(ranks, dimension), strict=True))


#: Layers, hidden size and MLP of the models below.
L, H, F = 2, 16, 24
_BLOCK: dict[str, tuple[list[int], int]] = {
    "self_attention.linear_qkv.weight": ([48, H], 0),
    "self_attention.linear_qkv.layer_norm_weight": ([H], 0),
    "self_attention.linear_proj.weight": ([H, H], 1),
}
_DENSE = {
    "mlp.linear_fc1.weight": ([2 * F, H], 0),
    "mlp.linear_fc1.layer_norm_weight": ([H], 0),
    "mlp.linear_fc2.weight": ([H, F], 1),
}
_PLAIN = _DENSE | {"mlp.linear_fc1.weight": ([F, H], 0)}
_EXPERTS = {
    "pre_mlp_layernorm.weight": ([H], 0), "mlp.router.weight": ([4, H], 0),
    "mlp.experts.experts.linear_fc1.weight": ([4, 2 * F, H], 0), "mlp.experts.experts.linear_fc2.weight": ([4, H, F], 0),
}  # fmt: skip
_SHARED = {
    "mlp.shared_experts.linear_fc1.weight": ([2 * F, H], 0), "mlp.shared_experts.linear_fc2.weight": ([H, F], 1),
    "mlp.shared_experts.gate_weight": ([1, H], 1),
}  # fmt: skip
_BIASES = {
    "self_attention.linear_qkv.bias": ([48], 0), "self_attention.linear_qkv.layer_norm_bias": ([H], 0),
    "self_attention.linear_proj.bias": ([H], 0), "mlp.linear_fc1.bias": ([F], 0), "mlp.linear_fc1.layer_norm_bias": ([H], 0),
    "mlp.linear_fc2.bias": ([H], 0),
}  # fmt: skip
_ENDS = {
    "embedding.word_embeddings.weight": ([64, H], 0),
    "decoder.final_layernorm.weight": ([H], 0),
    "output_layer.weight": ([64, H], 0),
}
_POSITIONS = {"embedding.position_embeddings.weight": ([32, H], 0), "decoder.final_layernorm.bias": ([H], 0)}


def stacked(
    block: dict[str, tuple[list[int], int]], top: str = "decoder"
) -> dict[str, tuple[list[int], int]]:
    return {f"{top}.layers.{name}": ([L, *shape], d + 1) for name, (shape, d) in block.items()}


def numbered(*blocks: dict[str, tuple[list[int], int]]) -> dict[str, tuple[list[int], int]]:
    return {
        f"decoder.layers.{n}.{name}": entry for n, block in enumerate(blocks) for name, entry in block.items()
    }


MODELS: dict[str, dict[str, tuple[list[int], int]]] = {
    "gpt3": {**_ENDS, **_POSITIONS, **stacked(_BLOCK | _PLAIN | _BIASES)},
    "gpt3_rope": {**_ENDS, "decoder.final_layernorm.bias": ([H], 0), **stacked(_BLOCK | _PLAIN | _BIASES)},
    "mtp": {**_ENDS, **stacked(_BLOCK | _DENSE), "mtp.layers.0.enorm.weight": ([H], 0), "mtp.layers.0.eh_proj.weight": ([H, 2 * H], 0),
            **{f"mtp.layers.0.transformer_layer.{name}": entry for name, entry in (_BLOCK | _DENSE).items()}},
    "shared_experts": {**_ENDS, **stacked(_BLOCK | _EXPERTS | _SHARED)},
    "dense_first": {**_ENDS, **numbered(_BLOCK | _DENSE, _BLOCK | _EXPERTS)},
    "biased_experts": {**_ENDS, **stacked(_BLOCK | _EXPERTS | {"mlp.experts.experts.linear_fc1.bias": ([4, 2 * F], 0)})},
    "value_head": {**_ENDS, "output_layer.weight": ([1, H], 1), **stacked(_BLOCK | _DENSE)},
    "no_head": {**{n: e for n, e in _ENDS.items() if "output" not in n}, **stacked(_BLOCK | _DENSE)},
    "no_embedding": {**{n: e for n, e in _ENDS.items() if "embed" not in n}, **stacked(_BLOCK | _DENSE)},
    "wider_layer": {**_ENDS, **numbered(_BLOCK | _DENSE, _BLOCK | _DENSE | {"mlp.linear_fc2.weight": ([H, 2 * F], 1)})},
    "layer_without_mlp": {**_ENDS, **numbered(_BLOCK | _DENSE, _BLOCK)},
    "vision": {"conv1.weight": ([H, 3, 4, 4], 0), "ln_pre.weight": ([H], 0), **stacked(_BLOCK | _PLAIN | _BIASES)},
    "bert": {"embedding.tokentype_embeddings.weight": ([2, H], 0), "lm_head.dense.weight": ([H, H], 0), **_ENDS,
             **stacked(_BLOCK | _PLAIN | _BIASES, "encoder")},
    "hybrid": {**_ENDS, **numbered({"mixer.in_proj.weight": ([40, H], 0), "mixer.A_log": ([4], 0)}, _BLOCK)},
    "wrapped": {f"module.{name}": entry for name, entry in {**_ENDS, **stacked(_BLOCK | _DENSE)}.items()},
}  # fmt: skip


#: What a table describes, if the arguments tell of heads.
DESCRIBED = ("gpt3_rope", "no_head")


def saved(
    root: Path, entries: dict[str, tuple[list[int], int]], args: dict[str, Any] | None, *, today: bool = False
) -> State:
    """A torch_dist checkpoint of two ranks; ``today`` is the form since core 0.19, with the common state among the records."""
    folder = root / "iter_0000010"
    whole = drawn({name: shape for name, (shape, _) in entries.items()})
    tensors: Tensors = {
        name: cut(whole[name], dimension)
        for name, (_, dimension) in entries.items()
        if whole[name].shape[dimension] > 1
    }
    common: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 10}
    if args is not None:
        common["args"] = Run().arguments(**args)
    objects = {"common_state/shard_0_1": [common]} if today else {}
    write_dcp(folder, tensors, objects)
    if not today:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return whole


def same(out: Path, want: State) -> None:
    have = read_result(out)
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name


def words_of(name: str) -> dict[str, Any]:
    """Arguments of a model."""
    known: dict[str, Any] = {
        "hidden_size": H,
        "ffn_hidden_size": F,
        "num_query_groups": 4,
        "kv_channels": 4,
        "padded_vocab_size": 64,
    }
    if "experts" in name or name == "dense_first":
        known |= {"num_experts": 4, "moe_ffn_hidden_size": F}
    if name in ("gpt3", "gpt3_rope", "vision", "bert"):
        known |= {"swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}
    if name == "gpt3":
        known |= {"position_embedding_type": "learned_absolute"}
    return known


@pytest.mark.parametrize("form", ["common.pt", "common_state", "without arguments"])
@pytest.mark.parametrize("name", MODELS)
def test_any_model_is_merged_as_metadata_has_it(name: str, form: str, tmp_path: Path) -> None:
    args = None if form == "without arguments" else words_of(name)
    whole = saved(tmp_path / "ckpt", MODELS[name], args, today=form == "common_state")
    for verb in ("verify", "inspect"):
        assert cli(verb, tmp_path / "ckpt").code == 0
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", whole)
    if name not in DESCRIBED or args is None:
        for target in ("hf", "megatron", "gpt_neox", "dcp"):
            assert_refused(
                tmp_path / "ckpt", tmp_path / "hf", "FS514", exit=2, command=("convert", "--to", target)
            )
    rows = {n for n in whole if n.endswith(("word_embeddings.weight", "output_layer.weight"))}
    if rows and name != "value_head":
        assert cli("merge", tmp_path / "ckpt", tmp_path / "less", "--vocab-size", 60).code == 0
        same(tmp_path / "less", {n: t[:60] if n in rows else t for n, t in whole.items()})
