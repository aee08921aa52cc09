"""What `ds_to_universal` makes of trained checkpoints, merged, against what the live engine held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, Case
from helpers import cli, read_result
from test_live_engine import Truth, assert_same, checkpoint

NAMES = ("zero1_bf16", "zero2_fp16", "zero3_bf16", "zero3_bf16_groups", "zero3_fp32")
SOURCES = [case for case in CASES if case.name in NAMES]


@pytest.mark.parametrize("case", SOURCES, ids=[case.name for case in SOURCES])
def test_merge_of_universal(trained: Path, tmp_path: Path, case: Case) -> None:
    step = f"global_step{case.steps}"
    source, made = checkpoint(trained, case) / step, tmp_path / "universal" / step
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(made), "--num_extract_workers", "1"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert ran.returncode == 0, ran.stdout.decode(errors="replace")[-3000:]
    truth = Truth(case, trained / case.name)
    merged = cli("merge", tmp_path / "universal", tmp_path / "out", "--optimizer")
    assert merged.code == 0, merged.out
    moments = {n: t for n, t in truth.moments.items() if not n.startswith("head.")}
    wanted = truth.high | moments
    if case.stage < 3:
        # ds_to_universal widens what is frozen.
        wanted["fixed.weight"] = wanted["fixed.weight"].to(torch.float32)
    assert_same(read_result(tmp_path / "out"), wanted)
