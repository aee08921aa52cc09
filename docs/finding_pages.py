"""A page for each code of findings, with the output that a damaged checkpoint gives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from fastshard.cli import main
from fastshard.common.codes import CODES
from fastshard.findings.code_pages import PAGES

ROOT = Path(__file__).parent.parent
_EXITS = {1: "1, a problem", 2: "2, could not run", 3: "3, incomplete"}
#: Columns of an example.
_WIDTH = 80
#: So that an example is the same on each machine; pages do not show them.
_FLAGS = "--no-settings --memory 4GiB --progress none"


def page(code: str) -> str:
    """What it means, why it happens, how to confirm and how to fix it, and an example; the first and the last
    but one for every code."""
    row = CODES[code]
    more = PAGES.get(code)
    lines = [
        f"# {code} {row.title}",
        "",
        f"*{row.severity}; {'' if row.severity == 'error' else 'as an error, '}exit code {_EXITS[row.exit]}*",
        "",
    ]
    told = {"What it means": row.meaning}
    if more:
        told |= {"Why it happens": more.why, "How to confirm": more.confirm}
    for title, text in {**told, "How to fix": row.help}.items():
        lines += [f"## {title}", "", text, ""] if text else []
    if shown := example(code):
        lines += ["## Example", "", "```console", *shown, "```", ""]
    return "\n".join([*lines, "[All findings](../../findings.md)", ""])


@cache
def example(code: str) -> tuple[str, ...]:
    """A command, and what it prints of a checkpoint that the tests damage; nothing if none shows the code."""
    # What damages checkpoints needs torch, and what signs them model-signing.
    if not all(map(find_spec, ("torch", "model_signing") if code == "FS315" else ("torch",))):
        return ()
    damage, case = _damage(), _cases().get(code)
    if case is None and code not in damage.EXAMPLES:
        return ()
    with tempfile.TemporaryDirectory() as folder:
        if case is None:
            command = damage.shown(code, Path(folder))
        else:
            damage.made(case, Path(folder) / case)
            command = f"verify {case}"
        printed = _printed(shlex.split(command), folder)
    return f"$ fastshard {command}", *printed.replace(folder, "/ckpt").rstrip("\n").splitlines()


@cache
def _damage() -> ModuleType:
    """The program of the tests, which are no package."""
    sys.path.insert(0, str(ROOT / "tests"))
    return import_module("damage")


@cache
def _cases() -> dict[str, str]:
    """A damaged checkpoint that gives each code as the first error; by what tests hold."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests/snapshots").glob("*.json")):
        ran = json.loads(path.read_text(encoding="utf-8"))
        # What reading every byte finds is in the second, as `verify` finds it.
        findings = [f for verb in ("inspect", "merge") for f in ran.get(verb, {}).get("findings", ())]
        errors = [f["code"] for f in findings if f["severity"] == "error"]
        if errors:
            found.setdefault(errors[0], path.stem)
    return found


def _printed(words: list[str], folder: str) -> str:
    """What a command prints in a folder."""
    columns, here, out = os.environ.get("COLUMNS"), Path.cwd(), io.StringIO()
    os.environ["COLUMNS"] = str(_WIDTH)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main([*words, *_FLAGS.split()])
    finally:
        os.chdir(here)
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return out.getvalue().replace(f" {_FLAGS}", "")
