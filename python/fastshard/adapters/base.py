"""What an adapter declares of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .. import layouts
from ..discover import File, Listing
from ..errors import Finding

#: Values of a file that are not tensors, by index in :attr:`Found.files`.
Values = Callable[[int], Any]


@dataclass(frozen=True)
class Options:
    """What the caller said about the source."""

    step: str | None = None
    config: dict[str, Any] | None = None
    config_path: str | None = None
    vocab_size: int | None = None
    accept: frozenset[str] = frozenset()
    layout: str | None = None


@dataclass
class Unit:
    """Where one file lies in the topology and how its keys become names."""

    file: int
    under: list[str] = field(default_factory=list)
    strip: str = ""
    prefix: str = ""
    coords: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    rank: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form that the core takes."""
        return {k: v for k, v in vars(self).items() if v not in (None, [], {}, "")}


@dataclass
class Found:
    """Files that an adapter recognised by their names."""

    adapter: Adapter
    framework: str
    #: Files whose headers are to be read, in order.
    files: list[File]
    #: What the names alone say is wrong.
    findings: list[Finding] = field(default_factory=list)
    step: str | None = None
    #: The adapter's own notes for :meth:`Adapter.declare`.
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Source:
    """Declaration of a source: everything the layout engine must know besides the tensors."""

    framework: str
    units: list[Unit]
    #: Name of the layout table; None where tensors are whole as they are.
    layout: str | None = None
    #: The table itself, where it is no built-in one.
    layout_text: str | None = None
    family: str | None = None
    generic: list[tuple[str, int | None]] = field(default_factory=list)
    degrees: dict[str, int] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)
    vocab_size: int | None = None
    pass_unknown: bool = False
    #: True if something outside the files found states what must exist.
    provable: bool = False
    #: Names in the files are those of Hugging Face.
    hf_names: bool = False
    findings: list[Finding] = field(default_factory=list)
    step: str | None = None
    #: The model's config as found, for a target that needs one.
    config: dict[str, Any] | None = None
    #: Values for the manifest.
    values: dict[str, Any] = field(default_factory=dict)
    #: Tensor names that an index or metadata file calls for.
    expected_names: set[str] = field(default_factory=set)

    def to_request(self) -> dict[str, Any]:
        """The form that the core takes."""
        text = self.layout_text
        if text is None and self.layout is not None:
            text = layouts.get(self.layout)
        return {
            "layout": text,
            "generic": self.generic,
            "units": [unit.to_dict() for unit in self.units],
            "degrees": self.degrees,
            "axes": self.axes,
            "facts": self.facts,
            "vocab_size": self.vocab_size,
            "pass_unknown": self.pass_unknown,
        }


class Adapter(Protocol):
    """Recognises one framework's checkpoints and declares them."""

    name: str

    def detect(self, listing: Listing, options: Options) -> Found | None:
        """Files of a checkpoint of this framework, by names alone; None if there is none."""

    def declare(self, found: Found, listing: Listing, values: Values, options: Options) -> Source:
        """The declaration, from what the files' headers say."""


def missing(path: str, rank: str | None, why: str, help: str) -> Finding:
    """A file that must be there and is not."""
    return Finding.of(
        "FS101", "missing file", file=path, rank=rank, expected=why, got="no such file", help=help
    )
