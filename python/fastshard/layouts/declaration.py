"""The declaration of a checkpoint by its source: the place of each tensor, and the model."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .._core import Table
from ..common import codes
from ..common.errors import FastshardError, Finding, raise_errors
from ..common.frozen import Freezable
from ..common.listing import File, Folder
from ..common.ranks import Rank
from ..common.records import dataclass, field, replace
from . import tables
from .declared_model import Description, Dialect, Evidence
from .declared_parts import (
    Adapted,
    Assembled,
    Blocks,
    Group,
    ListedBlocks,
    Moments,
    Optimizer,
    StateFile,
    StoredAdapter,
    Superseded,
    TreeInfo,
    Unit,
)
from .wrapper_names import bare, put_in, wrapped

__all__ = [
    "Adapted",
    "Allowances",
    "Assembled",
    "Binding",
    "Blocks",
    "Description",
    "Dialect",
    "Evidence",
    "Group",
    "ListedBlocks",
    "Moments",
    "Optimizer",
    "Source",
    "SourceFiles",
    "SourceNames",
    "StateFile",
    "Superseded",
    "TensorIndex",
    "TreeInfo",
    "Unit",
    "is_state",
]


@dataclass
class SourceFiles(Freezable):
    """The files of a source, by their numbers in the catalog, and their contents."""

    #: Files, or the parts of files that are used, and their places in the topology.
    units: list[Unit] = field(default_factory=list)
    #: Tensors stored in ranges of other tensors: fp32 master weights and optimizer slots.
    assembled: list[Assembled] = field(default_factory=list)
    #: The tensors that an adapter changes, by the model's own names.
    adapted: list[Adapted] = field(default_factory=list)
    #: The adapter itself.
    adapter: StoredAdapter | None = None
    #: The rank that wrote each file, according to its name. For files with units, the name may give more
    #: detail.
    ranks: dict[int, Rank] = field(default_factory=dict)
    #: Files that state their rank and are in that rank's place.
    placed: set[int] = field(default_factory=set)
    #: Folders to search for config and tokenizer, the nearest first.
    folders: list[Folder] = field(default_factory=list)
    #: Files in which a quantiser records its settings, by name. They describe the weights as stored.
    quantiser_files: Mapping[str, Path] = field(default_factory=dict)
    #: Values for the manifest.
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class SourceNames(Freezable):
    """The names of tensors in the files, in the model, and in the result."""

    #: Prefix of the model's own names, used by a conversion. A merge keeps all names unchanged.
    prefix: str = ""
    #: Prefixes of other copies of the model.
    other_prefixes: list[str] = field(default_factory=list)
    #: True if the caller chose the prefix, so that only this copy is used, even in a merge.
    is_chosen: bool = False
    #: The model's own names of tensors that wrappers have renamed, by stored name. The table uses the own
    #: names.
    own: dict[str, str] = field(default_factory=dict)
    #: True if outputs have the model's own names, not the stored ones.
    renames: bool = False
    #: Stored names of tensors that are not outputs: an adapter's factors, and the tensors that it replaces.
    hidden: set[str] = field(default_factory=set)
    #: Names of scales and similar tensors, below the prefix of the weights. They are copied along with the
    #: tensors that they belong to.
    beside: frozenset[str] = frozenset()


@dataclass
class Binding(Freezable):
    """The table by which the tensors are read, and the values of its axis letters."""

    #: Name of the layout table; None if tensors are stored in full.
    layout: str | None = None
    #: The table itself, if it is not the registered one of that name.
    table: Table | None = None
    #: The caller's own table, which describes the tensors and has that name.
    own_table: Table | None = None
    #: Rules for single tensors: the name, the dimension that ranks divide, and the parts of a fused tensor
    #: along it.
    generic: list[tuple[str, int | None, list[int]]] = field(default_factory=list)
    #: Degrees of the parallel dimensions that divide the tensors.
    degrees: dict[str, int] = field(default_factory=dict)
    #: Other degrees of the run that saved the checkpoint, if stated; they divide nothing here.
    other_degrees: dict[str, int] = field(default_factory=dict)
    #: Extents by the table's axis letters.
    axes: dict[str, int] = field(default_factory=dict)
    #: Conditions of the table, and whether each one holds.
    facts: dict[str, bool] = field(default_factory=dict)
    #: Sets of positions by name: the axis and the positions, ascending.
    sets: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    #: Vocabulary size without padding.
    vocab_size: int | None = None
    #: True if tensors that no rule names are passed through unchanged.
    pass_unknown: bool = False

    @property
    def usual_table(self) -> Table | None:
        """The registered table of the layout's name."""
        if self.own_table is not None or self.layout is None:
            return self.own_table
        return tables.table(self.layout)

    @property
    def effective_table(self) -> Table | None:
        """The table that the draft uses."""
        return self.usual_table if self.table is None else self.table


@dataclass
class TensorIndex(Freezable):
    """Tensors that must exist or are lost, according to an index, metadata or another checkpoint."""

    #: True if something other than the files found states what must exist.
    is_provable: bool = False
    #: True if that is another checkpoint, which is compared name by name.
    is_reference: bool = False
    #: Path of the index, if there is exactly one.
    path: str | None = None
    #: Tensor names that an index or metadata file calls for.
    names: set[str] = field(default_factory=set)
    #: The number of the file that an index names for each tensor; None without an index.
    weight_map: Mapping[str, int] | None = None
    #: True if an index lists the tensors of each file. A missing file then loses exactly these tensors.
    is_listed: bool = False
    #: True if each file of the index contains full tensors, so that its location does not matter.
    has_whole_files: bool = False
    #: True if the files differ only in the numbers in their names.
    by_numbers: bool = False
    #: Tensors that several files of the index contain; the copy that the index names is used.
    superseded: Sequence[Superseded] = ()
    #: Files next to the index that it does not list, although their names follow the same pattern.
    unnamed: Sequence[File] = ()
    #: Tensors that are lost, in full or in part, because a file is missing or unreadable; each with one such
    #: file.
    lost: dict[str, str] = field(default_factory=dict)
    #: The number of lost elements, if metadata states it.
    lost_elements: dict[str, int] = field(default_factory=dict)


@dataclass
class Allowances(Freezable):
    """Conditions that the caller allows although they are usually errors."""

    #: True if layers are copied on purpose (depth up-scaling of published models) so often that repeated
    #: layers only cause a warning.
    layers_may_repeat: bool = False
    #: Glob patterns of files that were copied on purpose.
    copies: list[str] = field(default_factory=list)
    #: True if NaN and infinite values are accepted.
    non_finite: bool = False
    #: How to treat large holes where a file should store tensors: as an error, as zeros, or as the manifest
    #: states.
    holes: Literal["refuse", "accept", "compare"] = "refuse"


@dataclass
class Source(Freezable):
    """Declaration of a source: everything that the layout engine must know besides the tensors.

    An adapter builds it step by step. ``fastshard.open`` freezes it; changes then need a copy
    (:func:`dataclasses.replace`). The core reads the fields that it needs by their names.
    """

    framework: str
    files: SourceFiles = field(default_factory=SourceFiles)
    names: SourceNames = field(default_factory=SourceNames)
    binding: Binding = field(default_factory=Binding)
    index: TensorIndex = field(default_factory=TensorIndex)
    allowances: Allowances = field(default_factory=Allowances)
    model: Description = field(default_factory=Description)
    optimizer: Optimizer = field(default_factory=Optimizer)
    findings: list[Finding] = field(default_factory=list)
    #: Errors about single tensors. They become notes if these tensors are not requested.
    tensor_findings: list[Finding] = field(default_factory=list)
    step: str | None = None
    #: Set for an Orbax checkpoint.
    tree: TreeInfo | None = None

    @property
    def called(self) -> str:
        """Name of the model in messages."""
        return f"the family {self.model.family!r}" if self.model.family else f"this model of {self.framework}"

    def weights_only(self, names_of: Callable[[int], Iterable[str]], optimizer: bool = False) -> Source:
        """Select the tensors to convert: those below the prefix, and optimizer state only on request.

        Args:
            names_of: returns the names of the tensors in a file, by its number.
            optimizer: True to use moments stored next to the weights as slots.
        """
        if optimizer and self.optimizer.beside is not None:
            return self._slots(self.optimizer.beside).weights_only(names_of)
        if not (self.model.hf_names or self.model.spelling or self.names.is_chosen):
            return self
        stored = [name for a in self.files.assembled for name, *_ in a.tensors]
        units = {n: list(self.of_unit(unit, names_of(unit.file))) for n, unit in enumerate(self.files.units)}
        stored += [name for held in units.values() for _, name in held]
        own = {name: self.names.own.get(name, name) for name in stored}
        if self.names.other_prefixes:
            raise FastshardError.of(
                codes.AMBIGUOUS,
                "the checkpoint holds several copies of the model",
                got=", ".join(f"{p}*" for p in (self.names.prefix, *self.names.other_prefixes)),
                help="choose one of them",
                run=[
                    f"--prefix {shlex.quote((self.names.prefix or self.names.other_prefixes[0]).rstrip('.'))}"
                ],
            )
        if not (self.names.prefix or any(map(is_state, own.values()))):
            return replace(self, findings=[*self.findings, *self._unwrapped()])

        def taken(name: str) -> bool:
            return own[name].startswith(self.names.prefix) and not is_state(own[name])

        kept: list[Assembled] = []
        for group in self.files.assembled:
            # The groups' own names, so that what is left needs no others.
            tensors = [
                (own[name].removeprefix(self.names.prefix), shape, pieces)
                for name, shape, pieces in group.tensors
                if taken(name)
            ]
            kept.append(replace(group, tensors=tensors))
        only = [
            replace(unit, only=[key for key, name in units[n] if taken(name)])
            for n, unit in enumerate(self.files.units)
        ]
        renamed = {
            name: bare
            for held in units.values()
            for _, name in held
            if taken(name) and (bare := own[name].removeprefix(self.names.prefix)) != name
        }
        return replace(
            self,
            optimizer=self._optimizer_below(),
            findings=[*self.findings, *self._unwrapped(), self._left(stored, own)],
            files=replace(self.files, units=only, assembled=kept),
            names=replace(self.names, own=renamed, prefix=""),
            binding=replace(self.binding, table=self._table_below()),
        )

    def _left(self, stored: list[str], own: Mapping[str, str]) -> Finding:
        """Make the finding that states the model's prefix and how many tensors are not converted."""
        left = [
            name for name in stored if not own[name].startswith(self.names.prefix) and not is_state(own[name])
        ]
        where = f"under {self.names.prefix!r}" if self.names.prefix else "next to the optimizer state"
        is_all = not left and not any(map(is_state, own.values()))
        return Finding.of(
            codes.IGNORED,
            f"the model is {where}"
            + ("" if is_all else "; the rest is not converted")
            + (f", including {len(left)} tensors that are not optimizer state" if left else ""),
            severity="warning" if left and not self.names.is_chosen else "note",
            tensor=left[0] if left else None,
        )

    def beside_config(self, names_of: Callable[[int], Iterable[str]]) -> Source:
        """Select the tensors of a merge with config.json: all of them.

        The model's tensors get the names that the config calls for. If the checkpoint contains several copies
        of the model, all names stay, and the merge writes no config.

        Args:
            names_of: returns the names of the tensors in a file, by its number.
        """
        if self.model.config is None:
            return self
        if not self.model.hf_names:
            if self.model.saved_whole and self.model.spelling is not None:
                return self._without_config([], None, f"the names are those of {self.model.spelling}")
            return self
        if self.names.other_prefixes:
            copies = [f"{prefix}*" for prefix in (self.names.prefix, *self.names.other_prefixes)]
            return self._without_config(
                copies, (self.names.prefix or self.names.other_prefixes[0]).rstrip(".")
            )
        units = {n: list(self.of_unit(unit, names_of(unit.file))) for n, unit in enumerate(self.files.units)}
        stored = [name for held in units.values() for _, name in held]
        stored += [name for group in self.files.assembled for name, *_ in group.tensors]
        # What an adapter hides is no output, and no second copy of the model.
        names = {name: name if name in self.names.hidden else self._below_prefix(name) for name in stored}
        if not self.files.adapted and (changed := wrapped(set(names.values()))) is not None:
            return self._without_config([changed[0]], None, f"{changed[1]} has changed the names")
        if not self.files.adapted and self.model.unloaded is not None:
            name, own = self.model.unloaded
            return self._without_config([name], None, f"its class uses {own}")
        if all(name == own for name, own in names.items()):
            return self
        by_name: dict[str, str] = {}
        for name, own in names.items():
            if name not in self.names.hidden and by_name.setdefault(own, name) != name:
                return self._without_config([by_name[own], name], "NAME")
        assembled = [
            replace(group, tensors=[(names[name], shape, pieces) for name, shape, pieces in group.tensors])
            for group in self.files.assembled
        ]
        renamed = {name: names[name] for held in units.values() for _, name in held if names[name] != name}
        note = Finding.of(
            codes.IGNORED,
            f"names are written without {self.names.prefix!r}, as for the model of config.json",
            severity="note",
        )
        return replace(
            self,
            optimizer=self._optimizer_below(),
            findings=[*self.findings, *self._unwrapped(), *([note] if self.names.prefix else [])],
            files=replace(self.files, assembled=assembled),
            names=replace(self.names, own=renamed, renames=True, prefix=""),
            binding=replace(self.binding, table=self._table_below()),
        )

    def as_called(self, names: Mapping[str, str], note: Finding) -> Source:
        """Return the source with new names for some of the model's tensors; the result has them too.

        Args:
            names: the new name by the model's own.
            note: the finding about the new names.
        """

        def new(own: str) -> str:
            return names.get(own, own)

        own = {name: new(own) for name, own in self.names.own.items()}
        state = replace(
            self.optimizer, untrained={new(self.names.own.get(n, n)) for n in self.optimizer.untrained}
        )
        return replace(
            self,
            optimizer=state,
            findings=[*self.findings, note],
            files=replace(
                self.files, adapted=[replace(one, name=new(one.name)) for one in self.files.adapted]
            ),
            names=replace(
                self.names,
                own=own | {name: to for name, to in names.items() if name not in self.names.own},
                renames=True,
            ),
            binding=replace(
                self.binding,
                generic=[(new(name), divided, parts) for name, divided, parts in self.binding.generic],
            ),
            index=replace(
                self.index,
                lost={new(self.names.own.get(name, name)): file for name, file in self.index.lost.items()},
                lost_elements={
                    new(self.names.own.get(name, name)): of for name, of in self.index.lost_elements.items()
                },
            ),
        )

    def _without_config(
        self,
        names: list[str],
        prefix: str | None,
        why: str = "the checkpoint holds several copies of the model",
    ) -> Source:
        """Return the source with its names unchanged, because no config fits."""
        warning = Finding.of(
            codes.IGNORED,
            f"config.json is not written: {why}",
            severity="warning",
            got=", ".join(names) or None,
            help=None if prefix is None else "choose one of them",
            run=[] if prefix is None else [f"--prefix {shlex.quote(prefix)}"],
        )
        model = replace(self.model, dialect=None)
        return replace(self, model=model, findings=[*self.findings, warning])

    def _below_prefix(self, name: str) -> str:
        """Return a tensor's name in the model; the stored name for a tensor that is not part of it."""
        own = self.names.own.get(name, name)
        inside = own.startswith(self.names.prefix) and not is_state(own)
        return own.removeprefix(self.names.prefix) if inside else name

    def _slots(self, moments: Moments) -> Source:
        """Return the source with moments as slots of their parameters."""
        raise_errors(moments.refused)
        groups, steps = moments.read()
        assembled: list[Assembled] = []
        for group in self.files.assembled:
            slots: dict[str, list[tuple[str, list[int], list[Any]]]] = {}
            rest = []
            for name, shape, pieces in group.tensors:
                if name in moments.slots:
                    parameter, slot = moments.slots[name]
                    slots.setdefault(slot, []).append((parameter, shape, pieces))
                else:
                    rest.append((name, shape, pieces))
            assembled.append(replace(group, tensors=rest))
            assembled += [
                replace(group, slot=slot, tensors=tensors, frozen=False) for slot, tensors in slots.items()
            ]
        taken = replace(
            self.optimizer,
            beside=None,
            groups=groups,
            steps={0: steps},
            moments_named=False,
            moments_only=True,
        )
        return replace(self, optimizer=taken, files=replace(self.files, assembled=assembled))

    def _optimizer_below(self) -> Optimizer:
        """Return the description of the optimizer, with parameter names relative to the prefix."""

        def below(name: str) -> str:
            return self.names.own.get(name, name).removeprefix(self.names.prefix)

        groups = self.optimizer.groups
        if groups is not None:
            groups = [
                replace(group, names=None if group.names is None else frozenset(map(below, group.names)))
                for group in groups
            ]
        return replace(self.optimizer, groups=groups, untrained=set(map(below, self.optimizer.untrained)))

    @staticmethod
    def of_unit(unit: Unit, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yield the key and the name of each tensor of a unit."""
        under = "".join(f"{part}." for part in unit.under)
        for name in names:
            if name.startswith(under):
                key = name.removeprefix(under)
                if unit.only is None or key in unit.only:
                    yield key, unit.prefix + key.removeprefix(unit.strip)

    def _unwrapped(self) -> list[Finding]:
        """Return a note that the output names omit the parts that wrappers added."""
        # Others are those of a reference, of a composite model, or without a stage.
        unwrapped = bare(list(self.names.own))
        first = next(iter(unwrapped.items()), None)
        if first is None:
            return []
        who = put_in(first[0]) or "a wrapper"
        message = (
            f"{len(unwrapped)} names are read without the prefixes that {who} added: {first[0]} is {first[1]}"
        )
        return [Finding.of(codes.IGNORED, message, severity="note")]

    def _table_below(self) -> Table | None:
        """Return the table with names relative to the prefix; None if the usual table has the same names."""
        usual = self.binding.usual_table
        if self.binding.table is None or usual is None:
            return None
        rules = [rule.renamed(rule.name.removeprefix(self.names.prefix)) for rule in self.binding.table.rules]
        same = [rule.name for rule in rules] == [rule.name for rule in usual.rules]
        return None if same else self.binding.table.with_rules(rules)


#: Places where trainers store state that is not a weight. source: torchtitan checkpoint.py, FSDP examples,
#: Lightning
_STATE = (
    "optim.",
    "optimizer.",
    "optimizers.",
    "optimizer_states.",
    "optimizer_state_dict.",
    "optimizer_state.",
    "lr_scheduler",
    "lr_schedulers.",
    "scheduler.",
    "scaler.",
    "train_state",
    "dataloader",
    "loops.",
    "callbacks.",
    "rng_state",
)


def is_state(name: str) -> bool:
    """Return True if a tensor's name shows that it is not part of a model."""
    return name.startswith(_STATE)
