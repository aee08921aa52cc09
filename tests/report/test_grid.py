"""The grid says of each damaged checkpoint what its findings say, where they say it, and nothing of what is
whole."""

from __future__ import annotations

import json
from pathlib import Path

import fastshard
import pytest
import torch
from damage import CASES, made
from fastshard.errors import Finding
from fastshard.reporting.grid import Grid, grid
from fastshard.reporting.grid_cells import STATES, THERE
from fastshard.reporting.report import about
from helpers import FIXTURES, HF, NEOX, TP4, copy
from safetensors.torch import load_file, save_file

MEMORY = "2GiB"

#: What is not there as it should be in each damaged checkpoint: (row, state, how many tensors), read off its
#: damage by hand. None where it cannot be opened. Those of VALUES are seen once all data is read.
TOLD: dict[str, list[tuple[str, str, int]] | None] = {
    "neox_missing_shard": [("tp 1", "missing", 12)],
    "neox_missing_layer": [("tp 0 … tp 1", "missing", 2)],
    "neox_truncated": [("tp 1", "damaged", 12)],
    "neox_bit_flipped": [("tp 0", "damaged", 1)],
    "neox_copied_shard": [("tp 1", "copied", 12)],
    "neox_swapped_ranks": [("tp 0 … tp 1", "copied", 24)],
    "neox_no_config": [("tp 0", "misfit", 6)],
    "neox_latest_points_nowhere": None,
    "neox_norms_drifted": [("tp 1", "misfit", 14)],
    "neox_sequential_missing_rank": [("tp 1", "missing", 40)],
    "zero1_missing_rank": [("dp 1, mp 0: bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "missing", 1)],
    "zero1_truncated": [("global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "damaged", 1)],
    "zero1_copied_rank": [("global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "copied", 1)],
    "zero1_stale_masters": [
        ("global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "misfit", 6),
        ("global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "misfit", 3),
    ],
    "zero3_missing_rank": [("dp 1, mp 0", "missing", 2)],
    "universal_missing_parameter": [("global_step4/zero/embed.weight/fp32.pt", "missing", 1)],
    "megatron_missing_rank": [("tp 1, pp 1", "missing", 14)],
    "megatron_copied_rank": [("tp 1, pp 0", "copied", 13)],
    "torch_dist_missing_file": [("rank 3: __3_1.distcp", "missing", 4)],
    "dcp_no_metadata": None,
    "dcp_missing_file": [("rank 1: __1_0.distcp", "missing", 1)],
    "dcp_truncated": [("__1_0.distcp", "damaged", 21)],
    "tp_missing_rank": [("tp 2", "missing", 21)],
    "tp_copied_rank": [("tp 1", "copied", 21)],
    "tp_truncated": [("tp 1", "damaged", 21)],
    "tp_no_layout_no_config": [],
    "hf_missing_file": [("model-00003-of-00004.safetensors", "missing", 15)],
    "hf_copied_file": [
        ("missing", "missing", 15),
        ("model-00003-of-00004.safetensors", "copied", 1),
    ],
    "hf_embed_is_a_slice": [("model-00001-of-00004.safetensors", "misfit", 1)],
    "hf_index_is_no_json": None,
    "colossalai_missing_stage": [
        (
            "pp 1: model-stage-00002-shard-00001.safetensors … pp 1: "
            "model-stage-00002-shard-00002.safetensors",
            "missing",
            2,
        ),
        ("missing", "missing", 20),
    ],
    "colossalai_no_index": [],
    "maxtext_missing_chunk": [("0/items", "missing", 1)],
    "maxtext_missing_array": [("0/items", "missing", 1)],
    "orbax_lone_host": [("process 1", "missing", 8)],
    "orbax_lone_host_that_is_not_primary": [("process 0", "missing", 8)],
    "paxml_missing_chunk": [("checkpoints/checkpoint_00004000/state", "missing", 2)],
}
#: Where headers tell nothing.
VALUES = (
    "neox_bit_flipped",
    "neox_no_config",
    "neox_norms_drifted",
    "zero1_stale_masters",
    "megatron_copied_rank",
    "tp_copied_rank",
)


def told(grid: Grid) -> list[tuple[str, str, int]]:
    return [(p.where, STATES[p.state].name, p.count) for p in grid.problems]


def test_each_case_is_told_of() -> None:
    assert TOLD.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_damage_is_where_it_is(name: str, tmp_path: Path) -> None:
    root = made(name, tmp_path / "ckpt")
    report = about(root, stats=name in VALUES, memory=MEMORY)
    expected = TOLD[name]
    if expected is None:
        assert report.verdict == "unopened" and report.grid is None and report.files
        return
    assert report.grid is not None and report.verdict == "broken"
    assert told(report.grid) == expected
    if name in VALUES:
        by_headers = about(root).grid
        assert by_headers is not None and told(by_headers) == []


@pytest.mark.parametrize(
    "fixture",
    [
        "gpt_neox/neox_pp_tp2",
        "sharded/tp4_micro",
        "sharded/hf_sharded",
        "sharded/megatron_legacy_tp2_pp2",
        "sharded/dcp_tp_micro",
        "deepspeed/zero1_bf16_dp2",
        "deepspeed/zero3_bf16_dp2",
        "universal/zero1_bf16_dp2",
        "sharded/colossalai_049_tp2_pp2",
        "orbax/paxml_gpt3_micro_weights",
    ],
)
def test_nothing_is_said_of_what_is_whole(fixture: str) -> None:
    report = about(FIXTURES / fixture, stats=True, memory=MEMORY)
    assert report.grid is not None and report.verdict != "broken"
    assert told(report.grid) == [] and report.grid.states == [THERE]
    ckpt = fastshard.open(FIXTURES / fixture)
    shown = {file for band in report.grid.bands for file in band.files}
    assert (
        shown <= {f.path for f in ckpt.opened.files}
        and sum(b.rows for b in report.grid.bands) == report.grid.rows
    )


def test_every_rank_is_a_row_and_all_its_tensors_are_counted() -> None:
    found = about(NEOX).grid
    assert found is not None and (found.ranks, found.rows) == (2, 4)
    (ranks, files) = found.bands
    assert (ranks.label, ranks.rows, ranks.file_count) == ("tp 0 … tp 1", 2, 12)
    assert sum(cell.of for cell in ranks.cells if cell) == 40
    assert files.file_count == 2


def test_what_is_left_over_is_shown(tmp_path: Path) -> None:
    root = copy(FIXTURES / "sharded/dcp_tp_micro", tmp_path / "ckpt")
    (root / "__7_0.distcp").write_bytes((root / "__0_0.distcp").read_bytes())
    report = about(root)
    assert report.grid is not None and told(report.grid) == [("__7_0.distcp", "unexpected", 1)]


def test_two_missing_ranks_are_two_bands(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    for rank in (0, 2):
        (root / f"tp_rank_{rank:02d}.safetensors").unlink()
    report = about(root)
    assert report.grid is not None
    assert told(report.grid) == [("tp 0", "missing", 21), ("tp 2", "missing", 21)]
    assert [band.label for band in report.grid.bands] == ["tp 0", "tp 1", "tp 2", "tp 3"]


def wide(root: Path, files: int, layers: int) -> Path:
    """A folder of files, each with another layer, in the form of Hugging Face."""
    root.mkdir()
    row = next(iter(load_file(HF / "model-00001-of-00004.safetensors").values()))[:1]
    for i in range(files):
        save_file(
            {f"model.layers.{n}.a.weight": row.clone() for n in range(i, layers, files)},
            root / f"model-{i + 1:05d}-of-{files:05d}.safetensors",
        )
    return root


def test_a_grid_that_is_too_large_is_put_together_and_hides_nothing(tmp_path: Path) -> None:
    root = wide(tmp_path / "ckpt", 160, 160)
    ckpt = fastshard.open(root)
    small = grid(ckpt, [])
    assert len(small.columns) <= 160 and small.rows == 160
    assert sum(len(b.cells) for b in small.bands) <= 12_000 + 160
    assert not all(b.alike for b in small.bands), "neighbours that differ are shown together, which is said"
    one = Finding.of(
        "FS301", "damaged", file="model-00123-of-00160.safetensors", tensor="model.layers.122.a.weight"
    )
    worse = grid(ckpt, [one])
    assert [b.worst for b in worse.bands].count(1) == 1
    assert told(worse) == [("model-00123-of-00160.safetensors", "damaged", 1)]


def test_the_worst_of_a_cell_is_shown(tmp_path: Path) -> None:
    ckpt = fastshard.open(TP4)
    where = {"file": "tp_rank_01.safetensors", "rank": "tp 1"}
    warned = Finding.of("FS307", "pad rows are not zero", tensor="lm_head.weight")
    wrong = Finding.of("FS301", "damaged", tensor="lm_head.weight", **where)
    cells = {
        band.label: STATES[band.cells[[c.label for c in found.columns].index("lm_head.weight")].state].name  # type: ignore[union-attr]
        for found in [grid(ckpt, [warned, wrong])]
        for band in found.bands
    }
    assert cells == {"tp 0": "doubtful", "tp 1": "damaged", "tp 2 … tp 3": "doubtful"}


def test_findings_without_a_place_mark_no_cell() -> None:
    ckpt = fastshard.open(TP4)
    found = grid(ckpt, [Finding.of("FS110", "ranks disagree"), Finding.of("FS104", "no marker", file=".")])
    assert told(found) == []


def test_so_much_is_missing_that_not_all_of_it_is_named(tmp_path: Path) -> None:
    """The core names a thousand tensors; the grid must not say of the others that nothing belongs there."""
    root = tmp_path / "ckpt"
    root.mkdir()
    names = [f"model.layers.{i}.{r}.weight" for i in range(40) for r in "abc"]
    for rank in range(40):
        if rank not in range(5, 25):
            save_file(
                {n: torch.full((2, 4), float(rank)) for n in names}, root / f"tp_rank_{rank:02d}.safetensors"
            )
    (root / "layout.json").write_text(json.dumps({"tp": 40, "tp_dim": dict.fromkeys(names, 0)}))
    found = about(root).grid
    assert found is not None and found.inferred
    assert told(found) == [("tp 5 … tp 24", "missing", 20 * 120)]
    assert [b.label for b in found.bands] == ["tp 0 … tp 4", "tp 5 … tp 24", "tp 25 … tp 39"]
    (root / "tp_rank_24.safetensors").write_bytes((root / "tp_rank_25.safetensors").read_bytes()[:-1])
    worse = about(root).grid
    assert worse is not None and told(worse) == [
        ("tp 5 … tp 23", "missing", 19 * 120),
        ("tp 24", "damaged", 120),
    ]


def test_layers_in_a_row_that_one_finding_tells_of_are_each_missing(tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "ckpt")
    run = Finding(
        "FS103",
        "error",
        "all files of layers 03 to 22 are missing",
        file="global_step4/layer_03-model_00-model_states.pt",
        layers=range(3, 23),
    )
    found = grid(fastshard.open(root), [run])
    missing = {
        int(column.removeprefix("layer ").split()[0])
        for problem in found.problems
        if STATES[problem.state].name == "missing"
        for column in problem.columns
    }
    assert missing == set(range(3, 23))
