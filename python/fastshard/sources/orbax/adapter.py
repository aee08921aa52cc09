"""Checkpoints of Orbax (MaxText) and Paxml: zarr arrays, plain or in OCDBT, from one or several hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...common import codes, json_text
from ...common.config_text import parse_yaml
from ...common.errors import FastshardError, Finding, error_for
from ...common.listing import File, Listing
from ...common.records import dataclass, replace
from ...layouts.declaration import Assembled, Binding, Blocks, Source, TreeInfo
from ...layouts.maxtext_names import FILE as MODEL_FILE
from ...models import maxtext_sizes
from .. import hf_config
from .. import levanter as levanter_model
from .. import maxtext as maxtext_model
from .. import paxml as paxml_model
from ..base import Contents, Found, Options
from . import completeness, levanter_steps, stores
from .completeness import Evidence
from .file_snapshot import Files
from .find_items import Place, choose, chunk_without_metadata, find
from .metadata import BY_PRIMARY, Sharding, Tree, parse_shardings, parse_tree
from .zarr_metadata import Array

#: Maximum number of arrays named in findings.
_NAMED = 20


@dataclass(frozen=True)
class OrbaxFiles:
    """The stores of the chosen item, and the evidence in their keys."""

    #: Directories of the item: one, or one per host.
    places: tuple[Place, ...]
    #: All stores, combined into one.
    union: stores.Union
    #: The contents of ``_METADATA``, if it exists.
    tree: Tree | None
    #: Whether all chunks exist.
    verdict: completeness.Verdict
    #: The blocks of each array.
    pieces: Mapping[str, Sequence[stores.Piece]]


class Orbax:
    """Directories with ``_METADATA``, ``manifest.ocdbt``, ``.zarray`` or ``zarr.json``."""

    name = "orbax"

    def detect(self, listing: Listing, options: Options) -> Found[OrbaxFiles] | None:
        """Find the item, check its completeness from keys alone, and list its blocks."""
        if listing.single:
            return None
        everywhere = find(listing)
        if not everywhere:
            _refuse_without_arrays(listing)
            return None
        places, findings = choose(listing, everywhere, options)
        findings = [*findings, *_committed(listing, places, options)]
        tree = _tree(listing, places)
        union = stores.open_stores(listing, places, set(tree.arrays) if tree else set())
        if tree is None and levanter_model.is_state_of_step(union.arrays) and not places[0].is_levanter:
            # The metadata, which alone tells whose store it is by the files' names, is written last.
            places = [replace(place, is_levanter=True, committed=False) for place in places]
            findings += _committed(listing, places, options)
        evidence = _evidence(listing, places, tree, union, options.given.get("expect_processes"))
        findings += union.copied()
        accepted = "elided-zeros" in options.accept
        verdict = completeness.judge(union.arrays, union.keys, evidence, accepted)
        findings += verdict.findings
        if tree is not None:
            findings += _expected(tree, set(union.arrays) | set(union.unread), evidence.where)
        if union.unread and not union.arrays:
            raise error_for(list(union.unread.values()))
        if not union.arrays:
            raise FastshardError.of(
                codes.UNCOMMITTED,
                "the metadata of all arrays is missing: the process that writes it used another disk, or "
                "the save was interrupted",
                file=evidence.where,
                got=f"{len(union.keys)} keys",
                help="name the directory of process 0 as another CKPT",
            )
        findings += _of_one_run(places, listing)
        findings += _beside(union, set(tree.arrays) if tree else set(), evidence.where)
        elided = verdict.elided if verdict.verdict == completeness.INCOMPLETE else verdict.missing
        reader, tensors, pieces = stores.listed(union, elided, evidence.stores_fill is True)
        anchor = _anchor(listing, places)
        apart = ([reader.root(key) for key, *_ in tensors], reader.send) if reader.lies_apart else None
        files = Files(listing, [file for place in places for _, file in place.files(listing)])
        blocks = Blocks(tensors, reader, files.identity(), files.files, files.look, apart)
        seen = OrbaxFiles(tuple(places), union, tree, verdict, pieces)
        paxml = not places[0].ocdbt and tree is None
        framework = "Paxml" if paxml and any(n.startswith("mdl_vars.") for n in union.arrays) else "Orbax"
        if places[0].is_levanter:
            framework = "Levanter"
            findings += levanter_steps.find_in_metadata(places[0].path(listing), evidence.where)
            if places[0].ocdbt:
                findings += levanter_steps.find_folders_beside_store(places[0].plain, evidence.where)
            if lost := levanter_model.find_lost_model(union.arrays, evidence.where):
                raise error_for([lost])
        return Found(
            self,
            framework,
            [anchor],
            seen,
            findings=findings,
            step=places[0].step,
            blocks={0: blocks},
        )

    def declare(
        self, found: Found[OrbaxFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare every array as boxes of its blocks."""
        union, tree, verdict = found.seen.union, found.seen.tree, found.seen.verdict
        place = found.seen.places[0]
        source = Source(found.framework, step=found.step, binding=Binding(pass_unknown=True))
        # Paxml's directories are the only list of its variables that there is.
        source.index.is_provable = tree is not None
        source.binding.vocab_size = options.vocab_size
        tensors = [
            (
                name,
                list(array.shape),
                [(lo, extent, 0, number) for lo, extent, number in found.seen.pieces[name]],
            )
            for name, array in sorted(union.arrays.items())
        ]
        where = place.label(listing)
        source.tensor_findings = [
            *union.unread.values(),
            *_shared(tree, where),
            *_widened(union.arrays, where),
        ]
        source.files.assembled.append(Assembled(0, {}, None, None, tensors, frozen=True))
        source.files.values = {"completeness": verdict.to_dict()}
        checkpoint = _checkpoint_metadata(listing, found.seen.places)
        custom = checkpoint.get("custom_metadata")
        source.tree = TreeInfo(
            # A folder that lies in no step's is named after anything.
            item=place.item if place.item and place.step is not None else "items",
            keys=tree.arrays if tree else {},
            types=tree.types if tree else {},
            strings=_strings(listing, found.seen.places),
            leaves=tree.leaves if tree else {},
            custom=custom if isinstance(custom, dict) else {},
        )
        if custom:
            source.files.values["custom_metadata"] = custom
        arrays = {name: (array.dtype, array.shape) for name, array in union.arrays.items()}
        config, path = options.config, options.config_path
        if config is None:
            config, path = _model_beside(listing, place)
        elif options.override_config is not None and (
            maxtext_model.is_train_state(arrays) or paxml_model.is_train_state(arrays)
        ):
            source.findings += _find_overridden(listing, place, config)
        if maxtext_model.is_train_state(arrays):
            scan = custom.get("scan_layers") if isinstance(custom, dict) else None
            stacked = scan if isinstance(scan, bool) else None
            maxtext_model.describe(source, arrays, config, path, stacked)
        elif paxml_model.is_train_state(arrays):
            paxml_model.describe(source, arrays, config, path)
        elif place.is_levanter or levanter_model.is_train_state(arrays):
            source.tensor_findings += levanter_model.find_lost_moments(arrays, where)
            levanter_model.describe(source, arrays, *hf_config.config_of(listing, place.folder, options))
        return source


def _shared(tree: Tree | None, where: str) -> list[Finding]:
    """Report entries of the tree that overwrote each other because Orbax joins keys with dots.

    Measured with 0.12.8.
    """
    return [
        Finding.of(
            codes.OVERLAP,
            "several entries of the tree are stored as this one array: all but one of them are lost",
            file=where,
            tensor=name,
            expected="one entry",
            got=f"{len(paths) + 1} entries, including {', '.join(paths[:3])}",
            help="save it again with keys that stay different when joined by dots, or leave it out "
            f"(--exclude '{name}')",
        )
        for name, paths in (tree.shared.items() if tree else ())
    ]


def _widened(arrays: Mapping[str, Array], where: str) -> list[Finding]:
    return [
        Finding.of(
            codes.UNSUPPORTED,
            f"safetensors has no {array.narrow}: it is stored as {array.dtype}, which can hold all its "
            "values",
            severity="note",
            file=where,
            tensor=name,
            got=array.narrow,
        )
        for name, array in arrays.items()
        if array.narrow
    ]


def _evidence(
    listing: Listing, places: list[Place], tree: Tree | None, union: stores.Union, expected: int | None
) -> Evidence:
    """Collect evidence about the processes that wrote the item, and about the chunks that each one had to
    write.
    """
    shardings: dict[str, Sharding] = {}
    for place in places:
        if file := _file(listing, place, "_sharding"):
            shardings |= parse_shardings(listing.read_text(file))
    evidence = Evidence(
        stores_fill=tree.stores_fill if tree else None,
        shardings=shardings,
        present=union.wrote(),
        per_process=places[0].ocdbt,
        committed=any(p.committed for p in places),
        expected=expected,
        lost={k: why for h in union.parts for k, why in h.lost.items() if k not in union.keys},
        by_primary={n for n, kind in tree.types.items() if kind in BY_PRIMARY} if tree else set(),
        beside=levanter_model.find_state(union.arrays)
        if len(places) == 1 and places[0].is_levanter and places[0].ocdbt
        else frozenset(),
        where=places[0].label(listing),
    )
    return replace(evidence, present=completeness.at_hand(union.arrays, union.of_process, evidence))


def _refuse_without_arrays(listing: Listing) -> None:
    """Raise an error for a save without arrays: one interrupted early, or chunks of unknown arrays."""
    started = next((f for f in listing.files if f.name == "_CHECKPOINT_METADATA"), None)
    if started is None:
        levanter_steps.refuse_without_manifest(listing)
        _refuse_chunks_alone(listing)
        return
    raise FastshardError.of(
        codes.UNCOMMITTED,
        "Orbax began to save here but wrote no array",
        file=started.path,
        help="name the directories of all hosts: the save was interrupted, or this process wrote to another "
        "disk",
    )


def _refuse_chunks_alone(listing: Listing) -> None:
    file = chunk_without_metadata(listing)
    if file is None:
        return
    raise FastshardError.of(
        codes.UNCOMMITTED,
        "the directory has chunks of arrays, but nothing that describes the arrays: the first process, "
        "which writes the description, used another disk",
        file=file.path,
        help="name the directory of process 0 as another CKPT",
    )


def _of_one_run(places: list[Place], listing: Listing) -> list[Finding]:
    """Report that chunks of several directories cannot prove that they are from the same run.

    Pieces in two directories are compared; other pieces fit any run.
    """
    if len(places) < 2:
        return []
    return [
        Finding.of(
            codes.LOOKALIKES,
            f"whether the chunks of {len(places)} directories "
            f"({', '.join(p.label(listing) for p in places[:4])}) are from one run: chunks do not name "
            "their run",
            help="pass a manifest that was made where the files were written",
            run=["--expect FILE"],
        )
    ]


def _committed(listing: Listing, places: list[Place], options: Options) -> list[Finding]:
    """Check that a directory of the step was committed, or that ``uncommitted`` is accepted.

    One committed directory is sufficient for the temporary ones of the same step.
    """
    loose = [p for p in places if not p.committed]
    if not loose:
        return []
    if len(loose) < len(places):
        return [
            Finding.of(
                codes.UNCOMMITTED,
                "a temporary directory is used to complete the committed one",
                severity="note",
                file=p.label(listing),
            )
            for p in loose
        ]
    accepted = "uncommitted" in options.accept
    finding = Finding.of(
        codes.UNCOMMITTED,
        "no directory of this step was committed: the save was interrupted, or one process failed",
        severity="warning" if accepted else None,
        decided="accept uncommitted" if accepted else None,
        file=places[0].label(listing),
        expected=levanter_steps.METADATA
        if places[0].is_levanter
        else "a committed directory, into which the processes' stores are merged",
        help=("pass the step's directory if this is a part of one; " if places[0].is_levanter else "")
        + "choose another step with --step; or name the directories of all processes and accept it: "
        "fastshard still checks that every chunk is there",
        run=["--accept uncommitted"],
    )
    if not accepted:
        raise error_for([finding])
    return [finding]


def _file(listing: Listing, place: Place, name: str) -> File | None:
    return _at(listing, place, place.folder, name)


def _at(listing: Listing, place: Place, folder: str, name: str) -> File | None:
    """Return the file of that name in a folder below the place's root directory."""
    path = f"{folder}/{name}" if folder else name
    return next((f for f in listing.files if f.root == place.root and f.path == path), None)


def _anchor(listing: Listing, places: list[Place]) -> File:
    """Return a file that changes whenever the store changes."""
    for place in places:
        stores = (f"{process.folder}/manifest.ocdbt" for process in place.processes)
        for name in ("manifest.ocdbt", "_METADATA", *stores):
            if file := _file(listing, place, name):
                return file
        if place.plain:
            return place.plain[0]
    raise AssertionError("places are found by such files")


def _strings(listing: Listing, places: Sequence[Place]) -> str | None:
    """Read the strings among the leaves, which Orbax stores in a separate file.

    source: orbax type_handlers.py
    """
    for place in places:
        if file := _file(listing, place, "_strings.json"):
            return listing.read_text(file)
    return None


def _tree(listing: Listing, places: list[Place]) -> Tree | None:
    found: Tree | None = None
    for place in places:
        file = _file(listing, place, "_METADATA")
        if file is None:
            continue
        tree = parse_tree(listing.read_text(file), place.inside("_METADATA"))
        if found is not None and set(tree.arrays) != set(found.arrays):
            raise FastshardError.of(
                codes.MIXED_STEPS,
                "two hosts name different arrays in _METADATA: they are from different saves",
                file=place.label(listing),
                help="pass only the directories of one save",
            )
        found = found or tree
    return found


def _checkpoint_metadata(listing: Listing, places: Sequence[Place]) -> dict[str, Any]:
    """Read ``_CHECKPOINT_METADATA`` of the step; empty if it is missing or unreadable."""
    for place in places:
        for folder in (place.folder, place.folder.rpartition("/")[0]):
            file = _at(listing, place, folder, "_CHECKPOINT_METADATA")
            if file and (value := json_text.object_in(listing.read_text(file, limit=1 << 20))):
                return value
    return {}


def _beside(union: stores.Union, expected: set[str], where: str) -> list[Finding]:
    """Report chunks of arrays without metadata, and chunks that a merge omitted."""
    lacking = [name for name in union.undescribed if name not in expected]
    findings = [
        Finding.of(
            codes.MISSING_FILE,
            "the metadata of this array is missing, although its chunks are here",
            file=where,
            tensor=name,
            expected=".zarray or zarr.json next to them",
            help="copy it from the host that wrote the checkpoint: without it, shape and dtype are unknown",
        )
        for name in lacking[:_NAMED]
    ]
    if len(lacking) > _NAMED:
        findings.append(
            Finding.of(codes.MISSING_FILE, f"and {len(lacking) - _NAMED} more arrays", file=where)
        )
    if union.unmerged:
        findings.append(
            Finding.of(
                codes.MISSING_CHUNKS,
                f"{union.unmerged} keys are only in the directories of processes, not in the merged store; "
                "they were read from there",
                severity="note",
                file=where,
            )
        )
    return findings


def _model_beside(listing: Listing, place: Place) -> tuple[dict[str, Any] | None, str | None]:
    """Read the yml that a conversion to MaxText left next to the step.

    Raises:
        FastshardError: ``FS211`` if it is not a config.
    """
    folder = place.folder
    while True:
        if file := _at(listing, place, folder, MODEL_FILE):
            path = file.path
            try:
                config = parse_yaml(listing.read_text(file, limit=1 << 20))
            except ValueError as error:
                raise FastshardError.of(codes.BAD_VALUE, f"not a config: {error}", file=path) from None
            if isinstance(config, dict) and config:
                return config, path
            raise FastshardError.of(codes.BAD_VALUE, "not a config: no keys", file=path)
        if not folder:
            return None, None
        folder = folder.rpartition("/")[0]


def _find_overridden(listing: Listing, place: Place, override: dict[str, Any]) -> list[Finding]:
    """Find settings of ``--config`` that differ from the yml next to the step."""
    try:
        own, path = _model_beside(listing, place)
    except FastshardError:
        return []
    return [] if own is None or path is None else maxtext_sizes.find_overridden_yml(own, override, path)


def _expected(tree: Tree, there: set[str], where: str) -> list[Finding]:
    """Report arrays in ``_METADATA`` that no store describes, and the reverse."""
    lacking = sorted(set(tree.arrays) - there)
    findings = [
        Finding.of(
            codes.MISSING_TENSOR,
            "named in _METADATA, but described in no store",
            file=where,
            tensor=name,
            help="name the directories of the other hosts as more CKPTs; if you passed all of them, choose "
            "another step with --step",
        )
        for name in lacking[:_NAMED]
    ]
    if len(lacking) > _NAMED:
        findings.append(
            Finding.of(codes.MISSING_TENSOR, f"and {len(lacking) - _NAMED} more arrays", file=where)
        )
    extra = sorted(there - set(tree.arrays) - set(tree.leaves))
    if extra:
        findings.append(
            Finding.of(
                codes.UNEXPECTED_FILE,
                f"_METADATA does not name {len(extra)} arrays that are stored",
                file=where,
                tensor=extra[0],
                help="restore the _METADATA that was saved with them if the model has them",
            )
        )
    return findings
