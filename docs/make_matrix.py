"""Writes docs/matrix.md from the table that tests/conformance holds; with --print to stdout."""

import sys
from pathlib import Path
from typing import Any

import tomlkit

TABLE = Path(__file__).parent.parent / "tests/conformance/matrix.toml"
MERGE = "merge"


def cells(row: dict[str, Any]) -> dict[str, str]:
    """The outcome of each target."""
    refused = {target: said for said, targets in row.get("refused", {}).items() for target in targets}
    return dict.fromkeys(row["proven"], "proven") | refused


def columns(rows: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Targets under one heading: the forms of a framework, where no source tells them apart."""
    # The row where most is proven has the targets in their order.
    named = max(rows.values(), key=lambda row: list(row.values()).count("proven"))
    found: dict[str, list[str]] = {}
    for target in named:
        found.setdefault(target.partition(":")[0], []).append(target)
    apart = {
        base
        for base, forms in found.items()
        if any(len({row[form] for form in forms}) > 1 for row in rows.values())
    }
    out: dict[str, list[str]] = {}
    for base, forms in found.items():
        out |= {form: [form] for form in forms} if base in apart else {base: forms}
    return out


def page(document: dict[str, Any]) -> str:
    """The page's text."""
    rows = {row["source"]: cells(row) for row in document.values()}
    heads = columns(rows)
    lines = [
        "# Every source under every target",
        "",
        "`tests/conformance` takes one small checkpoint of each format through every target. A check mark is "
        "proven: it is",
        "detected, planned and written, the files on disk are those that the manifest names, `verify` finds "
        "nothing, the tensors are",
        "those that somebody else's code or numpy tells, and the result, read as a source, gives them again. "
        "Every other cell is",
        "refused by one sentence, with nothing left behind. A heading stands for all forms of its target, "
        "e.g. `megatron` for",
        "`megatron:legacy` and `megatron:torch_dist`. A model decides too: the sentences below say which. "
        "This page is written by",
        "`docs/make_matrix.py` from `tests/conformance/matrix.toml`, which the tests hold.",
        "",
        f"| source | {' | '.join(heads)} |",
        f"|---|{'---|' * len(heads)}",
    ]
    for source, row in rows.items():
        marks = ["✓" if row[forms[0]] == "proven" else row[forms[0]].split()[0] for forms in heads.values()]
        lines.append(f"| {source} | {' | '.join(marks)} |")
    said: dict[str, dict[str, list[str]]] = {}
    for source, row in rows.items():
        for sentence in dict.fromkeys(row[forms[0]] for forms in heads.values()):
            if sentence != "proven":
                targets = ", ".join(head for head, forms in heads.items() if row[forms[0]] == sentence)
                said.setdefault(sentence, {}).setdefault(targets, []).append(source)
    lines += ["", "## Refused", "", "| code | exit | sentence | where |", "|---|---|---|---|"]
    for sentence, places in said.items():
        first, _, text = sentence.partition(": ")
        code, _, exit_ = first.split()
        where = "; ".join(f"{', '.join(sources)} → {targets}" for targets, sources in places.items())
        lines.append(f"| {code} | {exit_} | {text} | {where} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = page(tomlkit.parse(TABLE.read_text()).unwrap())
    if "--print" in sys.argv:
        sys.stdout.buffer.write(text.encode())
    else:
        (Path(__file__).parent / "matrix.md").write_text(text, encoding="utf-8")
