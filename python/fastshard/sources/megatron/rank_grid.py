"""The Megatron-LM ranks that have written files, according to folder names and arguments."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

from ...common import codes
from ...common.errors import FastshardError
from ...common.options import MAX_DEGREE
from ...common.ranks import format_rank
from ...common.records import dataclass
from ...common.topology import Topology
from ...models import megatron_sizes
from ..base import Found
from .rank_folders import MegatronFiles

#: Maximum number of ranks; no run has had as many.
_MAX_RANKS = 1 << 20


#: Maximum number of missing places to name one by one; above it, ranges are named.
_ONE_BY_ONE = 100


@dataclass
class RankGrid:
    """Degrees, and the (tp, pp, ep) rank of each file."""

    tp: int
    pp: int
    ep: int
    places: list[tuple[int, int, int]]
    #: Number of ranks that divide an expert's tensors.
    etp: int
    is_mixture: bool

    @cached_property
    def topology(self) -> Topology:
        """The degrees."""
        return Topology(self.tp, self.pp, self.ep, self.etp)

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the parallel dimensions that divide tensors."""
        experts = {"etp": self.etp} if self.is_mixture else {}
        return {"tp": self.tp} | ({"ep": self.ep} if self.ep > 1 else {}) | experts

    @classmethod
    def of(cls, found: Found[MegatronFiles], args: dict[str, Any], mixture: bool) -> RankGrid:
        """Derive the grid from folder names and arguments.

        Names end with the stage if there are several stages, then with the expert rank if there are several
        expert ranks.

        Raises:
            FastshardError: ``FS106`` if there is one number and nothing states whether it is the stage or the
                expert rank.
        """
        suffixes = found.seen.suffixes
        pp = megatron_sizes.size(args, "pipeline_model_parallel_size")
        ep = megatron_sizes.size(args, "expert_model_parallel_size")
        longest = max(len(s) for s in suffixes)
        if longest == 2 and mixture and pp is None and ep is None:
            raise FastshardError.of(
                codes.AMBIGUOUS,
                "the number after the tensor-parallel rank "
                "may be a pipeline stage or an expert-parallel rank",
                file=found.files[0].path,
                help="save the rank files again with their arguments (pipeline_model_parallel_size, "
                "expert_model_parallel_size)",
            )
        expert = longest == 2 and (ep or 1) > 1 and (pp or 1) == 1
        places = [
            (
                s[0],
                s[1] if len(s) > 1 and not expert else 0,
                s[2] if len(s) > 2 else s[1] if expert and len(s) > 1 else 0,
            )
            for s in suffixes
        ]
        tp = megatron_sizes.size(args, "tensor_model_parallel_size") or max(p[0] for p in places) + 1
        pp = pp or max(p[1] for p in places) + 1
        ep = ep or max(p[2] for p in places) + 1
        etp = (megatron_sizes.size(args, "expert_tensor_parallel_size") if mixture else None) or tp
        if max(tp, pp, ep, etp) > MAX_DEGREE or max(tp, etp) * pp * ep > _MAX_RANKS:
            raise FastshardError.of(
                codes.BAD_VALUE,
                "args: tensor-, pipeline- and expert-parallel degrees",
                file=found.files[0].path,
                expected=f"at most {MAX_DEGREE} each, and {_MAX_RANKS} ranks",
                got=f"{tp} x {pp} x {ep}",
            )
        return cls(tp, pp, ep, places, etp, mixture)

    def find_gaps(self) -> list[tuple[tuple[int, int, int], tuple[int, int, int]]]:
        """Find the places whose files are missing, as the first and last place of each range of
        tensor-parallel ranks.

        Places are listed singly if there are few.
        """
        there = set(self.places)
        every = itertools.product(range(self.pp), range(self.ep), range(self.tp))
        places = [(tensor, stage, expert) for stage, expert, tensor in every]
        gaps = [one for one in places if one not in there and self.topology.is_saved(one[0], one[2])]
        if len(gaps) <= _ONE_BY_ONE:
            return [(place, place) for place in sorted(gaps)]
        found: list[tuple[tuple[int, int, int], tuple[int, int, int]]] = []
        for place in gaps:
            if found and found[-1][1] == (place[0] - 1, *place[1:]):
                found[-1] = (found[-1][0], place)
            else:
                found.append((place, place))
        return found

    def of_expert(self, place: tuple[int, int, int]) -> int | None:
        """Return the rank among those that divide an expert's tensors; None for a place without a rank."""
        tensor, _, expert = place
        return self.topology.expert_rank(tensor, expert)

    def folder(self, place: tuple[int, int, int]) -> str:
        """Return the folder name of a rank.

        source: Megatron-LM megatron/training/checkpointing.py, get_checkpoint_name
        """
        rank, stage, expert = place
        name = f"mp_rank_{rank:02d}"
        name += f"_{stage:03d}" if self.pp > 1 else ""
        return name + (f"_{expert:03d}" if self.ep > 1 else "")

    def coords(self, place: tuple[int, int, int]) -> dict[str, int]:
        """Return the ranks of a place, as named in messages."""
        return {"tp": place[0], "pp": place[1]} | ({"ep": place[2]} if self.ep > 1 else {})

    def coords_of_tensors(self, place: tuple[int, int, int]) -> dict[str, int]:
        """Return the ranks of a place on all parallel dimensions, in the layout's form."""
        experts = {"etp": self.of_expert(place) or 0} if self.is_mixture else {}
        return self.coords(place) | experts

    def rank(self, place: tuple[int, int, int]) -> str:
        """Format the rank in the short form."""
        return format_rank(self.coords(place))

    def long_rank(self, place: tuple[int, int, int]) -> str:
        """Format the rank in words, e.g. ``tp rank 0, pp rank 1``."""
        return ", ".join(f"{dimension} rank {n}" for dimension, n in self.coords(place).items())
