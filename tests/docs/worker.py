"""Runs the Python blocks of one page in one namespace: a JSON line in for each block, a JSON line out."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import sys
import traceback
from typing import Any


def run(code: str, where: str, line: int, is_doctest: bool, names: dict[str, Any]) -> str:
    """What went wrong; empty if nothing."""
    told = io.StringIO()
    if is_doctest:
        test = doctest.DocTestParser().get_doctest(code, names, where, where, line)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        doctest.DocTestRunner(optionflags=flags).run(test, out=told.write, clear_globs=False)
        names.update(test.globs)
        return told.getvalue()
    try:
        # Lines are counted as the page has them.
        exec(compile("\n" * line + code, where, "exec"), names)
    except BaseException:
        return traceback.format_exc()
    return ""


def main() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    answers = sys.stdout
    for request in sys.stdin:
        asked = json.loads(request)
        if asked["module"]:
            # A docstring's example has the names of its module.
            names.update(vars(importlib.import_module(asked["module"])))
        with contextlib.redirect_stdout(io.StringIO()):
            told = run(asked["code"], asked["where"], asked["line"], asked["doctest"], names)
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
