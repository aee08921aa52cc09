"""Merged checkpoints against what DeepSpeed's live engine held when it wrote them.

Not against `zero_to_fp32`, which leaves frozen parameters of ZeRO-1 out and reads neither stage 0,
BF16_Optimizer nor pipelines.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import CASES, Case
from helpers import cli, read_result
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


class Truth:
    """What the engine held, under the names that a merged checkpoint has."""

    def __init__(self, case: Case, folder: Path) -> None:
        params, held, buffers = (
            load_file(folder / f"truth_{kind}.safetensors") for kind in ("params", "masters", "buffers")
        )
        self.moments = {n: t for n, t in held.items() if n.endswith((".exp_avg", ".exp_avg_sq"))}
        self.masters = {n: t for n, t in held.items() if n not in self.moments}
        self.params = params | buffers
        self.high = params | self.masters | buffers
        if case.pipeline:
            tied = {
                n: n.replace("tied_modules.embed.", "0.") for n in params if n.startswith("tied_modules.")
            }
            assert tied
            # The layer file's name of a tied tensor; the masters have it besides the optimizer's own.
            self.params = {tied.get(n, n): t for n, t in self.params.items()}
            self.high |= {tied[n]: self.high[n] for n in tied}
            if case.fused:
                # Only the layer files name what stage 0 holds.
                self.high = {n: t for n, t in self.high.items() if n not in tied}
                self.masters = {tied.get(n, n): t for n, t in self.masters.items()}
            names = {f"{n}.{m}": f"{tied[n]}.{m}" for n in tied for m in ("exp_avg", "exp_avg_sq")}
            self.moments = {names.get(n, n): t for n, t in self.moments.items()}


def checkpoint(trained: Path, case: Case) -> Path:
    folder = trained / case.name
    if not (folder / "latest").exists():
        pytest.skip(f"this version of DeepSpeed has no such setting: {case.zero}")
    return folder


def assert_same(have: Tensors, wanted: Tensors) -> None:
    assert set(have) == set(wanted)
    for name, tensor in wanted.items():
        assert have[name].dtype == tensor.dtype, name
        assert have[name].shape == tensor.shape, name
        assert torch.equal(have[name], tensor), name


@every_case
def test_merge(trained: Path, tmp_path: Path, case: Case) -> None:
    folder = checkpoint(trained, case)
    truth = Truth(case, folder)
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_same(read_result(tmp_path / "out"), truth.high if case.stage == 3 else truth.params)


@every_case
def test_merge_of_masters(trained: Path, tmp_path: Path, case: Case) -> None:
    folder = checkpoint(trained, case)
    ran = cli("merge", folder, tmp_path / "out", "--weights", "masters")
    if not Truth(case, folder).masters:
        # Stage 0 in fp32 trains the parameters themselves.
        assert (ran.code, (tmp_path / "out").exists()) == (2, False)
        assert ran.having("FS402")
        return
    assert ran.code == 0, ran.out
    assert_same(read_result(tmp_path / "out"), Truth(case, folder).high)


@every_case
def test_merge_of_moments(trained: Path, tmp_path: Path, case: Case) -> None:
    folder = checkpoint(trained, case)
    truth = Truth(case, folder)
    ran = cli("merge", folder, tmp_path / "out", "--optimizer", "--weights", "params")
    if case.stage == 3:
        ran = cli("merge", folder, tmp_path / "out", "--optimizer")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    moments = {n: t for n, t in have.items() if n.endswith((".exp_avg", ".exp_avg_sq"))}
    assert any(t.any() for t in moments.values())
    # A tied parameter has one set of moments, and one name for them.
    tied = "head." if not (case.experts or case.tensor) else "none"
    assert_same(moments, {n: t for n, t in truth.moments.items() if not n.startswith(tied)})


@every_case
def test_masters_agree(trained: Path, case: Case) -> None:
    folder = checkpoint(trained, case)
    ran = cli("master-weights", folder)
    if case.stage == 3 or not Truth(case, folder).masters:
        assert (ran.code, bool(ran.having("FS402"))) == (2, True), ran.out
    else:
        assert (ran.code, ran.doc["differing"]) == (0, []), ran.out
        assert ran.doc["compared"] >= len(Truth(case, folder).masters) - 1
        # Stage 0's own optimizers take a step when they are made.
        made = case.stage == 0 and (case.fused or not case.pipeline)
        assert ran.doc["steps"] == [float(case.steps + made)]


def test_zero_to_fp32_is_what_that_tool_makes(trained: Path, tmp_path: Path) -> None:
    """Where it can: it knows ZeRO 2 and 3, and ZeRO 1 without what was frozen; of other runs it raises."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    compared = []
    for case in CASES:
        folder = trained / case.name
        try:
            theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=True)
        except Exception:
            continue
        ran = cli("zero-to-fp32", folder, tmp_path / case.name, "--exclude_frozen_parameters")
        assert ran.code == 0, ran.out
        have = read_result(tmp_path / case.name)
        # It makes float32 of buffers, whatever they were.
        assert set(theirs) == set(have), case.name
        for name, tensor in theirs.items():
            assert torch.equal(have[name].float(), tensor.float()), (case.name, name)
        compared.append(case.name)
    assert len(compared) >= 8, compared
