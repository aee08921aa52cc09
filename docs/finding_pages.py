"""A page for each code of findings, with the output that a damaged checkpoint gives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from fastshard.cli import main
from fastshard.cli.code_pages import PAGES
from fastshard.cli.verbs.explain import parts
from fastshard.common.errors import CODES

ROOT = Path(__file__).parent.parent
_EXITS = {1: "1, a problem", 2: "2, could not run", 3: "3, incomplete"}
#: Columns of an example.
_WIDTH = 80


def page(code: str) -> str:
    """What it means, why it happens, how to confirm and how to fix it, and an example; the first and the last but one for
    every code."""
    row = CODES[code]
    more = PAGES.get(code)
    means, fix = parts(row.explanation, more.meaning if more else 1)
    lines = [
        f"# {code} {row.title}",
        "",
        f"*{row.severity}; as an error the exit code is {_EXITS[row.exit]}*",
        "",
    ]
    told = {"What it means": means}
    if more:
        told |= {"Why it happens": more.why, "How to confirm": more.confirm}
    for title, text in {**told, "How to fix": fix}.items():
        lines += [f"## {title}", "", text, ""] if text else []
    # Checkpoints are damaged by the tests' own code, which needs torch.
    case = _cases().get(code) if find_spec("torch") else None
    if case:
        lines += ["## Example", "", "```console", f"$ fastshard verify {case}", *example(case), "```", ""]
    return "\n".join([*lines, "[All findings](../../findings.md)", ""])


@cache
def _cases() -> dict[str, str]:
    """A damaged checkpoint that gives each code as the first error; by what tests hold."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests/snapshots").glob("*.json")):
        ran = json.loads(path.read_text(encoding="utf-8")).get("inspect", {})
        errors = [f["code"] for f in ran.get("findings", ()) if f["severity"] == "error"]
        if errors:
            found.setdefault(errors[0], path.stem)
    return found


@cache
def example(case: str) -> tuple[str, ...]:
    """What `fastshard verify` prints of a damaged checkpoint of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    import damage

    columns, here = os.environ.get("COLUMNS"), Path.cwd()
    os.environ["COLUMNS"] = str(_WIDTH)
    out = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            damage.made(case, Path(folder) / case)
            os.chdir(folder)
            main(["verify", case, "--no-settings", "--memory", "4GiB", "--progress", "none"])
            text = out.getvalue().replace(folder, "/ckpt")
            os.chdir(here)
    finally:
        os.chdir(here)
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return tuple(text.rstrip("\n").splitlines())
