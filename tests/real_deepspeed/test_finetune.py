"""EleutherAI/gpt-neox#1121: masters that nobody linked to the loaded parameters, and their repair.

The parameters are loaded into the module after `deepspeed.initialize` without `refresh_fp32_params`, and a
checkpoint is saved. Resumed normally, its first step copies the stale masters over the parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import CASES
from helpers import cli
from launching import launch

LR = 1e-7
#: Adam moves no parameter further in its first step; 16-bit parameters move by whole ulps or not at all.
SMALL = 10 * LR
FINETUNED = [case for case in CASES if case.finetune]
finetuned = pytest.mark.parametrize("case", [case.name for case in FINETUNED])

Report = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def resumed(trained: Path) -> Report:
    """One step from each checkpoint, stale, repaired and without its optimizer, by real DeepSpeed."""
    entries = []
    for case in FINETUNED:
        stale, repaired = trained / f"{case.name}_forgotten", trained / f"{case.name}_repaired"
        ran = cli("master-weights", stale, "--repair", repaired)
        assert ran.code == 0, ran.out
        entries += [(case.name, "good", trained / case.name, {}), (case.name, "stale", stale, {})]
        entries.append((case.name, "repaired", repaired, {}))
        if case.stage:
            dropped = trained / f"{case.name}_dropped"
            ran = cli("master-weights", stale, "--repair", dropped, "--drop-optimizer")
            assert ran.code == 0, ran.out
            entries.append((case.name, "dropped", dropped, {"load_module_only": True}))
    wanted = [
        {"case": case, "kind": kind, "path": str(path), "options": options, "lr": LR}
        for case, kind, path, options in entries
    ]
    (trained / "resume.json").write_text(json.dumps(wanted))
    launch("resume", trained)
    report = json.loads((trained / "resumed.json").read_text())
    for entry in report:
        before, after = entry["loss"]
        print(
            f"{entry['case']} {entry['kind']}: largest move {entry['move']:.3g}, loss {before:.4f} -> "
            f"{after:.4f}"
        )
    return {(entry["case"], entry["kind"]): entry for entry in report}


@finetuned
def test_masters_names_the_stale_tensors(trained: Path, case: str) -> None:
    ran = cli("master-weights", trained / f"{case}_forgotten")
    assert ran.code == 1
    assert {"embed.weight", "up.weight", "down.weight"} <= set(ran.doc["differing"])
    assert ran.having("FS401", severity="error", tensor="embed.weight")


@finetuned
def test_merge_refuses_stale_masters(trained: Path, tmp_path: Path, case: str) -> None:
    for options in ((), ("--weights", "masters")):
        ran = cli("merge", trained / f"{case}_forgotten", tmp_path / "out", *options)
        assert (ran.code, (tmp_path / "out").exists()) == (1, False)
        assert ran.having("FS401")


@finetuned
def test_a_stale_checkpoint_jumps(resumed: Report, case: str) -> None:
    entry, good = resumed[case, "stale"], resumed[case, "good"]
    assert entry["move"] > 0.1
    assert entry["loss"][1] > 2 * good["loss"][1]


@finetuned
def test_a_repaired_checkpoint_does_not(resumed: Report, case: str) -> None:
    entry, good = resumed[case, "repaired"], resumed[case, "good"]
    assert entry["move"] <= SMALL
    assert entry["loss"][0] == pytest.approx(good["loss"][0], rel=1e-6)
    assert entry["loss"][1] == pytest.approx(entry["loss"][0], rel=1e-2)


@pytest.mark.parametrize("case", [case.name for case in FINETUNED if case.stage])
def test_nor_does_one_without_its_optimizer(resumed: Report, case: str) -> None:
    entry = resumed[case, "dropped"]
    assert entry["move"] <= SMALL
    assert entry["loss"][1] == pytest.approx(entry["loss"][0], rel=1e-2)


def test_stage_0_cannot_drop_its_optimizer(trained: Path, tmp_path: Path) -> None:
    stale = trained / "zero0_bf16_forgotten"
    ran = cli("master-weights", stale, "--repair", tmp_path / "out", "--drop-optimizer")
    assert (ran.code, (tmp_path / "out").exists()) == (2, False)
    assert ran.having("FS514", help="without --drop-optimizer")
