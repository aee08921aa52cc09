"""What is longer than the screen, through the pager that the user has."""

from __future__ import annotations

import os
import shlex
import sys


def show(text: str) -> None:
    """Prints text, a screen at a time if it is longer than that and somebody looks at it."""
    pager = _pager() if sys.stdout.isatty() and _is_longer(text) else None
    if pager is None:
        print(text)
        return
    sys.stdout.flush()
    # As git does: it ends by itself where the text fits, and leaves the text on the screen.
    environment = {"LESS": "FRX", **os.environ}
    import subprocess

    try:
        subprocess.run(pager, input=text + "\n", text=True, env=environment, check=False)
    except OSError:
        print(text)


def _is_longer(text: str) -> bool:
    """True for a text that is longer than the screen."""
    import shutil

    return text.count("\n") >= shutil.get_terminal_size().lines


def _pager() -> list[str] | None:
    """The command of ``$PAGER``, else less; None for none (``PAGER=cat`` or an empty one too)."""
    try:
        words = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    import shutil

    return words if words and words != ["cat"] and shutil.which(words[0]) else None
