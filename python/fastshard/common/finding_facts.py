"""Short texts about a finding: its files, and the tensors that cannot be used because of it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from .errors import Finding
from .formatting import runs, some
from .regex import compile_when_used

__all__ = ["command_of", "effect_of", "files_of", "runs_of"]

#: Maximum number of names to list.
_NAMED = 3
#: The placeholder for the checkpoint in a command.
_CKPT = compile_when_used(r"(?<!\S)CKPT(?!\S)")
_NUMBER = compile_when_used(r"(\d+)")


def effect_of(finding: Finding) -> str | None:
    """Describe which tensors cannot be used because of a finding; return None if the finding lists none.

    E.g. ``26 of 40 tensors are missing or incomplete: all of layer 4; 14 in layers 2, 3;
    0.word_embeddings.weight``.
    """
    effect = finding.effect
    if effect is None:
        return None
    of = "" if effect.of is None else f" of {effect.of:,}"
    many = effect.count != 1 or effect.of is not None
    be = "is" if effect.count == 1 else "are"
    are = (
        f"{be} missing or incomplete"
        if finding.is_a("missing_file", "missing_tensor", "incomplete")
        else "cannot be used"
    )
    apart = effect.count - effect.in_layers
    parts = [_some(effect.tensors[:apart], apart)] if apart else []
    whole = {layer for run in effect.missing_layers for layer in run}
    torn = runs(layer for run in effect.layers for layer in run if layer not in whole)
    if torn:
        count = f"{effect.in_layers - effect.in_missing_layers:,} in " if apart or whole else "in "
        parts.insert(0, f"{count}{_layers(torn)}")
    if whole:
        parts.insert(0, f"all of {_layers(effect.missing_layers)}")
    return f"{effect.count:,}{of} tensor{'s' if many else ''} {are}: {'; '.join(parts)}"


def _layers(numbers: Sequence[range]) -> str:
    return f"layer{'' if sum(map(len, numbers)) == 1 else 's'} {runs_of(numbers)}"


def _some(names: Sequence[str], count: int) -> str:
    """Join the first few names, and add the number of the others."""
    more = f" and {count - _NAMED:,} more" if count > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def command_of(run: str, command: Sequence[str], paths: Sequence[str]) -> str:
    """Complete a command of a finding's help so that a shell can run it.

    Args:
        run: the finding's command: one that contains ``CKPT``, or options to add to the command that was run.
        command: the words of the command that was run.
        paths: the paths of the checkpoint, as the user passed them.

    >>> command_of("--memory 96MiB", ["fastshard", "verify", "a b", "--memory=8MiB"], ["a b"])
    "fastshard verify 'a b' --memory 96MiB"
    >>> command_of("fastshard merge CKPT OUT", [], ["a b"])
    "fastshard merge 'a b' OUT"
    >>> command_of("mv x/CKPT/a.json x/CKPT/a.json.old", [], ["x/CKPT"])
    'mv x/CKPT/a.json x/CKPT/a.json.old'
    """
    if not run.startswith("-"):
        given = shlex.join(paths)
        return _CKPT.sub(lambda _: given, run) if paths else run
    option, *values = run.split(" ", 1)
    words = list(command)
    if values and option != "--accept":
        # It takes the place of another value.
        words = [word for word in words if not word.startswith(f"{option}=")]
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return f"{shlex.join(words)} {run}" if not (option in words and not values) else shlex.join(words)


def runs_of(runs: Sequence[range]) -> str:
    """Format ranges of numbers for people.

    >>> runs_of([range(0, 3), range(5, 6), range(7, 9)])
    '0-2, 5, 7, 8'
    """
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def files_of(files: Sequence[str]) -> str:
    """Join file names into one text, with the numbers in which they differ in braces.

    >>> files_of(["layer_00-model_01.pt", "layer_02-model_01.pt"])
    'layer_{00,02}-model_01.pt'
    """
    split = [_NUMBER.split(file) for file in files]
    if len({tuple(parts[::2]) for parts in split}) == 1:
        differ = [i for i, texts in enumerate(zip(*split, strict=True)) if len(set(texts)) > 1]
        if len(differ) == 1:
            (at,) = differ
            first = split[0]
            numbers = sorted({parts[at] for parts in split}, key=int)
            return "".join((*first[:at], "{", ",".join(numbers), "}", *first[at + 1 :]))
    return some(files, _NAMED)
