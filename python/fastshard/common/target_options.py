"""Options that targets take. The command line, the checks of the API and the refusals are made of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Option:
    """One option; a target that takes it lists it among its own."""

    #: As the API calls it.
    name: str
    #: ``degree``: a positive number, 1 by default; ``number``; ``switch``; ``choice`` of words.
    kind: Literal["degree", "number", "switch", "choice"]
    help: str
    default: Any = None
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """As the command line calls it."""
        return f"--{self.name.replace('_', '-')}"


TP = Option("tp", "degree", "tensor-parallel degree of the result", 1)
PP = Option("pp", "degree", "pipeline-parallel degree of the result", 1)
MULTIPLE = Option(
    "make_vocab_size_divisible_by",
    "number",
    "pad the vocabulary to a multiple of this times tp (default: the source's, else 128)",
)
SCAN_AXIS = Option("param_scan_axis", "number", "MaxText: axis of the stacked layers (default: 1)")
FUSED_QKV = Option(
    "fused_qkv",
    "switch",
    "MaxText's GPT-3: one projection for queries, keys and values (default: the source's)",
)
ROPE_TYPE = Option(
    "rope_type",
    "choice",
    "MaxText: the rotary embedding that the result will be run with (default: llama3.1, whose order of queries and keys "
    "MaxText's own converter writes)",
    choices=("default", "llama3.1"),
)
STACKED_EXPERTS = Option(
    "stacked_experts",
    "switch",
    "DCP, universal: experts stacked, as a model of transformers 5 has them in memory (default: one by one, as version 4 and files)",
    False,
)
ZARR2 = Option("zarr2", "switch", "plain zarr v2, for Pathways, instead of OCDBT and zarr v3", False)
#: All of them, as they are listed.
OPTIONS = (TP, PP, MULTIPLE, SCAN_AXIS, FUSED_QKV, ROPE_TYPE, STACKED_EXPERTS, ZARR2)


def of(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of targets out of keyword arguments."""
    return {option.name: given.pop(option.name) for option in OPTIONS if option.name in given}
