"""Train states of which the model's part alone is converted, and models of which something is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core import Rule, Table
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, field
from ..layouts.declaration import Evidence
from ..layouts.jax_train_states import LEFT_OUT
from ..models.model import Model


@dataclass(frozen=True)
class RefusedModel:
    """The dialect of a model of which something is unknown; reading it raises the reason."""

    #: Name of the framework.
    name: str
    finding: Finding

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Raise the reason.

        Raises:
            FastshardError: always.
        """
        raise FastshardError([self.finding])


@dataclass(frozen=True)
class ModelAlone:
    """The rules of one train state, from which the table of a result is made."""

    weights: Table
    #: Names of what is no weight.
    state: tuple[str, ...]
    #: Why some of it is left out; the rest is the optimizer's.
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, step: bool, optimizer: bool) -> Table:
        """Return the table of a conversion, which takes the model alone."""
        left = [Rule.ignoring(name, self.reasons.get(name, LEFT_OUT)) for name in self.state]
        return self.weights.with_rules([*self.weights.rules, *left])
