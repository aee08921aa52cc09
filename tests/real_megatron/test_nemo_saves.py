"""What megatron-core saves in NeMo's layout computes in transformers what the live model does.

Needs `pip install '.[megatron]'`; see CONTRIBUTING.md. :mod:`make_nemo` makes them, on two gloo ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import cli
from megatron_ranks import launch
from transformers import AutoModelForCausalLM

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "tied_unstacked": "LlamaForCausalLM",
}
WORLD = 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, each in a folder of its case."""
    root = tmp_path_factory.mktemp("nemo")
    ranks = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29717",
        }
        for rank in range(WORLD)
    ]
    launch("make_nemo.py", [root], [root / f"log_{rank}" for rank in range(WORLD)], ranks)
    return root


@pytest.mark.parametrize("case", CLASSES)
def test_the_result_computes_what_the_live_model_does(case: str, made: Path, tmp_path: Path) -> None:
    assert cli("verify", made / case).code == 0
    ran = cli("convert", made / case, tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    assert not ran.having("FS216")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [CLASSES[case]]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = ours(torch.load(made / f"{case}.tokens")).logits
    wanted = torch.load(made / f"{case}.logits")
    assert wanted.std() > 0.01
    assert (logits - wanted).abs().max() < 1e-4
