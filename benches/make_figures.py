"""Makes docs/figures.md of what all_bars.py measured, and the few figures of README.md and docs/index.md
where it may give them.

python benches/make_figures.py benches/figures.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import show_size

ROOT = Path(__file__).parents[1]
#: Pages whose figures stand between two comments.
PAGES = ("README.md", "docs/index.md")
BLOCK = re.compile(r"(<!-- figures -->\n+)\|.*?(<!-- end of figures -->)", re.DOTALL)
#: The figures that a user compares tools by: the bar, the case, its peer, and how people call it.
FEW = (
    ("P1", "row merge, durable", "cp + fsync", "merge, verified and durable, against `cp` + fsync"),
    (
        "P3",
        "row merge",
        "DCP consolidate",
        "merge, not synced, against torch DCP's `consolidate_safetensors_files`",
    ),
    ("P5", "row merge", "load + cat + save", "the same against load + `torch.cat` + `save_file`"),
    ("P7", "verify, warm", "sha256sum", "verify (BLAKE3), warm, against `sha256sum`"),
)
#: What a limit is stated for, and how it is written.
FIGURES = {
    "wall_ratio": "time {}x",
    "cpu_ratio": "CPU {}x",
    "memory_ratio": "memory {}",
    "cpu_seconds_per_gb": "CPU {} s/GB",
    "gb_per_second": "{} GB/s",
    "peak_mib": "{} MiB",
    "spread_mib": "flat within {} MiB",
    "above_ms": "{} ms above it",
    "seconds": "{} s",
    "growth": "{}x the time for 4x the names",
    "read_share": "reads {} of the payload",
}


def build_table(heads: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table, and nothing where it has no rows."""
    if rows:
        yield from ("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
        yield from (f"| {' | '.join(row)} |" for row in rows)


def show(value: float | None) -> str:
    """A figure with three digits."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def show_ratio(figures: dict[str, float], name: str) -> str:
    """A median with the lowest and the highest round."""
    if f"{name}_ratio" not in figures:
        return ""
    middle, low, high = (figures[f"{name}_ratio{end}"] for end in ("", "_min", "_max"))
    return f"**{show(middle)}** ({show(low)} to {show(high)})"


def show_pair(figures: dict[str, float], name: str) -> str:
    """Our figure and the peer's."""
    return " / ".join(show(figures[key]) for key in (name, f"peer_{name}") if key in figures)


def show_target(target: dict[str, Any]) -> str:
    """A limit, and for which runs it is stated."""
    sign = "≥" if target["at_least"] else "≤"
    limit = target["limit"]
    shown = f"1/{1 / limit:.0f}" if target["figure"] == "memory_ratio" else show(limit)
    text = FIGURES[target["figure"]].format(f"{sign} {shown}")
    return text + (f" on {target['least_cores']} cores" if target["least_cores"] else "")


def show_verdict(case: dict[str, Any], target: dict[str, Any]) -> str:
    """What a figure is to its limit; a missed one is missed, one that was measured beside other work is no
    figure to publish."""
    verdict = str(target["verdict"])
    if verdict == "missed":
        verdict = f"**missed**: {show(case['figures'][target['figure']])}"
    return verdict + ("; measured beside other work" if case["loaded"] and "needs" not in verdict else "")


def list_cases(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Bars and their cases."""
    for bar in document["bars"]:
        for case in bar["cases"]:
            yield bar, case


def build_bars(document: dict[str, Any]) -> Iterator[str]:
    """The tables of what was measured, of targets, limits, and of what was not run."""
    measured = [(bar, case) for bar, case in list_cases(document) if not case["reason"]]
    rows, targets = [], []
    for bar, case in measured:
        figures = case["figures"]
        name = [bar["bar"], case["case"], case["peer"] or "-"]
        rows.append(
            [
                *name,
                show_size(case["bytes"]) if case["bytes"] else "-",
                case["state"],
                show_ratio(figures, "wall"),
                show_ratio(figures, "cpu"),
                show_pair(figures, "seconds"),
                show_pair(figures, "cpu_seconds_per_gb"),
                show_pair(figures, "gb_per_second"),
                show_pair(figures, "peak_mib"),
                "beside other work" if case["loaded"] else "idle",
            ]
        )
        targets += [[*name, show_target(target), show_verdict(case, target)] for target in case["targets"]]
    yield from ("", "## Targets", "", "A bar that is missed is written as missed, with its figure.")
    yield from build_table(["bar", "case", "against", "target", "result"], targets)
    missed = {
        bar["bar"]: bar for bar, case in measured if any(t["verdict"] == "missed" for t in case["targets"])
    }
    if missed:
        yield from ("", "What limits those that are missed:", "")
        yield from (f"- {name}, {bar['about']}: {bar['limit']}" for name, bar in missed.items())
    yield from (
        "",
        "## Figures",
        "",
        "Ours over theirs, below 1 is better; median (lowest to highest round). Pairs are ours / theirs.",
    )
    yield from build_table(
        [
            "bar",
            "case",
            "against",
            "tensors",
            "file system, inputs",
            "time",
            "CPU",
            "seconds",
            "CPU s per GB",
            "GB/s",
            "peak anonymous MiB",
            "machine",
        ],
        rows,
    )
    left_out = [[bar["bar"], bar["about"], bar["reason"]] for bar in document["bars"] if bar["reason"]]
    left_out += [
        [bar["bar"], ", against ".join(filter(None, (case["case"], case["peer"]))), case["reason"]]
        for bar, case in list_cases(document)
        if case["reason"]
    ]
    if left_out:
        yield from ("", "## Not measured")
        yield from build_table(["bar", "case", "why"], left_out)


def build_calls(section: dict[str, Any]) -> Iterator[str]:
    """System calls of merges and their peers."""
    yield from (
        "",
        "## System calls",
        "",
        section["reason"] or "From the beginning of the work to its end; in all, and per GiB of tensors.",
    )
    rows = [
        [
            row["side"],
            show_size(row["bytes"]),
            show_size(row["written_bytes"]),
            *(f"{count:,} ({row['per_gib'][kind]:,})" for kind, count in row["calls"].items()),
        ]
        for row in section["rows"]
    ]
    kinds = list(section["rows"][0]["calls"]) if rows else []
    yield from build_table(["side", "tensors", "written", *kinds], rows)


def build_locks(section: dict[str, Any]) -> Iterator[str]:
    """Waits for locks of the kernel."""
    yield from (
        "",
        "## Waits for locks",
        "",
        section["reason"]
        or "Threads that wait for a file that others write to, and for other locks of the kernel; "
        "milliseconds are over all threads.",
    )
    rows = [[str(value) for value in row.values()] for row in section["rows"]]
    yield from build_table(
        ["file system", "files", "threads", "fsync", "waits", "ms", "other waits", "ms"], rows
    )


def build_page(document: dict[str, Any]) -> str:
    """The page of all figures."""
    about = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    first, second = document["touch_seconds_per_gib"]
    lines = [
        "# Figures",
        "",
        "Made by `benches/make_figures.py` of what `benches/all_bars.py` measured: both sides in turns on "
        "the same bytes, outputs compared by",
        "hash. fastshard hashes every byte (BLAKE3), checks completeness and writes a manifest; most peers "
        "do not.",
        "",
    ]
    if reason := find_objection(document):
        lines += [f"**These are no release figures: {reason}.**", ""]
    lines += [
        f"- {document['date']}, revision {document['revision'] or 'unknown'}; the core's build: "
        f"{document['core']}; {versions}",
        f"- {about['cores']} cores of {about['cpu']}, {about['memory']}, Linux {about['kernel']}, Python "
        f"{about['python']}; {about['filesystem']}, and {document['memory_file_system']} where a case says "
        "so",
        f"- {show_size(document['size'])}, rounds: {document['rounds']}; cores that other processes had "
        f"before the first: {document['load']}",
        f"- memory is touched before each run; a GiB of fresh pages took {first} s, and {second} s again",
        *build_bars(document),
    ]
    for name, build in (("calls", build_calls), ("locks", build_locks)):
        if name in document:
            lines += build(document[name])
    return "\n".join(lines) + "\n"


def find_objection(document: dict[str, Any]) -> str:
    """Why the figures may not be published as those of a release; empty if they may."""
    reasons = {
        "the machine was loaded": document["loaded"],
        f"the core was built for {document['core']}": document["core"] != "optimised",
        f"{show_size(document['size'])} is less than 2 GiB": document["size"] < 2 << 30,
        "less than 5 rounds": document["rounds"] < 5,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)


def build_few(document: dict[str, Any]) -> str:
    """The table of README.md."""
    cases = {(bar["bar"], case["case"], case["peer"]): case["figures"] for bar, case in list_cases(document)}
    about = document["machine"]
    lines = [
        f"| {show_size(document['size'])}, {about['cores']} cores, median of {document['rounds']} | time | "
        "memory, MiB |",
        "|---|---|---|",
    ]
    for bar, case, peer, text in FEW:
        figures, small = cases[bar, case, peer], cases.get((bar, f"{case}, small", peer))
        also = f"; {small['wall_ratio']:.2f}x at a quarter of the size" if small else ""
        lines.append(
            f"| {text} | **{figures['wall_ratio']:.2f}x**{also} | {show_pair(figures, 'peak_mib')} |"
        )
    return "\n".join(
        [*lines, "", f"{about['cpu']}, {about['memory']}, {about['filesystem']}, {document['date']}. "]
    )


def main() -> int:
    (path,) = sys.argv[1:]
    document = json.loads(Path(path).read_text())
    (ROOT / "docs/figures.md").write_text(build_page(document))
    if reason := find_objection(document):
        print(f"{', '.join(PAGES)} keep their figures: {reason}")
        return 0
    for name in PAGES:
        page = ROOT / name
        text, count = BLOCK.subn(lambda found: found[1] + build_few(document) + found[2], page.read_text())
        assert count == 1, f"{name} has {count} places for figures"
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
