"""What real megatron-core saved of models other than Llama is merged as the live ones held it, bit for bit.

Needs `pip install '.[megatron]'`; see CONTRIBUTING.md. :mod:`make_models` makes the checkpoints: gloo ranks
on CPUs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import cli, read_result
from megatron_ranks import launch
from safetensors.torch import load_file

#: FASTSHARD_MEGATRON_MODELS names others of the maker's cases.
CASES = os.environ.get(
    "FASTSHARD_MEGATRON_MODELS",
    "gpt3_tp2,gpt3_pp2,mtp_tp2,shared_tp2,dense_first_ep2,deepseek_ep2,mla_tp2,moe_etp1,moe_bias_ep2,groups_1_tp2,gate_tp2,bert_tp2,t5_tp1,vit_tp2",
).split(",")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, each in a folder CASE/FORM."""
    root = tmp_path_factory.mktemp("models")
    launch("make_models.py", [root, *CASES], [root / "log"])
    return root


@pytest.mark.parametrize("form", ["torch_dist", "legacy"])
@pytest.mark.parametrize("name", CASES)
def test_merged_is_what_the_live_model_held(name: str, form: str, made: Path, tmp_path: Path) -> None:
    root, out = made / name, tmp_path / "out"
    assert cli("verify", root / form).code == 0
    ran = cli("merge", root / form, out)
    assert ran.code == 0, ran.out
    want, have = load_file(root / f"expected_{form}.safetensors"), read_result(out)
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name
