"""The files of a checkpoint with the state that ZeRO divides."""

from __future__ import annotations

from ...common.ranks import Rank
from ...common.records import dataclass


@dataclass(frozen=True)
class ZeroFiles:
    """Files by name, given by their numbers in ``Found.files``; several root directories may contain the same
    file.
    """

    #: The step's folders: root directory, and path in it.
    places: tuple[tuple[int, str], ...]
    #: (model-parallel rank, model file), ascending.
    ranks: tuple[tuple[int, int], ...]
    #: ZeRO-3 model files, each with one rank's part: (data-parallel rank, model-parallel rank, file).
    sliced: tuple[tuple[int, int, int], ...]
    #: Layer files of a pipeline: (pipeline layer, tp rank, file).
    layers: tuple[tuple[int, int, int], ...] = ()
    #: Numbers of digits of layer and rank numbers in their names; 0 without ranks.
    widths: tuple[int, int] = (2, 2)
    #: Partitions: (data-parallel rank, model-parallel rank, file).
    optim: tuple[tuple[int, int, int], ...] = ()

    def list_ranks(self) -> dict[int, Rank]:
        """List the rank that wrote each file, by the file's number."""
        ranks: dict[int, Rank] = {file: {"mp": mp} for mp, file in self.ranks}
        ranks |= {file: {"tp": tp, "layer": layer} for layer, tp, file in self.layers}
        return ranks | {file: {"dp": dp, "mp": mp} for dp, mp, file in (*self.sliced, *self.optim)}

    @property
    def pipeline(self) -> bool:
        """True if the layers are in separate files."""
        return bool(self.layers)
