"""DTensors as older versions of torch spell them: other modules, other fields of the mesh; and hostile
ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dtensor_maker import Named, Version, save
from helpers import cli, read_result

WHOLE = {"a.weight": torch.arange(30.0).view(10, 3), "a.bias": torch.arange(5.0)}


MINORS = [3, 4, 5, 7, 8, 9, 10, 12, 13]


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "rows_by_columns"])
def test_every_spelling_is_read(minor: int, kind: str, tmp_path: Path) -> None:
    mesh, names = ((4,), ("fsdp",)) if kind == "fsdp" else ((2, 2), ("ddp", "fsdp"))
    version, folder = Version(minor, mesh, names), tmp_path / "ckpt"
    folder.mkdir()
    for rank in range(4):
        at = (torch.arange(4).view(mesh) == rank).nonzero()[0].tolist()
        ours, content = version.device_mesh(rank), {}
        for name, whole in WHOLE.items():
            kinds = {"fsdp": [0], "hsdp": [None, 0], "rows_by_columns": [0, 1 if whole.dim() > 1 else None]}[
                kind
            ]
            local = whole
            for d, dim in enumerate(kinds):
                if dim is not None:
                    chunks = list(torch.chunk(local, mesh[d], dim)) + [local.narrow(dim, 0, 0)] * mesh[d]
                    local = chunks[at[d]]
            placements = tuple(
                version.placement("Replicate") if dim is None else version.placement("Shard", dim=dim)
                for dim in kinds
            )
            content[name] = version.tensor(local.clone(), whole, ours, placements)
        save(content, folder / f"model_world_size_4_rank_{rank}.pt")
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert set(have) == set(WHOLE) and all(torch.equal(have[name], WHOLE[name]) for name in WHOLE)
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    for rank in range(4):
        content = (folder / f"model_world_size_4_rank_{rank}.pt").read_bytes()
        (swapped / f"model_world_size_4_rank_{rank ^ 1}.pt").write_bytes(content)
    ran = cli("merge", swapped, tmp_path / "other")
    assert ran.code == 1 and {f["code"] for f in ran.errors} == {"FS113"}


@pytest.mark.parametrize("minor", [3, 4])
def test_an_order_that_nothing_tells_is_refused(minor: int, tmp_path: Path) -> None:
    """FSDP2 over tensor parallelism before 2.5: what follows from the placements is not what lies there."""
    version = Version(minor, (2, 2), ("dp", "tp"))
    for rank in range(4):
        both = (version.placement("Shard", dim=0), version.placement("Shard", dim=0))
        part = version.tensor(torch.zeros(2, 3), torch.zeros(8, 3), version.device_mesh(rank), both)
        save({"w": part}, tmp_path / f"model_world_size_4_rank_{rank}.pt")
    ran = cli("merge", tmp_path, tmp_path / "out")
    assert ran.code == 2 and "before torch 2.5" in ran.errors[0]["message"], ran.out
    assert ran.errors[0]["code"] == "FS514" and ran.errors[0]["tensor"] == "w"


@pytest.mark.parametrize("minor", [3, 5])
def test_a_sum_that_was_not_taken_is_refused(minor: int, tmp_path: Path) -> None:
    version = Version(minor, (2,), ("fsdp",))
    for rank in range(2):
        state = {"reduce_op": "sum"}
        term = Named(f"{version.classes}placement_types.{'_Partial' if minor == 3 else 'Partial'}", state)
        part = version.tensor(torch.ones(2, 3), torch.ones(2, 3), version.device_mesh(rank), (term,))
        save({"w": part}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    ran = cli("merge", tmp_path, tmp_path / "out")
    assert ran.code == 2 and "a term of a sum" in ran.errors[0]["message"], ran.out


def test_hostile_meshes_are_refused(tmp_path: Path) -> None:
    """A mesh in a form that is not known, of numbers beyond belief, nested without end, or of another
    class."""
    version = Version(13, (2,), ("fsdp",))
    good = version.device_mesh(0)
    nest: Any = (2,)
    for _ in range(60):
        nest = (nest, nest)
    layout = "torch.distributed._mesh_layout._MeshLayout"
    bad = {
        "no state": Named(good.name),
        "another class": Named("os.DeviceMesh", good.state),
        "no layout": Named(good.name, {"_coordinate_on_dim": (0,)}),
        "nested": Named(good.name, {**good.state, "_layout": Named(layout, {"shape": nest, "stride": (1,)})}),
        "negative": Named(
            good.name, {**good.state, "_layout": Named(layout, {"shape": (-2,), "stride": (1,)})}
        ),
        "two placements": version.device_mesh(0),
    }
    for what, mesh in bad.items():
        folder = tmp_path / what.replace(" ", "_")
        folder.mkdir()
        shard = version.placement("Shard", dim=0)
        for rank in range(2):
            placements = (shard, shard) if what == "two placements" else (shard,)
            save(
                {"w": version.tensor(torch.ones(1, 3), torch.ones(2, 3), mesh, placements)},
                folder / f"model_world_size_2_rank_{rank}.pt",
            )
        ran = cli("merge", folder, tmp_path / "out")
        assert ran.code == 2 and ran.errors[0]["code"] == "FS514", (what, ran.out)
        assert not (tmp_path / "out").exists()


def test_numbers_beyond_belief(tmp_path: Path) -> None:
    version = Version(13, (2,), ("fsdp",))
    for rank in range(2):
        mesh = version.device_mesh(rank)
        mesh.state["_coordinate_on_dim"] = (1 << 40,)
        save(
            {
                "w": version.tensor(
                    torch.ones(1, 3), torch.ones(2, 3), mesh, (version.placement("Shard", dim=0),)
                )
            },
            tmp_path / f"model_world_size_2_rank_{rank}.pt",
        )
    ran = cli("merge", tmp_path, tmp_path / "out")
    assert ran.code == 1 and {f["code"] for f in ran.errors} == {"FS201"}, ran.out
