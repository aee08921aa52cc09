"""The places of a checkpoint's arrays: steps and items, committed or not, in the given directories.

source: orbax/checkpoint/_src/path/{atomicity,step}.py, .../serialization/ocdbt_process_spec.py;
    paxml/checkpoint_paths.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...common import codes, json_text
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.records import dataclass, field
from ...common.regex import compile_when_used
from ...layouts.nnx_names import MODEL_ITEM, OPTIMIZER_ITEM
from .. import choose_step, step_names
from ..base import Options
from ..step_trackers import Step
from . import levanter_steps
from .zarr_metadata import METADATA

#: A folder that is still being written: ``4000.orbax-checkpoint-tmp-0``, ``items.orbax-checkpoint-tmp``,
#: ``checkpoint_1.tmp_2``.
_TEMPORARY = compile_when_used(r"\.(?:orbax-checkpoint-tmp|tmp)(?:[-_.].*)?$")
#: A step's folder: a number, with or without a prefix.
_STEP = compile_when_used(r"^(?:.*[_-])?(\d{1,18})$")
#: The same without prefixes that a host's folder may also have (``node_1``).
_PLAIN_STEP = compile_when_used(r"^(?:(?:checkpoint|ckpt|step)[_-])?\d{1,18}$")
#: The store of one process, or of the replicated arrays that it wrote.
_PROCESS = compile_when_used(r"^ocdbt\.process_(?:replica_)?([A-Za-z0-9]{1,64})$")
#: A chunk of zarr v2 or v3 below an array's folder, with either separator.
_CHUNK = compile_when_used(r"^(?:c(?:[./]\d+)*|\d+(?:[./]\d+)*)$")


@dataclass(frozen=True)
class Process:
    """The store of one process in an item's directory; a process may have two."""

    #: Name of its folder.
    folder: str
    #: Its number in the run, or the id that the run assigned.
    id: int | str

    @property
    def key(self) -> tuple[bool, int, str]:
        """A key for sorting processes."""
        return isinstance(self.id, str), self.id if isinstance(self.id, int) else 0, self.folder


def process_of(folder: str) -> Process | None:
    """Return the process whose store has this folder name."""
    match = _PROCESS.match(folder)
    if match is None:
        return None
    return Process(folder, int(match[1]) if match[1].isdecimal() and len(match[1]) < 10 else match[1])


@dataclass
class Place:
    """One directory with an item's arrays."""

    root: int
    #: Path relative to the root directory; empty for the root directory itself.
    folder: str
    #: Step and item according to the folder names, without the marks of temporary ones.
    step: str | None
    item: str
    committed: bool = True
    #: OCDBT: the stores of processes in this directory.
    processes: list[Process] = field(default_factory=list)
    #: OCDBT: True if the processes' stores were merged.
    merged: bool = False
    #: Arrays as plain folders: relative path of each metadata file.
    plain: list[File] = field(default_factory=list)
    #: Folders inside it that look like another item, if nothing determines which one to use.
    within: list[str] = field(default_factory=list)
    #: True for a Levanter step, in which each module may be a folder.
    is_levanter: bool = False

    @property
    def ocdbt(self) -> bool:
        """True if the arrays are in a separate key-value store."""
        return self.merged or bool(self.processes)

    def path(self, listing: Listing) -> Path:
        """Return the path of the directory."""
        return listing.roots[self.root] / self.folder if self.folder else listing.roots[self.root]

    def label(self, listing: Listing) -> str:
        """Return the directory's name in messages."""
        return str(self.path(listing)) if len(listing.roots) > 1 else self.folder or "."

    def inside(self, name: str) -> str:
        """Return the path of a file in it, relative to the root directory; for an empty name, the common
        prefix.
        """
        return f"{self.folder}/{name}" if self.folder else name

    def files(self, listing: Listing, below: str = "") -> Iterator[tuple[str, File]]:
        """Yield (relative path, file) for the directory or one of its folders."""
        prefix = self.inside(f"{below}/" if below else "")
        for file in listing.files:
            if file.root == self.root and file.path.startswith(prefix):
                yield file.path[len(prefix) :], file


def find(listing: Listing) -> list[Place]:
    """Find all directories with arrays."""
    places: dict[tuple[int, str], Place] = {}
    levanter = levanter_steps.Steps(listing)

    def place(root: int, folder: str) -> Place:
        if (root, folder) not in places:
            step, item, temporary = _named(listing.roots[root], folder)
            places[root, folder] = Place(root, folder, step, item, committed=not temporary)
        return places[root, folder]

    for file in listing.files:
        name, folder = file.name, file.folder
        if name == "_METADATA":
            place(file.root, folder)
        elif name == "manifest.ocdbt":
            parent, _, last = folder.rpartition("/")
            process = process_of(last)
            if process:
                place(file.root, parent).processes.append(process)
            else:
                place(file.root, folder).merged = True
        elif name in METADATA and folder:
            holder = levanter.holder(file)
            found = place(file.root, folder.rpartition("/")[0] if holder is None else holder)
            found.is_levanter = found.is_levanter or holder is not None
            found.plain.append(file)
    for (root, folder), found in places.items():
        found.is_levanter = found.is_levanter or levanter.is_step(root, folder)
        found.committed = found.committed and not levanter.is_unfinished(root, folder, found.is_levanter)
    for root, folder in _chunk_folders(listing, places.values()):
        place(root, folder)
    for found in places.values():
        if found.processes and not found.merged:
            # The last step of a save is to merge what the processes wrote.
            found.committed = False
    return _outermost(places)


def _chunk_folders(listing: Listing, places: Iterable[Place]) -> set[tuple[int, str]]:
    """Return root directory and folder of chunks that a process other than the first one wrote to its local
    disk.

    These files do not name the arrays. The chunks are identified by the names of arrays that are described
    elsewhere.

    source: measured with Orbax 0.6.3 without OCDBT; 0.12 without a store of array metadata
    """
    # The last part of all names in a step of Levanter is the same, and its steps are found by their metadata.
    names = {
        file.folder.rpartition("/")[2] for place in places if not place.is_levanter for file in place.plain
    }
    found: set[tuple[int, str]] = set()
    seen: set[tuple[int, str]] = set()
    for file in listing.files if names else ():
        if (file.root, file.folder) in seen:
            continue
        parts = file.path.split("/")
        for depth, part in enumerate(parts[:-1]):
            if part in names and _CHUNK.match("/".join(parts[depth + 1 :])):
                seen.add((file.root, file.folder))
                found.add((file.root, "/".join(parts[:depth])))
                break
    return found


def chunk_without_metadata(listing: Listing) -> File | None:
    """Find a file which shows that a folder is that of a process that wrote only chunks."""
    found = None
    for file in listing.files:
        folder, _, last = file.path.rpartition("/")
        marked = any(_TEMPORARY.search(part) for part in folder.split("/"))
        # zarr v3 keeps chunks in folders of their own.
        array, _, inner = folder.partition("/c/") if "/c/" in folder else (folder, "", "")
        if not (array and _CHUNK.match(f"{inner}/{last}" if inner else last)):
            return None
        # Names of variables have dots; folders of numbered files need not be arrays.
        if marked or "." in array.rpartition("/")[2]:
            found = found or file
    return found


def _outermost(places: dict[tuple[int, str], Place]) -> list[Place]:
    """Remove places inside another one, because a part of a store is not a separate item."""
    kept = []
    for (root, folder), place in places.items():
        parts = folder.split("/") if folder else []
        above = (("/".join(parts[:n]), parts[n]) for n in range(len(parts)))
        outer = next(((places[root, up], name) for up, name in above if (root, up) in places), None)
        if outer is None:
            kept.append(place)
        elif not (outer[0].ocdbt and outer[1].startswith("ocdbt.")):
            outer[0].within.append(folder)
    return kept


def _named(root: Path, folder: str) -> tuple[str | None, str, bool]:
    """Return step, item, and whether a folder in the path is temporary."""
    root = root.resolve()
    inside = len(folder.split("/")) if folder else 0
    full = (root / folder).parts[-2:]
    steps, names, temporary = [], [], False
    for depth, part in enumerate(reversed(full)):
        name = _TEMPORARY.sub("", part)
        if depth < inside:
            step = bool(_STEP.match(name))
            marked = name != part
        else:
            # The directory given and what is above it may be called anything.
            above = root if depth == inside else root.parent
            step = bool(_PLAIN_STEP.match(name)) or (
                bool(_STEP.match(name)) and (above / "_CHECKPOINT_METADATA").is_file()
            )
            marked = name != part and (step or ".orbax-checkpoint-tmp" in part)
        names.append(name)
        steps.append(step)
        temporary = temporary or marked
    if steps and steps[0]:
        return names[0], "", temporary
    return (names[1] if len(steps) > 1 and steps[1] else None), (names or [""])[0], temporary


def _once(listing: Listing, places: Iterable[Place]) -> list[Place]:
    """Remove directories that were given twice, or that are inside another given one."""
    found: dict[Path, Place] = {}
    for place in places:
        found.setdefault(place.path(listing).resolve(), place)
    return list(found.values())


def _steps(listing: Listing, places: list[Place]) -> dict[str, Step]:
    """Return the steps of the places.

    A step whose arrays are in no committed directory is not finished. If it has its final name nevertheless,
    it is unusable.
    """
    found: dict[str, Step] = {}
    names: dict[int, str] = {}
    for place in places:
        # The folders of one step may have several names: 4000 and checkpoint_4000 on two hosts.
        name = names.setdefault(step_names.number(place.step or ""), place.step or "")
        known = name in found
        step = found.setdefault(name, Step(usable=False, temporary=True))
        step.usable = step.usable or place.committed
        if not place.committed and not known and not _marked(listing, place):
            step.temporary = False
        folder = place.folder
        while folder and step_names.plain(folder.rpartition("/")[2]) != place.step:
            folder = folder.rpartition("/")[0]
        step.folders.append((place.root, folder))
    return found


def _marked(listing: Listing, place: Place) -> bool:
    """Return True if a folder in a place's path has a temporary name."""
    return _named(listing.roots[place.root], place.folder)[2]


def choose(listing: Listing, places: Iterable[Place], options: Options) -> tuple[list[Place], list[Finding]]:
    """Choose the directories of one item in one step, at most one per root directory, preferring committed
    ones.

    Returns them, and findings about other steps.

    Raises:
        FastshardError: ``FS501`` for a step that does not exist, ``FS106`` if several match, ``FS104`` for a
            newer step that cannot be used.
    """
    everywhere = list(places)
    levanter_steps.refuse_part(listing)
    places = _once(listing, everywhere)
    chosen, findings = _of_step(listing, places, options)
    _refuse_other_steps(listing, everywhere, places, chosen)
    # A directory that was itself given is the item that is meant, whatever it is called.
    items = {p.item for p in chosen if p.folder or len(listing.roots) == 1}
    if items == {MODEL_ITEM, OPTIMIZER_ITEM}:
        beside = next(p for p in chosen if p.item == OPTIMIZER_ITEM)
        chosen = [p for p in chosen if p.item != OPTIMIZER_ITEM]
        findings = [*findings, _report_optimizer(listing, beside)]
    elif items == {OPTIMIZER_ITEM}:
        _refuse_optimizer_alone(listing, chosen)
    elif len(items) > 1:
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "several items hold arrays",
            got=", ".join(sorted(i or "the step's own directory" for i in items)),
            help="pass the directory of one item as CKPT",
        )
    chosen = _one_of_each_root(listing, chosen, options)
    if outer := next((place for place in chosen if place.within), None):
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "a directory inside a directory of arrays also holds arrays",
            file=outer.label(listing),
            expected="one item",
            got=", ".join(sorted(outer.within)[:5]),
            help="pass one directory as CKPT, or move the leftovers of another save away",
        )
    # Of the same save, the one that the coordinator wrote first, and what describes the arrays.
    first = [(p, {process.id for process in p.processes}) for p in chosen]
    first.sort(key=lambda each: (not each[0].committed, 0 not in each[1], not each[0].plain, each[0].root))
    return [place for place, _ in first], findings


def _refuse_optimizer_alone(listing: Listing, chosen: Iterable[Place]) -> None:
    """Raise an error if the step's metadata names the model's item, and only the optimizer's exists.

    The optimizer's directory may have been passed alone.
    """
    for place in chosen:
        path = f"{place.folder.rpartition('/')[0]}/_CHECKPOINT_METADATA".lstrip("/")
        file = next((f for f in listing.files if f.root == place.root and f.path == path), None)
        if not place.folder or file is None:
            continue
        handlers = (json_text.object_in(listing.read_text(file, limit=1 << 20)) or {}).get("item_handlers")
        if isinstance(handlers, dict) and MODEL_ITEM in handlers:
            raise FastshardError.of(
                codes.MISSING_FILE,
                f"the item {MODEL_ITEM} is missing: there is only {OPTIMIZER_ITEM}",
                file=place.label(listing),
                expected=MODEL_ITEM,
                got=OPTIMIZER_ITEM,
                help="copy it from the host that saved the step, or pass the directory of the other item as "
                "CKPT",
            )


def _report_optimizer(listing: Listing, place: Place) -> Finding:
    """Report that the optimizer's state is in a separate item, which is not used."""
    return Finding.of(
        codes.IGNORED,
        f"{OPTIMIZER_ITEM} is a separate item and is not read: the model is {MODEL_ITEM}",
        severity="note",
        file=place.label(listing),
        help="pass its directory as CKPT to merge it alone",
    )


def _of_step(listing: Listing, places: list[Place], options: Options) -> tuple[list[Place], list[Finding]]:
    """Return the directories of the chosen step and findings about other steps; all directories if there are
    no steps.
    """
    stepped = {name: step for name, step in _steps(listing, places).items() if name}
    if not stepped:
        if options.step is not None:
            raise choose_step.no_steps(options.step)
        return places, []
    taken = choose_step.choose(listing, stepped, options)
    newest = step_names.number(taken.name)
    folders = set(taken.step.folders)
    chosen = [
        p
        for p in places
        if p.step is not None
        and step_names.number(p.step) == newest
        and any(
            root == p.root and (folder in ("", p.folder) or p.folder.startswith(f"{folder}/"))
            for root, folder in folders
        )
    ]
    return chosen, taken.findings


def _refuse_other_steps(
    listing: Listing, everywhere: list[Place], places: list[Place], chosen: list[Place]
) -> None:
    """Raise an error if a root directory contains nothing of the chosen step."""
    taken = {p.path(listing).resolve() for p in chosen}
    for root in range(len(listing.roots)):
        if not any(p.root == root and p.path(listing).resolve() in taken for p in everywhere):
            raise FastshardError.of(
                codes.MIXED_STEPS,
                "the directories hold different steps",
                file=str(listing.roots[root]),
                expected=f"step {chosen[0].step}",
                got=", ".join(sorted({str(p.step) for p in places if p.root == root})) or "no arrays",
                help="pass only the directories of one save, or choose a step that all of them hold",
                run=["--step NAME"],
            )


def _one_of_each_root(listing: Listing, chosen: list[Place], options: Options) -> list[Place]:
    """Choose at most one directory per root directory.

    A committed one is preferred to the remains of an earlier attempt at the same step.
    """
    for root in range(len(listing.roots)):
        same = [p for p in chosen if p.root == root]
        if len(same) > 1 and len(settled := [p for p in same if p.committed]) == 1:
            chosen = [p for p in chosen if p.root != root or p is settled[0]]
        elif len(same) > 1:
            # A save that is tried again may still be committed.
            may_come = not settled and "uncommitted" not in options.accept
            raise FastshardError.of(
                codes.UNCOMMITTED if may_come else codes.AMBIGUOUS,
                "there are several directories for this step"
                + (", and none of them is committed" if may_come else ""),
                got=", ".join(p.folder for p in same),
                help="wait for the save, or pass one of them as CKPT"
                if may_come
                else "pass one of them as CKPT",
            )
    return chosen
