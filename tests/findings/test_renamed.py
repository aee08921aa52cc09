"""Torch files under another rank's name: copied over its file, or swapped with it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from fastshard.sources.renamed_files import places, renamed
from helpers import FIXTURES, assert_refused, cli, copy, files_of
from hypothesis import given
from hypothesis import strategies as st

#: Good checkpoints, and the names of their files that stand for a rank, a layer or a stage.
SOURCES = {
    "zero1": ("deepspeed/zero1_bf16_dp2", "*_optim_states.pt"),
    "zero2": ("deepspeed/zero2_fp32_dp2", "*_optim_states.pt"),
    "zero3 optimizer": ("deepspeed/zero3_bf16_dp2", "*_optim_states.pt"),
    "zero3 model": ("deepspeed/zero3_bf16_dp2", "*_model_states.pt"),
    "neox layers": ("gpt_neox/neox_pp_tp1", "layer_*.pt"),
    "neox layers of two ranks": ("gpt_neox/neox_pp_tp2", "layer_*.pt"),
    "neox ranks": ("gpt_neox/neox_seq_tp2", "mp_rank_*.pt"),
}


def pairs(source: str, pattern: str) -> list[tuple[Path, Path]]:
    files = sorted((FIXTURES / source).rglob(pattern))
    assert len(files) > 1
    relative = [f.relative_to(FIXTURES / source) for f in files]
    return list(itertools.combinations(relative, 2))


@pytest.mark.parametrize("key", SOURCES)
def test_a_copy_over_another_s_file_is_named(key: str, tmp_path: Path) -> None:
    source, pattern = SOURCES[key]
    for number, (one, two) in enumerate(pairs(source, pattern)):
        ckpt = copy(FIXTURES / source, tmp_path / f"copied{number}")
        shutil.copyfile(ckpt / one, ckpt / two)
        ran = cli("merge", ckpt, tmp_path / f"out{number}")
        # It is a copy of what is there too: the bytes tell.
        (told,) = ran.having("FS303", file=str(two), message=f"a copy of {one}")
        assert ran.code == 1 and told["got"] == one.stem, ran.findings
        assert not (tmp_path / f"out{number}").exists()


@pytest.mark.parametrize("key", SOURCES)
def test_two_that_were_swapped_are_named(key: str, tmp_path: Path) -> None:
    source, pattern = SOURCES[key]
    for number, (one, two) in enumerate(pairs(source, pattern)):
        ckpt = copy(FIXTURES / source, tmp_path / f"swapped{number}")
        (ckpt / one).rename(ckpt / "aside")
        (ckpt / two).rename(ckpt / one)
        (ckpt / "aside").rename(ckpt / two)
        ran = cli("merge", ckpt, tmp_path / f"out{number}")
        assert ran.code == 1 and set(files_of(ran.having("FS113"))) == {str(one), str(two)}, ran.findings
        assert not (tmp_path / f"out{number}").exists()


def test_names_that_were_changed_on_purpose_are_accepted(tmp_path: Path) -> None:
    """The ranks of a run, numbered anew by hand."""
    ckpt = copy(FIXTURES / "gpt_neox/neox_pp_tp1", tmp_path / "ckpt")
    file = sorted(ckpt.rglob("layer_02*.pt"))[0]
    content = torch.load(file, weights_only=True)
    aside = tmp_path / "layer_07-model_00-model_states.pt"
    torch.save(content, aside)
    shutil.copyfile(aside, file)
    assert_refused(ckpt, tmp_path / "out", "FS113", got="layer_07-model_00-model_states")
    ran = cli("merge", ckpt, tmp_path / "out", "--accept", "renamed")
    assert ran.code == 0 and ran.having("FS113")[0]["severity"] == "warning", ran.findings


@pytest.mark.parametrize(
    "archive",
    [
        "archive",
        "mp_rank_00_model_states",
        "mp_rank_00_model_states.pt",
        "tmp",
        "checkpoint-7",
        "model_states_3",
        "",
    ],
)
def test_names_that_say_nothing_else_are_no_matter(archive: str) -> None:
    assert renamed([{"path": "global_step4/mp_rank_00_model_states.pt", "archive": archive}, None]) == []


@given(
    st.sampled_from(
        [
            "mp_rank_{:02d}_model_states",
            "bf16_zero_pp_rank_{}_mp_rank_00_optim_states",
            "layer_{:02d}-model_00-model_states",
            "pytorch_model-stage-{:05d}-shard-00001",
        ]
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_numbers_decide(name: str, a: int, b: int) -> None:
    file = {"path": f"step/{name.format(a)}.pt", "archive": name.format(b)}
    assert bool(renamed([file])) == (a != b)
    assert a in places(name.format(a)).values()
    # Files that an index numbers are no places.
    assert places(f"pytorch_model-{a:05d}-of-{b:05d}") == {}
