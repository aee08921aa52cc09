"""A check that from_pretrained finds tensors whose names differ from those that the class in config.json
writes."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..common import codes
from ..common.errors import Finding
from ..common.formatting import counted
from ..layouts import tables
from ..models import config_json

if TYPE_CHECKING:
    from ..expected.expected_list import ExpectedTensors
    from ..expected.from_transformers import LoadReport
    from ..layouts.declaration import Description
    from ..targets.request import Request

__all__ = ["count_ties_once", "is_named_as_listed", "not_loaded", "severity_of", "unloaded_prefix"]

#: Names of frameworks, by the first part of the names of their tables.
_FRAMEWORKS = {
    "gpt_neox": "GPT-NeoX",
    "maxtext": "MaxText",
    "megatron": "Megatron-LM",
    "olmo_core": "OLMo-core",
    "paxml": "Paxml",
    "torchtitan": "torchtitan",
}


def is_named_as_listed(
    listed: ExpectedTensors, names: Collection[str], stored_as: Mapping[str, Sequence[str]]
) -> bool:
    """Return True if every tensor that a class writes is stored under the class's name for it.

    One of several tied tensors is enough.

    Args:
        listed: the tensors that the config promises.
        names: the names of the stored tensors.
        stored_as: the stored names of tensors that are stored in another form, by the names in the list.
    """
    # What lists tensors is loaded where there is a list.
    from ..expected.expected_list import patterns

    optional = patterns(listed.may_be_missing)
    ties: dict[str, set[str]] = {}
    for group in listed.ties:
        spelled = {name for one in group for name in listed.mapping.get(one, (one,))}
        ties |= dict.fromkeys(spelled, spelled)
    return all(
        tensor.name in names
        or any(pattern.search(tensor.name) for pattern in optional)
        or not ties.get(tensor.name, set()).isdisjoint(names)
        or all(name in names for name in stored_as.get(tensor.name, ("",)))
        for tensor in listed.tensors
    )


def count_ties_once(listed: ExpectedTensors, names: Iterable[str]) -> list[str]:
    """Return the names, with only the last of each group of tied tensors, which is seldom the head."""
    names = list(names)
    others = {
        name for group in listed.ties for name in sorted(set(group).intersection(names), key=names.index)[:-1]
    }
    return [name for name in names if name not in others]


def severity_of(request: Request, model: Description) -> str:
    """Return the severity of names that the class does not load.

    It is an error for a result that is written with its config.json, and for a folder whose files show that
    ``save_pretrained`` wrote it. It is a warning otherwise, since a merged checkpoint is not loaded.
    """
    if request.writes:
        return "error" if request.to == "hf" or model.hf_names else "warning"
    return "error" if model.saved_whole else "warning"


def not_loaded(
    called: str,
    listed: ExpectedTensors,
    names: Collection[str],
    report: LoadReport | None,
    severity: str,
    *,
    allows_headless: bool,
) -> list[Finding]:
    """Find tensors that from_pretrained would initialise because the files have other names.

    Args:
        called: description of the class.
        listed: the tensors that the config promises.
        names: the names of the stored tensors, by which they are loaded.
        report: the loader's complaints about these tensors; None if the loader could not be used.
        severity: the severity of the finding.
        allows_headless: whether a model without the head of its class passes with a warning.
    """
    known = {tensor.name for tensor in (*listed.tensors, *listed.in_memory)}
    unknown = [name for name in names if name not in known]
    if report is None:
        if not unknown:
            return []
        finding = _other_names(called, unknown[0], "and its loader could not be run", "warning")
        return [finding.replace(count=len(unknown))]
    missing = count_ties_once(listed, report.missing)
    if not missing:
        return []
    base = f"{report.base}." if report.base else "\0"
    has_base = any(tensor.name.startswith(base) for tensor in listed.in_memory)
    if has_base and not any(name.startswith(base) for name in (*missing, *names)):
        # The model lies there without its head, under names that its class puts the base's before.
        severity = "warning" if allows_headless else severity
        return [
            Finding.of(
                codes.NOT_LOADED,
                f"{called} has a head with {counted(len(missing), 'tensor')}, and the checkpoint holds the "
                "model without it",
                severity=severity,
                tensor=missing[0],
                count=len(missing),
                help="name the class without a head under architectures in config.json, or add the tensors "
                "of the head",
            )
        ]
    total = len(count_ties_once(listed, (tensor.name for tensor in listed.in_memory)))
    fitting = max(total - len(missing), 0)
    first = unknown[0] if unknown else missing[0]
    finding = _other_names(called, first, f"and finds {fitting} of its {total} tensors", severity)
    near = next((name for name in missing if first.endswith(f".{name}")), None)
    finding = finding.replace(expected=near or missing[0], count=len(missing), evidence=_whose(unknown))
    if near is not None and all(name.startswith(first.removesuffix(near)) for name in names):
        prefix = first.removesuffix(near).rstrip(".")
        finding = finding.replace(
            help="pass the prefix that all names have",
            run=[f"--prefix {shlex.quote(prefix)}"],
        )
    return [finding]


def _other_names(called: str, name: str, how: str, severity: str) -> Finding:
    return Finding.of(
        codes.NOT_LOADED,
        f"{called} uses other names, {how}",
        severity=severity,
        tensor=name,
        help="write the names of a good checkpoint of the model; if the names have a prefix, pass it",
        run=["--like GOOD", "--prefix NAME"],
    )


def _whose(names: Sequence[str]) -> str | None:
    """Name the other framework to which most of these names belong, if a layout table knows them."""
    for layout in tables.names():
        framework = _FRAMEWORKS.get(layout.partition(".")[0])
        if framework is None or not names:
            continue
        table = tables.table(layout)
        if 2 * sum(table.rule_of(name) is not None for name in names) > len(names):
            return f"most of them are names of {framework}"
    return None


def unloaded_prefix(model: Description, renamed: Mapping[str, str]) -> list[Finding]:
    """Report names in a folder of ``save_pretrained`` with a prefix that the class does not load.

    Args:
        model: the description of the model in the folder.
        renamed: the names that a merge writes, by the names in the files.
    """
    config = model.config or {}
    changed = [(name, own) for name, own in renamed.items() if name != own]
    changed = changed or [one for one in (model.unloaded,) if one is not None]
    if not changed or not model.saved_whole or "auto_map" in config:
        return []
    kind = config_json.architecture_of(config)
    called = kind.name if kind is not None else f"the model of type {config.get('model_type')}"
    name, own = changed[0]
    return [
        Finding.of(
            codes.NOT_LOADED,
            f"{called} loads no tensor with a name like this",
            tensor=name,
            expected=own,
            help="merge the checkpoint: merge writes names that the class loads, or writes no config.json "
            "next to the names",
            run=["fastshard merge CKPT OUT"],
        )
    ]
