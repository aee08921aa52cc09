"""Logging to Python's logger ``fastshard``, off by default.

The core logs to topics of the same logger; it checks for a listener at the start of each long call.
"""

from __future__ import annotations

import os
import sys

__all__ = ["is_logged", "log", "log_to_stderr"]

#: Environment variable with the level at which the command line logs to stderr: ``FASTSHARD_LOG=debug``.
VARIABLE = "FASTSHARD_LOG"


#: The level DEBUG of the module ``logging``, which is not imported just for this value.
_DEBUG = 10


def is_logged(topic: str) -> bool:
    """Return True if a topic, e.g. ``findings``, has a listener.

    In a program that does not use logging, no topic has one.
    """
    logging = sys.modules.get("logging")
    return logging is not None and logging.getLogger(f"fastshard.{topic}").isEnabledFor(_DEBUG)


def log(topic: str, message: str, *arguments: object) -> None:
    """Log a message of a topic at level DEBUG.

    The function formats arguments only if the topic has a listener.
    """
    if is_logged(topic):
        sys.modules["logging"].getLogger(f"fastshard.{topic}").log(_DEBUG, message, *arguments, stacklevel=2)


def log_to_stderr(level: str | None = None) -> None:
    """Log to stderr at a minimum level: ``debug``, ``info`` or ``warning``.

    None means the level of ``FASTSHARD_LOG``.
    """
    level = os.environ.get(VARIABLE) if level is None else level
    if not level:
        return
    import logging

    logger = logging.getLogger("fastshard")
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        return
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(relativeCreated)7d ms %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(number)
