"""Retries of requests whose answers may be lost, and repeated checks of answers that may be late."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..common import codes
from ..common.errors import FastshardError

__all__ = ["TRIES", "look_again", "repeat"]

T = TypeVar("T")

#: Number of attempts at a request whose answer was lost, and of checks of an answer.
TRIES = 3


def repeat(request: Callable[[], T]) -> T:
    """Make an idempotent request, and retry it a few times if its answer is lost."""
    left = TRIES
    while True:
        left -= 1
        try:
            return request()
        except FastshardError as error:
            if error.code != codes.IO or not left:
                raise


def look_again(look: Callable[[], T], is_good: Callable[[T], bool], pause: Callable[[], object]) -> T:
    """Check a few times, with pauses, until the result is good; return the last result."""
    found = look()
    for _ in range(TRIES - 1):
        if is_good(found):
            break
        pause()
        found = look()
    return found
