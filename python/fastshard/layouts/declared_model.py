"""The declaration of a model: its family, its config, and the dialect that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..common.records import dataclass, field
from .model_classes import ModelClass


@dataclass(frozen=True)
class Evidence:
    """Properties of a model that its tensors show. A dialect sees only these and the config values."""

    family: str
    #: Facts derived from names and shapes.
    facts: Mapping[str, bool] = field(default_factory=dict)
    #: Known extents.
    axes: Mapping[str, int] = field(default_factory=dict)
    #: Classes that the caller's own table describes, by ``model_type``.
    classes: Mapping[str, ModelClass] = field(default_factory=dict)
    #: Sets of positions by name: the axis and the positions, ascending.
    sets: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)


class Dialect(Protocol):
    """The terms that a framework uses for models; the dialects are in :mod:`fastshard.models`."""

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
    """Facts about the model besides its tensors, for code that depends on what the model computes.

    The layout engine does not read them.
    """

    family: str | None = None
    #: The config as found, for a target that needs one.
    config: dict[str, Any] | None = None
    #: The file from which the config was read.
    config_file: Path | None = None
    #: The dialect of the config, with what the adapter found out for it; None if nothing states what the
    #: model computes.
    dialect: Dialect | None = None
    #: The framework whose names the tensors have, if the config is from transformers and the names are not.
    spelling: str | None = None
    #: Why a Hugging Face model has no table, so that its names stay unchanged; None if it has one.
    no_table: str | None = None
    #: A stored name that the class of the config does not load, and the name that it loads; None if no stored
    #: name contradicts the class.
    unloaded: tuple[str, str] | None = None
    #: The kind of a Hugging Face model without an output layer; None for a model that has one.
    headless: str | None = None
    #: True if ``save_pretrained`` wrote the files, so that their config describes them.
    saved_whole: bool = False
    #: True if this is one of several files of a model, inspected alone.
    is_part: bool = False

    @property
    def hf_names(self) -> bool:
        """True if the names in the files are those of Hugging Face."""
        return self.dialect is not None and self.dialect.name == "transformers" and self.spelling is None
