"""Rank files that are gone, copied, swapped, cut, flipped, of another step or another run: each is told, none
is published."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, copy, flip_bit, read_result
from safetensors.torch import load_file

Saved = Callable[..., Path]


def file(folder: Path, rank: int, kind: str = "model", world: int = 4) -> Path:
    return folder / f"{kind}_world_size_{world}_rank_{rank}.pt"


def plain_names(folder: Path) -> None:
    """Archives that do not tell under which name they were saved, as of a trainer that saves to a buffer."""
    for path in folder.glob("*_rank_*.pt"):
        with path.open("rb") as stream:
            content = torch.load(stream, weights_only=False)
        with path.open("wb") as stream:
            torch.save(content, stream)


def swap(a: Path, b: Path) -> None:
    aside = a.with_suffix(".aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def other_step(folder: Path, kind: str) -> None:
    path = file(folder, 2, kind)
    content = torch.load(path, weights_only=False)
    if kind == "optim":
        for entry in content["state"].values():
            entry["step"] += 1
    else:
        content["lr_scheduler"]["last_epoch"] = 9
    torch.save(content, path)


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def cut_of(content: dict[str, Any]) -> None:
    """One tensor's local part is shorter than its mesh says."""
    content["model.norm.weight"]._local_tensor = content["model.norm.weight"]._local_tensor[:-1].clone()


def swapped(folder: Path) -> None:
    plain_names(folder)
    swap(file(folder, 1), file(folder, 2))


def copied(folder: Path) -> None:
    plain_names(folder)
    shutil.copy(file(folder, 1), file(folder, 2))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, int, str]] = {
    "gone": (lambda f: file(f, 2).unlink(), "FS101", 3, "model_world_size_4_rank_2.pt"),
    "last_gone": (lambda f: file(f, 3).unlink(), "FS101", 3, "model_world_size_4_rank_3.pt"),
    "swapped": (lambda f: swap(file(f, 1), file(f, 2)), "FS113", 1, "model_world_size_4_rank_1.pt"),
    "swapped_unnamed": (swapped, "FS113", 1, "model_world_size_4_rank_1.pt"),
    "copied": (lambda f: shutil.copy(file(f, 1), file(f, 2)), "FS303", 1, "model_world_size_4_rank_2.pt"),
    "copied_unnamed": (copied, "FS113", 1, "model_world_size_4_rank_2.pt"),
    "cut": (lambda f: file(f, 2).write_bytes(file(f, 2).read_bytes()[:-700]), "FS312", 1, "rank_2.pt"),
    "cut_by_half": (
        lambda f: file(f, 2).write_bytes(file(f, 2).read_bytes()[:9000]),
        "FS312",
        1,
        "rank_2.pt",
    ),
    "empty": (lambda f: file(f, 2).write_bytes(b""), "FS316", 1, "rank_2.pt"),
    "flipped": (lambda f: flip_bit(file(f, 2), 4096), "FS301", 1, "rank_2.pt"),
    "optimizer_of_another_step": (
        lambda f: other_step(f, "optim"),
        "FS107",
        1,
        "model_world_size_4_rank_2.pt",
    ),
    "scheduler_of_another_step": (
        lambda f: other_step(f, "extra_state"),
        "FS107",
        1,
        "model_world_size_4_rank_2.pt",
    ),
    "a_local_part_cut": (lambda f: changed(file(f, 2), cut_of), "FS201", 1, "rank_2.pt"),
    "fewer_stated": (
        lambda f: (f / "fsdp_config.json").write_text('{"world_size": 8}'),
        "FS110",
        1,
        "fsdp_config.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told(damage: str, saved: Saved, tmp_path: Path) -> None:
    folder = copy(saved("fsdp2"), tmp_path / "ckpt")
    do, code, exit_code, named = DAMAGE[damage]
    do(folder)
    before = {p.name: p.stat().st_size for p in folder.iterdir()}
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == exit_code, ran.out
    first = next(f for f in ran.errors if f["code"] == code)
    assert named in first["file"] and first["help"]
    # One clear finding a file, not one for each tensor.
    assert len(ran.errors) <= 4, ran.out
    assert not (tmp_path / "out").exists()
    assert {p.name: p.stat().st_size for p in folder.iterdir()} == before


def test_replicas_that_differ(saved: Saved, tmp_path: Path) -> None:
    """HSDP has each part twice."""
    folder = copy(saved("hsdp"), tmp_path / "ckpt")

    def drift(content: dict[str, Any]) -> None:
        content["model.norm.weight"]._local_tensor[0] += 1

    changed(file(folder, 2), drift)
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 1 and [f["code"] for f in ran.errors] == ["FS302"], ran.out
    assert ran.errors[0]["tensor"] == "model.norm.weight"
    assert not (tmp_path / "out").exists()


def test_a_buffer_that_differs(saved: Saved, tmp_path: Path) -> None:
    """What is no DTensor each rank has for itself: it must be the same."""
    folder = copy(saved("fsdp2"), tmp_path / "ckpt")
    for rank in range(4):
        changed(
            file(folder, rank),
            lambda content, rank=rank: content.update(count=torch.tensor([3.0, rank // 3])),
        )
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 1 and [(f["code"], f["tensor"]) for f in ran.errors] == [("FS302", "count")], ran.out


def test_files_of_two_runs(saved: Saved, tmp_path: Path) -> None:
    """One run continued with other ranks, in the same folder; and a file of another mesh under this one's
    name."""
    folder = copy(saved("fsdp2"), tmp_path / "both")
    for rank in range(2):
        shutil.copy(file(saved("fsdp2", 2), rank, world=2), folder)
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS106"]
    assert "model_world_size_2" in ran.errors[0]["got"]
    mixed = copy(saved("hsdp"), tmp_path / "mixed")
    shutil.copy(file(saved("fsdp2"), 3), mixed)
    ran = cli("merge", mixed, tmp_path / "out")
    assert ran.code == 1 and [(f["code"], f["rank"]) for f in ran.errors] == [("FS110", "rank 3")], ran.out
    assert not (tmp_path / "out").exists()


def test_swapped_files_are_right_where_that_is_accepted(saved: Saved, tmp_path: Path) -> None:
    """Each file says which rank's it is, so that its name does not matter."""
    folder = copy(saved("fsdp2"), tmp_path / "ckpt")
    swap(file(folder, 1), file(folder, 2))
    for kind in ("optim", "extra_state"):
        swap(file(folder, 1, kind), file(folder, 2, kind))
    ran = cli("merge", folder, tmp_path / "out", "--accept", "renamed")
    assert ran.code == 0, ran.out
    assert ran.having("FS113")
    have = read_result(tmp_path / "out")
    want = load_file(folder / "expected.safetensors")
    assert all(torch.equal(tensor, want[name]) for name, tensor in have.items())


def test_an_optimizers_file_gone_is_only_told(saved: Saved, tmp_path: Path) -> None:
    folder = copy(saved("fsdp2"), tmp_path / "ckpt")
    file(folder, 2, "optim").unlink()
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 0 and [f["file"] for f in ran.having("FS101")] == ["optim_world_size_4_rank_2.pt"]
    ran = cli("merge", folder, tmp_path / "other", "--optimizer")
    assert ran.code == 3 and [f["code"] for f in ran.errors] == ["FS101"]
