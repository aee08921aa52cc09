"""The guard on steps as real frameworks saved them: a good step raises no alarm, a lost file does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fastshard.integrations import SaveGuard
from helpers import FIXTURES
from holding import HANG

#: A checkpoint of each framework, and a file of it that some rank wrote.
STEPS = {
    "gpt_neox/neox_pp_tp2": "layer_03-model_01-model_states.pt",
    "sharded/hf_sharded": "model-00002-of-00004.safetensors",
    "sharded/megatron_legacy_tp2_pp2": "mp_rank_01_001/model_optim_rng.pt",
    "sharded/dcp_fsdp2": "__1_0.distcp",
    "deepspeed/zero1_bf16_dp2": "*_rank_1_mp_rank_00_optim_states.pt",
    "sharded/megatron_torch_dist_tp2_pp2": "__3_0.distcp",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_like_the_one_before_is_proven_and_one_without_a_file_is_not(
    step: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    guard = SaveGuard(rank=0, world=1)
    for name in ("1", "2"):
        shutil.copytree(FIXTURES / step, tmp_path / name)
        verdict = guard.after_save(tmp_path / name)
        guard.results(HANG)
        assert verdict is not None and verdict.ok and guard.last_verified == tmp_path / name
    assert not recwarn.list
    shutil.copytree(FIXTURES / step, tmp_path / "3")
    (lost,) = (tmp_path / "3").rglob(STEPS[step])
    lost.unlink()
    with pytest.warns(UserWarning, match="3: "):
        verdict = guard.after_save(tmp_path / "3")
    assert verdict is not None and not verdict.ok and guard.last_proven == tmp_path / "2"
