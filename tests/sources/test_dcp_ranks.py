"""What several gloo ranks save by torch.distributed.checkpoint, in every form that its writers have."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import Forks
from helpers import assert_refused, cli, copy, read_result
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

#: Extents that ranks do not divide, fewer rows than ranks, divided columns, and copies.
PLACED = {
    "uneven.weight": ((7, 5), torch.float32, Shard(0)),
    "few.weight": ((1, 3), torch.float32, Shard(0)),
    "bias": ((11,), torch.bfloat16, Shard(0)),
    "columns.weight": ((4, 10), torch.float16, Shard(1)),
    "copied.weight": ((4, 4), torch.float32, Replicate()),
    "even.weight": ((12, 64), torch.float64, Shard(0)),
}
#: Forms of files by the name of the folder.
FORMS = ("plain", "threads", "each_apart", "async", "compressed")


def whole(even: bool = False) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(5)
    shapes = {name: (12, 12, 12)[: len(shape)] if even else shape for name, (shape, *_) in PLACED.items()}
    return {
        name: torch.randn(shapes[name], generator=dice, dtype=torch.float64).to(dtype)
        for name, (_, dtype, _) in PLACED.items()
    }


def save_all(folder: Path, mesh: Any, hybrid: bool) -> None:
    """Every form, by one rank of a run."""

    def placed(even: bool = False) -> dict[str, Any]:
        return {
            name: distribute_tensor(
                tensor, mesh, [Replicate(), PLACED[name][2]] if hybrid else [PLACED[name][2]]
            )
            for name, tensor in whole(even).items()
        }

    state = {"model": placed(), "step": 4}
    dcp.save(state, checkpoint_id=folder / "plain")
    if hybrid:
        return
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "threads", thread_count=4))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "each_apart", single_file_per_rank=False))
    dcp.async_save(state, checkpoint_id=folder / "async").result()
    from torch.distributed.checkpoint import _extension

    if _extension.ZStandard.is_available():
        writer = dcp.FileSystemWriter(folder / "compressed", _extensions=[_extension.ZStandard()])
        dcp.save(state, storage_writer=writer)
    dcp.save(placed(), storage_writer=dcp.HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True))
    mapping = {name: 1 + i % 2 for i, name in enumerate(PLACED)}
    writer = dcp.HuggingFaceStorageWriter(
        str(folder / "hf_both"), mapping, save_distributed=True, enable_consolidation=True
    )
    dcp.save(placed(), storage_writer=writer)
    # Each rank writes the same file: the last one's is left.
    for last in range(dist.get_world_size()):
        for even in (True, False):
            name = f"hf_over_{last}_{'even' if even else 'uneven'}"
            writer = dcp.HuggingFaceStorageWriter(str(folder / name))
            wrote = writer.write_data

            def in_turn(*arguments: Any, wrote: Any = wrote, last: int = last) -> Any:
                for rank in [*(r for r in range(dist.get_world_size()) if r != last), last]:
                    if rank == dist.get_rank():
                        done = wrote(*arguments)
                    dist.barrier()
                return done

            writer.write_data = in_turn  # type: ignore[method-assign]
            dcp.save(placed(even), storage_writer=writer)
    dcp.save(state, checkpoint_id=folder / "alone", use_collectives=False)
    differs = {**state, "local": torch.full((3,), float(dist.get_rank()))}
    dcp.save(differs, checkpoint_id=folder / "differs", use_collectives=False)


def rank_of(folder: Path, rank: int, world: int) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=90))
    hybrid = world == 4
    mesh = init_device_mesh("cpu", (2, 2) if hybrid else (world,))
    save_all(folder, mesh, hybrid)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Forks]:
    """A process that has imported torch, whose forks are the ranks."""
    forks = Forks(
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "pytest",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    yield forks
    forks.kill()


def run(ranks: Forks, folder: Path, world: int) -> Path:
    logs = [folder / f"log{rank}" for rank in range(world)]
    ranks.launch(Path(__file__), [folder, world], logs, [{"RANK": str(rank)} for rank in range(world)])
    return folder


@pytest.fixture(scope="module")
def three(ranks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(ranks, tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def hybrid(ranks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(ranks, tmp_path_factory.mktemp("hybrid"), 4)


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return set(have) == set(want) and all(
        have[n].dtype == t.dtype and torch.equal(have[n], t) for n, t in want.items()
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_merged_as_torch_reads_it(form: str, three: Path, tmp_path: Path) -> None:
    root = three / form
    if form == "compressed" and not root.exists():
        pytest.skip("torch compresses with zstandard or pyzstd")
    assert cli("verify", root).code == 0
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert same(have, {f"model.{n}": t for n, t in whole().items()})
    dcp_to_torch_save(root, tmp_path / "whole.pt")
    assert same(have, {f"model.{n}": t for n, t in torch.load(tmp_path / "whole.pt")["model"].items()})


def test_replicas_of_hybrid_sharding_are_saved_once(hybrid: Path, tmp_path: Path) -> None:
    ran = cli("merge", hybrid / "plain", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert same(read_result(tmp_path / "out"), {f"model.{n}": t for n, t in whole().items()})


@pytest.mark.parametrize("form", ["plain", "threads", "each_apart"])
def test_every_missing_file_is_named(form: str, three: Path, tmp_path: Path) -> None:
    for file in sorted((three / form).glob("*.distcp")):
        root = copy(three / form, tmp_path / file.name)
        (root / file.name).unlink()
        ran = cli("merge", root, tmp_path / "out")
        described = dcp.FileSystemReader(three / form).read_metadata()
        if any(
            info.relative_path == file.name for i, info in described.storage_data.items() if i.fqn != "step"
        ):
            assert ran.code == 3 and ran.having("FS101", file=file.name), ran.out
        assert ran.code == 3 or same(
            read_result(tmp_path / "out"), {f"model.{n}": t for n, t in whole().items()}
        )
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_metadata_cut_anywhere_are_refused(three: Path, tmp_path: Path) -> None:
    root = copy(three / "plain", tmp_path / "ckpt")
    good = (root / ".metadata").read_bytes()
    for length in [0, 1, 2, *range(10, len(good), max(1, len(good) // 40)), len(good) - 1]:
        (root / ".metadata").write_bytes(good[:length])
        ran = cli("merge", root, tmp_path / "out")
        assert ran.code in (1, 2, 3) and not (tmp_path / "out").exists(), length
        assert ran.errors[0]["code"] in ({"FS602", "FS604", "FS312"} if length else {"FS316"}), ran.out


def test_metadata_of_another_save_are_not_taken_for_these_files(
    three: Path, hybrid: Path, tmp_path: Path
) -> None:
    root = copy(three / "plain", tmp_path / "ckpt")
    shutil.copy(hybrid / "plain/.metadata", root / ".metadata")
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code in (1, 3) and not (tmp_path / "out").exists(), ran.out
    # What an interrupted save leaves beside good metadata is in nobody's way.
    root = copy(three / "plain", tmp_path / "interrupted")
    shutil.copy(hybrid / "plain/.metadata", root / ".metadata.tmp")
    ran = cli("merge", root, tmp_path / "good")
    assert ran.code == 0, ran.out
    assert same(read_result(tmp_path / "good"), {f"model.{n}": t for n, t in whole().items()})


def test_shards_of_the_safetensors_form_are_what_torch_makes_of_them(three: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    consolidate_safetensors_files(str(three / "hf"), str(tmp_path / "torch"), dict.fromkeys(PLACED, 1))
    for root in (three / "hf", three / "hf_both", three / "hf_both/sharded", tmp_path / "torch"):
        ran = cli("merge", root, tmp_path / f"out_{root.parent.name}_{root.name}")
        assert ran.code == 0, ran.out
        assert same(read_result(tmp_path / f"out_{root.parent.name}_{root.name}"), whole()), root


@pytest.mark.parametrize("even", ["even", "uneven"])
@pytest.mark.parametrize("last", range(3))
def test_ranks_that_wrote_over_each_other_are_found(
    last: int, even: str, three: Path, tmp_path: Path
) -> None:
    """save_distributed=True forgotten: one rank's slices are left, and nothing in their shapes says so."""
    root = three / f"hf_over_{last}_{even}"
    ran = assert_refused(root, tmp_path / "out", "FS208", exit=1)
    assert ran.having("FS208", help="save_distributed=True")
    assert json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]


def test_ranks_that_saved_each_for_itself(three: Path, tmp_path: Path) -> None:
    """use_collectives=False: metadata of each rank, of which none says all."""
    root = three / "alone"
    assert {f.name for f in root.glob("*.metadata")} == {f"__{rank}.metadata" for rank in range(3)}
    want = {f"model.{n}": t for n, t in whole().items()}
    assert cli("verify", root).code == 0
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert same(read_result(tmp_path / "out"), want)
    # As nodes have it, each its own ranks' files.
    for rank in range(3):
        (tmp_path / f"node{rank}").mkdir()
        for file in root.glob(f"__{rank}[._]*"):
            shutil.copy(file, tmp_path / f"node{rank}")
    nodes = [tmp_path / f"node{rank}" for rank in range(3)]
    assert cli("merge", *nodes, tmp_path / "of_nodes").code == 0
    assert same(read_result(tmp_path / "of_nodes"), want)
    assert_refused(
        [nodes[0], nodes[2]], tmp_path / "gap", "FS101", exit=3, file="__1.metadata", rank="rank 1"
    )
    assert_refused(nodes[:2], tmp_path / "end", "FS205", exit=1, tensor="model.uneven.weight")
    # Records of a rank that nothing names: its metadata is lost.
    shutil.copy(root / "__2_0.distcp", nodes[1])
    assert_refused(nodes[:2], tmp_path / "unnamed", "FS101", exit=3, file="__2.metadata", rank="rank 2")
    (nodes[1] / "__2_0.distcp").unlink()
    (nodes[1] / "__1_0.distcp").unlink()
    assert_refused(nodes, tmp_path / "file", "FS101", exit=3, file="__1_0.distcp")


def test_copies_of_ranks_that_differ_are_found(three: Path, tmp_path: Path) -> None:
    """What is no DTensor each rank saves as the whole."""
    ran = cli("merge", three / "differs", tmp_path / "out")
    assert ran.code == 1 and not (tmp_path / "out").exists(), ran.out
    assert any(error["tensor"] == "local" for error in ran.errors), ran.out


def test_metadata_of_all_and_of_single_ranks_must_agree(three: Path, tmp_path: Path) -> None:
    root = copy(three / "alone", tmp_path / "ckpt")
    shutil.copy(three / "plain/.metadata", root / ".metadata")
    assert_refused(root, tmp_path / "out", "FS106", exit=2, help="older save")


if __name__ == "__main__":
    rank_of(Path(sys.argv[1]), int(os.environ["RANK"]), int(sys.argv[2]))
