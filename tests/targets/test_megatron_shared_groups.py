"""Fewer groups of heads than tensor-parallel ranks: each group is divided among some of them, row by row.

source: megatron/core/transformer/attention.py (get_query_key_value_tensors)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import delta_maker
import moe_maker
import pytest
import torch
import transformers
from helpers import assert_refused, cli, load_pt
from megatron_trips import same, to_hf
from safetensors.torch import load_file

DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 250,
    "max_position_embeddings": 64,
}


def dense() -> Any:
    """A Qwen2, whose biases of queries, keys and values are divided too."""
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DENSE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "dense": dense,
    "one_group": lambda: moe_maker.qwen(3, num_key_value_heads=1),
    "mixture": lambda: moe_maker.qwen(3, num_key_value_heads=2),
    "output_gate": lambda: delta_maker.model(num_key_value_heads=1),
}
FORMS = ["legacy", "legacy-local", "torch_dist"]


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(3)
    MODELS[name]().save_pretrained(folder)
    return folder


def packed(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of attention in a rank file."""
    state = load_pt(folder / f"release/mp_rank_{rank:02d}/model_optim_rng.pt")["model"]
    return {name: t for name, t in state.items() if "self_attention.linear_" in name and t is not None}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_model_goes_and_comes_back(name: str, form: str, tp: int, tmp_path: Path) -> None:
    source, out = saved(name, tmp_path / "hf"), tmp_path / "megatron"
    if name == "output_gate" and form == "legacy-local":
        pytest.skip("delta nets are built with Transformer Engine alone")
    ran = cli("convert", source, out, "--to", f"megatron:{form}", "--tp", tp)
    assert ran.code == 0, ran.out
    ran = cli("verify", out)
    assert ran.code == 0, ran.out
    same(to_hf(out, tmp_path / "back"), load_file(source / "model.safetensors"))


@pytest.mark.parametrize(("name", "degrees"), [("dense", (4, 8)), ("mixture", (4,))])
def test_each_rank_has_its_rows_of_the_packed_projection(
    name: str, degrees: tuple[int, ...], tmp_path: Path
) -> None:
    source = saved(name, tmp_path / "hf")
    for tp in (1, *degrees):
        ran = cli("convert", source, tmp_path / str(tp), "--to", "megatron:legacy", "--tp", tp)
        assert ran.code == 0, ran.out
    full = packed(tmp_path / "1", 0)
    for tp in degrees:
        ranks = [packed(tmp_path / str(tp), rank) for rank in range(tp)]
        for name_of, tensor in full.items():
            parts = [rank[name_of] for rank in ranks]
            if "layer_norm" in name_of or (name_of.endswith("bias") and "linear_proj" in name_of):
                assert all(torch.equal(part, tensor) for part in parts)
                continue
            assert torch.equal(torch.cat(parts, 1 if "linear_proj" in name_of else 0), tensor), name_of


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    source, out = saved("dense", tmp_path / "hf"), tmp_path / "megatron"
    assert cli("convert", source, out, "--to", "megatron:legacy", "--tp", 4).code == 0
    (out / "fastshard.manifest.json").unlink()
    assert cli("verify", out).code == 0
    (out / "release/mp_rank_02/model_optim_rng.pt").unlink()
    ran = cli("verify", out)
    assert ran.code == 3 and [f["rank"] for f in ran.doc["findings"]] == ["tp 2, pp 0"], ran.out
    assert_refused(
        out, tmp_path / "hf2", ran.doc["findings"][0]["code"], exit=3, command=("convert", "--to", "hf")
    )


@pytest.mark.parametrize(
    ("heads", "groups", "tp"),
    [(12, 3, 2), (8, 2, 3), (6, 2, 4), (6, 1, 4)],
)
def test_degrees_that_divide_no_group_are_refused(heads: int, groups: int, tp: int, tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        **DENSE | {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 8 * heads}
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert_refused(
        tmp_path / "hf",
        tmp_path / "out",
        "FS204",
        exit=2,
        command=("convert", "--to", "megatron:legacy"),
        options=("--tp", str(tp)),
    )
