"""Ranks of a model under tensor, pipeline and expert parallelism.

source: megatron/core/parallel_state.py (RankGenerator, order tp-cp-ep-dp-pp);
megatron/training/checkpointing.py (get_checkpoint_name) for the files that ranks save
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .records import dataclass


@dataclass(frozen=True)
class Topology:
    """Parallel degrees.

    The ranks of a stage are numbered in two ways, from the same first rank: by ``etp`` and ``ep`` for the
    tensors of experts, and by ``tp`` for all others.
    """

    tp: int = 1
    pp: int = 1
    #: Ranks among which the experts of a layer are divided.
    ep: int = 1
    #: Ranks that divide the tensors of one expert.
    etp: int = 1

    @property
    def stage_ranks(self) -> int:
        """The smallest number of ranks of a pipeline stage."""
        return math.lcm(self.tp, self.etp * self.ep)

    @property
    def shares_files(self) -> bool:
        """True if ranks with different parts of experts save files with the same name."""
        return self._step < self.etp

    def expert_rank(self, tensor: int, expert: int) -> int | None:
        """Return the rank among the ranks that divide an expert's tensors.

        It follows from the tensor- and the expert-parallel rank; None if no rank has these two.
        """
        rank = (tensor - self.etp * expert) % self._step
        return rank if rank < self.etp else None

    def is_saved(self, tensor: int, expert: int) -> bool:
        """Return True if Megatron-LM saves the file of a tensor- and an expert-parallel rank.

        Ranks with the first copy of their experts save.
        """
        return (tensor - self.etp * expert) % self.tp < self.etp

    def list_file_ranks(self) -> list[dict[str, int]]:
        """List the ranks of a stage that have a file each, by their ranks on each parallel dimension."""
        every = ((tensor, expert) for expert in range(self.ep) for tensor in range(self.tp))
        ranks = ((tensor, expert, self.expert_rank(tensor, expert)) for tensor, expert in every)
        return [
            {"tp": tensor, "ep": expert, "etp": rank} for tensor, expert, rank in ranks if rank is not None
        ]

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """Return the number of the first rank of a stage with these ranks on the parallel dimensions."""
        return coords.get("tp", 0) + coords.get("etp", 0) + self.etp * coords.get("ep", 0)

    def stage(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer; the sizes of stages differ by at most one layer."""
        return layer * self.pp // layers

    @property
    def _step(self) -> int:
        # Two counts of the same ranks agree modulo this.
        return math.gcd(self.tp, self.etp * self.ep)
