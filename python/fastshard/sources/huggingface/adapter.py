"""Hugging Face checkpoints: a single file or several files with an index, safetensors or ``.bin``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common import codes, safe_files
from ...common.config_text import shown
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.records import dataclass, field, replace
from ...common.regex import compile_when_used
from ...layouts.declaration import (
    Allowances,
    Binding,
    Description,
    Source,
    SourceFiles,
    Superseded,
    TensorIndex,
    Unit,
)
from ...models import huggingface, sidecar_files
from .. import hf_config, model_prefix, single_files
from ..base import Contents, Found, Options, lacking, missing, unexpected
from ..choose_step import ITSELF, Chosen, SeveralModels, folder_of, note_steps_within
from ..index_files import read_json, safe_relative
from ..step_names import is_step
from ..step_trackers import OF_RUNS
from . import index_mismatch
from .shard_offsets import not_whole, zeroed

#: (index, single file): safetensors first, because transformers prefers it.
_FORMS = [
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
    # accelerate with FSDP and FULL_STATE_DICT; it writes no index. source: accelerate utils/fsdp_utils.py
    ("pytorch_model_fsdp.bin.index.json", "pytorch_model_fsdp.bin"),
]
#: Additional models of a trainer that saves several: `model_1.safetensors`. source: accelerate
#: checkpointing.py
_FURTHER = compile_when_used(r"^(model|pytorch_model|pytorch_model_fsdp)_\d+\.(safetensors|bin)$")
#: Files of a PEFT adapter.
_ADAPTER = ("adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin"))
_SHARD = compile_when_used(r"^(.+)-(\d+)-of-(\d+)\.(safetensors|bin)$")


def _weight_map(content: Any, path: str) -> dict[str, str]:
    """Return the file for each tensor according to an index."""
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FastshardError.of(codes.BAD_VALUE, "the index has no weight_map", file=path)
    if odd := next((tensor for tensor, name in weight_map.items() if not isinstance(name, str)), None):
        raise FastshardError.of(
            codes.BAD_VALUE,
            "the index names no file for this tensor",
            file=path,
            tensor=str(odd),
            expected="a file name",
            got=shown(weight_map[odd]),
        )
    return weight_map


def slices_as_wholes(
    listing: Listing, folder: str, files: Sequence[File], contents: Contents, layout: str
) -> list[Finding]:
    """Warn of an index that names one file for a tensor whose slices are in several files.

    A loader that uses the index loads one slice as the full tensor. ``verify`` reports this as an error.

    Args:
        listing: contents of the root directories.
        folder: the folder that may contain an index.
        files: the ranks' files.
        contents: contents of the files.
        layout: a description of the files, for messages.

    Raises:
        FastshardError: ``FS211`` for an index that is not JSON.
    """
    file = listing.find(f"{folder}/{_FORMS[0][0]}" if folder else _FORMS[0][0])
    index = read_json(listing, file, safe_files.MAX_INDEX) if file is not None else None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if file is None or not isinstance(weight_map, dict):
        return []
    holders: dict[str, set[str]] = {}
    for i, one in enumerate(files):
        for tensor in contents.tensors(i):
            holders.setdefault(".".join(tensor["path"]), set()).add(one.name)
    false = sorted(t for t, name in weight_map.items() if len(holders.get(t, ())) > 1 and name in holders[t])
    if not false:
        return []
    return [
        Finding.of(
            codes.SLICE_AS_WHOLE,
            f"the index names one file for each of {len(false)} tensors, but several files hold slices of "
            "them",
            severity="warning",
            file=file.path,
            tensor=false[0],
            expected=f"no index next to {layout}",
            got=str(weight_map[false[0]]),
            help="move the index away: a loader that follows it reads one slice as the full tensor",
        )
    ]


def _report_further(listing: Listing, files: Sequence[File], inside: Mapping[str, File]) -> list[Finding]:
    """Report the files of additional models next to a single-file model.

    If the folder has a config.json, it belongs to the main model, and the others are named in a warning.

    Raises:
        SeveralModels: ``FS106`` if nothing determines which model to use.
    """
    if len(files) != 1 or files[0].name not in (single for _, single in _FORMS):
        return []
    stem = files[0].name.rpartition(".")[0]
    further = [f for name, f in sorted(inside.items()) if (m := _FURTHER.match(name)) and m[1] == stem]
    if not further:
        return []
    every = [file.path for file in (files[0], *further)]
    got = ", ".join(file.name for file in (files[0], *further[:7]))
    if "config.json" in inside:
        return [
            unexpected(
                file.path, f"not read: this is another model than the one of config.json and {files[0].name}"
            )
            for file in further
        ]
    finding = Finding.of(
        codes.AMBIGUOUS,
        "the directory holds several models of one trainer",
        file=files[0].folder or None,
        got=got,
        help="pass the file of one model as CKPT",
        run=[
            f"fastshard inspect {shlex.quote(str(listing.roots[file.root] / file.path))}"
            for file in (files[0], *further[:7])
        ],
    )
    raise SeveralModels(finding, files=every)


def _refuse_beside_adapter(listing: Listing, folder: str) -> None:
    """Refuse a model in a folder below an adapter, because either one may be meant.

    Raises:
        SeveralModels: ``FS106``; ``--step`` chooses, with the folder's name, or a dot for the adapter.
    """
    config, weights = _ADAPTER
    names = {file.name for file in listing.within("")}
    if config not in names or not names.intersection(weights):
        return
    name = folder.rpartition("/")[2]
    finding = Finding.of(
        codes.AMBIGUOUS,
        "the directory is a PEFT adapter, and also holds a model",
        got=f"{config}, {folder}",
        help=f"choose the model in {folder}, or the adapter itself with {ITSELF!r}",
        run=[f"--step {shlex.quote(name)}", f"--step {ITSELF}"],
    )
    raise SeveralModels(finding, steps=[name, ITSELF])


def _is_of_model(name: str) -> bool:
    """Return True for transformers' own names of model files, which no trainer uses for state."""
    shard = _SHARD.match(name)
    stem = f"{shard[1]}.{shard[4]}" if shard else name
    return stem in {file for form in _FORMS for file in form}


@dataclass(frozen=True)
class HfFiles:
    """The statements of an index about its files; empty without an index."""

    #: Path of the index.
    index: str | None = None
    #: The file that it names for each tensor, for existing files.
    weight_map: Mapping[str, int] | None = None
    #: Its ``total_size``, of any type.
    counted: object = None
    #: Tensors whose file is missing.
    lost: Mapping[str, str] = field(default_factory=dict)
    #: Files next to it that it does not name although their names follow the same pattern.
    unnamed: tuple[File, ...] = ()
    #: True if the files' names differ only in their numbers.
    by_numbers: bool = False


class HuggingFace:
    """Directories written by ``save_pretrained`` or fastshard, and single tensor files."""

    name = "hf"

    def detect(self, listing: Listing, options: Options) -> Found[HfFiles] | None:
        """Look for an index, for a single model file, or for numbered shards without an index."""
        if listing.single:
            single_files.refuse_unreadable(listing)
            return Found(self, "Hugging Face", listing.files[:1], HfFiles(), listing.files[0].folder)
        choice = self._folder(listing, options)
        if choice is None:
            return None
        folder, chosen = choice
        inside = {f.name: f for f in reversed(listing.within(folder))}
        found = self._found(listing, folder, inside)
        found = replace(found, findings=[*found.findings, *_report_further(listing, found.files, inside)])
        if chosen is None:
            steps = note_steps_within(self._holding(listing))
            found = replace(found, findings=[*steps, *found.findings])
        else:
            step = chosen.name if is_step(chosen.name) else None
            found = replace(found, findings=[*chosen.findings, *found.findings], step=step)
        names: dict[str, list[File]] = {}
        for file in listing.within(folder):
            names.setdefault(file.name, []).append(file)
        for file in found.files:
            copies = names.get(file.name, []) if file.folder == folder else []
            if len(copies) > 1:
                raise FastshardError.of(
                    codes.AMBIGUOUS,
                    "several of the directories have a file of this name",
                    file=file.path,
                    got=", ".join(str(listing.roots[f.root]) for f in copies),
                    help="pass one directory only; to merge the slices of tensor-parallel ranks, copy them "
                    "into one directory as tp_rank_00.safetensors, tp_rank_01.safetensors, ... with the "
                    "config.json",
                )
        return found

    @staticmethod
    def _folder(listing: Listing, options: Options) -> tuple[str, Chosen | None] | None:
        """Find the folder of a model: ``checkpoint-N`` by the rules for steps, parallel models by ``--step``.

        Raises:
            FastshardError: ``FS106`` if nothing determines which of several models to use, ``FS501`` if the
                step does not exist.
        """
        holding = HuggingFace._holding(listing)
        if not holding or (options.step == ITSELF and "" not in holding):
            return None
        if "" in holding and options.step in (None, ITSELF):
            # The directory given is the model itself.
            return "", None
        folders = set(holding)
        places = [(f.root, f.folder) for f in listing.files if f.folder in folders]
        folder, chosen, _ = folder_of(
            listing,
            places,
            options,
            OF_RUNS,
            holds_model=lambda at: any(_is_of_model(file.name) for file in listing.within(at)),
        )
        if options.step is None:
            _refuse_beside_adapter(listing, folder)
        return folder, chosen

    @staticmethod
    def _holding(listing: Listing) -> list[str]:
        """List the folders that contain a model's files."""
        return [
            folder
            for folder in listing.folders()
            if any(
                f.name in names or _SHARD.match(f.name) for names in _FORMS for f in listing.within(folder)
            )
        ]

    def _found(self, listing: Listing, folder: str, inside: dict[str, File]) -> Found[HfFiles]:
        for index, single in _FORMS:
            if (
                index in inside
                and single in inside
                and not index_mismatch.is_for(listing, inside, index, single)
            ):
                stale = index_mismatch.without_files(inside[index], single)
                return Found(self, "Hugging Face", [inside[single]], HfFiles(), folder, [stale])
            if index in inside:
                return self._from_index(listing, inside[index], inside)
            if single in inside:
                return Found(self, "Hugging Face", [inside[single]], HfFiles(), folder)
        shards = [(f, m) for f in inside.values() if (m := _SHARD.match(f.name))]
        return self._without_index(folder, shards)

    def _from_index(self, listing: Listing, index: File, inside: dict[str, File]) -> Found[HfFiles]:
        content = read_json(listing, index, safe_files.MAX_INDEX)
        weight_map = _weight_map(content, index.path)
        findings = []
        files: dict[str, File] = {}
        for tensor, name in weight_map.items():
            if name in files:
                continue
            if not safe_relative(name):
                findings.append(
                    Finding.of(
                        codes.UNSAFE_PATH,
                        "a file name in the index points outside the directory",
                        file=index.path,
                        tensor=str(tensor),
                        got=repr(name),
                        help="do not use this checkpoint: the index may be an attempt to read other files",
                    )
                )
            else:
                path = f"{index.folder}/{name}" if index.folder else name
                file = inside.get(name) or listing.find(path)
                if file is None:
                    findings.append(
                        missing(
                            path,
                            {},
                            f"named in {index.name}",
                            "copy it from the original checkpoint",
                        )
                    )
                    files[name] = File(-1, path, 0)
                else:
                    files[name] = file
        present = [f for f in files.values() if f.root >= 0]
        order = {f.path: i for i, f in enumerate(present)}
        numbers = {name: order[file.path] for name, file in files.items() if file.path in order}
        expected = {tensor: numbers[name] for tensor, name in weight_map.items() if name in numbers}
        absent = {name: file.path for name, file in files.items() if file.root < 0}
        lost = {tensor: absent[name] for tensor, name in weight_map.items() if name in absent}
        findings += index_mismatch.numbers(index, files, inside)
        metadata = content.get("metadata")
        counted = metadata.get("total_size") if isinstance(metadata, dict) else None
        unnamed = index_mismatch.like_named(inside, files)
        seen = HfFiles(index.path, expected, counted, lost, tuple(unnamed))
        # Files of the same naming that the index does not name are leftovers.
        for name, file in inside.items():
            if _SHARD.match(name) and name not in files and name.endswith(index.name.split(".")[1]):
                findings.append(unexpected(file.path, "the index does not name this file"))
        return Found(self, "Hugging Face", present, seen, index.folder, findings)

    def _without_index(self, folder: str, shards: list[tuple[File, re.Match[str]]]) -> Found[HfFiles]:
        """Find shards without an index. Shards named ``-0000i-of-0000n`` state their number themselves."""
        findings = []
        groups: dict[tuple[str, str, str], dict[int, File]] = {}
        for file, match in shards:
            groups.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = file
        if len(groups) > 1:
            raise FastshardError.of(
                codes.AMBIGUOUS,
                "the directory holds several sets of shards, and no index states which is the model",
                file=folder or None,
                got=", ".join(f"{stem}-*-of-{total}.{suffix}" for stem, total, suffix in sorted(groups)),
                help="keep one set there, or add its index",
            )
        ((stem, total, suffix), have) = next(iter(groups.items()))
        count = int(total)
        if count > 100_000:
            raise FastshardError.of(
                codes.UNSUPPORTED, f"{count} shards by the file name", file=next(iter(have.values())).path
            )
        first = 0 if 0 in have else 1
        for i, last in lacking(have, first, first + count - 1):
            name, end = (f"{stem}-{n:05d}-of-{total}.{suffix}" for n in (i, last))
            findings.append(
                missing(
                    f"{folder}/{name}" if folder else name,
                    {},
                    f"{count} shards by the file names",
                    "copy it from the original checkpoint",
                    upto=end if last > i else None,
                )
            )
        findings.append(
            Finding.of(
                codes.UNEXPECTED_FILE,
                "there is no index; the shards are read by their names",
                severity="note",
                file=f"{folder}/model.safetensors.index.json" if folder else "model.safetensors.index.json",
            )
        )
        return Found(
            self, "Hugging Face", [have[i] for i in sorted(have)], HfFiles(by_numbers=True), folder, findings
        )

    def declare(self, found: Found[HfFiles], listing: Listing, values: Contents, options: Options) -> Source:
        """Declare each file as one unit; config.json provides the axes if the model type is known."""
        weight_map = found.seen.weight_map
        part = single_files.find_part(listing, values, options.accept) if listing.single else None
        source = Source(
            framework=found.framework,
            step=found.step,
            model=Description(dialect=huggingface.DIALECT, saved_whole=True, is_part=part is not None),
            files=SourceFiles(units=[Unit(file=i) for i in range(len(found.files))]),
            binding=Binding(pass_unknown=True, vocab_size=options.vocab_size),
            index=TensorIndex(
                weight_map=weight_map,
                has_whole_files=weight_map is not None,
                path=found.seen.index,
                unnamed=found.seen.unnamed,
                by_numbers=found.seen.by_numbers,
                names=set(weight_map or ()),
                lost=dict(found.seen.lost),
                is_listed=weight_map is not None,
            ),
            allowances=Allowances(layers_may_repeat=True),
        )
        _take_copies_of_index(source, found.files, values, weight_map or {})
        counted, index = found.seen.counted, found.seen.index
        # Of a part it is known that it lacks the rest.
        slices = not_whole(found.files, values, index, counted) if part is None else []
        source.findings += slices
        source.findings += zeroed(listing, found.folder, found.files, values)
        folder = found.folder
        names = _in_order(values, len(found.files))
        if part is not None:
            source.findings.append(part)
        if listing.single:
            config, path = None, None
            if part is None:
                config, path = _config_beside(source, listing, options, names)
        else:
            # A model's own folder says what it is; that of a step may leave it to the one above.
            above = is_step((found.step or folder or listing.roots[0].absolute().name).rpartition("/")[2])
            source.files.folders = sidecar_files.places(listing, folder, above=above)
            config, path = hf_config.config_of(listing, folder, options, above=above)
        if _by_a_trainer(values, found):
            source.model = replace(source.model, saved_whole=False)
        is_torch = any(not file.name.endswith(".safetensors") for file in found.files)
        is_foreign = model_prefix.find_foreign_prefix(names, config) is not None
        is_wrapped = is_foreign or all(name.startswith("module.") for name in names)
        if is_torch or options.prefix is not None or is_wrapped:
            model_prefix.recognise(source, names, config, options.prefix, _paths(values, len(found.files)))
        if config is not None:
            hf_config.describe(source, listing, config, path, names, outer=source.names.prefix)
        if source.binding.layout is None and index is not None and not slices:
            # Elsewhere a table says what there must be.
            source.findings += index_mismatch.sizes(index, counted, found.files, values, config)
        return source


def _take_copies_of_index(
    source: Source, files: Sequence[File], contents: Contents, weight_map: Mapping[str, int]
) -> None:
    """Omit copies of tensors that the index places in another file, and note where the copies are."""
    superseded: dict[tuple[int, int], list[str]] = {}
    first: dict[str, int] = {}
    copies: dict[str, set[int]] = {}
    for file in range(len(files) if len(files) > 1 and weight_map else 0):
        for name in contents.listed(file) if contents.readable(file) else ():
            if first.setdefault(name, file) != file:
                copies.setdefault(name, {first[name]}).add(file)
    for name, places in copies.items():
        if weight_map.get(name) in places:
            for other in places - {weight_map[name]}:
                superseded.setdefault((weight_map[name], other), []).append(name)
    for (file, other), names in sorted(superseded.items()):
        dropped = set(names)
        unit = source.files.units[other]
        kept = [n for n in (contents.listed(other) if unit.only is None else unit.only) if n not in dropped]
        if not kept:
            # The index looks for others there: another file was copied over it.
            continue
        unit.only = kept
        source.index.superseded = [*source.index.superseded, Superseded(tuple(names), file, other)]
        source.findings.append(
            Finding.of(
                codes.OVERLAP,
                f"{len(names)} tensors of {files[other].path} are not read: the index names this file for "
                "them",
                severity="note",
                file=files[file].path,
                tensor=names[0],
                count=len(names),
            )
        )


def _config_beside(
    source: Source, listing: Listing, options: Options, names: Sequence[str]
) -> tuple[dict[str, Any] | None, Path | None]:
    """Return the config.json for a single file: the given one, or the one next to it.

    The one next to it must describe a model with these names. If it describes another model, the files next
    to it are not used as companion files, and a note reports this.
    """
    config, path = hf_config.config_of(listing, "", options)
    places = sidecar_files.beside_files(listing)
    beside = sidecar_files.first(places, "config.json")
    stored = None if beside is None else safe_files.read_object(beside, safe_files.MAX_CONFIG)
    if stored is None or single_files.fits_config(listing.roots[0] / listing.files[0].path, stored, names):
        source.files.folders = places
        return (stored, beside) if config is None else (config, path)
    if config is None:
        source.findings.append(
            Finding.of(
                codes.NOT_PROVABLE,
                "config.json next to the file is not used: most tensors have names that its model lacks",
                severity="note",
                file="config.json",
                unnoticed="config.json next to the file is of another model",
                help="pass the config if it is for this model",
                run=["--config FILE"],
            )
        )
    return config, path


def _in_order(contents: Contents, files: int) -> list[str]:
    """Return the names of all tensors, in file order."""
    return list(
        dict.fromkeys(name for i in range(files) if contents.readable(i) for name in contents.listed(i))
    )


def _paths(contents: Contents, files: int) -> dict[str, list[str]]:
    """Return the keys of nested dicts that lead to each tensor, by tensor name."""
    readable = (i for i in range(files) if contents.readable(i))
    return {".".join(t["path"]): t["path"] for i in readable for t in contents.tensors(i)}


def _by_a_trainer(contents: Contents, found: Found[HfFiles]) -> bool:
    """Return True for a state dict below a key, as a script with ``torch.save`` or Lightning writes it."""
    torch_files = (i for i, file in enumerate(found.files) if not file.name.endswith(".safetensors"))
    return any(len(t["path"]) > 1 for i in torch_files if contents.readable(i) for t in contents.tensors(i))
