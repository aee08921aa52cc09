"""megatron-core loads what is written, strictly, and computes what transformers does.

Needs `pip install '.[megatron]'`; see CONTRIBUTING.md. One launch of two gloo ranks serves all models.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from helpers import cli
from megatron_ranks import launch
from tiny_models import MODELS, model

#: Megatron's local attention has no window, and its scaled rotary embeddings are compared beyond 64 positions
#: only.
NAMES = [name for name in MODELS if name != "mistral"]
WORLD = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each model: what was written, and what megatron-core recorded."""
    return tmp_path_factory.mktemp("real_megatron")


@pytest.fixture(scope="module")
def reports(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by model and degrees."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install '.[megatron]' (CONTRIBUTING.md)")
    source = tmp_path_factory.mktemp("source")
    tokens = torch.arange(40).reshape(2, 20) * 7 % 200
    for name in NAMES:
        made = model(name, source / name)
        folder = root / name
        folder.mkdir()
        torch.save(tokens, folder / "tokens.pt")
        with torch.no_grad():
            torch.save(made(tokens).logits, folder / "logits.pt")
        for tp, pp in ((2, 1), (1, 2)):
            for form, target in (("legacy", "megatron:legacy-local"), ("torch_dist", "megatron:torch_dist")):
                out = folder / f"tp{tp}_pp{pp}" / form
                # One form at other degrees than those it is loaded at: torch_dist serves all of them.
                at = (pp, tp) if form == "torch_dist" else (tp, pp)
                out.parent.mkdir(exist_ok=True)
                ran = cli(
                    "convert",
                    source / name,
                    out,
                    "--to",
                    target,
                    "--tp",
                    at[0],
                    "--pp",
                    at[1],
                    "--make-vocab-size-divisible-by",
                    256 // at[0],
                )
                assert ran.code == 0, ran.out
    ranks = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29713",
        }
        for rank in range(WORLD)
    ]
    launch("loading.py", [root], [source / f"rank_{rank}.log" for rank in range(WORLD)], ranks)
    return [json.loads((root / f"report_{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_load_alike(name: str, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        for degrees in ("tp2 pp1", "tp1 pp2"):
            entry = report[f"{name} {degrees}"]
            assert entry["tensors"] > 10
            assert entry["torch_dist_is_legacy"], (name, degrees)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report[f"{name} tp2 pp1"]["difference"] < 1e-4, report


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_megatron_recorded_equal_those_of_its_checkpoint(
    name: str, reports: list[dict[str, Any]], root: Path
) -> None:
    """Another implementation, with tensor parallelism, against transformers on the shards that it loads."""
    for rank in range(WORLD):
        compared = fastshard.layers(
            root / name / f"layers_{rank}.safetensors", root / name / "tp2_pp1/legacy", vocab_size=200
        )
        assert not compared.differing, compared.units
        assert max(unit.relative for unit in compared.units) < 1e-5


@pytest.mark.parametrize("kind", ["gate_proj", "q_proj"])
def test_a_wrong_conversion_is_named_by_what_megatron_recorded(
    kind: str, reports: list[dict[str, Any]], root: Path, tmp_path: Path
) -> None:
    good = fastshard.open(root / "llama/tp2_pp1/torch_dist", to="hf", vocab_size=200)
    with fastshard.Writer(tmp_path / "bad", config=good.config) as writer:
        for name, tensor in good.items():
            value = tensor.torch()
            if name == "model.layers.2.mlp.gate_proj.weight" and kind == "gate_proj":
                value = good["model.layers.2.mlp.up_proj.weight"].torch()
            if name.startswith("model.layers.1.") and name.endswith("q_proj.weight") and kind == "q_proj":
                # The query heads of the two groups are exchanged.
                value = value.roll(value.shape[0] // 2, 0)
            writer[name] = value.contiguous()
    compared = fastshard.layers(root / "llama/layers_0.safetensors", tmp_path / "bad")
    assert compared.differing == [{"gate_proj": "layers.2", "q_proj": "layers.1"}[kind]]
