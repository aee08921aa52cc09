"""The companion files of a model (config, tokenizer, custom code), and the folders to search for them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from .. import _core
from ..common import codes, json_text, safe_files
from ..common.errors import FastshardError, Finding
from ..common.listing import Folder, Listing, linked, refuse_unprintable
from ..common.records import replace
from ..common.regex import compile_when_used
from ..common.stored_places import is_stored
from . import tokenizer

#: Companion files besides the tokenizer's. source: transformers utils/__init__.py, processing_utils.py
OTHERS = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
#: Files that must or should accompany weights that are passed on: model card, licence, notices.
DOCUMENTS = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt")
#: Folders in which trainers store files from Hugging Face. source: verl
#: utils/checkpoint/fsdp_checkpoint_manager.py, NeMo Automodel components/checkpoint/checkpointing.py
_SUBFOLDERS = ("huggingface", ".hf_metadata")
#: Keys that state where something was loaded from. source: transformers configuration_utils.py,
#: tokenization_utils_base.py
_LOADED_FROM = ("_name_or_path", "name_or_path", "special_tokens_map_file", "tokenizer_file")
#: The modules that sentence-transformers loads in order; each one except the model has its own folder.
#: source: sentence-transformers sentence_transformers/SentenceTransformer.py (_load_sbert_model)
MODULES = "modules.json"
#: Other files that it reads from the same folder.
_OF_MODULES = compile_when_used(r"config_sentence_transformers\.json|sentence_\w+_config\.json")
#: Maximum number of custom code files of a model.
_MAX_CODE = 64
#: Maximum number of files in the modules next to a model.
_MAX_MODULES = 256


def places(listing: Listing, folder: str, *, above: bool = True) -> list[Folder]:
    """Return the folders to search for a model's config and tokenizer, the nearest first.

    These are the folder of its tensors, the folders above it in the checkpoint, the folder above the
    checkpoint, and ``huggingface/`` and ``.hf_metadata/`` in each of them.

    Args:
        listing: contents of the root directories.
        folder: folder of the tensors, relative to a root.
        above: whether to search above the checkpoint too.
    """
    if listing.single:
        return []
    elsewhere = any(_core.is_remote(root) for root in listing.roots)
    levels: list[list[Folder]] = []
    for index, root in enumerate(listing.roots):
        at = folder
        if (file := listing.by_itself(index)) is not None:
            # Nobody has named its folder.
            levels.extend([] for _ in range(1 - len(levels)))
            levels[0].append(Folder(root, listing.links_within, file))
            continue
        chain = [Folder(root / at if at else root, listing.links_within, sifted=True)]
        while at:
            at = at.rpartition("/")[0]
            chain.append(Folder(root / at if at else root, listing.links_within, sifted=True))
        # What lies there on other hosts nobody has said.
        if above and not elsewhere:
            top = root.absolute().parent
            is_named = any(top.is_relative_to(other.absolute()) for other in listing.roots)
            chain.append(Folder(top, listing.links_within, None if is_named else root, sifted=is_named))
        for i, one in enumerate(chain):
            levels.extend([] for _ in range(i + 1 - len(levels)))
            levels[i].append(one)
    found: dict[Path, Folder] = {}
    for one in (one for level in levels for one in level):
        for place in (one, *(replace(one, path=one.path / name) for name in _SUBFOLDERS)):
            found.setdefault(place.path, place)
    return list(found.values())


def beside_files(listing: Listing) -> list[Folder]:
    """Return the folders of single files that were passed as CKPT."""
    pairs = zip(listing.roots, listing.named, strict=True)
    return [Folder(root, listing.links_within, None if root is path else path) for root, path in pairs]


def first(folders: Iterable[Folder], name: str) -> Path | None:
    """Return the file of this name from the first folder that contains it.

    Raises:
        FastshardError: ``FS601`` if something else has the name, ``FS603`` for a link that leaves the folder.
    """
    return next((path for folder in folders if (path := folder.file(name)) is not None), None)


def from_above(folders: Iterable[Folder], paths: Mapping[str, Path]) -> dict[str, str]:
    """Return the companion files from a folder above the checkpoint, by name.

    Their paths are relative to the checkpoint.
    """
    above = {f.path: f.beside for f in folders if f.beside is not None and f.beside.is_dir()}
    found = {}
    for name, path in paths.items():
        root = above.get(path.parent)
        if root is not None:
            found[name] = f"../{path.relative_to(root.absolute().parent).as_posix()}"
    return found


def passed_over(folders: Iterable[Folder], present: Collection[str]) -> list[Finding]:
    """Warn of companion files that are ignored, because anybody may have put them there.

    Args:
        folders: the searched folders.
        present: names of the companions that were found or given; one of a tokenizer's files is enough.
    """
    words = () if any(tokenizer.is_of(name) for name in present) else tokenizer.NAMES
    wanted = [name for name in ("config.json", *OTHERS, *words) if name not in present]
    left = [
        (folder.path / name, why)
        for folder in folders
        for name in wanted
        if (why := folder.why_not(name)) is not None
    ]
    if not left:
        return []
    (path, why), names = left[0], list(dict.fromkeys(path.name for path, _ in left))
    ways = [f"--tokenizer {path.parent}"] if any(tokenizer.is_of(name) for name in names) else []
    ways += [f"--config {path.parent / 'config.json'}"] if "config.json" in names else []
    taken = f"; to use them anyway, pass {' '.join(ways)}" if ways else ""
    return [
        Finding.of(
            codes.UNEXPECTED_FILE,
            f"not copied: {why}",
            severity="warning",
            file=str(path),
            expected="a directory that only you, root and the checkpoint's owner may write to",
            got=", ".join(names),
            help=f"copy the model's files into the checkpoint{taken}",
        )
    ]


def documents(folders: Iterable[Folder], config: Path) -> dict[str, Path]:
    """Find the model card and the licence next to ``config`` in the checkpoint, by name."""
    # Above the checkpoint, or below it, they are about something else.
    own = [folder for folder in folders if folder.beside is None and folder.path == config.parent]
    return {name: path for name in DOCUMENTS if (path := first(own, name)) is not None}


def beside(folders: list[Folder], config: Path | None) -> dict[str, Path]:
    """Find companion files besides the tokenizer's and config.json, by name.

    Args:
        folders: folders to search, the nearest first.
        config: the model's config.json; custom code is next to it.
    """
    found = {name: path for name in OTHERS if (path := first(folders, name)) is not None}
    if config is None:
        return found
    found |= documents(folders, config)
    # One that was given by itself lies in a folder that nobody has named.
    here = next((folder for folder in folders if folder.path == config.parent), None)
    here = here or Folder(config.parent, linked(config.parent), config)
    return found | _code(config, here) | _modules(here)


def differing(listing: Listing, paths: Iterable[Path]) -> list[Finding]:
    """Report differences between the parts of a checkpoint on several hosts' disks.

    Files at the same place in different root directories must have the same content. For parts on other
    hosts' disks, those hosts report differences. For parts in a store, this function reports them.

    Args:
        listing: contents of the root directories.
        paths: the files that are used.
    """
    findings = []
    elsewhere = {root for root in listing.roots if _core.is_remote(root) and not is_stored(root)}
    for path in paths:
        taken = next((root for root in listing.roots if path.is_relative_to(root)), None)
        if taken is None:
            continue
        inside = path.relative_to(taken)
        for index, root in enumerate(listing.roots):
            other: Path | None = root / inside
            if (file := listing.by_itself(index)) is not None:
                # Nobody has named its folder: what others put there is passed over.
                other = Folder(root, listing.links_within, file).file(inside.as_posix())
            if other is None or other == path or root in elsewhere:
                continue
            if not safe_files.is_file(other) or _same(path, other):
                continue
            findings.append(
                Finding.of(
                    codes.RANKS_DISAGREE,
                    f"two parts of the checkpoint have different versions of {path.name}",
                    file=str(other),
                    expected=f"the content of {path}",
                    got="other content",
                    help=_right_one(path.name),
                )
            )
    return findings


def _right_one(name: str) -> str:
    if name == "config.json":
        return "pass the config of this checkpoint with --config"
    return (
        "pass the tokenizer of this model with --tokenizer"
        if tokenizer.is_of(name)
        else "move the wrong one away"
    )


def _same(one: Path, other: Path) -> bool:
    contents = [safe_files.read_bytes(path, safe_files.MAX_TEXT) for path in (one, other)]
    if contents[0] == contents[1]:
        return True
    if one.suffix != ".json":
        return False
    try:
        first, second = (json_text.load(content) for content in contents)
    except ValueError:
        return False
    return bool(_without_paths(first) == _without_paths(second))


def _without_paths(value: Any) -> Any:
    """Return a config without the keys, at any depth, that state where it was loaded from."""
    if isinstance(value, dict):
        return {key: _without_paths(part) for key, part in value.items() if key not in _LOADED_FROM}
    return [_without_paths(part) for part in value] if isinstance(value, list) else value


def module_folders(path: Path) -> list[str]:
    """List the folders of the modules in a modules.json, without those outside the model's folder.

    A normalisation module has no files, so copies do not include its folder.
    """
    try:
        content = json_text.load(safe_files.read_text(path, safe_files.MAX_CONFIG))
    except ValueError:
        return []
    rows = content if isinstance(content, list) else []
    named = [
        row.get("path")
        for row in rows
        if isinstance(row, dict) and not str(row.get("type")).endswith(".Normalize")
    ]
    folders = [PurePosixPath(one) for one in named if isinstance(one, str) and one.strip("./")]
    return [str(one) for one in folders if not one.is_absolute() and ".." not in one.parts]


def _modules(folder: Folder) -> dict[str, Path]:
    """Find the modules of a sentence-transformers model: modules.json, the files that it names, and files
    next to it.

    They are copied byte for byte.
    """
    listed = folder.file(MODULES)
    if listed is None:
        return {}
    names = [MODULES, *(name for name in folder.names() if _OF_MODULES.fullmatch(name))]
    for module in module_folders(listed):
        for at, inner, files in os.walk(folder.path / module):
            inner.sort()
            inside = Path(at).relative_to(folder.path)
            names += [(inside / name).as_posix() for name in sorted(files) if not name.startswith(".")]
    if len(names) > _MAX_MODULES:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the directories that modules.json names also hold other files",
            file=str(listed),
            expected=f"at most {_MAX_MODULES} files",
            got=str(len(names)),
            help="pass a directory that holds only the model's files",
        )
    found = {name: path for name in names if (path := folder.file(name)) is not None}
    for path in found.values():
        refuse_unprintable(path.name, path)
    return found


def _code(config: Path, folder: Folder) -> dict[str, Path]:
    """Find the Python modules that a config.json's ``auto_map`` needs: all modules next to it, because they
    import each other.
    """
    content = json_text.object_in(safe_files.read_text(config, safe_files.MAX_CONFIG))
    if not isinstance(content.get("auto_map"), dict):
        return {}
    programs = (name for name in folder.names() if name.endswith(".py"))
    paths = [path for name in programs if (path := folder.file(name)) is not None]
    if len(paths) > _MAX_CODE:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the directory of a model with custom code (auto_map) also holds other programs",
            file=str(config.parent),
            expected=f"at most {_MAX_CODE} modules",
            got=str(len(paths)),
            help="pass a directory that holds only the model's files",
            run=["--config FILE"],
        )
    for path in paths:
        refuse_unprintable(path.name, path)
    return {path.name: path for path in paths}
