"""The files that DeepSpeed writes for a step."""

from __future__ import annotations

from ...common.ranks import Rank
from ...common.records import dataclass
from ..zero.zero_files import ZeroFiles


@dataclass(frozen=True)
class DeepSpeedFiles(ZeroFiles):
    """The files of ``engine.save_checkpoint``, including those of experts."""

    #: (MoE layer, expert, model-parallel rank, file).
    experts: tuple[tuple[int, int, int, int], ...] = ()
    #: Optimizer state of experts: (expert-parallel rank, model-parallel rank, file).
    expp: tuple[tuple[int, int, int], ...] = ()

    def list_ranks(self) -> dict[int, Rank]:
        """List the rank that wrote each file, and the expert for expert files, by file number."""
        ranks = super().list_ranks()
        ranks |= {file: {"mixture": layer, "expert": expert} for layer, expert, _, file in self.experts}
        return ranks | {file: {"ep": ep, "mp": mp} for ep, mp, file in self.expp}
