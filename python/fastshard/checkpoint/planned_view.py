"""The tensors of a plan, each computed when it is read, and the files that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common import json_text, safe_files
from .tensor_map import Tensors

if TYPE_CHECKING:
    from pathlib import Path

    from ..common.errors import Finding
    from .checkpoint import Checkpoint
    from .plan import Plan

__all__ = ["PlannedView"]


class PlannedView(Tensors):
    """The tensors of a plan under the target's names; each is computed when it is read."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, companions: Mapping[str, Path | str]) -> None:
        #: The source checkpoint.
        self.checkpoint = checkpoint
        #: The plan of the conversion.
        self.plan = plan
        #: Files that a conversion would copy along with the tensors (tokenizer, code), by name.
        self.companions = dict(companions)

    @property
    def _plan(self) -> Plan:
        return self.plan

    @property
    def findings(self) -> list[Finding]:
        """Warnings and notes from planning."""
        return list(self.plan.findings)

    @property
    def unread(self) -> list[str]:
        """Statements that can be verified only by reading all data, one line each."""
        return []

    @property
    def texts(self) -> dict[str, str]:
        """Text files that a conversion would write (config.json), by name."""
        return dict(self.plan.texts)

    @property
    def config(self) -> dict[str, Any] | None:
        """The result's config.json; None for a target that has none.

        Raises:
            FastshardError: if the source's own config, which the result includes, cannot be read.
        """
        if (text := self.plan.texts.get("config.json")) is not None:
            return json_text.object_in(text)
        own = self.companions.get("config.json")
        return None if own is None else safe_files.read_object(own, safe_files.MAX_CONFIG)
