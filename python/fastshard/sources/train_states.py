"""Train states of which only the model is converted, and models with unknown properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._core import Rule, Table
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, field
from ..layouts.declaration import Description, Evidence, Optimizer, Source
from ..layouts.jax_train_states import LEFT_OUT
from ..models.model import Model


@dataclass(frozen=True)
class RefusedModel:
    """The dialect of a model with unknown properties; reading it raises an error with the reason."""

    #: Name of the framework.
    name: str
    finding: Finding

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Raise an error with the reason.

        Raises:
            FastshardError: always.
        """
        raise FastshardError([self.finding])


@dataclass(frozen=True)
class ModelAlone:
    """The rules of one train state, from which a result's table is made."""

    weights: Table
    #: Names of state that is not weights.
    state: tuple[str, ...]
    #: Reasons why some of it is omitted; the rest is optimizer state.
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, step: bool, optimizer: bool) -> Table:
        """Return the table of a conversion, which includes only the model."""
        left = [Rule.ignoring(name, self.reasons.get(name, LEFT_OUT)) for name in self.state]
        return self.weights.with_rules([*self.weights.rules, *left])


def take_unknown(
    source: Source, config: dict[str, Any] | None, framework: str, strange: str, expected: str, export: str
) -> None:
    """Declare a model for which no table names the tensor ``strange``. Its tensors can be merged."""
    finding = Finding.of(
        codes.UNSUPPORTED,
        f"there is no layout for this model of {framework}: its tensors can be merged, but not converted to "
        "other layouts",
        tensor=strange,
        expected=expected,
        help=export,
    )
    source.findings.append(finding.replace(severity="note"))
    source.model = Description(config=config, dialect=RefusedModel(framework, finding))


def bind_model(
    source: Source, table: Table, root: str, state: Sequence[str], reasons: Mapping[str, str]
) -> None:
    """Declare the table of the model whose names begin with ``root``, and the state next to it."""
    weights = table.with_rules([rule.renamed(root + rule.name) for rule in table.rules])
    source.binding.layout, source.binding.table = table.name, weights
    source.optimizer = Optimizer(rules=ModelAlone(weights, tuple(state), reasons))


def bind_config(
    source: Source, axes: dict[str, int], facts: dict[str, bool], sets: dict[str, tuple[str, list[int]]]
) -> None:
    """Declare the values in the config; the vocabulary size is the caller's, if given."""
    if source.binding.vocab_size:
        axes.pop("V", None)
    source.binding.axes, source.binding.facts, source.binding.sets = axes, facts, sets
    source.index.is_provable = True
