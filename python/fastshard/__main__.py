"""``python -m fastshard``, and the command itself."""

import os
import sys

# `signal` takes milliseconds to import, in which Ctrl-C would print a traceback.
from _signal import SIG_DFL, SIGINT, SIGTERM, default_int_handler, getsignal, signal  # type: ignore[import-not-found]


def _end(number: int, frame: object) -> None:
    """Ends the process without a word: nothing has begun until the command line takes signals over."""
    os._exit(128 + number)


for _number in (SIGINT, SIGTERM):
    # What a parent made this process ignore (nohup, a background job) stays ignored.
    if getsignal(_number) in (default_int_handler, SIG_DFL):
        signal(_number, _end)


def main() -> int:
    """Runs the command line and returns its exit code: 2 too where memory does not hold the program."""
    try:
        from .cli import main as run

        return run()
    except (MemoryError, ImportError) as error:
        # Of a module that memory does not hold the loader says no more than this.
        if isinstance(error, ImportError) and "failed to map segment" not in str(error):
            raise
    sys.stderr.write("error FS512: the system has no memory left to load fastshard\n")
    sys.stderr.write("  help      raise the limit of the process (ulimit -v, a cgroup)\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
