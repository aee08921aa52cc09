"""Output of long texts through the user's pager."""

from __future__ import annotations

import os
import shlex
import sys


def show(text: str) -> None:
    """Print text, in a pager if it is longer than the terminal's screen."""
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
    """Return True if a text is longer than the screen."""
    import shutil

    return text.count("\n") >= shutil.get_terminal_size().lines


def _pager() -> list[str] | None:
    """Return the command of ``$PAGER``, or less; None for ``PAGER=cat``, an empty or a missing one."""
    try:
        words = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    import shutil

    return words if words and words != ["cat"] and shutil.which(words[0]) else None
