"""Dequantised weights for a requested dtype: the request to the core, and the tensors that are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import _core
from ..common import codes
from ..common.errors import Finding
from ..common.formatting import counted
from ..common.records import dataclass, field, replace
from ..layouts.declaration import Source
from ..models.quantised.forms import Weight
from ..models.quantised.values import DamagedError, NoValuesError, ValueAccess
from ..sources.hf_config import with_plain_weights
from .drafting import Opened
from .stored_bytes import StoredBytes

__all__ = ["Dequantised", "Logical", "dequantised", "describe_record", "weights_of"]

_HELP = "leave out --dtype to keep them, or dequantise them with the tool that quantised them"


@dataclass(frozen=True)
class Dequantised:
    """The request to the core for the values of quantised weights."""

    coded: Sequence[Mapping[str, object]] = ()
    #: Names of the values, by the names of their codes.
    values_of_codes: Mapping[str, str] = field(default_factory=dict)
    #: Names of scales and similar tensors, which are left out.
    hidden: Sequence[str] = ()
    findings: Sequence[Finding] = ()
    #: The record for the manifest: the dtype, the number of weights by format, and the number of omitted
    #: tensors by role; empty if there are none.
    record: Mapping[str, Any] = field(default_factory=dict)

    def left_out(self, own_names: Mapping[str, str]) -> frozenset[str]:
        """Return the stored names of the tensors that are left out.

        ``own_names`` maps stored names to the model's own names.
        """
        stored = {own: name for name, own in own_names.items()}
        return frozenset(stored.get(name, name) for name in self.hidden)

    def described(self, source: Source, names_of: Callable[[int], Iterable[str]]) -> Source:
        """Return the source's declaration as if its weights were stored unquantised.

        Args:
            source: the source as it is stored.
            names_of: returns the names of the tensors in a file, by its number.
        """
        values = (
            {**source.files.values, "dequantised": dict(self.record)} if self.record else source.files.values
        )
        stored = [
            name for unit in source.files.units for _, name in source.of_unit(unit, names_of(unit.file))
        ]
        stored += [
            name for group in source.files.assembled if group.slot is None for name, *_ in group.tensors
        ]
        own = [source.names.own.get(name, name) for name in dict.fromkeys(stored)]
        hidden = {*self.hidden, *source.names.hidden}
        names = [self.values_of_codes.get(name, name) for name in own if name not in hidden]
        source = replace(
            source,
            files=replace(source.files, values=values, quantiser_files={}),
            names=replace(source.names, beside=frozenset()),
        )
        return with_plain_weights(source, names)


def dequantised(opened: Opened, prefix: str, dtype: str) -> Dequantised:
    """Build the request for the values of all quantised weights of a checkpoint.

    Args:
        opened: the checkpoint.
        prefix: the prefix of the model's names.
        dtype: the requested dtype, by its safetensors name.
    """
    if not (opened.quantised.weights or opened.quantised.of_activations):
        return Dequantised(findings=opened.quantised.unsaid)
    stored = StoredBytes(opened)
    access = ValueAccess(
        dtype, lambda name, start, length: stored.read(name.removeprefix(prefix), start, length)
    )
    weights_coded: list[Mapping[str, object]] = []
    values_of_codes: dict[str, str] = {}
    open_points: list[tuple[str, str]] = []
    damages: list[Finding] = []
    refused: dict[tuple[str, str], list[Weight]] = {}
    done: list[Weight] = []
    for weight in opened.quantised.weights:
        if prefix:
            weight = _below(prefix, weight)
        try:
            values = weight.values(access)
        except DamagedError as error:
            damages.append(error.finding)
            continue
        except NoValuesError as error:
            refused.setdefault((weight.form.name, str(error)), []).append(weight)
            continue
        name = f"{weight.module}{values.suffix}"
        weights_coded.append({"name": name, "shape": values.shape, "coded": values.coded.document()})
        values_of_codes[weight.codes] = name
        open_points += [(weight.codes, note) for note in values.open_points]
        done.append(weight)
    others = [f"{prefix}{name}" for name in opened.quantised.of_activations]
    hidden = [*others, *(name for weight in done for name in weight.companions.values())]
    findings = [
        *opened.quantised.unsaid,
        *damages,
        *(_refused(form, why, weights) for (form, why), weights in refused.items()),
    ]
    findings += [
        Finding.of(codes.IGNORED, note, severity="warning", tensor=name) for name, note in open_points[:20]
    ]
    if not (done or others):
        return Dequantised(weights_coded, values_of_codes, hidden, findings)
    left = Counter(role for weight in done for role in weight.companions)
    left += Counter({"scales of activations": len(others)})
    record = {
        "dtype": dtype,
        "forms": dict(Counter(weight.form.name for weight in done)),
        "left_out": dict(left),
    }
    findings.append(
        Finding.of(
            codes.IGNORED,
            describe_record(record),
            severity="note",
            tensor=done[0].codes if done else others[0],
            count=len(done) or None,
        )
    )
    return Dequantised(weights_coded, values_of_codes, hidden, findings, record)


@dataclass(frozen=True)
class Logical:
    """The weight that stored codes represent."""

    name: str
    shape: tuple[int, ...]
    form: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"name": self.name, "shape": list(self.shape), "form": self.form}

    def __str__(self) -> str:
        return f"{list(self.shape)}, {self.form}"


def weights_of(opened: Opened) -> dict[str, Logical]:
    """Return the weights that are stored quantised, by the names of their codes.

    Weights whose record is damaged are left out.
    """
    access = ValueAccess("F32", StoredBytes(opened).read, looks=False, compares_readers=False)
    found: dict[str, Logical] = {}
    for weight in opened.quantised.weights:
        suffix, shape = ".weight", weight.sizes.shape
        try:
            values = weight.values(access)
            suffix, shape = values.suffix, values.shape
        except DamagedError:
            continue
        except (NoValuesError, _core.CoreError):
            # It is of the shape that its codes say.
            pass
        found[weight.codes] = Logical(f"{weight.module}{suffix}", shape, weight.form.name)
    return found


def _below(prefix: str, weight: Weight) -> Weight:
    """Add a prefix to all names of a weight."""
    return replace(
        weight,
        module=f"{prefix}{weight.module}",
        codes=f"{prefix}{weight.codes}",
        companions={role: f"{prefix}{name}" for role, name in weight.companions.items()},
        stored={f"{prefix}{name}": stored for name, stored in weight.stored.items()},
    )


def _refused(form: str, why: str, weights: Sequence[Weight]) -> Finding:
    first = weights[0]
    return Finding.of(
        codes.UNSUPPORTED,
        f"{counted(len(weights), 'weight')} stored as {form}, which --dtype cannot dequantise: {why}",
        tensor=first.codes,
        expected="weights that fastshard can dequantise",
        got=form,
        help=_HELP,
        count=len(weights),
    )


def describe_record(record: Mapping[str, Any]) -> str:
    """Format the manifest's record of dequantised weights in one line."""
    forms = " and ".join(
        f"{counted(count, 'weight')} stored as {form}" for form, count in record["forms"].items()
    )
    left = ", ".join(f"{role} ({count:,})" for role, count in record["left_out"].items())
    if not forms:
        return f"left out, because the result is not quantised: {left}"
    are = "is dequantised" if sum(record["forms"].values()) == 1 else "are dequantised"
    return f"{forms} {are} to {record['dtype']}; left out: {left}"
