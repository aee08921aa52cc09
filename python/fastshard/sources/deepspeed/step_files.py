"""Which files of a step DeepSpeed wrote."""

from __future__ import annotations

from ...common.records import dataclass
from ..zero.zero_files import ZeroFiles


@dataclass(frozen=True)
class DeepSpeedFiles(ZeroFiles):
    """The files of ``engine.save_checkpoint``, with those of a mixture of experts."""

    #: (mixture, expert, model-parallel rank, file).
    experts: tuple[tuple[int, int, int, int], ...] = ()
    #: Optimizer state of a mixture: (expert-parallel rank, model-parallel rank, file).
    expp: tuple[tuple[int, int, int], ...] = ()
