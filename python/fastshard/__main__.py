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

from .cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
