"""What an adapter declares of a checkpoint."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from .. import _core, layouts
from .._core import Table
from ..configs import shown
from ..discover import File, Listing
from ..errors import FastshardError, Finding, from_core
from ..models import huggingface
from ..models.model import Dialect, Evidence, Model
from ..tokenizer import Tokenizer

#: Ranks of one parallel dimension at most; no run has as many.
MAX_DEGREE = 1 << 16
#: Multiple of a vocabulary at most.
MAX_MULTIPLE = 1 << 31


class Contents:
    """What the headers of the files say, by index in :attr:`Found.files`."""

    def __init__(self, catalog: _core.Catalog, readable: list[Any]) -> None:
        self._catalog = catalog
        self._readable = readable
        # Not functools.cache: it would hold the catalog, and its open files, as long as the class lives.
        self._values: dict[int, Any] = {}
        self._tensors: dict[int, list[dict[str, Any]]] = {}
        #: Files of which more values were asked for than are looked at.
        self.cut: set[int] = set()

    def __call__(self, file: int) -> Any:
        """Contents that are not tensors; None for a file that cannot be read."""
        if file not in self._values:
            self._values[file] = None
            if self.readable(file):
                text, whole = self._catalog.values(file)
                self._values[file] = json.loads(text)
                if not whole:
                    self.cut.add(file)
        return self._values[file]

    def readable(self, file: int) -> bool:
        """False for a file that cannot be read, which is a finding already."""
        return self._readable[file] is not None

    def tensors(self, file: int) -> list[dict[str, Any]]:
        """``path``, ``dtype``, ``shape``, ``storage``, ``offset``, ``storage_bytes``, ``storage_crc32`` of each."""
        if file not in self._tensors:
            self._tensors[file] = json.loads(self._catalog.tensors(file))
        return self._tensors[file]

    def names(self) -> set[str]:
        """Names of all tensors, as the files that can be read give them."""
        files = (i for i in range(len(self._readable)) if self.readable(i))
        return {name for i in files for name in self._catalog.names(i)}

    def bytes(self, file: int, tensor: int, limit: int) -> bytes:
        """Bytes of a small tensor.

        Raises:
            FastshardError: ``FS515`` if it is larger than ``limit`` bytes.
        """
        try:
            return self._catalog.tensor_bytes(file, tensor, limit)
        except _core.CoreError as error:
            raise from_core(error) from None

    def packed(self, file: int, path: list[str]) -> dict[str, Any] | None:
        """An object that the file holds as bytes, as plain data: ``values`` and ``tensors``.

        Raises:
            FastshardError: if it is malformed or too large.
        """
        try:
            text = self._catalog.packed(file, path)
        except _core.CoreError as error:
            raise from_core(error) from None
        packed: dict[str, Any] | None = None if text is None else json.loads(text)
        return packed


#: What ``accept`` takes: all of it but ``copies=GLOB``.
ACCEPTABLE = ("uncommitted", "elided-zeros", "older-step", "renamed", "copies")


def checked_accept(what: Iterable[str]) -> frozenset[str]:
    """What is to be accepted.

    Raises:
        FastshardError: ``FS515`` for what nothing is known of.
    """
    if isinstance(what, str):
        raise FastshardError.of("FS515", "accept", expected="a list of words", got=repr(what))
    what = frozenset(what)
    for one in what:
        word, is_given, pattern = one.partition("=")
        if word not in ACCEPTABLE or (is_given and (word != "copies" or not pattern)):
            raise FastshardError.of(
                "FS515", "accept", expected=f"{', '.join(ACCEPTABLE)} or copies=GLOB", got=repr(one)
            )
    return what


@dataclass(frozen=True)
class Options:
    """What the caller said about the source."""

    step: str | None = None
    config: dict[str, Any] | None = None
    config_path: str | None = None
    vocab_size: int | None = None
    accept: frozenset[str] = frozenset()
    layout: str | None = None
    #: Processes that wrote the checkpoint, where the files do not tell.
    expect_processes: int | None = None


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
    #: The only keys wanted below `under`; all if None.
    only: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The form that the core takes."""
        wanted = {} if self.only is None else {"only": self.only}
        return {k: v for k, v in vars(self).items() if v not in (None, [], {}, "")} | wanted


@dataclass
class Assembled:
    """Tensors of one rank that lie in ranges of other tensors (partitions of flat vectors)."""

    #: File that messages name.
    file: int
    coords: dict[str, int]
    rank: str | None
    #: What of a parameter they are, e.g. ``exp_avg``; None for its values.
    slot: str | None
    #: (name, shape, pieces). Pieces are ranges, one after another: (elements, file, tensor in it, first
    #: element there); or boxes: (first index, extent, file, tensor in it).
    tensors: list[tuple[str, list[int], list[Any]]]
    #: True for parameters that are not trained and have no copy.
    frozen: bool = False
    #: True for further names, wanted only where the masters are taken.
    masters_only: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The form that the core takes."""
        kept = {k: v for k, v in vars(self).items() if k not in ("frozen", "masters_only") and v is not None}
        return kept | ({"alone": True} if self.frozen else {})


@dataclass
class StateFile:
    """A file that holds masters and optimizer state, by tensors in it."""

    file: int
    masters: list[int]
    #: Moments and steps.
    state: list[int]
    #: Keys that lead to steps that are no tensors, and not zero: numbers in the pickle, or what is refused.
    numbers: list[list[str]] = field(default_factory=list)


@dataclass
class Blocks:
    """Arrays that are stored as encoded blocks (zarr chunks): decoded one by one when the engine needs them."""

    #: (key, dtype, shape, bytes) of each block that is present; dtype as safetensors names it (BF16, F32, I64, BOOL ...),
    #: shape of what is handed on (blocks at the edge are clipped to the array), bytes that decoding takes (they are whole there).
    tensors: list[tuple[str, str, list[int], int]]
    #: Fills the writable buffer with the little-endian C-ordered elements of the block `key`.
    #: Called from several threads.
    read: Callable[[str, memoryview], None]
    #: Text that identifies what is stored (names, sizes and times of the files behind it): part of the plan's digest.
    identity: str

    def listed(
        self,
    ) -> tuple[list[tuple[str, str, list[int], int]], str, Callable[[str, memoryview], str | None]]:
        """The form that the core takes; findings of a block come back as JSON."""

        def read(key: str, view: memoryview) -> str | None:
            try:
                self.read(key, view)
            except FastshardError as error:
                return json.dumps([finding.to_dict() for finding in error.findings])
            return None

        return self.tensors, self.identity, read


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
    #: For files of records (``.distcp``), by index in `files`: offset, length and name of each record wanted.
    records: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    #: Stores that files stand for (their anchors), by index in `files`.
    blocks: dict[int, Blocks] = field(default_factory=dict)


@dataclass
class TreeInfo:
    """How Orbax names an item and its entries; kept for writing it again."""

    item: str
    #: key_metadata by array.
    keys: dict[str, list[dict[str, Any]]]
    #: Entries that are no arrays: (key_metadata, value_metadata).
    leaves: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]
    #: What the writer said of the checkpoint.
    custom: dict[str, Any]
    #: value_type by array.
    types: dict[str, str] = field(default_factory=dict)
    #: Texts among the leaves, as stored.
    strings: str | None = None


@dataclass
class Source:
    """Declaration of a source: everything the layout engine must know besides the tensors."""

    framework: str
    units: list[Unit]
    #: Name of the layout table; None where tensors are whole as they are.
    layout: str | None = None
    #: The table itself, where it is not the one of that name.
    table: Table | None = None
    family: str | None = None
    generic: list[tuple[str, int | None]] = field(default_factory=list)
    degrees: dict[str, int] = field(default_factory=dict)
    axes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, bool] = field(default_factory=dict)
    vocab_size: int | None = None
    pass_unknown: bool = False
    #: True if something outside the files found states what must exist.
    provable: bool = False
    #: The files are what ``save_pretrained`` writes: their config describes them.
    saved_whole: bool = False
    findings: list[Finding] = field(default_factory=list)
    #: Errors about single tensors: notes where these are not asked for.
    of_tensors: list[Finding] = field(default_factory=list)
    step: str | None = None
    #: The model's config as found, for a target that needs one.
    config: dict[str, Any] | None = None
    #: Whose words the config is in; None where nothing says what the model computes.
    dialect: Dialect | None = None
    #: What the tensors tell of the model besides facts, by the dialect's words.
    features: dict[str, Any] = field(default_factory=dict)
    #: The file that it was read from.
    config_file: Path | None = None
    #: Where config and tokenizer are looked for, the nearest first.
    places: list[Path] = field(default_factory=list)
    #: Why a model of Hugging Face has no table, so that its names stay; None for one that has.
    no_table: str | None = None
    #: What a model of Hugging Face without an output layer is; None for one that has one.
    headless: str | None = None
    #: Contents for the manifest.
    values: dict[str, Any] = field(default_factory=dict)
    #: Tensor names that an index or metadata file calls for.
    expected_names: set[str] = field(default_factory=set)
    #: Where the model's own names begin, for a conversion; a merge keeps every name as it is.
    weights_prefix: str = ""
    #: Where further copies of the model begin.
    other_prefixes: list[str] = field(default_factory=list)
    #: Masters and optimizer slots.
    assembled: list[Assembled] = field(default_factory=list)
    #: Which copy of the weights is taken unless one is asked for: ``params`` or ``masters``.
    weights: str = "params"
    #: True if the files hold parameters besides the masters.
    params_stored: bool = True
    #: True if the files hold fp32 masters (or should).
    masters: bool = False
    #: True if the files hold optimizer state (or should), but no masters.
    moments_only: bool = False
    #: True where layers are copied on purpose so often that it only warns (depth up-scaling of published models).
    layers_may_repeat: bool = False
    #: Glob patterns of files that were copied on purpose.
    copies_accepted: list[str] = field(default_factory=list)
    #: What is wrong with the optimizer's files; no error where only the parameters are asked for.
    optimizer_findings: list[Finding] = field(default_factory=list)
    #: What of the optimizer's state cannot be taken; it matters only where that is asked for.
    moments_unread: list[Finding] = field(default_factory=list)
    #: Names of parameters that have no moments: they were not trained, or are further names of one that was.
    untrained: set[str] = field(default_factory=set)
    #: Files that hold masters.
    state_files: list[StateFile] = field(default_factory=list)
    #: Files that hold nothing but optimizer state.
    optimizer_files: set[str] = field(default_factory=set)
    #: True if the optimizer's files say that there are no moments: it never took a step.
    unstepped: bool = False
    #: Optimizer steps by file.
    steps: dict[int, list[float]] = field(default_factory=dict)
    #: Set for a checkpoint of Orbax.
    tree: TreeInfo | None = None
    #: Table for a conversion that takes the step (or not) and the optimizer's state (or not), where both lie
    #: beside the weights under names of their own.
    rules: Callable[[bool, bool], Table] | None = None
    #: True if there are moments under such names.
    moments_named: bool = False

    @property
    def hf_names(self) -> bool:
        """True if names in the files are those of Hugging Face."""
        return self.dialect is huggingface.DIALECT

    def model(self) -> Model:
        """What the model computes, by the values and the tensors.

        Raises:
            FastshardError: ``FS211`` for a value of another kind, ``FS514`` where nothing says what its values mean.
        """
        if self.dialect is None:
            what = f"the family {self.family!r}" if self.family else f"this model of {self.framework}"
            raise FastshardError.of(
                "FS514", f"no words are known for {what}: its tensors can be merged, not converted"
            )
        evidence = Evidence(self.family or "", self.facts, self.axes, self.features)
        return self.dialect.read(self.config or {}, evidence)

    def weights_only(self) -> Source:
        """The part that a conversion takes: what begins with the prefix, and no optimizer's state."""
        if not self.weights_prefix and not any(
            is_state(name) for a in self.assembled for name, *_ in a.tensors
        ):
            return self
        if not self.hf_names:
            return self
        if self.other_prefixes:
            raise FastshardError.of(
                "FS106",
                "the checkpoint holds several copies of the model",
                expected="one",
                got=", ".join(f"{p}*" for p in (self.weights_prefix, *self.other_prefixes)),
                help="`fastshard merge --include 'PREFIX*'` writes the one that is meant; convert that",
            )
        kept: list[Assembled] = []
        left: list[str] = []
        for group in self.assembled:
            tensors = [
                (name.removeprefix(self.weights_prefix), shape, pieces)
                for name, shape, pieces in group.tensors
                if name.startswith(self.weights_prefix) and not is_state(name)
            ]
            left += [
                name
                for name, *_ in group.tensors
                if not name.startswith(self.weights_prefix) and not is_state(name)
            ]
            kept.append(replace(group, tensors=tensors))
        where = f"below {self.weights_prefix!r}" if self.weights_prefix else "beside the optimizer's state"
        note = Finding.of(
            "FS212",
            f"the model is what lies {where}; the rest is not converted"
            + (f", {len(left)} tensors among it that are no optimizer's state" if left else ""),
            severity="warning" if left else "note",
            tensor=left[0] if left else None,
        )
        return replace(
            self,
            assembled=kept,
            table=self._table_below(),
            weights_prefix="",
            findings=[*self.findings, note],
        )

    def _table_below(self) -> Table | None:
        """The table with names as they are below the prefix; None for the one that is called so anyhow."""
        if self.table is None or self.layout is None:
            return None
        usual = layouts.table(self.layout)
        rules = [rule.renamed(rule.name.removeprefix(self.weights_prefix)) for rule in self.table.rules]
        same = [rule.name for rule in rules] == [rule.name for rule in usual.rules]
        return None if same else self.table.with_rules(rules)

    def to_request(self, weights: str | None = None, optimizer: bool = False) -> dict[str, Any]:
        """The form that the core takes (the table as itself), for one copy of the weights, with optimizer slots or without."""
        taken = weights or self.weights
        table = self.table
        if table is None and self.layout is not None:
            table = layouts.table(self.layout)
        return {
            "layout": table,
            "generic": self.generic,
            "units": [unit.to_dict() for unit in self.units],
            "assembled": [
                a.to_dict()
                for a in self.assembled
                if (a.slot is None or optimizer) and (taken == "masters" or not a.masters_only)
            ],
            "prefer_assembled": taken == "masters",
            "untrained": sorted(self.untrained) if optimizer else [],
            "twins_may_differ": weights == "params",
            "layers_may_repeat": self.layers_may_repeat,
            "copies_accepted": self.copies_accepted,
            "degrees": self.degrees,
            "axes": self.axes,
            "facts": self.facts,
            "vocab_size": self.vocab_size,
            "pass_unknown": self.pass_unknown,
        }


#: Where trainers keep what is no weight. source: torchtitan checkpoint.py, FSDP examples, Lightning
_STATE = ("optim.", "optimizer.", "optimizer_states.", "lr_scheduler", "train_state", "dataloader")


def is_state(name: str) -> bool:
    """True for a tensor that no model has, by its name."""
    return name.startswith(_STATE)


#: Files that a target prescribes, small texts besides (by path), and what had to be assumed.
Completed = tuple[list[dict[str, Any]], dict[str, str], list[Finding]]


@dataclass
class Bound:
    """What is known once a plan has bound the axes of a target."""

    #: Extents.
    axes: dict[str, int]
    #: Names of the target's tensors, and the shape that a rank holds of each.
    shapes: dict[str, list[int]]
    #: Names of the source's tensors.
    stored: list[str]
    #: Bytes that a rank holds of each.
    bytes: dict[str, int]
    #: Their dtypes.
    dtypes: dict[str, str]
    #: torch name of the weights' dtype.
    dtype: str | None
    #: Shapes of the whole tensors, by name.
    whole: Callable[[], dict[str, list[int]]]
    #: The model's, if one was given or found.
    tokenizer: Tokenizer | None = None


def positive(options: dict[str, Any], single: str | None = None) -> None:
    """Checks degrees and multiples that a caller gave; ``single`` is the one that the target does not have.

    Raises:
        FastshardError: ``FS515`` for one that is no positive whole number, or beyond what a run has.
    """
    for option, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FastshardError.of("FS515", option, expected="a positive whole number", got=shown(value))
        largest = MAX_DEGREE if option in ("--tp", "--pp") else MAX_MULTIPLE
        if value > largest:
            raise FastshardError.of("FS515", option, expected=f"{largest} at most", got=shown(value))
    if single is not None and options[single] != 1:
        raise FastshardError.of(
            "FS515",
            f"{single}: the target has no such parallel dimension",
            expected="1",
            got=str(options[single]),
        )


class Target(Protocol):
    """What a conversion makes of a source; the names of the formats are in :mod:`.targets`."""

    #: As ``--to`` names it.
    name: str

    @property
    def layout(self) -> str:
        """Name of the layout table; empty if names and shapes stay."""

    def request(self, table: Table | None) -> dict[str, Any]:
        """The target's side of the core's request, with the table."""

    def complete(self, bound: Bound) -> Completed:
        """What follows once the plan has bound the axes."""


class Adapter(Protocol):
    """Recognises one framework's checkpoints and declares them."""

    name: str

    def detect(self, listing: Listing, options: Options) -> Found | None:
        """Files of a checkpoint of this framework, by names alone; None if there is none."""

    def declare(self, found: Found, listing: Listing, values: Contents, options: Options) -> Source:
        """The declaration, from what the files' headers say."""


def counted(text: str, file: File) -> int:
    """A rank, stage or layer as a file's name counts it.

    Raises:
        FastshardError: ``FS106`` for one that no run has.
    """
    number = int(text)
    if number > MAX_DEGREE:
        raise FastshardError.of(
            "FS106",
            "the file's name counts further than any run does",
            file=file.path,
            expected=f"at most {MAX_DEGREE}",
            got=text if len(text) < 24 else f"{text[:20]}...",
            help="remove the file if it is no part of this save",
        )
    return number


#: Missing files that are named one by one; of more their runs are.
_NAMED = 256


def lacking(have: Iterable[int], first: int, last: int) -> list[tuple[int, int]]:
    """Numbers from ``first`` to ``last`` that are not there, as runs (first, last); each by itself if they are few.

    A number in a file's name may be anything: what is done grows with what is there.
    """
    there = sorted({n for n in have if first <= n <= last})
    bounds = [first - 1, *there, last + 1]
    runs = [(a + 1, b - 1) for a, b in itertools.pairwise(bounds) if b - a > 1]
    if sum(b - a + 1 for a, b in runs) <= _NAMED:
        return [(n, n) for a, b in runs for n in range(a, b + 1)]
    return runs


def missing(path: str, rank: str | None, why: str, help: str, *, upto: str | None = None) -> Finding:
    """A file that must be there and is not; or all from it to ``upto``, the name of the last of a run."""
    what = "missing file" if upto is None else f"missing files, from this one to {upto}"
    return Finding.of("FS101", what, file=path, rank=rank, expected=why, got="no such file", help=help)
