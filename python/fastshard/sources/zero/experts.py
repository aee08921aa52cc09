"""deepspeed.moe: experts are divided over expert-parallel ranks, and each rank counts its own from 0.

An expert parameter group is divided into partitions among the data-parallel ranks with the same experts, so
there is one flat vector per expert-parallel rank. ``param_shapes`` is that of rank 0. Expert files are
numbered among all experts.
source: DeepSpeed runtime/engine.py (_save_moe_checkpoint), runtime/zero/stage_1_and_2.py
    (_configure_moe_settings),
utils/groups.py (_create_expert_and_data_parallel), moe/{layer,experts}.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ...common.records import dataclass, field
from ...common.regex import compile_when_used

_Rank = TypeVar("_Rank")
_NAME = compile_when_used(r"^((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)$")


def is_expert(name: str) -> bool:
    """Return True for a tensor of one of the experts."""
    return _NAME.match(name) is not None


@dataclass
class Experts:
    """The experts of a model, according to the files that store them."""

    #: Prefix of each module's experts, up to their number -> existing numbers.
    numbers: dict[str, set[int]] = field(default_factory=dict)
    #: All tensors of experts, in order.
    tensors: dict[str, list[int]] = field(default_factory=dict)
    #: Optimizer files of ZeRO stage 0: (expert-parallel rank, file).
    optimizers: list[tuple[int, int]] = field(default_factory=list)
    #: True if data-parallel ranks with the same experts are consecutive.
    #: source: runtime/constants.py (use_data_before_expert_parallelism)
    data_first: bool = False
    #: False if expert files are missing, which is reported elsewhere.
    whole: bool = True

    def add(self, name: str, shape: list[int]) -> None:
        """Add a tensor from a file."""
        self.tensors.setdefault(name, shape)
        if match := _NAME.match(name):
            self.numbers.setdefault(match[1], set()).add(int(match[2]))

    def has(self, names: Iterable[str]) -> bool:
        """Return True if any of the names belongs to an expert."""
        return bool(self.numbers) and any(map(is_expert, names))

    def divided(self, order: list[_Rank], count: int) -> list[list[_Rank]] | None:
        """Divide data-parallel ranks among expert-parallel ranks; ``count`` ranks have the same experts."""
        if count < 1 or len(order) % count:
            return None
        width = len(order) // count
        if self.data_first:
            return [order[e * count : (e + 1) * count] for e in range(width)]
        return [order[e::width] for e in range(width)]

    def list_of_rank(self, rank: int, width: int) -> list[tuple[str, list[int]]]:
        """List names and shapes of the experts on an expert-parallel rank."""
        found = []
        for name, shape in self.tensors.items():
            match = _NAME.match(name)
            own = len(self.numbers[match[1]]) // width if match else 0
            if match and own and int(match[2]) // own == rank:
                found.append((name, shape))
        return found

    def name_of(self, name: str, rank: int, width: int) -> str | None:
        """Return the name, among all experts, of an expert's tensor on a rank; None if there is none."""
        match = _NAME.match(name)
        if match is None:
            return name
        every = self.numbers.get(match[1], set())
        own = len(every) // width
        if len(every) % width or int(match[2]) >= own:
            return None
        return f"{match[1]}{rank * own + int(match[2])}{match[3]}"
