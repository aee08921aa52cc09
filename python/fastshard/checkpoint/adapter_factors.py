"""Checks of a LoRA adapter's factors: that all exist which the installed peft saves, and that they have an
effect.

The checks run when the base of the adapter is verified or written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.formatting import counted, some
from ..common.records import replace
from ..layouts.declared_parts import StoredAdapter
from ..sources.peft import tensor_names
from ..sources.peft.missing_factors import PAIRS
from .drafting import Opened
from .stored_bytes import StoredBytes

if TYPE_CHECKING:
    from ..expected.from_peft import AdapterTensors

__all__ = ["find_lacking"]

#: Number of bytes of a factor to read at a time.
_WINDOW = 4 << 20
#: Size of a value in bytes, by dtype.
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_UNNOTICED = "whether every target module has factors"


def find_lacking(opened: Opened) -> list[Finding]:
    """List the findings about an adapter's factors; the list is empty if there is no adapter."""
    adapter = opened.source.files.adapter
    if adapter is None:
        return []
    found = _find_zero_update(opened, adapter)
    # An adapter by itself is for a base that is elsewhere.
    return found if opened.source.framework == "PEFT adapter" else found + _compare_with_peft(opened, adapter)


def _find_zero_update(opened: Opened, adapter: StoredAdapter) -> list[Finding]:
    """Warn if every product of factors is zero, so that the adapter changes no value of the base.

    Reading stops at the first value that is not zero.
    """
    names = tensor_names.read_names(adapter.shapes, saved=adapter.is_saved)
    products = [
        (module.factors[a], module.factors[b])
        for module in names.modules.values()
        for a, b in PAIRS
        if a in module.factors and b in module.factors
    ]
    source = replace(
        opened.source,
        files=replace(opened.source.files, adapted=[]),
        names=replace(opened.source.names, hidden=set(), own={}, prefix=""),
    )
    stored = StoredBytes(replace(opened, source=source))
    try:
        if not products or not all(_is_zero(stored, b) or _is_zero(stored, a) for a, b in products):
            return []
    except (_core.CoreError, FastshardError):
        # What cannot be read is an error where all is read.
        return []
    which = "lora_B" if all(_is_zero(stored, b) for _, b in products) else "lora_A"
    return [
        Finding.of(
            codes.ZERO_SLAB,
            f"the adapter changes nothing: every {which} is zero",
            severity="warning",
            file=adapter.file,
            tensor=products[0][1 if which == "lora_B" else 0],
            expected="trained factors",
            got=f"{counted(len(products), 'product')} with value zero",
            help="save the adapter again after training; lora_B is zero before the first step",
        )
    ]


def _is_zero(stored: StoredBytes, name: str) -> bool:
    """Return True if all values of a tensor are zero; False if the tensor does not exist."""
    if name not in stored:
        return False
    size, width = stored.size(name), _WIDTHS.get(stored.dtype(name))
    if width is None:
        return False
    # Minus zero is zero: its sign is the only bit of it that is set.
    values = (1 << 8 * width - 1) - 1
    return not any(
        (stored.raw(name, start, min(_WINDOW, size - start)).view(f"<u{width}") & values).any()
        for start in range(0, size, _WINDOW)
    )


def _compare_with_peft(opened: Opened, adapter: StoredAdapter) -> list[Finding]:
    """Compare the stored tensors with the tensors that peft saves for this adapter and base."""
    if not opened.asks_transformers:
        return [_note_unchecked(adapter, "transformers was not used")]
    if adapter.base is None or not isinstance(adapter.base.get("model_type"), str):
        return [_note_unchecked(adapter, "the base model has no config.json")]
    # What few checkpoints need is imported for these.
    from ..expected.from_peft import list_tensors

    own = tensor_names.read_names(adapter.shapes, saved=adapter.is_saved)
    names = {name for module in own.modules.values() for name in module.factors.values()}
    names |= set(own.whole.values())
    shapes = {name: adapter.shapes[name] for name in names}
    try:
        listed = list_tensors(adapter.base, adapter.config, shapes, adapter.path)
    except FastshardError as error:
        return [_note_unchecked(adapter, error.findings[0].message)]
    return _list_missing(adapter, own, listed)


def _list_missing(
    adapter: StoredAdapter, own: tensor_names.AdapterNames, listed: AdapterTensors
) -> list[Finding]:
    """List the tensors that peft saves and the file lacks, unless peft loads the file without missing any."""
    saved = tensor_names.read_names(listed.saved, saved=True)
    stored = _list_parts(own)
    missing = _list_parts(saved) - stored
    if missing and listed.missing is not None and adapter.is_saved:
        # It knows more spellings than it writes.
        missing &= _list_parts(tensor_names.read_names(listed.missing, saved=False))
    if not missing:
        return []
    if stored.isdisjoint(_list_parts(saved)):
        return [_note_unchecked(adapter, f"{listed.by} has other names for all of its modules")]
    names = sorted(f"{module}.{kind}" for module, kind in missing)
    states = bool(adapter.config.get("peft_version"))
    return [
        Finding.of(
            codes.MISSING_TENSOR,
            f"the adapter lacks {counted(len(names), 'tensor')} that {listed.by} saves: {some(names, 3)}",
            severity="error" if states else "warning",
            file=adapter.file,
            tensor=names[0],
            expected=f"{counted(len(_list_parts(saved)), 'tensor')} according to {adapter.path}",
            got=f"{len(names)} of them missing",
            help="copy the adapter again from the host that saved it, or pass the adapter_config.json that "
            "was saved with it",
        )
    ]


def _list_parts(names: tensor_names.AdapterNames) -> set[tuple[str, str]]:
    """List the factors as pairs of module and kind, and the tensors that are saved as they were trained."""
    factors: Iterable[tuple[str, str]] = (
        (module.name, kind) for module in names.modules.values() for kind in module.factors
    )
    whole = (name.rpartition(".") for name in names.whole)
    return {*factors, *((module, own) for module, _, own in whole)}


def _note_unchecked(adapter: StoredAdapter, why: str) -> Finding:
    """Build a note with the reason why the modules of the adapter were not checked."""
    return Finding.of(
        codes.NOT_PROVABLE,
        f"not checked: {_UNNOTICED} ({why})",
        severity="note",
        file=adapter.path,
        unnoticed=_UNNOTICED,
    )
