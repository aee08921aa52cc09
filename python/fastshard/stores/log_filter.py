"""Keeps signatures and tokens out of the logs of HTTP libraries, which contain addresses and, at DEBUG,
headers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..common.regex import compile_when_used

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

__all__ = ["filter_logs", "secrets_hidden", "secrets_hidden_everywhere"]

#: Queries of addresses, which contain signatures, and tokens in headers.
_SECRETS = compile_when_used(r"\?[^\s'\"<>]+|(?i:bearer)\s+[^\s'\"]+")
_hiding: list[Any] = []
#: One entry for each :func:`secrets_hidden_everywhere` that is open.
_everywhere: list[None] = []
#: Loggers of huggingface_hub that log addresses.
_HUB_LOGGERS = ("utils._http", "lfs", "hf_api", "_commit_api", "utils._auth")


def filter_logs(library: str) -> None:
    """Install the filter in the loggers of an HTTP library, once.

    It changes only records that are made within :func:`secrets_hidden`, so not those of other code's
    requests, or within :func:`secrets_hidden_everywhere`.
    """
    if _hiding:
        return
    import logging
    from contextvars import ContextVar

    is_ours: ContextVar[bool] = ContextVar("is_ours", default=False)

    class HidingFilter(logging.Filter):
        """Shortens records that are made during a request of this module."""

        def filter(self, record: logging.LogRecord) -> bool:
            """Remove secrets from a record."""
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
    """Filter the logs of this thread during the block."""
    is_ours = _hiding[0]
    before = is_ours.set(True)
    try:
        yield
    finally:
        is_ours.reset(before)


@contextlib.contextmanager
def secrets_hidden_everywhere() -> Iterator[None]:
    """Filter the logs of all threads during the block, because a library may send requests from its own
    threads."""
    _everywhere.append(None)
    try:
        yield
    finally:
        _everywhere.pop()
