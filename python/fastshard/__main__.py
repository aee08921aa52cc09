"""``python -m fastshard``, and the command itself."""

import gc
import os
import sys

# `signal` takes milliseconds to import, in which Ctrl-C would print a traceback.
from _signal import SIG_DFL, SIGINT, SIGTERM, default_int_handler, getsignal, signal  # type: ignore[import-not-found]
from errno import ENOMEM


def _end(number: int, frame: object) -> None:
    """End the process without a message, because no work starts before the command line handles signals."""
    os._exit(128 + number)


for _number in (SIGINT, SIGTERM):
    # What a parent made this process ignore (nohup, a background job) stays ignored.
    if getsignal(_number) in (default_int_handler, SIG_DFL):
        signal(_number, _end)


def _is_of_memory(error: Exception) -> bool:
    """Return True if the program ran out of memory; for a module, only the loader's message shows it."""
    words = ("failed to map segment", "annot allocate memory", "cannot map zero-fill pages")
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == ENOMEM)
        or (isinstance(error, ImportError) and any(part in str(error) for part in words))
    )


def _print_version() -> bool:
    """Print the version without the command line; return False if the command line must report an error."""
    from . import _core

    try:
        sys.stdout.write(f"fastshard {_core.__version__}\n")
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        # A shell has closed it, its reader has gone, or its disk is full.
        return False
    return True


def main() -> int:
    """Run the command line and return its exit code, which is also 2 if the program runs out of memory."""
    # What imports and the reading of names make is no garbage: looking for some among it takes a fifth of a
    # short run.
    gc.set_threshold(100_000, 20, 20)
    try:
        if sys.argv[1:2] == ["--version"] and _print_version():
            return 0
        from .cli import main as run

        code = run()
        # At its end Python would look through everything once more, for nothing. Extensions that torch loads
        # complain of what is left.
        if "torch" not in sys.modules:
            gc.freeze()
        return code
    except (MemoryError, ImportError, OSError) as error:
        if not _is_of_memory(error):
            raise
    sys.stderr.write("error FS512: the system has no memory left to load fastshard\n")
    sys.stderr.write("  help      raise the limit of the process (ulimit -v, a cgroup)\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
