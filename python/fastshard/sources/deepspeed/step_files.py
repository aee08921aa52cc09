"""The files that DeepSpeed wrote in a step."""

from __future__ import annotations

from ...common.ranks import Rank
from ...common.records import dataclass
from ..zero.zero_files import ZeroFiles


@dataclass(frozen=True)
class DeepSpeedFiles(ZeroFiles):
    """The files of ``engine.save_checkpoint``, with those of a mixture of experts."""

    #: (mixture, expert, model-parallel rank, file).
    experts: tuple[tuple[int, int, int, int], ...] = ()
    #: Optimizer state of a mixture: (expert-parallel rank, model-parallel rank, file).
    expp: tuple[tuple[int, int, int], ...] = ()

    def list_ranks(self) -> dict[int, Rank]:
        """List the rank that wrote each file by the file's number; for an expert's file, also the expert."""
        ranks = super().list_ranks()
        ranks |= {file: {"mixture": layer, "expert": expert} for layer, expert, _, file in self.experts}
        return ranks | {file: {"ep": ep, "mp": mp} for ep, mp, file in self.expp}
