"""``fastshard COMMAND ...``: parses the command line and runs the command.

Modules for running commands are imported only for a run, so that ``--version`` does not wait for them.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from .parser import UsageError, parse
from .signals import Stopping
from .std_streams import Streams, prepare
from .verbs import VERBS, Verbs


def main(argv: Sequence[str] | None = None, verbs: Verbs = VERBS) -> int:
    """Run the command line and return its exit code; without ``argv``, the process then exits."""
    prepare()
    with Stopping(last=argv is None) as stopping:
        words = sys.argv[1:] if argv is None else argv
        try:
            return _carried_out(words, stopping, verbs)
        except KeyboardInterrupt as stopped:
            # Before it was a run.
            from .run import Run

            return Run(words, stopping, verbs).stopped(stopped)


def _carried_out(words: Sequence[str], stopping: Stopping, verbs: Verbs) -> int:
    streams = Streams()
    parsed: list[Namespace] = []

    def parsing() -> None:
        try:
            parsed.append(parse(words, verbs))
        except SystemExit:
            # What was printed fails only now, if it does.
            sys.stdout.flush()
            raise

    try:
        if not streams.write(parsing):
            return streams.ended(0)
    except SystemExit as ended:
        # --help and --version.
        return streams.ended(ended.code if isinstance(ended.code, int) else 0)
    except UsageError as error:
        from .run import Run

        return Run(words, stopping, verbs).misused(error)
    from .run import Run

    return Run(words, stopping, verbs, parsed[0]).carried_out()
