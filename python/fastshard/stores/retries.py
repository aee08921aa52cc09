"""Requests that are made again, and answers that are looked at again: they may be lost or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..common import codes
from ..common.errors import FastshardError

__all__ = ["TRIES", "look_again", "repeat"]

T = TypeVar("T")

#: Times that a request is made whose answer was lost, and that an answer is looked at.
TRIES = 3


def repeat(request: Callable[[], T]) -> T:
    """Make a request that does no harm if it is made twice, a few times if its answer is lost."""
    left = TRIES
    while True:
        left -= 1
        try:
            return request()
        except FastshardError as error:
            if error.code != codes.IO or not left:
                raise


def look_again(look: Callable[[], T], is_good: Callable[[T], bool], pause: Callable[[], object]) -> T:
    """Look a few times, with a pause between, until what is found is good; return what was found last."""
    found = look()
    for _ in range(TRIES - 1):
        if is_good(found):
            break
        pause()
        found = look()
    return found
