"""Names of steps: their numbers, their order, and the part of a path that names the step."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..common.regex import compile_when_used

#: Prefixes and suffixes of a folder that is still being written.
_TEMPORARY = compile_when_used(
    r"^(?:tmp[-_.]|\.tmp[-_.]?)|[-_.](?:orbax-checkpoint-tmp|tmp|partial|incomplete)(?:[-_.].*)?$"
)


#: Names that are numbered like steps; other numbered folders may be anything.
_NUMBERED = compile_when_used(
    r"^\d{1,18}$|(?:checkpoint|ckpt|step|iter|iteration|epoch)[-_=.]?\d", re.IGNORECASE
)


_NUMBER = compile_when_used(r"\d{1,18}")
#: Counts that Lightning's names state after a word, next to metrics whose values do not show the order.
#: source: pytorch_lightning callbacks/model_checkpoint.py (`_format_checkpoint_name`); NeMo adds
#: `reduced_train_loss=2.31` before them and `consumed_samples=512.0` after them
_COUNTS = compile_when_used(r"(?:^|[-_])(epoch|step)=(\d{1,18})(?!\d|\.\d)")
#: Suffix of the copy of the last step, which NeMo prefers when it continues a run.
_LAST = "-last"


def plain(name: str) -> str:
    """Remove the marks of temporary names from a folder's name."""
    return _TEMPORARY.sub("", name)


def number(name: str) -> int:
    """Return the last number in a step's name; -1 if there is none."""
    numbers = numbers_of(name)
    return numbers[-1] if numbers else -1


def numbers_of(name: str) -> tuple[int, ...]:
    """List the numbers in a name; only epoch and step if the name states the step after that word."""
    counts = {match[1]: int(match[2]) for match in _COUNTS.finditer(plain(name))}
    if "step" in counts:
        return (*([counts["epoch"]] if "epoch" in counts else []), counts["step"])
    return tuple(int(n) for n in _NUMBER.findall(plain(name)))


def alike(one: str, other: str) -> bool:
    """Return True for names that differ only in their numbers."""
    return _NUMBER.sub("#", plain(one)) == _NUMBER.sub("#", plain(other))


def newer(one: str, than: str) -> bool:
    """Return True if a step is newer than another, by the numbers in their names (epoch before step).

    Of two saves of the same step, the one marked as the last is newer.
    """
    if one == than + _LAST:
        return True
    if alike(one, than):
        return numbers_of(one) > numbers_of(than)
    return number(one) > number(than) >= 0


def matching(steps: Iterable[str], wanted: str) -> list[str]:
    """Return the steps with this name, or those with this number if no step has the name."""
    names = list(steps)
    if wanted in names:
        return [wanted]
    # A number as a tracker or a person writes it, or the name with fewer zeros.
    meant = number(wanted) if wanted.isdecimal() or _NUMBERED.search(wanted) else -1
    same = [n for n in names if meant >= 0 and number(n) == meant]
    # What a crash left of a step is meant only by its whole name.
    same = [n for n in same if plain(n) == n] or same
    same = [n for n in same if n + _LAST not in same]
    return [n for n in same if wanted.isdecimal() or n.isdecimal() or alike(n, wanted)]


def is_step(name: str) -> bool:
    """Return True for names that are numbered like steps; other numbered folders may be anything."""
    return bool(_NUMBERED.search(plain(name))) and number(name) >= 0


def part_of(folders: Iterable[str], any_name: bool = False) -> int | None:
    """Return the index of the only path part in which folders differ, if it is named like a step in all of
    them.

    With ``any_name``, it may have any name, because something else determines the step.
    """
    paths = [folder.split("/") for folder in folders]
    if len({len(p) for p in paths}) != 1:
        return None
    differing = [d for d in range(len(paths[0])) if len({p[d] for p in paths}) > 1]
    if len(differing) != 1 or not (any_name or all(is_step(p[differing[0]]) for p in paths)):
        return None
    return differing[0]


def bearing(folder: str) -> str:
    """Return a path up to its last step name; the complete path if it has none."""
    parts = folder.split("/")
    at = next((d for d in reversed(range(len(parts))) if is_step(parts[d])), len(parts) - 1)
    return "/".join(parts[: at + 1])


def split_at_step(folder: str) -> tuple[str, str]:
    """Split a path after its last step name; without a step, the full path is the second part.

    >>> split_at_step("run/global_step_5/actor"), split_at_step("actor")
    (('run/global_step_5', 'actor'), ('', 'actor'))
    """
    parts = folder.split("/") if folder else []
    at = next((d + 1 for d in reversed(range(len(parts))) if is_step(parts[d])), 0)
    return "/".join(parts[:at]), "/".join(parts[at:])
