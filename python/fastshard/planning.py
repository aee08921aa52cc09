"""Plans: what will be written, from what, before a byte is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from . import _core, budget, layouts
from .declared import Source
from .discover import File
from .errors import FastshardError, Finding, from_core
from .maps import Maps
from .models import config_json
from .placing import NOTHING, Wanted
from .sizes import parse_size
from .targets.base import Bound
from .targets.registry import check, keeps_all, target_of
from .tokenizer import Tokenizer

#: Threads at most; no machine has as many cores.
_MAX_THREADS = 1 << 14
_DTYPES = {"keep": None, "bf16": "BF16", "f16": "F16", "f32": "F32"}
_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def default_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int | None) -> int:
    """The number of worker threads asked for; default all cores.

    Raises:
        FastshardError: ``FS515`` if it is none.
    """
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MAX_THREADS:
        raise FastshardError.of(
            "FS515", "threads", expected=f"a whole number from 1 to {_MAX_THREADS}", got=repr(threads)
        )
    return threads


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint as planning sees it: declaration, files, and what was found on opening."""

    source: Source
    catalog: _core.Catalog
    findings: list[Finding]
    #: Files in the catalog's order.
    files: list[File]


class Plan:
    """A plan: every output tensor as views over pieces of source files.

    ``findings`` says what was found while planning; with an error among them the plan cannot be
    written.
    """

    def __init__(
        self,
        core: _core.Plan,
        findings: list[Finding],
        source: Source,
        target: str,
        writes_arrays: bool = False,
        keeps_names: bool = False,
    ) -> None:
        self.core = core
        self.findings = findings
        self.source = source
        self.target = target
        #: True for a result that is a store of arrays.
        self.writes_arrays = writes_arrays
        #: True for a conversion of a model without a table, whose names and config stay.
        self.keeps_names = keeps_names

    @cached_property
    def maps(self) -> Maps:
        """Maps of the source files, for views of outputs that are one run of one file."""
        return Maps(self.core.descriptor)

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the plan: the id of its run and the key for resuming it."""
        return self.core.digest()

    @cached_property
    def outputs(self) -> list[tuple[str, str, list[int], int, int]]:
        """(name, dtype, shape, bytes, pieces) of every output tensor, in file order."""
        return self.core.outputs()

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each output by name."""
        return {output[0]: i for i, output in enumerate(self.outputs)}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Counts, bytes, files, dtypes, axes and value ops."""
        summary: dict[str, Any] = json.loads(self.core.summary())
        return summary

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain data (``fastshard plan --json``)."""
        document: dict[str, Any] = json.loads(self.core.to_json())
        return document

    def __repr__(self) -> str:
        s = self.summary
        return f"<fastshard.Plan {self.target}: {s['outputs']} tensors, {s['bytes']:,} bytes in {len(s['files'])} files>"


def make_plan(
    opened: Opened,
    to: str | None = None,
    *,
    vocab_size: int | None = None,
    dtype: str = "keep",
    replicas: str = "equal",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    max_shard_size: str | int = "5GB",
    weights: str | None = None,
    wanted: Wanted = NOTHING,
    tokenizer: Tokenizer | None = None,
) -> Plan:
    """Plans a merge (``to`` is None) or a conversion. See :func:`fastshard.plan`."""
    if dtype not in _DTYPES:
        raise FastshardError.of("FS515", "dtype", expected=" | ".join(_DTYPES), got=repr(dtype))
    if replicas not in ("equal", "mean"):
        raise FastshardError.of("FS515", "replicas", expected="equal | mean", got=repr(replicas))
    include, exclude = list(include), list(exclude)
    check(to, wanted, bool(include or exclude))
    keeping, optimizer = keeps_all(to), wanted.optimizer
    source = opened.source if keeping else opened.source.weights_only()
    if vocab_size is not None:
        if not isinstance(vocab_size, int) or not 0 < vocab_size < 1 << 48:
            raise FastshardError.of(
                "FS211", "vocab_size", expected="a positive whole number", got=repr(vocab_size)
            )
        axes = {k: v for k, v in source.axes.items() if k != "V"}
        source = replace(source, vocab_size=vocab_size, axes=axes)
    if source.layout is not None and source.table is None and source.layout not in layouts.names():
        raise FastshardError.of("FS514", f"{source.framework} with the layout {source.layout}: not read yet")
    findings = _weights(source, opened.findings, weights, optimizer)
    findings += [f for f in source.findings if f not in opened.source.findings]
    findings += [_asked_for(f, include, exclude) for f in source.of_tensors]
    request: dict[str, Any] = {
        "source": source.to_request(weights, optimizer),
        "dtype": _DTYPES[dtype],
        "mean_replicas": replicas == "mean",
        "include": include,
        "exclude": exclude,
        "max_shard_size": parse_size(max_shard_size, "max_shard_size"),
    }
    if dtype != "keep":
        request["source"]["dequantise"] = config_json.weight_block(source.config)
        source = replace(source, config=config_json.unquantised(source.config or {}) or None)
    target = None
    if to is not None:
        target = target_of(source, to, wanted)
        request["target"] = target.request(layouts.table(target.layout) if target.layout else None)
        if source.rules is not None and not keeping:
            request["source"]["layout"] = source.rules(target.keeps_step, optimizer)
    # A file that is missing or cannot be read makes every tensor in it missing: say the cause, not the echo.
    broken = any(f.severity == "error" for f in findings)
    core = _plan(opened.catalog, request)
    planned = [Finding.from_dict(f) for f in json.loads(core.findings())]
    if broken:
        planned = [f for f in planned if f.code not in ("FS101", "FS102", "FS103", "FS205", "FS207", "FS515")]
    findings += planned if source.rules is None else _grouped(planned)
    if dtype != "keep":
        findings += _quantised(core, dtype, opened.source.config)
    if not source.provable:
        findings.append(
            Finding.of(
                "FS109",
                "completeness not provable: nothing outside the files states what must exist",
                help="give --expect CONFIG (a config.json or the training config)"
                if source.config is None
                else "--expect with a manifest states it, or --layout with a table of your own",
            )
        )
    summary = json.loads(core.summary())
    findings += _words(source, summary["axes"], tokenizer)
    dtypes = {d: v[1] for d, v in summary["dtypes"].items() if d in _TORCH_DTYPES}
    masters = source.masters and (weights or source.weights) == "masters"
    # Beside masters frozen parameters may be most of the bytes: by the narrower dtype the masters would be rounded.
    weight = {d: (_TORCH_DTYPES[d] == "float32" if masters else False, n) for d, n in dtypes.items()}
    main = _TORCH_DTYPES[max(weight, key=lambda d: weight[d])] if weight else None
    if target is not None and not any(f.severity == "error" for f in findings):
        bound = Bound(
            axes=summary["axes"],
            shapes={output[0]: output[2] for output in core.outputs()},
            bytes={output[0]: output[3] for output in core.outputs()},
            dtypes={output[0]: output[1] for output in core.outputs()},
            stored=[name for unit in source.units for name in opened.catalog.names(unit.file)],
            dtype=main,
            whole=lambda: _whole_shapes(opened.catalog, request),
            tokenizer=tokenizer,
        )
        # What the files are called and hold follows from the tensors that there are.
        request["target"]["files"], request["texts"], assumed = target.complete(bound)
        request["target"]["dtypes"] = target.dtypes(bound)
        core = _plan(opened.catalog, request)
        findings += assumed + _vocabulary(source, summary["axes"], tokenizer)
        findings += [
            f for f in map(Finding.from_dict, json.loads(core.findings())) if f not in findings + planned
        ]
    keeps_names = target is not None and target.keeps_names
    if (target is None or keeps_names) and source.hf_names and source.config:
        config = config_json.with_rows(source.config, summary["axes"].get("V"))
        # With another one transformers would cast the tensors, or take them for quantised ones. What transformers itself has
        # saved is as its config says.
        if dtype != "keep" or masters or not (source.saved_whole or config_json.dtype_of(config) is None):
            config = config_json.with_dtype(config, main)
        if config != opened.source.config or (to is not None and source.config_file is None):
            request["texts"] = {
                **request.get("texts", {}),
                "config.json": json.dumps(config, indent=2) + "\n",
            }
            core = _plan(opened.catalog, request)
    arrays = target is not None and target.writes_arrays
    return Plan(core, findings, source, to or "merge", writes_arrays=arrays, keeps_names=keeps_names)


def _asked_for(finding: Finding, include: list[str], exclude: list[str]) -> Finding:
    """An error about a tensor is a note where that is left out, as the core takes these patterns."""
    name = finding.tensor or ""
    taken = not include or any(fnmatchcase(name, pattern) for pattern in include)
    if taken and not any(fnmatchcase(name, pattern) for pattern in exclude):
        return finding
    return replace(finding, message=f"left out, as asked for: {finding.message}", severity="note", help=None)


def _weights(source: Source, opened: list[Finding], weights: str | None, optimizer: bool) -> list[Finding]:
    """Which copy of the weights is taken, and what that makes of the findings about optimizer files."""
    if weights not in (None, "params", "masters"):
        raise FastshardError.of("FS515", "weights", expected="params | masters", got=repr(weights))
    held = source.masters or source.moments_only or source.moments_named
    if (weights == "masters" and not source.masters) or (optimizer and not held):
        raise FastshardError.of(
            "FS402",
            "the checkpoint holds no fp32 masters or optimizer state",
            severity="error",
            help="only its parameters can be taken (--weights params)",
        )
    if weights == "params" and not source.params_stored:
        raise FastshardError.of(
            "FS402",
            "the checkpoint holds its parameters as fp32 masters only (ZeRO stage 3)",
            severity="error",
            help="take the masters (--weights masters, the default here); --dtype bf16 rounds them",
        )
    if not held or source.moments_named:
        return list(opened)
    unread: list[Finding] = []
    if optimizer and not any(a.slot for a in source.assembled):
        unread = [
            Finding.of("FS402", "the optimizer holds no moments: it never took a step", severity="warning")
            if source.unstepped
            else Finding.of("FS402", "the checkpoint holds no moments that can be read", severity="error")
        ]
    taken = weights or source.weights
    # Masters are compared with the parameters unless that is declined; moments alone are compared with nothing.
    lenient = not optimizer and (weights == "params" or source.moments_only)

    def weighed(finding: Finding, about_optimizer: bool) -> Finding:
        if lenient and about_optimizer and finding.severity == "error":
            return replace(finding, severity="warning")
        # What cannot be named cannot be taken either.
        if (taken == "masters" or optimizer) and finding.code == "FS402":
            return replace(finding, severity="error")
        return finding

    found = [weighed(f, f.file in source.optimizer_files) for f in opened]
    found += [weighed(f, True) for f in source.optimizer_findings]
    found += source.moments_unread if optimizer else []
    told = {
        "params": "the parameters as stored; the fp32 masters are compared with them",
        "masters": "the fp32 masters; the parameters stored beside them are compared with them"
        if source.params_stored
        else "the fp32 masters, the only copy of the weights",
    }
    if not any(f.severity == "error" for f in found):
        # Otherwise what is wrong with the optimizer files is the cause.
        found += unread
    if source.moments_only:
        return found
    return [*found, Finding.of("FS403", f"weights taken: {told[taken]}")]


def _grouped(findings: list[Finding]) -> list[Finding]:
    """Tensors that are left out for one reason are one note: a train state has two moments of each weight."""
    left: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.code == "FS212":
            left.setdefault(finding.message, []).append(finding)
    notes = [
        group[0] if len(group) == 1 else replace(group[0], message=f"{len(group)} tensors: {reason}")
        for reason, group in left.items()
    ]
    return [f for f in findings if f.code != "FS212"] + notes


def _quantised(core: _core.Plan, dtype: str, config: dict[str, Any] | None) -> list[Finding]:
    """What is stored quantised and has no scales that are understood would be kept as it is, which is not what was asked for."""
    outputs = core.outputs()
    method = config_json.quantised_by(config or {})
    packed = [(n, kind) for n, kind, shape, *_ in outputs if kind[0] in "IU" and len(shape) > 1]
    if method and packed:
        return [
            Finding.of(
                "FS514",
                f"{len(packed)} tensors hold packed weights (quantization_config: {method}), whose values are not computed here",
                tensor=packed[0][0],
                expected=f"floats that can be cast to {dtype}",
                got=packed[0][1],
                help="leave out --dtype to keep them, or dequantise them with the tool that quantised them",
            )
        ]
    stored = [(name, kind) for name, kind, *_ in outputs if kind.startswith("F8_")]
    if not stored:
        return []
    name, kind = stored[0]
    return [
        Finding.of(
            "FS514",
            f"{len(stored)} tensors stored in FP8 have no scales beside them (NAME_scale_inv, NAME_scale)",
            tensor=name,
            expected=f"floats that can be cast to {dtype}",
            got=kind,
            help="leave out --dtype to keep them, or dequantise them with the tool that quantised them",
        )
    ]


def _words(source: Source, axes: dict[str, int], tokenizer: Tokenizer | None) -> list[Finding]:
    """Whether each word of the tokenizer has its row."""
    rows = axes.get("P", axes.get("V"))
    if tokenizer is None or rows is None:
        return []
    kept = min(rows, axes.get("V", rows))
    unproven = _unproven_words(tokenizer, kept, rows)
    if tokenizer.largest is None:
        return unproven
    words = tokenizer.largest + 1
    if kept < min(rows, words):
        beyond = f", more than the {rows} rows that are stored" if words > rows else ""
        return [
            Finding.of(
                "FS211",
                f"the vocabulary is cut to {kept} rows, and the tokenizer's ids go up to {tokenizer.largest}{beyond}",
                file=tokenizer.path,
                expected=f"all {rows} rows stored" if beyond else f"{words} of {rows} rows stored",
                got=str(kept),
                help=f"--vocab-size {min(words, rows)} keeps {'every row' if beyond else 'them'}; "
                "or give the tokenizer that belongs to the model with --tokenizer",
            )
        ]
    if rows < words:
        return [
            Finding.of(
                "FS215",
                f"the tokenizer's ids go up to {tokenizer.largest}, and the vocabulary has {rows} rows",
                severity="warning",
                file=tokenizer.path,
                expected=f"{rows - 1} at most",
                got=str(tokenizer.largest),
                help="tokens beyond have no row: the tokenizer was extended, or belongs to another model",
            )
        ]
    return unproven


def _unproven_words(tokenizer: Tokenizer, kept: int, rows: int) -> list[Finding]:
    """Rows that are dropped though nothing that was read tells whose they are."""
    file = tokenizer.unread or tokenizer.partial
    if file is None or kept >= rows:
        return []
    why = "cannot be read from this file" if tokenizer.unread else "has special tokens that no file tells"
    return [
        Finding.of(
            "FS109",
            f"the tokenizer's vocabulary {why}: "
            f"{rows - kept} of {rows} rows are dropped without proof that no token has one of them",
            severity="warning",
            file=str(file),
            help="give the tokenizer that belongs to the model with --tokenizer, tokenizer_config.json included",
        )
    ]


def _vocabulary(source: Source, axes: dict[str, int], tokenizer: Tokenizer | None) -> list[Finding]:
    """Padding of a vocabulary whose true size nothing states is taken for words."""
    if "P" not in axes or source.vocab_size is not None or "V" in source.axes:
        return []
    known = tokenizer is not None and tokenizer.unread is None and tokenizer.partial is None
    if tokenizer is not None and known and tokenizer.largest is not None and tokenizer.largest < axes["P"]:
        number = f"--vocab-size {tokenizer.largest + 1}, by {tokenizer.path}"
    else:
        number = "the tokenizer's size with --vocab-size"
    return [
        Finding.of(
            "FS109",
            f"the true size of the vocabulary is stated nowhere: all {axes['P']} rows are kept, padding too if there is any",
            help=f"give {number}",
        )
    ]


def _whole_shapes(catalog: _core.Catalog, request: dict[str, Any]) -> dict[str, list[int]]:
    """Shapes of the target's tensors if it were not divided."""
    undivided = {**request, "target": {**request["target"], "degrees": {}, "files": []}, "texts": {}}
    return {output[0]: output[2] for output in _plan(catalog, undivided).outputs()}


def _in_json(request: dict[str, Any]) -> tuple[str, _core.Table | None, _core.Table | None]:
    """The request as the core takes it: JSON, and the tables of source and target as themselves."""
    sides = {key: dict(request[key]) for key in ("source", "target") if key in request}
    source, target = (sides.get(key, {}).pop("layout", None) for key in ("source", "target"))
    return json.dumps({**request, **sides}), source, target


def _plan(catalog: _core.Catalog, request: dict[str, Any]) -> _core.Plan:
    try:
        catalog.within(budget.stated())
        return catalog.plan(*_in_json(request))
    except _core.CoreError as error:
        raise from_core(error) from None
