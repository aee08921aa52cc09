"""Declaration of a model: its family, its config, and the dialect that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..common.records import dataclass, field
from .model_classes import ModelClass


@dataclass(frozen=True)
class Evidence:
    """Properties of a model that its tensors show: all that a dialect sees of a checkpoint besides values."""

    family: str
    #: What names and shapes decide.
    facts: Mapping[str, bool] = field(default_factory=dict)
    #: Extents that are known.
    axes: Mapping[str, int] = field(default_factory=dict)
    #: What a table of the caller's own says of classes, by ``model_type``.
    classes: Mapping[str, ModelClass] = field(default_factory=dict)
    #: Sets of positions by name: the axis and the positions, ascending.
    sets: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)


class Dialect(Protocol):
    """A framework's vocabulary for models; :mod:`fastshard.models` has them."""

    @property
    def name(self) -> str:
        """Name of the framework in messages."""

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Any:
        """Derive the :class:`~fastshard.models.model.Model` from a config's values and the tensors.

        Raises:
            FastshardError: ``FS211`` for a value of the wrong type.
        """


@dataclass(frozen=True)
class Description:
    """Facts about the model besides its tensors, for code that must know what the model computes.

    The layout engine does not read them.
    """

    family: str | None = None
    #: Its config as found, for a target that needs one.
    config: dict[str, Any] | None = None
    #: The file that it was read from.
    config_file: Path | None = None
    #: Whose words the config is in, with what the adapter found out for it; None where nothing says what the
    #: model computes.
    dialect: Dialect | None = None
    #: Whose names the model has, where its config is that of transformers and its names are not.
    spelling: str | None = None
    #: Why a model of Hugging Face has no table, so that its names stay; None for one that has.
    no_table: str | None = None
    #: A stored name that the class of the config does not load, and what it loads; None where nothing speaks
    #: against the names.
    unloaded: tuple[str, str] | None = None
    #: What a model of Hugging Face without an output layer is; None for one that has one.
    headless: str | None = None
    #: The files are what ``save_pretrained`` writes: their config describes them.
    saved_whole: bool = False
    #: It is one of several files of a model, looked at by itself.
    is_part: bool = False

    @property
    def hf_names(self) -> bool:
        """True if names in the files are those of Hugging Face."""
        return self.dialect is not None and self.dialect.name == "transformers" and self.spelling is None
