"""Keeps signatures and tokens out of what HTTP libraries log: addresses, and at DEBUG headers too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..common.regex import compile_when_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

__all__ = ["filter_logs", "secrets_hidden", "secrets_hidden_everywhere"]

#: Queries of addresses, in which signatures are, and tokens of headers.
_SECRETS = compile_when_used(r"\?[^\s'\"<>]+|(?i:bearer)\s+[^\s'\"]+")
_hiding: list[Any] = []
#: One entry for each :func:`secrets_hidden_everywhere` that is open.
_everywhere: list[None] = []
#: Loggers of huggingface_hub that name addresses.
_HUB_LOGGERS = ("utils._http", "lfs", "hf_api", "_commit_api", "utils._auth")


def filter_logs(library: str) -> None:
    """Install the filter in the loggers of an HTTP library, once.

    It changes only records that are made within :func:`secrets_hidden`, and so none of other users' requests,
    or within :func:`secrets_hidden_everywhere`.
    """
    if _hiding:
        return
    import logging
    from contextvars import ContextVar

    is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)

    class HidingFilter(logging.Filter):
        """Shortens records that are made during a request of this module."""

        def filter(self, record: logging.LogRecord) -> bool:
            """Take secrets out of a record."""
            if _everywhere or is_ours.get():
                record.msg, record.args = _SECRETS.sub("...", record.getMessage()), None
            return True

    hides = HidingFilter()
    core = library.replace("httpx", "httpcore")
    below = ("connection", "http11", "http2", "proxy", "socks")
    of_hub = (f"huggingface_hub.{one}" for one in _HUB_LOGGERS)
    for name in (library, *(f"{core}.{one}" for one in below), *of_hub):
        logging.getLogger(name).addFilter(hides)
    _hiding.append(is_ours)


@contextlib.contextmanager
def secrets_hidden() -> Iterator[None]:
    """Filter what this thread logs meanwhile."""
    is_ours = _hiding[0]
    before = is_ours.set(True)
    try:
        yield
    finally:
        is_ours.reset(before)


@contextlib.contextmanager
def secrets_hidden_everywhere() -> Iterator[None]:
    """Filter what all threads log meanwhile: a library may send requests from threads that it starts."""
    _everywhere.append(None)
    try:
        yield
    finally:
        _everywhere.pop()
