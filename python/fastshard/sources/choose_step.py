"""The choice among a run's steps, common to all frameworks.

The chosen step is the requested one, or the one that the tracker file names, or the one with the highest
number. A newer step that cannot be used is never ignored silently: if it has its final name, it is refused.
If it has a temporary name, or is newer than the tracker's step, it is reported, because a run may be writing
it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding, error_for
from ..common.listing import File, Listing, holds_weights
from ..common.records import dataclass, replace
from ..common.regex import compile_when_used
from .base import Options
from .step_names import alike, bearing, is_step, matching, newer, numbers_of, part_of, plain, split_at_step
from .step_trackers import (
    MOST_NAMED,
    Step,
    find_linked_step,
    find_unfinished_mark,
    folders_in,
    have,
    pointing_nowhere,
    tracked,
)

#: Folders next to the model's folder in which trainers store optimizer state and other state of a run.
#: source: accelerate utils/fsdp_utils.py (optimizer_0), NeMo Automodel components/checkpoint/checkpointing.py
#: (optim), verl utils/megatron_utils.py (optimizer, extra)
_STATE = compile_when_used(r"^(?:optim(?:izer)?(?:_states?|_\d+)?|extra(?:_states?)?|rng|dataloader)$")

#: Steps of transformers' Trainer, and files that it writes only with a model: next to its steps, they show
#: that the run's final model was there. axolotl writes config, tokenizer and ``adapter_config.json`` before.
#: source: transformers trainer.py (_save), trainer_utils.py (PREFIX_CHECKPOINT_DIR); peft peft_model.py
#: (save_pretrained); axolotl train.py (save_initial_configs)
_TRAINER_STEP = compile_when_used(r"^checkpoint-\d+$")
_SAVED_WITH_MODEL = ("training_args.bin", "adapter_model.safetensors", "adapter_model.bin")

#: The value of ``step`` for the given folder itself.
ITSELF = "."


class SeveralModels(FastshardError):
    """The error for a checkpoint that contains several models, if nothing states which one to use."""

    def __init__(self, finding: Finding, *, steps: Sequence[str] = (), files: Sequence[str] = ()) -> None:
        super().__init__([finding])
        #: The values of ``--step`` that select each model.
        self.steps = tuple(steps)
        #: Single files below the first root directory, each of which may be passed as CKPT.
        self.files = tuple(files)


@dataclass(frozen=True)
class Chosen:
    """The chosen step, and findings about the other steps."""

    name: str
    findings: list[Finding]
    step: Step


def by_folder(
    folders: Iterable[tuple[int, str]], any_name: bool = False
) -> tuple[dict[str, Step], dict[str, str]] | None:
    """Return the steps of folders that contain one checkpoint each, and the folder of each step.

    None if no part of the paths distinguishes the folders.
    """
    places = list(folders)
    paths = sorted({folder for _, folder in places})
    at = part_of(paths, any_name) if len(paths) > 1 else None
    if at is None and len(paths) > 1:
        return None
    steps: dict[str, Step] = {}
    step_folders: dict[str, str] = {}
    for root, folder in places:
        whole = "/".join(folder.split("/")[: at + 1]) if at is not None else bearing(folder)
        name = whole.rpartition("/")[2]
        steps.setdefault(name, Step()).folders.append((root, whole))
        step_folders[name] = folder
    return steps, step_folders


def folder_of(
    listing: Listing,
    places: Iterable[tuple[int, str]],
    options: Options,
    trackers: tuple[str, ...] = (),
    holds_model: Callable[[str], bool] | None = None,
) -> tuple[str, Chosen, list[str]]:
    """Choose the step's folder among folders that contain one checkpoint each.

    Return it with the folders inside it that also contain a checkpoint and are not steps.

    Args:
        listing: contents of the root directories.
        places: root directory and folder of each one; at least one.
        options: ``step`` and the accepted conditions.
        trackers: names of files that name a step.
        holds_model: returns True for a folder whose files show that it contains a model, whatever its name;
            None to decide by names alone.

    Raises:
        FastshardError: as :func:`choose`; ``FS106`` for folders that are not steps of one run; ``FS501`` if
            none of them is the requested step.
    """
    whole = sorted(set(places))
    every = {folder for _, folder in whole}
    candidates = [
        (root, folder) for root, folder in whole if not any(_below(folder, other) for other in every)
    ]
    aside = {f for f in every if holds_state(f) and not (holds_model is not None and holds_model(f))}
    # Without a model, state is what there is.
    aside = set() if aside == every else aside
    candidates = [place for place in candidates if place[1] not in aside]
    named_by_file = any(f.name in trackers for f in listing.files)
    candidates, options = _take_one_model(candidates, options, named_by_file)
    found = by_folder(candidates) or (by_folder(candidates, any_name=True) if named_by_file else None)
    wanted = options.step
    if wanted is not None and (found is None or not matching(found[0], wanted)):
        # Nothing orders them, or it is another part of the path; the one asked for may still be one of them.
        named: list[tuple[int, str]] = []
        for those in (candidates, whole):
            named = [p for p in those if any(matching([part], wanted) for part in p[1].split("/"))]
            if len({folder for _, folder in named}) == 1:
                return named[0][1], Chosen(bearing(named[0][1]).rpartition("/")[2], [], Step(named)), []
        if found is None and not named:
            _one([], {folder.rpartition("/")[2] or ".": Step() for _, folder in candidates}, wanted)
    if found is None:
        folders = sorted({folder for _, folder in candidates})
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "several directories hold a checkpoint",
            got=", ".join(folder or "." for folder in folders[:MOST_NAMED]),
            help="pass one directory as CKPT, or choose a step",
            run=["--step NAME"],
        )
    chosen = choose(listing, found[0], options, trackers)
    folder = found[1][chosen.name]
    beside = {other for other in aside if _below(folder, above := _above_state(other)) or folder == above}
    return folder, chosen, sorted(beside | {other for other in every if _below(other, folder)})


def holds_state(folder: str) -> bool:
    """Return True if a folder's name, or a name on its path below the step, shows that it has no model."""
    return any(map(_STATE.match, split_at_step(folder)[1].split("/")))


def _above_state(folder: str) -> str:
    """Return the folder that contains the state folder in a path."""
    above, below = split_at_step(folder)
    parts = below.split("/")
    at = next(d for d, part in enumerate(parts) if _STATE.match(part))
    return "/".join([part for part in (above, *parts[:at]) if part])


def _take_one_model(
    places: list[tuple[int, str]], options: Options, named_by_file: bool
) -> tuple[list[tuple[int, str]], Options]:
    """Select the folders of one model if a step contains several, such as ``actor`` and ``critic``.

    Args:
        places: root directory and folder of each one.
        options: ``step`` may name a model, a step or both: ``global_step_5/actor``.
        named_by_file: whether a tracker file names a step.

    Returns:
        The folders of the model, and the options without its name.

    Raises:
        SeveralModels: ``FS106`` if the caller did not choose one.
    """
    split = {folder: split_at_step(folder) for _, folder in places}
    stepped = {bool(above) for above, _ in split.values()}
    if len(stepped) > 1 or (stepped == {False} and named_by_file):
        # Something else tells them apart.
        return places, options
    words = [word for word in (options.step or "").split("/") if word]
    kept, steps = places, []
    for word in words:
        of_step = [p for p in kept if any(matching([part], word) for part in split[p[1]][0].split("/"))]
        of_model = [p for p in kept if word in split[p[1]][1].split("/")]
        if of_step:
            steps.append(word)
        elif not of_model:
            # Of this name there is nothing, or it is one that has another order.
            return places, options
        kept = of_step or of_model
    models = sorted({split[folder][1] for _, folder in kept})
    if len(models) < 2:
        return kept, replace(options, step="/".join(steps) or None)
    names = [_name_among(model, models) for model in models if model]
    finding = Finding.of(
        codes.AMBIGUOUS,
        "the checkpoint holds several models",
        got=", ".join(model or "." for model in models[:MOST_NAMED]),
        help="choose one, or pass its directory as CKPT",
        run=[f"--step {shlex.quote('/'.join([*steps, name]))}" for name in names[:MOST_NAMED]],
    )
    raise SeveralModels(finding, steps=names)


def _name_among(model: str, models: Sequence[str]) -> str:
    """Return the first part of a model's path that no other model has; the full path if there is none."""
    others = {part for other in models if other != model for part in other.split("/")}
    return next((part for part in model.split("/") if part not in others), model)


def within_this(folders: Iterable[str]) -> list[Finding]:
    """Report checkpoints inside the chosen folder, and report run state next to it as notes."""
    return [
        Finding.of(
            codes.UNEXPECTED_FILE,
            "the state of the run next to the model is not read"
            if holds_state(folder)
            else "the directory holds another checkpoint",
            severity="note" if holds_state(folder) else None,
            file=folder,
            help=f"pass {folder} to read that checkpoint",
        )
        for folder in folders
    ]


def note_steps_within(folders: Iterable[str]) -> list[Finding]:
    """Note that the model in the given folder is used although the folder also contains steps.

    Trainers store the final model above the steps that they saved before.

    Args:
        folders: all folders that contain a model.
    """
    steps = {folder.rpartition("/")[2] for folder in folders if is_step(folder.rpartition("/")[2])}
    if not steps:
        return []
    newest = max(steps, key=lambda name: (numbers_of(name), name))
    return [
        Finding.of(
            codes.STEP_TAKEN,
            f"the model in the directory itself is used; the directory also has {len(steps)} "
            f"step{'s' if len(steps) > 1 else ''}: {have(steps)}",
            help="choose a step",
            run=[f"--step {shlex.quote(newest)}"],
        )
    ]


def _below(folder: str, other: str) -> bool:
    return folder != other and (other == "" or folder.startswith(f"{other}/"))


def choose(
    listing: Listing, steps: Mapping[str, Step], options: Options, trackers: tuple[str, ...] = ()
) -> Chosen:
    """Choose the requested step, or the tracker's step, or the newest one.

    Args:
        listing: contents of the root directories.
        steps: steps by their ``--step`` names; at least one.
        options: ``step`` and the accepted conditions.
        trackers: names of files that name a step.

    Raises:
        FastshardError: ``FS501`` for a step that does not exist; ``FS105`` if the tracker names one;
            ``FS106`` if nothing determines the step; ``FS104`` for a newer one that cannot be used.
    """
    steps = _marked(listing, steps)
    outer = _outer(steps)
    if outer is not None and (options.step is None or matching(outer, options.step)):
        # The Trainer keeps a framework's own steps in its own.
        chosen = _choose(listing, outer, options, ())
        within = {folder for _, folder in outer[chosen.name].folders}
        inside = {
            name: replace(step, folders=[f for f in step.folders if f[1].rpartition("/")[0] in within])
            for name, step in steps.items()
        }
        inside = {name: step for name, step in inside.items() if step.folders}
        files = [f for f in listing.files if f.folder in within]
        part = replace(listing, files=files)
        inner = _choose(part, inside, replace(options, step=None), trackers)
        return Chosen(inner.name, [*chosen.findings, *inner.findings], inside[inner.name])
    return _choose(listing, steps, options, trackers)


def _choose(
    listing: Listing, steps: Mapping[str, Step], options: Options, trackers: tuple[str, ...]
) -> Chosen:
    """Choose among steps in the same folder."""
    if options.step is not None:
        name = _one(matching(steps, options.step), steps, options.step)
        return Chosen(name, [], steps[name])
    usable = [name for name, step in steps.items() if step.usable] or list(steps)
    pointer = tracked(listing, trackers) or find_linked_step(listing, steps)
    if pointer is not None:
        file, named = pointer
        if found := matching(usable, named):
            name = _one(found, steps, named)
            findings = [*_note_choice(name, steps, file), *_later(listing, name, steps, options, file)]
            return Chosen(name, findings, steps[name])
        finding = pointing_nowhere(listing, steps, file, named)
        if "older-step" not in options.accept or not any(step.usable for step in steps.values()):
            raise error_for([finding])
        name = _newest(usable)
        return Chosen(name, [_softened(finding), *_note_choice(name, steps, None)], steps[name])
    name = _newest(usable)
    findings = [*_note_choice(name, steps, None), *_later(listing, name, steps, options, None)]
    return Chosen(name, findings, steps[name])


def _marked(listing: Listing, steps: Mapping[str, Step]) -> Mapping[str, Step]:
    """Mark steps as unfinished that have temporary names or a marker file next to them.

    If all steps are like this, none is marked.
    """
    unfinished = {
        name
        for name, step in steps.items()
        if plain(name) != name
        or any(find_unfinished_mark(listing, root, folder) for root, folder in step.folders)
    }
    if len(unfinished) == len(steps):
        return steps
    return {
        name: replace(step, usable=False, temporary=True) if name in unfinished else step
        for name, step in steps.items()
    }


def _outer(steps: Mapping[str, Step]) -> dict[str, Step] | None:
    """Return the steps that contain other steps: ``checkpoint-500/global_step500``."""
    places = {place for step in steps.values() for place in step.folders}
    parents = {(root, folder.rpartition("/")[0]) for root, folder in places}
    folders = {folder for _, folder in parents}
    if not folders or not all(is_step(folder.rpartition("/")[2]) for folder in folders):
        return None
    if len(folders) > 1 and part_of(folders) is None and not _of_hosts(folders):
        return None
    for name, step in steps.items():
        above = {folder.rpartition("/")[0].rpartition("/")[2] for _, folder in step.folders}
        if len(above) > 1 and is_step(name):
            return None  # One step under several folders: they are those of hosts.
    outer: dict[str, Step] = {}
    for root, folder in sorted(parents):
        outer.setdefault(bearing(folder).rpartition("/")[2], Step()).folders.append((root, folder))
    return outer


def _of_hosts(folders: Iterable[str]) -> bool:
    """Return True if several sibling folders contain the same steps: ``node0/checkpoint-500``."""
    steps_by_host: dict[str, set[str]] = {}
    for folder in folders:
        above, _, step = folder.rpartition("/")
        steps_by_host.setdefault(above, set()).add(step)
    return (
        len(steps_by_host) > 1
        and part_of(steps_by_host, any_name=True) is not None
        and len(set(map(frozenset, steps_by_host.values()))) == 1
    )


def no_steps(wanted: str) -> FastshardError:
    """Build the error for a request for a step of a checkpoint without steps."""
    return FastshardError.of(
        codes.NO_SUCH_PATH,
        f"there is no step {shown(wanted)}: this checkpoint has no steps",
        help="leave out --step, or name the directory that holds the steps as CKPT",
    )


def _one(found: list[str], steps: Mapping[str, Step], wanted: str) -> str:
    # What lies in the root itself has no name that could be asked for.
    if not any(name.strip(".") for name in steps):
        raise no_steps(wanted)
    if not found:
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            f"there is no step {shown(wanted)}",
            expected=f"one of {have(steps)}",
            help="choose one of these",
            run=["--step NAME"],
        )
    if len(found) > 1:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            f"several directories are step {shown(wanted)}",
            got=have(found),
            help="pass its full name, or its directory as CKPT",
            run=["--step NAME"],
        )
    return found[0]


def _newest(names: list[str]) -> str:
    """Return the step with the highest number.

    Raises:
        FastshardError: ``FS106`` if there are several steps and none is numbered, or two have the same
            number.
    """
    numbered = [n for n in names if numbers_of(n)]
    candidates = numbered or names
    best = candidates[0]
    for name in candidates[1:]:
        if newer(name, best):
            best = name
    rivals = [n for n in candidates if n != best and not newer(best, n)]
    if rivals:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "there are several steps, and nothing states which is the newest",
            got=have([best, *rivals]),
            help="choose one of these",
            run=[f"--step {shlex.quote(best)}"],
        )
    return best


def _note_choice(name: str, steps: Mapping[str, Step], tracker: File | None) -> list[Finding]:
    """Describe the choice, if there are several steps."""
    others = [n for n in steps if n != name]
    if not others:
        return []
    why = f"{tracker.path} names it" if tracker else "the newest by number"
    message = (
        f"step {name} is used, {why}; {len(others)} more {'is' if len(others) == 1 else 'are'} available: "
        f"{have(others)}"
    )
    return [
        Finding.of(
            codes.STEP_TAKEN,
            message,
            help="choose another step",
            run=[f"--step {shlex.quote(max(others, key=numbers_of))}"],
        )
    ]


def _later(
    listing: Listing, name: str, steps: Mapping[str, Step], options: Options, tracker: File | None
) -> list[Finding]:
    """Report steps that are newer than the chosen one.

    Raises:
        FastshardError: ``FS104`` for a step under its final name, and ``FS101`` for the lost final model of a
            run, unless ``older-step`` is accepted or a tracker names the chosen step; ``FS106`` for a newer
            one of another framework.
    """
    known = {folder for step in steps.values() for folder in step.folders}
    later = {
        (step.folders[0][1] if step.folders else "") or n: step.temporary
        for n, step in steps.items()
        if newer(n, name)
    }
    for path, temporary in _beside(listing, steps[name], name, known):
        later.setdefault(path, temporary)
    if tracker is None and (other := _find_other_newer(listing, steps[name], name, known)) is not None:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "another framework saved a newer step here: nothing states which one to use",
            file=other,
            got=f"{name}, {other}",
            help="choose the step, or pass the other framework's directory as CKPT",
            run=[f"--step {shlex.quote(name)}"],
        )
    findings = [] if tracker is not None else _find_lost_final_model(listing, steps[name], name, options)
    for other, temporary in sorted(later.items(), key=lambda item: (numbers_of(item[0]), item[0])):
        if tracker is not None or temporary:
            why = "which the tracker does not name" if tracker and not temporary else "not finished"
            finding = Finding.of(
                codes.UNCOMMITTED,
                f"there is a newer step, {why}: a run may be writing it now",
                severity="warning",
                file=other,
                got=f"step {name} is used",
                help="choose another step",
                run=["--step NAME"],
            )
        else:
            finding = Finding.of(
                codes.UNCOMMITTED,
                "a newer step has its final name, but cannot be used",
                severity="warning" if "older-step" in options.accept else None,
                decided="accept older-step" if "older-step" in options.accept else None,
                file=other,
                expected="a complete step",
                got=f"{name} is the newest step that can be read",
                help="restore its missing files, or use the older step",
                run=[f"--step {shlex.quote(name)}"],
            )
        findings.append(finding)
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        raise error_for(errors)
    return findings


def _find_lost_final_model(listing: Listing, step: Step, name: str, options: Options) -> list[Finding]:
    """Find out whether a run lost its final model, which its Trainer wrote after the last step."""
    if not _TRAINER_STEP.match(name):
        return []
    above = {(root, folder.rpartition("/")[0]) for root, folder in step.folders if folder}
    beside = [f for f in listing.files if (f.root, f.folder) in above and f.name in _SAVED_WITH_MODEL]
    is_accepted = "older-step" in options.accept
    return [
        Finding.of(
            codes.MISSING_FILE,
            "the run's final model is incomplete or missing: the Trainer writes this file with it",
            severity="warning" if is_accepted else None,
            decided="accept older-step" if is_accepted else None,
            file=file.path,
            expected="weights and config of the final model next to this file",
            got=f"{name} is the newest step that can be read",
            help="restore the missing files, or use the step",
            run=[f"--step {shlex.quote(name)}"],
        )
        for file in beside[:1]
    ]


def _beside(
    listing: Listing, step: Step, name: str, known: set[tuple[int, str]]
) -> Iterator[tuple[str, bool]]:
    """Yield folders next to a step's folder whose names are those of newer steps but whose contents are not
    recognised.

    Each one is returned with its path and whether its name is temporary.
    """
    if not is_step(name):
        return
    for root in sorted({root for root, _ in step.folders}):
        for folder in sorted({folder for r, folder in step.folders if r == root and folder}):
            parent = folder.rpartition("/")[0]
            own = _entries(listing.roots[root] / folder)
            for entry in folders_in(listing.roots[root] / parent):
                path = f"{parent}/{entry}" if parent else entry
                if (root, path) in known or not alike(entry, name) or numbers_of(entry) <= numbers_of(name):
                    continue
                # A bare number may name anything, a year for one: it is a step if it holds what steps hold,
                # or nothing.
                inside = _entries(listing.roots[root] / path)
                if not plain(entry).isdecimal() or plain(entry) != entry or not inside or inside & own:
                    yield path, plain(entry) != entry


def _find_other_newer(listing: Listing, step: Step, name: str, known: set[tuple[int, str]]) -> str | None:
    """Find a folder next to a step's folder that is named like a newer step of another kind and contains
    weights.

    Epochs are not compared with steps.
    """

    def is_counted(one: str) -> bool:
        return is_step(one) and len(numbers_of(one)) == 1 and "epoch" not in one.lower()

    if not is_counted(name):
        return None
    for root, folder in step.folders:
        above = f"{folder.rpartition('/')[0]}/".lstrip("/")
        for file in listing.files:
            entry = file.path.removeprefix(above).partition("/")[0]
            path = above + entry
            if (
                file.root == root
                and file.path.startswith(f"{path}/")
                and (root, path) not in known
                and is_counted(entry)
                and not alike(entry, name)
                and numbers_of(entry) > numbers_of(name)
                and holds_weights(file.name)
            ):
                return path
    return None


def _entries(path: Path) -> set[str]:
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return {plain(e.name) for e in entries}
    return set()


def _softened(finding: Finding) -> Finding:
    return finding.replace(severity="warning", decided="accept older-step")
