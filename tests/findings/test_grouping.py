"""One cause is one finding: missing files of a rank or a stage, chunks of a process, two files that were
swapped."""

from __future__ import annotations

import itertools
import json
import pickle
from copy import copy as copy_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zero_maker
from damage import lost
from fastshard import Finding
from fastshard.cli.finding_text import lines
from fastshard.cli.verbs.diff import _share
from fastshard.common.finding_facts import effect_of, files_of
from fastshard.findings.causes import Causes, LostFile
from fastshard.findings.effects import attach_effects, effect_on
from fastshard.findings.grouping import RankFile, group_by_cause
from helpers import FIXTURES, HF, NEOX, STEP, cli, copy
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from zero_maker import Run

LEGACY = FIXTURES / "sharded/megatron_legacy_tp2_pp2"


def missing(path: str, coords: dict[str, int] | None = None, **fields: Any) -> Finding:
    fields = {"evidence": "the arguments", "help": f"copy {path} from the node that wrote it", **fields}
    return Finding.of("FS101", "the file is missing", file=path, coords=coords, **fields)


def mesh(tp: int, pp: int) -> dict[str, dict[str, int]]:
    return {f"r_{t:02d}_{p:03d}.pt": {"tp": t, "pp": p} for t, p in itertools.product(range(tp), range(pp))}


def told(files: dict[str, dict[str, int]], gone: set[str]) -> list[Finding]:
    found = [missing(f, c) for f, c in files.items() if f in gone]
    return group_by_cause(found, [RankFile(f, c) for f, c in files.items() if f not in gone])


@pytest.mark.parametrize(
    ("gone", "rank", "message"),
    [
        ({"r_00_001.pt", "r_01_001.pt"}, "pp 1", "pipeline stage 1 is missing: 2 of 4 files"),
        ({"r_01_000.pt", "r_01_001.pt"}, "tp 1", "tensor-parallel rank 1 is missing: 2 of 4 files"),
    ],
)
def test_a_stage_or_a_rank_that_is_gone_is_one_finding(gone: set[str], rank: str, message: str) -> None:
    (one,) = told(mesh(2, 2), gone)
    assert (one.rank, one.message, set(one.files), one.evidence) == (rank, message, gone, "the arguments")
    assert (
        one.file == one.files[0]
        and one.help is not None
        and one.help.startswith("copy these files from the node")
    )


def test_ranks_that_are_gone_are_one_finding_with_a_range() -> None:
    files = mesh(16, 2)
    (one,) = told(files, {name for name, c in files.items() if 3 <= c["tp"] <= 5 or c["tp"] == 9})
    assert (one.message, one.rank) == (
        "tensor-parallel ranks 3-5, 9 are missing: 8 of 32 files",
        "tp 3 to 5 and 9",
    )
    assert one.coords == {"tp": (range(3, 6), range(9, 10))} and len(one.files) == 8
    assert one.help == (
        "copy these files from the nodes that ran tensor-parallel ranks 3-5, 9, "
        "or name their directories as more CKPTs"
    )
    (one,) = told(mesh(4, 1), {"r_01_000.pt", "r_03_000.pt"})
    assert one.files == ("r_01_000.pt", "r_03_000.pt") and one.rank == "tp 1 and 3"


def test_files_of_one_rank_in_several_layers_name_no_layer() -> None:
    gone = [
        missing(f"layer_{layer:02d}-model_01.pt", {"layer": layer, "tp": 1}, rank="tp 1") for layer in (2, 3)
    ]
    (merged,) = group_by_cause(gone, [])
    assert merged.message == "2 files of tensor-parallel rank 1 are missing"


def test_help_names_no_rank_where_none_is_known() -> None:
    (one,) = group_by_cause([missing(f"x_{n}", help=f"ask node {n}") for n in range(2)], [])
    assert one.message == "2 files are missing" and "nodes that wrote them" in (one.help or "")
    (one,) = group_by_cause([missing(f"x_{n}", help="copy it from the hub") for n in range(2)], [])
    assert one.help == "copy it from the hub (each of these files)"


def test_parameters_alone_remain_a_way_out() -> None:
    run = ["--weights params"]
    gone = [missing(f"x_{n}", {"dp": n}, run=run) for n in range(2)]
    (one,) = group_by_cause(gone, [RankFile("x_2", {"dp": 2})])
    assert (one.help or "").endswith("or take the parameters alone") and list(one.run) == run


def test_what_is_no_rank_as_a_whole_is_said_by_files() -> None:
    files = mesh(2, 2)
    assert [f.file for f in told(files, {"r_01_001.pt"})] == ["r_01_001.pt"]
    (one,) = told(files, {"r_01_000.pt", "r_00_001.pt"})
    assert (one.message, one.rank) == ("2 files are missing", "tp 0, pp 1; tp 1, pp 0")
    assert set(one.files) == {"r_01_000.pt", "r_00_001.pt"}


@given(st.integers(1, 3), st.integers(1, 3), st.data())
def test_no_file_is_lost_or_said_twice(tp: int, pp: int, data: st.DataObject) -> None:
    files = mesh(tp, pp)
    gone = data.draw(st.sets(st.sampled_from(sorted(files))))
    assert sorted(file for one in told(files, gone) for file in one.files) == sorted(gone)


def test_findings_of_other_kinds_stay_as_they_are() -> None:
    others = [
        Finding.of("FS312", "the file is truncated", file="a"),
        Finding.of("FS101", "the file is missing", file="a", tensor="t"),
        Finding.of("FS101", "2 more missing files", file="a", count=2),
        missing("x_1", severity="warning"),
    ]
    assert group_by_cause(others, []) == others


def test_files_that_are_missing_for_another_reason_stay_apart() -> None:
    one, other = missing("x_1", {"tp": 1}), missing("x_2", {"tp": 1}, evidence="an index")
    assert group_by_cause([one, other], []) == [one, other]


def pointer(name: str, size: int = 9) -> Finding:
    return Finding.of(
        "FS316",
        "a Git LFS pointer",
        file=name,
        expected=f"{size} bytes",
        got="131 bytes",
        help="fetch the file itself, inside the clone",
        run=[f"git lfs pull --include {name}"],
    )


def test_files_of_which_the_same_is_said_are_one_finding() -> None:
    (one,) = group_by_cause([pointer("m-10.bin"), pointer("m-9.bin")], [])
    assert (one.files, one.message) == (("m-9.bin", "m-10.bin"), "2 files: a Git LFS pointer")
    assert (one.expected, one.parts) == ("9 bytes", ())
    assert one.run == ("git lfs pull --include m-9.bin,m-10.bin",)
    (one,) = group_by_cause([pointer("m-1.bin"), pointer("m-2.bin", 8)], [])
    assert (one.expected, one.got) == (None, "131 bytes")
    assert [(p.file, p.expected) for p in one.parts] == [("m-1.bin", "9 bytes"), ("m-2.bin", "8 bytes")]
    (one,) = group_by_cause([pointer(f"m-{n}.bin") for n in range(99)], [])
    assert one.run == ("git lfs pull --include '*.bin'",)


def test_sentences_about_several_agree_with_their_number() -> None:
    found = [missing(f"x_{n}", evidence="named in a.json") for n in range(2)]
    (one,) = group_by_cause(found, [])
    assert one.evidence == "named in a.json"
    assert (
        effect_of(one.replace(effect=effect_on(["a"], 40))) == "1 of 40 tensors is missing or incomplete: a"
    )
    lacking = [Finding.of("FS102", "expected by the layout, but missing", tensor=name) for name in "ab"]
    assert lines(lacking)[0] == "error FS102: 2 tensors: expected by the layout, but missing"


def test_numbers_in_braces_are_in_order() -> None:
    assert files_of(["m-00004.bin", "m-00001.bin", "m-00010.bin"]) == "m-{00001,00004,00010}.bin"


def test_a_share_that_is_not_none_is_not_zero() -> None:
    assert [_share(n, 10_000) for n in (0, 1, 10, 9_999, 10_000)] == [
        "0.0%",
        "< 0.1%",
        "0.1%",
        "> 99.9%",
        "100.0%",
    ]


def test_two_checks_of_one_file_are_one_finding() -> None:
    copied = Finding.of("FS303", "a copy", file="a", got="b")
    again = Finding.of("FS303", "another's partition", file="a", rank="dp 1", got="c", help="copy it")
    assert group_by_cause([copied, again], []) == [copied.replace(rank="dp 1", help="copy it")]


def test_layers_that_are_missing_are_one_finding() -> None:
    gone = [
        Finding.of("FS103", f"layer {n} is missing", layers=range(n, n + 1), count=3, axis="L")
        for n in (1, 4, 5)
    ]
    (one,) = group_by_cause(gone[1:], [])
    assert (one.layers, one.count, one.message) == (
        range(4, 6),
        6,
        "layers 4, 5 are missing: no file has any of their 6 tensors",
    )
    (one,) = group_by_cause(gone, [])
    assert one.layers is None and [part.layers for part in one.parts] == [f.layers for f in gone]


def test_a_rank_that_lacks_files_of_every_kind_is_one_finding() -> None:
    kinds = ("step1/dp_{}_mp_00_model.pt", "step1/bf16_dp_{}_mp_00_optim.pt")
    gone = [missing(kind.format(1), {"dp": 1, "mp": 0}, evidence=kind) for kind in kinds]
    (one,) = group_by_cause(gone, [RankFile(kind.format(0), {"dp": 0, "mp": 0}) for kind in kinds])
    assert (one.rank, one.message) == ("dp 1", "data-parallel rank 1 is missing: 2 of 4 files")
    assert one.files == tuple(f.file for f in gone) and one.evidence == "; ".join(kinds)
    # Of another rank one file is there.
    present = [
        RankFile(kinds[0].format(0), {"dp": 0, "mp": 0}),
        RankFile(kinds[1].format(1), {"dp": 1, "mp": 0}),
    ]
    findings = [gone[0], missing(kinds[1].format(0), {"dp": 0, "mp": 0})]
    assert [f.message for f in group_by_cause(findings, present)] == ["the file is missing"] * 2


def test_effects_are_counted_once_and_for_their_cause() -> None:
    a, b = Finding.of("FS312", "the file is truncated", file="a"), missing("b")
    names = {"layers.0.q": "a", "layers.1.q": "a", "norm": "b", "own": "b"}
    own = Finding.of("FS301", "CRC", tensor="own")
    causes = Causes(files=[LostFile(a), LostFile(b)], named=names)
    first, second, third = attach_effects([a, b, own], causes, names, ["head"], [])
    assert first.effect == effect_on(["layers.0.q", "layers.1.q"], 5) and second.effect == effect_on(
        ["norm"], 5
    )
    assert first.effect is not None and first.effect.layers == (range(2),) and third.effect is None


def test_an_effect_names_no_more_than_people_read() -> None:
    effect = effect_on([f"layers.{n}.q" for n in range(16_384)], None)
    assert (effect.count, effect.in_layers, len(effect.tensors), effect.layers) == (
        16_384,
        16_384,
        256,
        (range(16_384),),
    )


# real checkpoints


def test_a_lost_rank_of_gpt_neox(tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "ckpt")
    gone = sorted(root.glob(f"{STEP}/layer_*-model_01-*"))
    for file in gone:
        file.unlink()
    ran = cli("verify", root)
    (one,) = ran.errors
    assert ran.code == 3 and one["message"] == "tensor-parallel rank 1 is missing: 6 of 12 files"
    assert one["files"] == [str(f.relative_to(root)) for f in gone]
    effect = one["effect"]
    assert (effect["count"], effect["of"]) == (26, 40) and effect["layers"][1] == {"first": 2, "last": 4}
    text = cli("verify", root, json_output=False).out
    assert text.count("error FS101") == 1 and "26 of 40 tensors are missing or incomplete" in text


def test_a_lost_stage_of_megatron(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    lost("*/mp_rank_*_001/*")(root)
    (one,) = cli("verify", root).errors
    assert one["message"] == "pipeline stage 1 is missing: 2 of 4 files" and one["rank"] == "pp 1"
    assert one["effect"]["count"] == 14


def test_each_of_several_lost_files_has_its_own_effect(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    (root / "model-00001-of-00004.safetensors").unlink()
    cut = root / "model-00003-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    effects = {f["code"]: f["effect"] for f in cli("verify", root).errors}
    assert set(effects) == {"FS101", "FS312"} and not set(effects["FS101"]["tensors"]) & set(
        effects["FS312"]["tensors"]
    )
    assert effects["FS312"]["count"] == 15


def test_a_lost_process_of_orbax_is_one_finding() -> None:
    (one,) = cli("verify", FIXTURES / "orbax/mp2_local_BROKEN_063_zarr3").errors
    assert (one["code"], one["rank"], one["effect"]["count"]) == ("FS111", "process 1", 8)
    assert "8 of 17 arrays" in one["message"]


def many_ranks(folder: Path, tp: int, gone: set[int]) -> None:
    """Files of so many tensor-parallel ranks, without those of some."""
    (folder / "layout.json").write_text(json.dumps({"tp": tp, "tp_dim": {"a": 0, "b": 1}}))
    for rank in sorted(set(range(tp)) - gone):
        tensors = {"a": np.full((2, 256), rank, np.float32), "b": np.full((4, 2), rank, np.float32)}
        save_file(tensors, folder / f"tp_rank_{rank:02d}.safetensors")


def test_lost_ranks_of_many_are_one_finding(tmp_path: Path) -> None:
    """Of 128 ranks the names have two digits or three; those that are lost are named, with one effect."""
    gone = {*range(40, 48), 105}
    many_ranks(tmp_path, 128, gone)
    (one,) = cli("verify", tmp_path).errors
    assert one["message"] == "tensor-parallel ranks 40-47, 105 are missing: 9 of 128 files"
    assert one["rank"] == "tp 40 to 47 and 105" and one["effect"]["tensors"] == ["a", "b"]
    assert one["files"] == [f"tp_rank_{rank:02d}.safetensors" for rank in sorted(gone)]


def test_lost_ranks_that_are_told_by_runs_are_one_finding_too(tmp_path: Path) -> None:
    """Of hundreds of files the first of each run is named."""
    many_ranks(tmp_path, 600, {5, *range(100, 300), *range(400, 520)})
    (one,) = cli("verify", tmp_path).errors
    assert one["message"] == "tensor-parallel ranks 5, 100-299, 400-519 are missing: 321 of 600 files"
    assert one["files"] == [f"tp_rank_{rank:02d}.safetensors" for rank in (5, 100, 400)]
    assert one["effect"]["count"] == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_lost_ranks_of_zero_are_one_finding(stage: int, tmp_path: Path) -> None:
    """With a node all files of its data-parallel ranks are lost, whatever they hold."""
    root = zero_maker.write(tmp_path / "ckpt", Run(stage, 8, torch.bfloat16, [{"a": torch.rand(64)}]))
    gone = sorted(file for rank in (3, 4, 5) for file in root.rglob(f"*zero_pp_rank_{rank}_*"))
    for file in gone:
        file.unlink()
    (one,) = cli("verify", root).errors
    assert (one["rank"], len(one["files"])) == ("dp 3 to 5", len(gone))
    assert one["message"].startswith("data-parallel ranks 3-5 are missing: ")


@pytest.mark.parametrize(
    "coords", [{"tp": -1}, {"tp": "x"}, {"tp": range(3, 3)}, {"tp": [5]}, [1], {"tp": 1 << 70}]
)
def test_coords_of_another_form_are_refused(coords: Any) -> None:
    with pytest.raises(TypeError, match="coords are numbers, or ranges of them, by dimension"):
        Finding.of("FS101", "the file is missing", coords=coords)


def test_coords_survive_copies() -> None:
    finding = Finding.of("FS101", "the file is missing", coords={"tp": range(3, 6), "pp": 1})
    assert pickle.loads(pickle.dumps(finding)) == copy_of(finding) == finding
    assert finding.rank == "tp 3 to 5, pp 1" and finding.replace(coords=None).rank is None
    assert "coords" not in finding.to_dict()
    assert finding.replace(rank=None).coords == {} and finding.replace(rank="mp 3").coords == finding.coords


def test_several_files_of_different_ranks_are_of_no_one_rank() -> None:
    found = [
        Finding.of("FS110", "rank on tp", file=f"x_{n}", coords={"tp": n}, help="move it") for n in range(2)
    ]
    (one,) = group_by_cause(found, [])
    assert len(one.files) == 2 and one.rank is None and one.coords == {}
