"""The Rust core. Records go in and out as classes, tuples and dicts; long calls release the GIL and stay
interruptible.

A record that holds what no option can be (a number that is too large or none, a text that is no UTF-8) raises
CoreError (``FS515``).
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict, final, type_check_only

import numpy as np
from numpy.typing import NDArray
from typing_extensions import NotRequired

from .stores.result_prefix import ResultPrefix
from .zarr.array_writer import StoreWriter

__all__ = [
    "STEPS",
    "Catalog",
    "CoreError",
    "Draft",
    "Effect",
    "FileParts",
    "Finding",
    "Hasher",
    "Meeting",
    "PatternBudget",
    "Patterns",
    "Plan",
    "ResultWriter",
    "Roster",
    "Rule",
    "StoreFolder",
    "Table",
    "__version__",
    "anonymous_memory",
    "begin_parts",
    "bring",
    "codes_table",
    "collect",
    "commit",
    "crc32_of_constant",
    "dcp_metadata",
    "dcp_object",
    "exit_code",
    "histogram_edges",
    "identify_process",
    "is_process_dead",
    "is_remote",
    "judge",
    "let_go",
    "make_part",
    "manifest_entry",
    "manifest_files",
    "plain_pickle",
    "shared_run",
    "stand_in",
    "storage_of",
    "vocabulary",
    "will_read",
    "write_piece",
]

__version__: str
#: True where tests can hold a run at named places: never in a released build.
STEPS: bool

class CoreError(Exception):
    """Findings that stopped an operation: its one argument is a list of them."""

@final
class Effect:
    """What a finding makes impossible."""

    def __new__(
        cls,
        count: int,
        of: int | None,
        in_layers: int,
        layers: Sequence[range],
        tensors: Sequence[str],
        in_missing_layers: int,
        missing_layers: Sequence[range],
    ) -> Effect:
        """Says which tensors cannot be used; the arguments are the properties below."""
    @property
    def count(self) -> int:
        """How many tensors are missing, incomplete or unreadable."""
    @property
    def of(self) -> int | None:
        """How many tensors there would be in all, where that is known."""
    @property
    def in_layers(self) -> int:
        """How many of them are in layers."""
    @property
    def layers(self) -> tuple[range, ...]:
        """These layers."""
    @property
    def in_missing_layers(self) -> int:
        """How many of them are in layers of which no tensor is left."""
    @property
    def missing_layers(self) -> tuple[range, ...]:
        """These layers."""
    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, those outside of layers first; of very many the first."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

#: What findings of several codes have in common; `Kind` in rust/fastshard/src/codes.rs says what each means.
_Kind: TypeAlias = Literal[
    "missing_file",
    "missing_tensor",
    "incomplete",
    "misfit",
    "misplaced",
    "swapped",
    "unreadable",
    "damaged",
    "lost_file",
    "whole_checkpoint",
    "consequence",
    "comparison",
    "unproven",
    "nothing_found",
    "per_file",
    "once_per_file",
    "content",
    "reportable",
    "resumable",
]

@final
class Finding:
    """One observation about a checkpoint: what, where, expected, got, what to do. It does not change.

    ``str()`` is one line, control characters escaped. Texts with lone surrogates, as names of files that are
    no UTF-8 have them, are kept with these as escapes.

    Examples:
        >>> finding = fastshard.open("lossy").findings[0]
        >>> finding.code, finding.severity, finding.rank
        ('FS101', 'error', 'tp 1')
        >>> print(finding)
        global_step0/layer_03-model_01-model_states.pt: the file is missing (tp 1)...
        >>> finding.help
        'copy layer_03-model_01-model_states.pt from the node that ran tp rank 1'
    """

    def __new__(cls, code: str, severity: str, message: str, **fields: Any) -> Finding:
        """A finding; ``fields`` are those below. Raises ValueError for a code or a severity that there is
        not."""
    @classmethod
    def of(cls, code: str, message: str, **fields: Any) -> Finding:
        """A finding with the code's own severity, unless ``severity`` is among the fields."""
    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """A finding from its plain form; keys that it does not know are passed over."""
    def to_dict(self) -> dict[str, Any]:
        """Plain data, without empty fields; ``layers`` as ``first`` and ``last``."""
    def replace(self, **changes: Any) -> Finding:
        """The same finding with other fields; None takes one away."""
    def __replace__(self, **changes: Any) -> Finding: ...
    def is_a(self, *kinds: _Kind) -> bool:
        """Tells whether the table of codes has its code under one of some kinds."""
    @property
    def code(self) -> str:
        """Stable code, e.g. ``FS101`` (``fastshard explain CODE``)."""
    @property
    def severity(self) -> str:
        """``error``, ``warning`` or ``note``."""
    @property
    def message(self) -> str:
        """One clause that says what is wrong."""
    @property
    def file(self) -> str | None:
        """File, as the user would name it."""
    @property
    def files(self) -> tuple[str, ...]:
        """All files that it is about; ``file`` is the first of them."""
    @property
    def rank(self) -> str | None:
        """Rank in the field's words, e.g. ``tp 1``."""
    @property
    def coords(self) -> dict[str, tuple[range, ...]]:
        """Ranks that it is about, by dimension: ``{"tp": (range(3, 6),), "pp": (range(1, 2),)}``. Given as
        numbers, ranges, or sequences of ranges; ``rank`` says them unless it is given too."""
    @property
    def host(self) -> str | None:
        """Host, where known."""
    @property
    def tensor(self) -> str | None:
        """Tensor name."""
    @property
    def layers(self) -> range | None:
        """Layers that it is about as a whole, or other positions on ``axis``."""
    @property
    def axis(self) -> str | None:
        """Axis of the layout that it is about."""
    @property
    def count(self) -> int | None:
        """How many tensors, files or findings it stands for, where it names one or none of them."""
    @property
    def expected(self) -> str | None:
        """What was expected."""
    @property
    def got(self) -> str | None:
        """What was found."""
    @property
    def evidence(self) -> str | None:
        """Who says what must be: the checkpoint's arguments, an index, a config."""
    @property
    def effect(self) -> Effect | None:
        """Tensors that are missing, incomplete or unreadable because of it."""
    @property
    def parts(self) -> tuple[Finding, ...]:
        """Findings of the same cause that it stands for, where they say more than it does."""
    @property
    def title(self) -> str:
        """What its code is called, in a few words."""
    @property
    def headline(self) -> str:
        """What is wrong, and where: one line, control characters escaped."""
    @property
    def help(self) -> str | None:
        """What to do about it."""
    @property
    def run(self) -> tuple[str, ...]:
        """Commands that do it, in their order. One that begins with ``-`` is options of the command that was
        run."""
    @property
    def advice(self) -> str | None:
        """What to do about it, with its commands: one line."""
    @property
    def decided(self) -> str | None:
        """By which option it is judged otherwise than by itself: ``accept WHAT``, ``ignore CODE``, ``error
        CODE``, ``fail_on warning``."""
    @property
    def unnoticed(self) -> str | None:
        """What could be missing without a finding, for one that says so."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@type_check_only
class OpenedFile(TypedDict):
    """A file that was opened; sizes in bytes."""

    path: str
    root: int
    format: str
    checksums: bool
    size: int
    tensors: int
    #: Name that the archive was given when it was saved.
    archive: str | None
    #: Name of the first tensor that is a part of a larger one.
    partial: str | None

@type_check_only
class StoredTensor(TypedDict):
    """A tensor of a file: a view of a storage; `offset` in bytes, `strides` in elements."""

    #: Keys from the file's root.
    path: list[str]
    dtype: str
    torch_dtype: str
    shape: list[int]
    #: Number of the storage in the file.
    storage: int
    offset: int
    strides: list[int]
    storage_bytes: int
    storage_crc32: int | None

@type_check_only
class Mesh(TypedDict):
    """A mesh of ranks, and where in it the rank is that wrote the file."""

    shape: list[int]
    names: list[str] | None
    #: None for a rank that is not in the mesh.
    coordinate: list[int] | None
    #: The rank's number in the run, and ranks of the run or of this mesh of it, where they are told.
    rank: int | None
    ranks: int | None

@type_check_only
class Placement(TypedDict):
    """What a dimension of a mesh does to a tensor: ``replicate``, ``shard``, ``strided`` or ``partial``."""

    kind: str
    dim: NotRequired[int]
    #: Pieces that were there already.
    split: NotRequired[int]

@type_check_only
class Shard(TypedDict):
    """A box of a tensor: first index, extent, and the tensor of the file that it is."""

    lo: list[int]
    size: list[int]
    tensor: int

@type_check_only
class RankPart(TypedDict):
    """A tensor of which a file holds a rank's part: a DTensor has placements, a ShardedTensor shards."""

    path: list[str]
    #: Of the whole.
    shape: list[int]
    mesh: NotRequired[int]
    placements: NotRequired[list[Placement]]
    #: Dimensions of the tensor, each with those of the mesh in the order in which they divide it, where it is
    #: told.
    order: NotRequired[list[tuple[int, list[int]]] | None]
    tensor: NotRequired[int]
    rank: NotRequired[int | None]
    ranks: NotRequired[int | None]
    shards: NotRequired[list[Shard]]

@type_check_only
class Distributed(TypedDict):
    """The tensors of which a file holds a rank's part, and the meshes, each once."""

    meshes: list[Mesh]
    parts: list[RankPart]

@type_check_only
class PlacedFile(TypedDict):
    """A file that a target prescribes."""

    name: str
    #: The ranks whose outputs it holds, by parallel dimension.
    coords: NotRequired[dict[str, int]]
    #: Under the form's name what it holds: ``safetensors``, ``torch_zip``, ``records``, ``dcp_metadata`` or
    #: ``arrays``.
    content: dict[str, Any]

@type_check_only
class MetRank(TypedDict):
    """A rank that has come to a meeting; `storage` tells what it sees of the destination."""

    rank: int
    host: str
    pid: int
    storage: str

@type_check_only
class LentRoot(TypedDict):
    """A root of a rank's sources: where it is `there`, on its host, and `here`."""

    rank: int
    host: str
    there: str
    here: str
    #: For one that is a file, its name.
    file: str | None

@type_check_only
class WriteSettings(TypedDict):
    """How a run writes; `memory` in bytes, `patience` in seconds."""

    threads: int
    memory: int
    #: The fields of `common.options.WriteRequest`.
    publish: NotRequired[dict[str, Any]]
    values: NotRequired[dict[str, Any]]
    #: Of files that go along those from above the checkpoint: where from, by name.
    above: NotRequired[dict[str, str]]
    #: True if the sources were compared with a manifest of theirs.
    expected: NotRequired[bool]
    patience: NotRequired[float]
    #: Which rank has each root of the sources on its own disk.
    near: NotRequired[list[int] | None]
    #: How findings are judged.
    gate: NotRequired[dict[str, Any]]

@type_check_only
class RunOptions(TypedDict, total=False):
    """How a run reads; `threads` and `memory` (bytes) are always among them."""

    threads: int
    memory: int
    scratch_dir: str | None
    #: Part n of t.
    subset: tuple[int, int] | None
    #: Only these outputs.
    only: list[str] | None
    #: ``nothing``, ``zero_slabs`` (as findings) or ``full``.
    stats: str

#: The manifest as JSON, which is its format, and findings.
_Written = tuple[str, list[Finding]]
_CopiedFile = tuple[str, str, str | None]
#: What a callback came to: None, or findings, one at least.
_Told = list[Finding] | None

_Progress = Callable[[int, int], object] | None

@final
class Catalog:
    """Files of one checkpoint, opened and parsed; no payload byte has been read."""

    def __new__(
        cls,
        roots: list[str | PathLike[str]],
        files: list[tuple[int, str]],
        threads: int,
        records: dict[int, list[tuple[int, int, str, bool]]] | None = None,
        blocks: dict[
            int,
            tuple[
                list[tuple[str, str, list[int], int]],
                str,
                Callable[[str, memoryview], _Told],
                tuple[list[int], Callable[[list[str]], _Told]] | None,
                Callable[[bool], _Told] | None,
            ],
        ]
        | None = None,
        memory: int | None = None,
        words: dict[str, tuple[str, ...]] | None = None,
    ) -> Catalog:
        """Files opened; `words` are what names of tensors tell, by what they tell: without them nothing.

        Raises CoreError if the headers take more than `memory` bytes, what the process holds included.
        """
    def reads_store(self) -> bool:
        """True if files of a store are among them, which are read by requests."""

    def findings(self) -> list[Finding]:
        """The files that could not be read."""
    def files(self) -> list[OpenedFile | None]:
        """The files in the order given; None for those that could not be read."""
    def values(self, file: int) -> tuple[Any, bool]:
        """What a file holds besides tensors, as plain data, and whether that is all of it: it is bounded."""
    def tensors(self, file: int) -> Sequence[StoredTensor]:
        """A file's tensors; each is made when it is asked for."""
    def distributed(self, file: int) -> Distributed:
        """The tensors of which a file holds a rank's part, and the meshes; of a file that can be read."""
    def tensor_bytes(self, file: int, tensor: int, limit: int) -> bytes:
        """Bytes of a small tensor. Raises CoreError if it is larger than `limit` bytes or no plain run."""
    def names(self, file: int) -> list[str]:
        """Names of a file's tensors, keys joined by dots."""
    def dtypes(self, file: int) -> set[str]:
        """Dtypes of a file's tensors."""
    def packed(self, file: int, path: list[str]) -> dict[str, Any] | None:
        """An object that a file holds as bytes (a pickle inside a uint8 tensor or an io.BytesIO).

        ``{"values", "tensors"}``; nothing is unpickled. None if nothing is there or in it. Raises CoreError
        for one that is malformed or larger than 16 MiB.
        """
    def named(self) -> tuple[int, int]:
        """Number of tensors, and bytes of their names."""
    def within(self, memory: int | None) -> None:
        """States what planning may take. Raises CoreError if the names of the tensors alone take more."""
    def draft(self, request: object, source: Table | None = None, target: Table | None = None) -> Draft:
        """Drafts a plan under the tables of the two sides; `fastshard.checkpoint.drafting.CoreRequest` has
        the request's fields, or a dict. Raises CoreError for a layout or pattern that cannot be used."""
    def compare(self, request: object) -> Plan:
        """Plans the comparison of parameters with their masters; `Plan.check` carries it out."""
    def repair(self, request: object, repair: dict[str, Any]) -> Plan:
        """Plans masters rebuilt from parameters in the optimizer files' own layout."""
    def inventory(self, options: RunOptions, progress: _Progress = None) -> _Written:
        """Hashes what is there."""
    def against(
        self,
        manifest: str | PathLike[str],
        own_roots: int,
        options: RunOptions,
        progress: _Progress = None,
        checked: Plan | None = None,
    ) -> list[Finding]:
        """Compares the content of the first `own_roots` roots with a manifest.

        The options may select tensors by name or by part. What `checked` has read in `Plan.check` is not
        read again.
        """

@final
class PatternBudget:
    """The steps that the regular expressions of one file may take together, whoever wrote them."""

    def __new__(cls, file: str, steps: int | None = None) -> PatternBudget:
        """A budget of some seconds, or of so many steps; findings name ``file``."""
    @property
    def taken(self) -> int:
        """The steps that were taken."""

@final
class Patterns:
    """Regular expressions of one list, which match what Python's ``re`` matches; they do not change."""

    def __new__(cls, texts: list[str], how: str, budget: PatternBudget) -> Patterns:
        """Reads patterns, each before any is tried.

        Args:
            texts: the patterns, as their file has them.
            how: ``start`` (``re.match``), ``full`` (``re.fullmatch``) or ``module``: the name or what follows
                one of its dots, as peft matches names.
            budget: that of the file.

        Raises:
            CoreError: ``FS211`` for what is no regular expression, ``FS514`` for one that has what is not
                matched here.
        """
    def first(self, name: str) -> int | None:
        """The number of the first pattern that matches a name. Raises CoreError (``FS514``) above the
        budget."""

@final
class Table:
    """A parsed layout table; it does not change. See docs/layouts.md."""

    def __new__(cls, text: str, base: Table | None = None) -> Table:
        """A table, which extends ``base`` if it says so. Raises CoreError (``FS210``) if the text is not a
        valid table."""
    @staticmethod
    def extends_of(text: str) -> str | None:
        """Name of the table that a text extends. Raises CoreError (``FS210``) if it is no table."""
    @staticmethod
    def of(name: str, vocab: str | None, shard: dict[str, list[str]], rules: list[Rule]) -> Table:
        """A table of rules alone, its family called as it is. Raises CoreError (``FS210``) for rules that do
        not fit it."""
    @property
    def name(self) -> str:
        """Name, as ``layout`` gives it."""
    @property
    def family(self) -> str:
        """Model family: tables of one meet in the same canonical tensors."""
    @property
    def vocab(self) -> str | None:
        """Axis of the true vocabulary."""
    @property
    def rules(self) -> list[Rule]:
        """The rules, in the order of the table."""
    @property
    def model_types(self) -> list[str]:
        """The ``model_type`` of the configs that the table is for."""
    @property
    def models(self) -> dict[str, Any]:
        """Its sections ``[model.MODEL_TYPE]``, as they stand there."""
    @property
    def has_config(self) -> bool:
        """True if the table says what configs mean."""
    def is_for(self, config: str, file: str | None = None) -> bool:
        """True if the table is for a model, by its config as JSON: for its ``model_type``, and for configs
        like it.

        ``file`` is the config's, for messages. Raises CoreError (``FS211``) naming the key for a value that
        does not fit.
        """
    def describe(
        self, config: str | None, names: list[str], file: str | None = None
    ) -> tuple[dict[str, int], dict[str, bool], dict[str, tuple[str, list[int]]]]:
        """Axes, facts, and sets (axis and positions) of a model by its config, as JSON; without one, facts by
        names alone.

        What is not among them is for the tensors to tell. ``names`` are those of the tensors stored, none on
        a target's side; ``file`` is the config's, for messages. Raises CoreError (``FS211``) naming the key
        for values that do not fit.
        """
    def with_rules(self, rules: list[Rule]) -> Table:
        """The same table with other rules. Raises CoreError (``FS210``) naming the first that does not fit
        it."""
    def rule_of(self, name: str) -> Rule | None:
        """The first rule that names a tensor."""
    def shape(self, name: str, axes: dict[str, int]) -> list[int | None] | None:
        """The whole shape of a tensor, with None where the axes do not tell; None where no rule gives it
        one."""
    def misfits(self, shapes: dict[str, tuple[int, ...]], axes: dict[str, int]) -> int:
        """How many whole tensors have another shape than their rules give them, under the axes and what most
        agree on."""

@final
class Rule:
    """One rule of a table; it does not change."""

    @staticmethod
    def literal(name: str, shape: str, canonical: str, optional: bool = False) -> Rule:
        """A rule for one tensor, its name taken literally. Raises CoreError (``FS210``) for a shape that is
        no expression."""
    @staticmethod
    def ignoring(name: str, reason: str) -> Rule:
        """A rule that leaves out one tensor of whatever shape, its name taken literally."""
    @property
    def name(self) -> str:
        """The pattern of names."""
    @property
    def dimensions(self) -> list[str] | None:
        """The expressions of the dimensions, without spaces; None for tensors of any shape."""
    def matches(self, name: str) -> bool:
        """True for a name of the pattern."""
    def renamed(self, name: str) -> Rule:
        """The rule for the same tensors under another pattern of names. Raises CoreError (``FS210``) for one
        that is none."""
    def stacked(self, axis: str, at: int) -> Rule:
        """The rule for such tensors stacked along an axis, which becomes dimension ``at``.

        ``L in moe`` is the layers of a set. Raises CoreError (``FS210``) for what is no axis.
        """
    def slot(self, slot: str, power: float) -> Rule:
        """The rule for what an optimizer keeps of each element, canonical ``slot.NAME``, of its own type.

        It is stored with the weight's factor to the given power, and without its addend.
        """
    def left_out(self, reason: str) -> Rule:
        """The rule that leaves the same tensors out."""

@type_check_only
class Compared(TypedDict):
    """What tensors differ in from a roster. Names are the stored ones, but of ``missing`` the roster's."""

    #: Name and shape of each tensor that is not there.
    missing: list[tuple[str, list[int | None] | None]]
    #: Name, shape, and the shape expected.
    differing: list[tuple[str, list[int], list[int | None] | None]]
    #: Name, dtype, and the dtype expected.
    dtypes: list[tuple[str, str, str]]
    #: Names of tensors that the roster has not.
    further: list[str]
    #: How many are as expected.
    same: int
    #: How many have each pair of dtypes: what is there, and what is expected.
    kinds: dict[tuple[str, str], int]

@final
class Roster:
    """The tensors that a model must hold; it does not change."""

    def __new__(
        cls,
        entries: list[tuple[str, list[int | None] | None, str | None, bool]],
        any_of: list[list[str]] = ...,
    ) -> Roster:
        """A roster of entries: name, shape (None, or None for an extent, where it is not known), dtype by
        safetensors' name, and if a model may be without it. Of each group in ``any_of`` one tensor is enough.

        Raises CoreError for a name that stands in it twice, a dtype that there is not, or a group with an
        unknown name.
        """
    def __len__(self) -> int: ...
    def entries(self) -> list[tuple[str, list[int | None] | None, str | None, bool]]:
        """The entries, by their names."""

@final
class Draft:
    """All that a plan says but where its outputs lie. Placed once; looked at after that it raises
    ValueError."""

    def findings(self) -> list[Finding]:
        """Findings, errors first."""
    def odd_dtypes(self) -> list[Finding]:
        """Warnings about tensors of a few layers that have another floating dtype than the same in all
        others."""
    def lost(self) -> dict[str, int | None]:
        """Tensors that must be there and are not whole; the elements of each, where the layout says how
        many."""
    def axes(self) -> dict[str, int]:
        """Extents of the axes."""
    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype, of all ranks."""
    def names(self) -> set[str]:
        """Names of the tensors."""
    def tensors(
        self,
    ) -> list[tuple[str, tuple[str, list[int], int, list[int], list[tuple[int, str, list[int]]] | None]]]:
        """Each tensor once: its name, and a record that tensors share if they are alike.

        The record has dtype, a rank's shape and bytes, shape of the full tensor, and how ranks cut it. A cut
        is (dimension, parallel dimension, extents of the parts that are each shared equally); None where
        ranks do not hold equal shares of parts.
        """
    def full_tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype of each full tensor by its name; tensors that are alike share one record."""
    def positions(self) -> dict[str, dict[str, int]]:
        """Position of each tensor on the axes that its name counts (``L`` for layers, ``E`` for experts),
        where it counts any."""
    def made_of(self) -> dict[str, set[str]]:
        """Names of the stored tensors that each output is made of."""
    def compared(self, roster: Roster, names: dict[str, str], outer: str) -> Compared:
        """What the whole tensors differ in from a roster: ``missing``, ``differing``, ``dtypes``,
        ``further``, and counts.

        ``names`` gives the model's own name of each tensor that has another; only tensors whose own name
        begins with ``outer`` are the model's, and the roster has their names without it.
        """
    def place(self, placement: dict[str, Any]) -> Plan:
        """The plan, with every output in a file."""

@final
class Plan:
    """A plan with the open files that it reads."""

    def findings(self) -> list[Finding]:
        """What is wrong with it, and what is to be said of it."""
    def unwritable(self) -> list[Finding]:
        """Outputs that the format of their file cannot hold."""
    def digest(self) -> str:
        """BLAKE3 of the plan, hexadecimal."""
    def to_json(self) -> str:
        """The whole plan."""
    def named(self) -> tuple[int, int]:
        """Number of outputs, and bytes of their names."""
    def names(self) -> list[str]:
        """A name for each output that no other has: its own, or FILE:KEY where ranks each have one of it."""
    def written_names(self) -> tuple[list[str], list[str]]:
        """The files that a write makes, a folder with a slash at its end; the names that appear last."""
    def excerpt(self, output: int) -> str:
        """The plan of one output alone, as JSON. Raises IndexError if there is none at this position."""
    def summary(self) -> dict[str, Any]:
        """Counts, bytes, files, dtypes, axes, value ops."""
    def outputs(self) -> list[tuple[str, str, list[int], int, int]]:
        """(name, dtype, shape, bytes, pieces) of every output."""
    def pieces(self, output: int) -> list[tuple[str | None, str, list[int]]]:
        """(rank, file, local shape) of the stored tensors an output is made of."""
    def sources(self, output: int) -> list[str]:
        """Files that an output is read from."""
    def contiguous(self, output: int) -> tuple[int, int] | None:
        """(file, offset in bytes) of an output that is one run of one file, else None.

        Raises CoreError (``FS506``) if the file changed since it was opened.
        """
    def descriptor(self, file: int) -> int | None:
        """A new descriptor of a source file, for the caller to close; None where it is to be read, not
        mapped.

        Raises CoreError (``FS506``) if the file changed since it was opened.
        """
    def read(self, output: int, start: int, buffer: NDArray[np.uint8], threads: int = 1) -> None:
        """Fills a contiguous buffer with an output's bytes from byte ``start``, on at most so many
        threads."""
    def write(
        self,
        out: str | PathLike[str],
        options: WriteSettings,
        progress: _Progress = None,
        arrays: StoreWriter | None = None,
        paths: tuple[list[_CopiedFile], list[str]] | None = None,
        tell: Callable[[Finding], object] | None = None,
        meeting: Meeting | None = None,
        about: dict[str, Any] | None = None,
        store: ResultPrefix | None = None,
    ) -> _Written:
        """Writes and publishes. `arrays` writes the arrays of a result that has some;
        `tell` is called with each finding that is to be said before the work.

        `paths` are the files that go along, (name there, path, BLAKE3 when it was chosen), and what `out`
        must lie apart from; none, and the roots, if not given.

        With `meeting` the ranks there do it together; `about` is kept with the run.

        With `store` the result is published there, and `out` is where it is staged.

        A signal handler or a callback that raises stops it; that is raised even where it came too late.
        """
    def told(self) -> list[Finding]:
        """What the last `write` came to, whatever it raised.

        ``FS519`` is among them if the result is published, ``FS510`` if it was stopped before.
        """
    def refuse_unwritten(self) -> None:
        """Refuses to read files with large holes in the place of tensors: raises their findings
        (``FS317``)."""

    def check(
        self, options: RunOptions, progress: _Progress = None
    ) -> tuple[list[Finding], dict[str, str], dict[str, dict[str, Any]]]:
        """Runs without writing: findings, and hashes and statistics by output."""

@final
class Meeting:
    """A rank that has met the others of a run at its destination."""

    def __new__(cls, out: str | PathLike[str], about: dict[str, Any]) -> Meeting:
        """Meets: `about` has ``rank``, ``world``, ``timeout`` (s), ``words`` (alike for all) and
        ``hosts``."""
    def ranks(self) -> list[MetRank]:
        """Those that have come."""
    def stop(self, findings: list[Finding]) -> None:
        """Says why this rank stops, so that the others do too."""
    def done(self) -> None:
        """Says that this rank has nothing left to do."""
    def lend(
        self, roots: list[dict[str, str | None]], files: list[tuple[int, str]], folder: str | PathLike[str]
    ) -> list[LentRoot]:
        """Lends files (root, relative path) below roots (``folder``, ``file``), and makes folders in `folder`
        that stand for the other ranks'."""
    def stamp(self, wanted: list[tuple[int, int, str]]) -> str:
        """A digest of files (rank, number of its root, path) as they were when the ranks met."""
    def lent(self) -> dict[int, int]:
        """Bytes that each rank has lent by now."""
    def close(self) -> None:
        """Takes leave."""

@final
class Hasher:
    """BLAKE3 of bytes that come in pieces."""

    def __new__(cls) -> Hasher: ...
    def update(self, content: bytes) -> None:
        """Adds bytes."""
    def hexdigest(self) -> str:
        """The digest of all of them, hexadecimal."""

@final
class FileParts:
    """The bytes of a file for its upload, in order."""

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
    @property
    def has_ended(self) -> bool:
        """True once the run has ended, so that nobody waits for the upload any more."""
    def take(self, length: int) -> bytes | None:
        """Takes the next `length` bytes, fewer at the end; None after it. Waits until they are made."""

@final
class StoreFolder:
    """A folder whose files are placeholders of those of a store, until it is closed."""

    def __new__(
        cls,
        folder: str | PathLike[str],
        name: str,
        files: Sequence[tuple[str, int, int]],
        room: int,
        read: Callable[[int, int, memoryview], list[Finding] | None],
    ) -> StoreFolder: ...
    def counts(self) -> tuple[int, int]:
        """Number of requests so far, and the bytes that they asked for."""

    def forget(self) -> None:
        """Releases the bytes that are kept between reads."""

    def close(self) -> None:
        """Makes the placeholders ordinary files again, and waits for requests that were made ahead."""

@final
class ResultWriter:
    """A result written tensor by tensor."""

    def __new__(
        cls, out: str | PathLike[str], nbytes: int, max_shard_size: int, overwrite: bool, fsync: bool
    ) -> ResultWriter: ...
    def add(self, name: str, dtype: str, shape: list[int], data: NDArray[np.uint8]) -> None:
        """Adds a tensor: little-endian bytes in C order."""
    def finish(
        self,
        texts: dict[str, str],
        copies: list[_CopiedFile],
        values: dict[str, Any] | None,
        words: dict[str, tuple[str, ...]],
        non_finite_accepted: bool,
    ) -> _Written:
        """Publishes."""
    def abort(self) -> None:
        """Removes everything that was written."""

def begin_parts(
    plan: Plan,
    out: str | PathLike[str],
    options: WriteSettings,
    parts: int,
    about: dict[str, Any],
    paths: tuple[list[_CopiedFile], list[str]],
) -> tuple[str, str, int | None, list[int], list[Finding]]:
    """Begins a run of so many parts, or its next round: its name, its folder, the round, bytes of the parts,
    findings."""

def make_part(
    plan: Plan,
    out: str | PathLike[str],
    options: WriteSettings,
    nonce: str,
    part: int,
    paths: tuple[list[_CopiedFile], list[str]],
    progress: _Progress = None,
) -> bool:
    """Makes a part of a run; False if it was made before."""

def commit(
    plan: Plan,
    out: str | PathLike[str],
    options: WriteSettings,
    nonce: str,
    arrays: StoreWriter | None,
    paths: tuple[list[_CopiedFile], list[str]],
    progress: _Progress = None,
    tell: Callable[[Finding], object] | None = None,
) -> _Written:
    """Judges what the parts have made, and publishes."""

def collect(
    out: str | PathLike[str], abandon: str | None, patience: float, dry: bool
) -> list[tuple[str, str | None, str, int, list[tuple[str, str, bool]]]]:
    """Removes what interrupted runs have left: path, run, fate and bytes of storage of each, and the results
    in it: path, ``older`` or ``newer``, and whether all of it is there."""

def storage_of(path: str | PathLike[str]) -> str:
    """The storage that a path lies on, for people: filesystem, what is mounted, and where."""

def write_piece(
    files: list[tuple[str, str]],
    roots: list[str],
    out: str | PathLike[str],
    options: WriteSettings,
    progress: _Progress = None,
    tell: Callable[[Finding], object] | None = None,
) -> _Written:
    """Copies files (name, path) as a host's part of a checkpoint."""

def identify_process() -> str:
    """The identity of this process as JSON."""

def is_process_dead(identity: str) -> tuple[bool, str]:
    """True if a process has certainly ended, and its description for people."""

def is_remote(path: str | PathLike[str]) -> bool:
    """True if a path stands for something that no file system of this host holds."""

def bring(path: str | PathLike[str], lo: int, hi: int) -> None:
    """Fills bytes `lo` to `hi` of a file with those of what it stands for, if it does."""

def let_go(path: str | PathLike[str], lo: int, hi: int) -> None:
    """Lets go of what was brought."""

def will_read(ranges: Sequence[tuple[PathLike[str], int, int]]) -> None:
    """Says that ranges (path, first byte, one past the last) of what files stand for will be read."""

def shared_run(out: str | PathLike[str], nonce: str) -> dict[str, Any]:
    """What is written of a run: ``run``, ``folder``, ``about``, ``parts``, ``missing``."""

def codes_table() -> list[tuple[str, str, str, int, str, str, str, str]]:
    """The table of finding codes, in order: code, name, severity, exit code of an error, title, meaning,
    help, check of a report."""

def exit_code(findings: list[Finding]) -> int:
    """The exit code that findings stand for."""

def judge(findings: list[Finding], gate: dict[str, Any]) -> list[Finding]:
    """Findings as a gate judges them: ``warnings``, ``error``, ``ignore``.

    Raises:
        CoreError: ``FS515`` if an error is to be ignored.
    """

def manifest_entry(root: str, name: str) -> dict[str, Any]:
    """The entry of a file without tensors in a manifest: name, size in bytes, BLAKE3.

    Raises:
        CoreError: if it cannot be read.
    """

def manifest_files(
    manifest: str,
    roots: list[str],
    options: RunOptions,
    progress: Callable[[int, int], object] | None = None,
) -> list[Finding]:
    """Findings about the files without tensors that a manifest lists: looked for in each root in turn, hashed
    on as many threads as the options say.

    Raises:
        CoreError: if the manifest or a file that is there cannot be read.
    """

def anonymous_memory() -> int:
    """Anonymous resident memory of this process, in bytes."""

def crc32_of_constant(pattern: bytes, length: int) -> int:
    """CRC32 of the first ``length`` bytes of ``pattern``, which must not be empty, again and again. No such
    bytes are made."""

def histogram_edges() -> list[float]:
    """The 63 edges between the bins of a histogram, ascending; the first and the last bin are open."""

def dcp_metadata(path: str | PathLike[str]) -> Any:
    """What a `.metadata` file says. Raises CoreError if it is none."""

def dcp_object(path: str | PathLike[str], offset: int, len: int) -> Any:
    """The value of a record that is no tensor. Raises CoreError if it cannot be read."""

def plain_pickle(path: str | PathLike[str]) -> Any:
    """Read a pickle of dicts, lists, texts and numbers; tuples are lists. Nothing in it is called.

    Raises:
        CoreError: ``FS602`` for a pickle that is damaged, too large, or holds an object.
    """

def stand_in(path: str | PathLike[str], head: bytes, size: int) -> Finding | None:
    """What lies in the place of a file of text, by its first bytes; None for what may be the file itself."""

def vocabulary(path: str | PathLike[str], kind: str, wanted: list[str]) -> dict[str, Any]:
    """The largest id of a tokenizer's vocabulary and the ids of the tokens wanted: ``largest``, ``ids``.

    Args:
        path: the file, read in bounded memory.
        kind: ``tokenizers`` (tokenizer.json), ``ids`` (vocab.json, added_tokens.json), ``sentencepiece`` or
            ``lines`` (vocab.txt).
        wanted: tokens.

    Raises:
        CoreError: ``FS211`` if the file is none of this kind.
    """
