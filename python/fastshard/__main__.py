"""``python -m fastshard``, and the command itself."""

import signal
import sys

# Until the command line takes signals over, which it imports first, one ends the process without a word: nothing has begun.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
