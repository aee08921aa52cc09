"""Rank files of one kind, checked for completeness and for the rank that each file states."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.ranks import rank_range
from ...common.records import dataclass, field
from ..base import Contents, Found, lacking, missing, unexpected
from ..renamed_files import places
from .find_files import FsdpFiles
from .placements import Unreadable, box


@dataclass
class Ranks:
    """Rank files of one kind, with the place that each file states."""

    found: Found[FsdpFiles]
    contents: Contents
    #: Files by rank, according to the file names.
    files: dict[int, int]
    findings: list[Finding] = field(default_factory=list)
    #: True if a file is missing, cannot be read, or does not belong to the rank in its name.
    broken: bool = False
    #: The parts of tensors that each file describes.
    distributed: dict[int, _core.Distributed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, file in self.files.items():
            self.distributed[rank] = self.contents.distributed(file)
            self.broken |= not self.contents.readable(file)
        self._all_there()
        self._where_they_say()
        self._one_mesh()

    def label(self, rank: int) -> str:
        """Format a rank."""
        return f"rank {rank}"

    def path(self, rank: int) -> str:
        """Return the path of a rank's file."""
        return self.found.files[self.files[rank]].path

    def parameters(self) -> set[str]:
        """Return the names of divided tensors, without buffers, of which each rank has its own copy."""
        return {".".join(part["path"]) for record in self.distributed.values() for part in record["parts"]}

    def paths(self) -> dict[str, list[str]]:
        """Return the keys of nested dicts that lead to each tensor, by tensor name."""
        parts = [part["path"] for record in self.distributed.values() for part in record["parts"]]
        files = [file for file in self.files.values() if self.contents.readable(file)]
        parts += [tensor["path"] for file in files for tensor in self.contents.tensors(file)]
        return {".".join(path): path for path in parts}

    def aliases(self) -> set[str]:
        """Return the aliases of tied parameters.

        An alias shares its place with another tensor on every rank that has either of them.
        """
        found: dict[str, bool] = {}
        for file in self.files.values():
            owners: dict[tuple[Any, ...], str] = {}
            for tensor in self.contents.tensors(file) if self.contents.readable(file) else ():
                if 0 in tensor["shape"]:
                    continue
                name = ".".join(tensor["path"])
                place = (tensor["storage"], tensor["offset"], tuple(tensor["shape"]))
                is_alias = owners.setdefault(place, name) != name
                found[name] = found.get(name, True) and is_alias
        return {name for name, is_alias in found.items() if is_alias}

    def boxes_of(self, rank: int, part: _core.RankPart) -> list[tuple[list[int], list[int], int]]:
        """Return a rank's boxes of one tensor, each with the tensor in the file.

        Raises:
            FastshardError: ``FS514`` for a placement that does not determine a box.
        """
        if "shards" in part:
            return [(shard["lo"], shard["size"], shard["tensor"]) for shard in part["shards"]]
        try:
            bounds = box(part["shape"], self.distributed[rank]["meshes"][part["mesh"]], part)
        except Unreadable as why:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"a DTensor whose placement is not supported: {why}",
                file=self.path(rank),
                rank=self.label(rank),
                tensor=".".join(part["path"]),
                help="redistribute it to Shard or Replicate before saving, or save with "
                "torch.distributed.checkpoint",
            ) from None
        return [] if bounds is None else [(*bounds, part["tensor"])]

    def _all_there(self) -> None:
        """Check that all ranks exist, according to file names, to contents, or up to the highest rank."""
        world = self.found.seen.world
        why = f"{world} ranks, by the files' names"
        worlds = [n for record in self.distributed.values() for n in _worlds(record)]
        usual = Counter(worlds).most_common(1)[0][0] if worlds else None
        if world is None:
            world = usual or max(self.files, default=0) + 1
            why = f"{world} ranks, by the meshes" if usual else f"ranks 0 to {world - 1}, by the other files"
        elif usual is not None and usual > world:
            self.broken = True
            first = next(r for r, record in self.distributed.items() if usual in _worlds(record))
            self.findings.append(
                Finding.of(
                    codes.RANKS_DISAGREE,
                    "the mesh has more ranks than the file's name states",
                    file=self.path(first),
                    rank=self.label(first),
                    expected=str(world),
                    got=str(usual),
                    help="copy all files of this step again; they were renamed, or ranks are missing",
                )
            )
        sibling = self.found.files[next(iter(self.files.values()))]
        for rank, last in lacking(self.files, 0, world - 1):
            self.broken = True
            name, end = (_renumbered(sibling.name, n) for n in (rank, last))
            self.findings.append(
                missing(
                    f"{sibling.folder}/{name}" if sibling.folder else name,
                    {"rank": rank_range(rank, last)},
                    why,
                    f"copy {name} from the node that ran rank {rank}, or name that node's directory as "
                    "another CKPT",
                    upto=end if last > rank else None,
                )
            )
        for rank in [rank for rank in self.files if rank >= world]:
            self.broken = True
            why = f"rank {rank} is beyond the {world} of this checkpoint"
            self.findings.append(unexpected(self.path(rank), why))
            del self.files[rank], self.distributed[rank]

    def _where_they_say(self) -> None:
        """Check that the rank that a file states is the rank in its name."""
        for rank, record in self.distributed.items():
            own = {n for mesh in record["meshes"] if (n := mesh["rank"]) is not None}
            own |= {n for part in record["parts"] if (n := part.get("rank")) is not None}
            if not own - {rank}:
                continue
            self.broken = True
            inside = places(self.contents.archive(self.files[rank]) or "")
            if inside.get("rank", rank) != rank:
                # The name that torch.save left in the archive says so already.
                continue
            self.findings.append(
                Finding.of(
                    codes.RENAMED,
                    "according to its tensors, the file was saved by another rank",
                    file=self.path(rank),
                    rank=self.label(rank),
                    expected=f"rank {rank}",
                    got=", ".join(f"rank {n}" for n in sorted(own)),
                    help="copy the file of this rank from the node that wrote it",
                )
            )

    def _one_mesh(self) -> None:
        """Check that all ranks divide the model over the same mesh."""
        meshes_by_rank: dict[int, tuple[tuple[Any, ...], ...]] = {
            rank: tuple(
                sorted({(*mesh["shape"], *(mesh["names"] or ())) for mesh in record["meshes"]}, key=str)
            )
            for rank, record in self.distributed.items()
            if record["meshes"]
        }
        usual = Counter(meshes_by_rank.values()).most_common(1)[0][0] if meshes_by_rank else ()
        for rank, meshes in meshes_by_rank.items():
            if meshes == usual:
                continue
            self.broken = True
            self.findings.append(
                Finding.of(
                    codes.RANKS_DISAGREE,
                    "ranks divide the model over different meshes",
                    file=self.path(rank),
                    rank=self.label(rank),
                    expected=f"{_meshes(usual)}, as on the other ranks",
                    got=_meshes(meshes),
                    help="copy the file of this rank from the node that ran it: this one is from another run",
                )
            )


def _worlds(record: _core.Distributed) -> list[int]:
    """Return the number of ranks in the run, according to a file's meshes and groups."""
    worlds = [mesh["ranks"] for mesh in record["meshes"]] + [
        part.get("ranks") for part in record["parts"][:1]
    ]
    return [max(n for n in worlds if n)] if any(worlds) else []


def _renumbered(name: str, rank: int) -> str:
    """Return the name of another rank's file in the same save."""
    return re.sub(
        r"\d+(?=\D*$)", lambda m: f"{rank:0{len(m[0])}d}" if m[0][0] == "0" else str(rank), name, count=1
    )


def _meshes(meshes: tuple[tuple[Any, ...], ...]) -> str:
    return "; ".join("x".join(map(str, mesh)) for mesh in meshes)
