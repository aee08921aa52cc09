"""Ways to read a source so that its tensors get the names of a reference (``--like``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from .. import _core
from .._core import Rule
from ..common import codes
from ..common.errors import FastshardError, Finding, from_core
from ..common.records import replace
from ..common.thread_counts import default_threads
from ..expected.compare_reference import compare, fit
from ..expected.expected_list import ExpectedTensors
from ..expected.reference import Reference
from ..expected.reference_names import Side, gain, moves
from ..layouts.declaration import Source
from ..targets.form import Form
from ..targets.registry import target_of
from ..targets.request import DTYPES, MERGE, Request
from .drafting import UNPLACED, CoreRequest, Merged, Opened, draft_of, taken

#: Number of bytes of two tensors to compare at a time, and number of bytes at the start, where most tensors
#: differ.
_CHUNK, _BEGIN = 1 << 24, 1 << 12
#: Size of the widest element in bytes.
_WIDEST = 16


def sides_of(
    opened: Opened, reference: Reference, request: Request, planned: Side, core_request: CoreRequest
) -> Iterator[Side]:
    """Yield the complete model under each set of names that the reference may use.

    These are the planned names (unless the target has a separate form), the stored names, and those of
    transformers.
    """
    every = replace(core_request, include=(), exclude=())
    keeps = request.to in (None, "hf") and not request.optimizer
    if keeps:
        yield replace(planned, draft=draft_of(opened.catalog, every)) if request.is_narrowed else planned
    every = replace(every, target=None, optimizer=False, table=None)
    if request.to is not None or not keeps:
        as_stored = replace(MERGE, vocab_size=request.vocab_size, weights=request.weights)
        stored, form, how = as_referenced(opened, reference, taken(opened, as_stored), as_stored)
        every = replace(every, source=stored, target=form)
        values = Values(opened.catalog, every)
        drafted = draft_of(opened.catalog, every)
        yield Side(drafted, stored, True, values.same, how, values.ends_in_zeros)
    if request.to != "hf" or not keeps:
        as_hf = Request("hf", vocab_size=request.vocab_size)
        try:
            source = taken(opened, as_hf)
            every = replace(every, source=source, target=target_of(source, as_hf).form())
            draft = draft_of(opened.catalog, every)
        except FastshardError:
            # It has no such form.
            return
        if not any(found.severity == "error" for found in draft.findings()):
            values = Values(opened.catalog, every)
            yield Side(draft, source, False, values.same, "", values.ends_in_zeros)


def compared(
    opened: Opened, reference: Reference, request: Request, merged: Merged, named: Iterable[str | None]
) -> list[Finding]:
    """List the tensors of a reference that are missing from a draft, or have another form in it.

    ``named`` are tensors with a known error.
    """
    sides = sides_of(opened, reference, request, _planned(opened, merged), merged.core_request)
    return judged_of(sides, reference, request, named)


def judged_of(
    sides: Iterable[Side], reference: Reference, request: Request, named: Iterable[str | None]
) -> list[Finding]:
    """List the tensors of a reference that are missing from these sides, or have another form in them."""
    return compare(sides, reference, request.wants, DTYPES[request.dtype], named)


def fitting(
    opened: Opened, reference: Reference, request: Request, merged: Merged
) -> tuple[float, list[Side]]:
    """Return the share (0 to 1) of a reference's names that the checkpoint has, and the searched sides."""
    sides = list(sides_of(opened, reference, request, _planned(opened, merged), merged.core_request))
    return fit(sides, reference), sides


def own_names(opened: Opened, merged: Merged) -> set[str]:
    """Return the model's own names of the planned tensors."""
    return _planned(opened, merged).own_names


def _planned(opened: Opened, merged: Merged) -> Side:
    """Return the tensors under the planned names."""
    values = Values(opened.catalog, merged.core_request)
    return Side(
        merged.draft, merged.source, merged.is_merge, values.same, merged.renamed, values.ends_in_zeros
    )


def as_referenced(
    opened: Opened, reference: Reference, source: Source, request: Request
) -> tuple[Source, Form | None, str]:
    """Return a source whose result has the names of the reference, the form of the merge, and a description.

    A model that a table describes gets the form of the table. Otherwise, prefixes of the names are changed.
    The description states how the names changed.
    """
    roster = reference.roster
    if source.names.prefix:
        return source, None, ""
    if request.to is not None:
        target = target_of(source, request)
        if not target.keeps_names or target.takes_slots:
            # By a table's names, or for a trainer, which has those of memory.
            return source, None, ""
    if source.binding.layout is not None and not source.model.hf_names:
        return source, None, ""
    core_request = CoreRequest(source, request.weights, mean_replicas=request.replicas == "mean")
    side = Side(draft_of(opened.catalog, core_request), source, below=True)
    if source.binding.layout is None and (by_list := as_written(side, reference.listed)) is not None:
        return by_list
    if source.binding.layout is not None:
        shaped, form = by_table(side, request)
        if form is None:
            return _without_table(opened, reference, core_request) or (source, None, "")
        core_request = replace(core_request, source=shaped, target=form)
        other = Side(draft_of(opened.catalog, core_request), shaped, below=True)
        if roster is None:
            # The table tells the names of a config's model.
            fits = other.tensors.keys() != side.tensors.keys()
        else:
            fits = gain(other, side, roster) > 0
        return (shaped, form, "") if fits else (source, None, "")
    if roster is None:
        return source, None, ""
    way = moves(side, roster, reference.path)
    if way is None:
        return _by_config_of(opened, reference, side, core_request) or (source, None, "")
    note = Finding.of(
        codes.IGNORED,
        f"names are written as in the reference {reference.path}: {way}",
        severity="note",
    )
    return source.as_called(way.names, note), None, str(way)


def as_listed(
    opened: Opened, listed: ExpectedTensors, source: Source, request: Request
) -> tuple[Source, Form | None, str]:
    """Return a source whose result for Hugging Face has the names that ``save_pretrained`` writes.

    Additional copies of tied tensors are omitted. The form and the description are as in
    :func:`as_referenced`. The source is returned unchanged if its names are right already.

    Args:
        opened: the checkpoint.
        listed: the tensors that its config promises.
        source: the requested part of the checkpoint.
        request: the request.

    Raises:
        FastshardError: ``FS514`` for a tensor that has no such form.
    """
    if not listed.only_in_memory:
        return source, None, ""
    is_other_class = "auto_map" in (source.model.config or {})
    if (
        listed.quantised
        or source.names.prefix
        or is_other_class
        or not target_of(source, request).keeps_names
    ):
        return source, None, ""
    plain = source
    if source.binding.layout is not None:
        plain = replace(
            source,
            binding=replace(
                source.binding, layout=None, table=None, axes={}, facts={}, sets={}, pass_unknown=True
            ),
        )
    side = Side(draft_of(opened.catalog, CoreRequest(plain)), plain, below=True)
    return as_written(side, listed, drops_ties=True) or (source, None, "")


def as_written(
    side: Side, listed: ExpectedTensors | None, *, drops_ties: bool = False
) -> tuple[Source, Form, str] | None:
    """Return a source under its names in memory, with the form in which transformers writes it.

    Return None if the names are not those in memory.

    Args:
        side: the requested part of a checkpoint, and its tensors.
        listed: the tensors that its config promises, if they are known.
        drops_ties: True to write tied tensors once, even if all other names are those on disk.

    Raises:
        FastshardError: ``FS514`` for a tensor that has no such form.
    """
    from ..expected.names_on_disk import are_in_memory, tables_of

    source, stored = side.source, side.own_names
    if listed is None or not (listed.made or drops_ties) or not are_in_memory(listed, stored):
        return None
    in_memory, on_disk = tables_of(listed, stored)
    beside = _beside(side, in_memory)
    facts = {"tied": True}
    form = Form("merge", on_disk.with_rules([*on_disk.rules, *beside]), facts=facts)
    note = Finding.of(
        codes.IGNORED,
        f"names are written as save_pretrained of {listed.model_class} writes them (transformers "
        f"{listed.transformers})",
        severity="note",
    )
    changed = replace(
        source,
        findings=[*source.findings, note],
        binding=replace(
            source.binding,
            table=in_memory.with_rules([*in_memory.rules, *beside]),
            facts={**source.binding.facts, **facts},
        ),
    )
    return changed, form, "as save_pretrained writes them"


def _without_table(
    opened: Opened, reference: Reference, core_request: CoreRequest
) -> tuple[Source, Form, str] | None:
    """Return the result of :func:`as_written` for a class whose names on disk no table lists.

    Such a class has no output layer, or another one.
    """
    from ..expected.from_transformers import class_name, list_for

    source, listed, config = core_request.source, reference.listed, reference.config
    if source.model.headless is None:
        return None
    if listed is None:
        # Who gives a config alone asks for what it promises.
        asks = reference.roster is None or opened.asks_transformers
        if not asks or config is None or class_name(config) is None:
            return None
        try:
            listed = list_for(config, str(reference.config_file))
        except FastshardError:
            return None
    if listed.quantised:
        return None
    plain = replace(
        source,
        binding=replace(
            source.binding, layout=None, table=None, axes={}, facts={}, sets={}, pass_unknown=True
        ),
    )
    every = replace(core_request, source=plain, weights=None)
    side = Side(draft_of(opened.catalog, every), plain, below=True)
    return as_written(side, listed)


def _by_config_of(
    opened: Opened, reference: Reference, side: Side, core_request: CoreRequest
) -> tuple[Source, Form, str] | None:
    """Return the result of :func:`as_written` for the config of a reference that is a checkpoint.

    Return None if the list for this config does not give the names of the reference. Sizes may have changed
    since: if they contradict that config, the checkpoint's own config is used.
    """
    from ..expected.from_transformers import class_name

    roster, config = reference.roster, reference.config
    if roster is None or not opened.asks_transformers or config is None or class_name(config) is None:
        return None
    if not side.draft.compared(roster, side.source.names.own, side.outer)["missing"]:
        return None
    configs = [(config, reference.config_file)]
    own = opened.source.model
    if own.config is not None and own.config != config and class_name(own.config) == class_name(config):
        configs.append((own.config, own.config_file))
    first = None
    for config_of, file in configs:
        listed = _list_of(config_of, str(file))
        found = as_written(side, listed)
        if found is None:
            continue
        changed, form, _ = found
        every = replace(core_request, source=changed, weights=None, target=form)
        other = Side(draft_of(opened.catalog, every), changed, below=True)
        if gain(other, side, roster) <= 0:
            continue
        first = first or found
        if not any(one.severity == "error" for one in other.draft.findings()):
            return found
    return first


def _list_of(config: dict[str, Any], file: str) -> ExpectedTensors | None:
    """Return the list for a config whose weights are not quantised; None if there is no such list."""
    from ..expected.from_transformers import list_for

    try:
        listed = list_for(config, file)
    except FastshardError:
        return None
    return None if listed.quantised else listed


def _beside(side: Side, table: _core.Table) -> list[Rule]:
    """Build rules that keep the tensors outside the model as they are."""
    found: list[Rule] = []
    for name, (_, shape) in side.tensors.items():
        own = side.source.names.own.get(name, name)
        if table.rule_of(own) is None:
            axes = ", ".join(f"beside{len(found)}d{d}" for d in range(len(shape)))
            found.append(Rule.literal(own, f"[{axes}]", own))
    return found


def by_table(side: Side, request: Request) -> tuple[Source, Form | None]:
    """Return a source, and the form in which transformers stores its model, for a merge.

    The form is None if no table describes the model. Both tables include the tensors outside the model, so
    that these are kept.
    """
    source = side.source
    try:
        target = target_of(source, Request("hf", vocab_size=request.vocab_size))
    except FastshardError:
        return source, None
    form, usual = target.form(), source.binding.usual_table
    if form.table is None or usual is None:
        return source, None
    beside = _beside(side, usual)
    form = replace(form, name="merge", table=form.table.with_rules([*form.table.rules, *beside]))
    return replace(
        source, binding=replace(source.binding, table=usual.with_rules([*usual.rules, *beside]))
    ), form


class Values:
    """The stored values of a draft's tensors."""

    def __init__(self, catalog: _core.Catalog, core_request: CoreRequest) -> None:
        self._catalog, self._core_request = catalog, replace(core_request, dtype=None, include=(), exclude=())
        self._begins: dict[str, bytes] = {}

    @cached_property
    def _plan(self) -> _core.Plan:
        draft = draft_of(self._catalog, self._core_request)
        return draft.place(UNPLACED)

    @cached_property
    def _index(self) -> dict[str, tuple[int, int]]:
        return {name: (i, size) for i, (name, _, _, size, _) in enumerate(self._plan.outputs())}

    def same(self, one: str, other: str, constant: bool) -> bool:
        """Return True if two tensors of the same shape and dtype have the same bytes.

        Tensors with a single repeated value count as the same only if ``constant``.
        """
        if one not in self._index or other not in self._index:
            return False
        first = self._begin(one)
        if first != self._begin(other):
            return False
        size, is_varied = self._index[one][1], constant
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            bytes_of = self._read(one, start, length)
            if bytes_of != self._read(other, start, length):
                return False
            # Zeros and ones are the same in tensors that have nothing to do with each other.
            is_varied = is_varied or bytes_of[_WIDEST:] != bytes_of[:-_WIDEST]
        return is_varied

    def ends_in_zeros(self, name: str, first: int) -> bool:
        """Return True if a tensor is zero from this row to its end."""
        if name not in self._index:
            return False
        number, size = self._index[name]
        rows = self._plan.outputs()[number][2][0]
        start = size // rows * first if rows else size
        return not any(any(self._read(name, at, min(_CHUNK, size - at))) for at in range(start, size, _CHUNK))

    def _begin(self, name: str) -> bytes:
        if name not in self._begins:
            self._begins[name] = self._read(name, 0, min(_BEGIN, self._index[name][1]))
        return self._begins[name]

    def _read(self, name: str, start: int, length: int) -> bytes:
        import numpy as np

        buffer = np.empty(length, dtype=np.uint8)
        try:
            self._plan.read(self._index[name][0], start, buffer, default_threads())
        except _core.CoreError as error:
            raise from_core(error) from None
        return buffer.tobytes()
