"""Data that a report reads from the manifest of a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..checkpoint import manifests
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.plan import Plan
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.formatting import human
from ..evaluation.loss_figures import describe_loss
from ..verification.stats import TensorStats


def manifest_of(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Read the manifest of a checkpoint, and compare its list of files by names and sizes."""
    try:
        path = manifests.beside(checkpoint)
        document = None if path is None else manifests.read(path)
    except FastshardError as error:
        return None, [_weaker(f) for f in error.findings]
    if document is None or checkpoint.listing.single:
        return document, []
    have = {file.path: file.size for file in checkpoint.listing.files}
    found = []
    for file in manifests.tensor_files(document):
        name, size = str(file["name"]), file.get("size")
        if name not in have:
            found.append(
                Finding.of(
                    codes.MISSING_FILE,
                    "the file is missing",
                    file=name,
                    evidence=f"named in {manifests.MANIFEST_NAME}",
                    help="copy it from the host that made the manifest",
                )
            )
        elif size is not None and have[name] != size:
            found.append(
                Finding.of(
                    codes.HASH,
                    "the file has another size than its manifest says",
                    file=name,
                    expected=f"{size} bytes",
                    got=f"{have[name]} bytes",
                    help="restore the file from a good copy",
                )
            )
    told = {f.file for f in checkpoint.findings if f.severity == "error"}
    return document, [f for f in found if f.file not in told]


def describe_recorded_loss(document: dict[str, Any] | None) -> str:
    """Describe the loss that a manifest records; empty if there is none, or if it is malformed."""
    try:
        return describe_loss(document["values"]["loss"]) if document is not None else ""
    except (KeyError, TypeError, ValueError, OverflowError):
        return ""


def _weaker(finding: Finding) -> Finding:
    """Turn an error into a warning, because an unreadable manifest does not mean that the checkpoint is
    damaged."""
    return finding.replace(severity="warning")


def recorded_numbers(document: dict[str, Any], plan: Plan) -> dict[str, TensorStats]:
    """Return the statistics in a manifest of tensors that are unchanged."""
    recorded = {}
    named = Counter(t["name"] for t in document["tensors"])
    # Of shards, which may have the whole's name, they are something else.
    entries = {t["name"]: t for t in document["tensors"] if t.get("stats") and named[t["name"]] == 1}
    for name, dtype, shape, _, _ in plan.outputs:
        entry = entries.get(name)
        if entry is not None and (entry.get("dtype"), entry.get("shape")) == (dtype, shape):
            try:
                recorded[name] = TensorStats.from_dict(dtype, shape, entry["stats"])
            except (AttributeError, KeyError, TypeError, ValueError):
                return {}  # Somebody else's, or edited: what is half told misleads.
    return recorded if all(map(_sound, recorded.values())) else {}


def _sound(s: TensorStats) -> bool:
    """Return False for impossible statistics.

    :func:`fastshard.verify` reports them, and a picture must not show them.
    """
    counts = (s.count, s.zeros, s.nan, s.inf, *s.histogram)
    if len(s.histogram) != 64 or not all(type(n) is int and n >= 0 for n in counts):
        return False
    figures = (s.min, s.max, s.mean, s.std)
    numbers = all(f is None or (type(f) in (int, float) and abs(f) < float("inf")) for f in figures)
    return numbers and sum(counts[1:]) == s.count


#: The code of a value that was assumed.
_ASSUMED = codes.DEFAULT_ASSUMED


def assumed_values(
    document: dict[str, Any] | None, findings: Iterable[Finding]
) -> tuple[tuple[str, str], ...]:
    """List values that a conversion assumed by default: the file with the value, and the message."""
    recorded = [f for f in (document or {}).get("findings") or [] if isinstance(f, dict)]
    told = [(str(f.get("file") or ""), str(f.get("message"))) for f in recorded if f.get("code") == _ASSUMED]
    told += [(f.file or "", f.message) for f in findings if f.code == _ASSUMED]
    return tuple(dict.fromkeys(told))


#: Maximum number of sources in a report.
_SOURCES = 20


def provenance(document: dict[str, Any] | None) -> tuple[tuple[str, str], ...]:
    """Return the origin of a result according to its manifest."""
    if document is None:
        return ()
    sources = document.get("sources") or []
    named = ", ".join(str(s.get("path")) for s in sources[:_SOURCES] if isinstance(s, dict))
    more = f" and {len(sources) - _SOURCES:,} more" if len(sources) > _SOURCES else ""
    made = document.get("provenance") or {}
    parts = [p for p in made.get("parts", ()) if isinstance(p, dict)]
    accepted = [f for f in document.get("findings") or [] if isinstance(f, dict)]
    ops: dict[str, int] = {}
    for of_tensor in (document.get("value_ops") or {}).values():
        for op in of_tensor if isinstance(of_tensor, list) else [of_tensor]:
            word = str(op.get("op", op)) if isinstance(op, dict) else str(op)
            ops[word] = ops.get(word, 0) + 1
    rows = [
        ("made by", str(document.get("tool", ""))),
        ("kind", str(document.get("kind", ""))),
        ("plan", str(document.get("plan") or "")),
        ("sources", f"{len(sources):,} files: {named}{more}" if sources else ""),
        ("their topology", ", ".join(f"{k} {v}" for k, v in (document.get("topology") or {}).items())),
        ("value ops", ", ".join(f"{op} x {n:,}" for op, n in ops.items())),
        ("run", str(made.get("run", ""))),
        ("made on", ", ".join(f"{p.get('host')} ({human(p.get('bytes') or 0)})" for p in parts)),
        (
            "warnings and notes then",
            "; ".join(f"{f.get('code')}: {f.get('message')}" for f in accepted[:_SOURCES]),
        ),
        ("not checked then", "; ".join(map(str, document.get("not_checked") or []))),
    ]
    return tuple((key, value) for key, value in rows if value)
