"""References (``--like``): known-good checkpoints of the same model, whose headers are compared with another
one's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import _core
from ..common import codes, safe_files
from ..common.errors import FastshardError, Finding, error_for
from ..common.listing import Folder, linked
from ..common.options import StrPath
from ..common.records import dataclass, field, replace
from ..common.regex import compile_when_used
from ..common.stored_places import show_text
from ..layouts.declaration import Source, is_state
from ..layouts.wrapper_names import bare
from ..models import config_json
from .expected_list import ExpectedTensors, from_document, roster_of
from .from_transformers import is_model, list_for

__all__ = ["Reference", "Whole", "read"]

#: Suffix of the name of an index.
_INDEX = ".index.json"
#: The name of a file that is one of several.
_SHARD = compile_when_used(r"-\d+-of-(\d+)\.(safetensors|bin)$")


@dataclass(frozen=True)
class Whole:
    """A checkpoint's full tensors, from the function that opens it."""

    source: Source
    findings: list[Finding]
    #: Stored name, dtype and shape of each tensor.
    tensors: list[tuple[str, str, list[int]]]
    #: The files that contain them.
    files: list[Path]


@dataclass(frozen=True)
class Reference:
    """A model with which a checkpoint is compared, as far as the reference describes it."""

    #: The path, as the caller gave it.
    path: str
    #: Its tensors by the model's own names; None for a config whose tensors follow from a layout table.
    roster: _core.Roster | None
    #: Its config.json, and the path of that file.
    config: dict[str, Any] | None = None
    config_file: Path | None = None
    #: Folders to search for its tokenizer and similar files; empty for a single file, whose folder may belong
    #: to anyone.
    places: list[Folder] = field(default_factory=list)
    #: The files with its tensors.
    files: list[Path] = field(default_factory=list)
    #: Total size of all tensors in bytes, if only an index describes them.
    total: int | None = None
    #: True if all its shapes are known.
    has_shapes: bool = True
    #: The list of transformers for a config, if the reference is one.
    listed: ExpectedTensors | None = None

    @property
    def own_config(self) -> tuple[dict[str, Any], Path] | None:
        """The reference's config and its path, for a checkpoint without one; None for a single file."""
        if self.config is None or self.config_file is None or not self.places:
            return None
        return self.config, self.config_file

    @property
    def authority(self) -> str | None:
        """Class, version and digest of the list, if the reference is one."""
        return None if self.listed is None else self.listed.authority

    def refuse_itself(self, roots: Iterable[Path], files: Iterable[Path], single: bool) -> None:
        """Refuse to compare a checkpoint with itself.

        Raises:
            FastshardError: ``FS515`` if the reference is the checkpoint with these roots and files.
        """
        at = Path(self.path).resolve()
        paths = {path.resolve() for path in files}
        is_root = not single and at in {root.resolve() for root in roots}
        if is_root or (paths and paths <= {path.resolve() for path in self.files}):
            raise FastshardError.of(
                codes.USAGE,
                "--like names the checkpoint itself, so missing tensors would not be noticed",
                file=self.path,
                help="name another checkpoint of the same model: the one that training started from, or an "
                "earlier step",
            )

    def refuse_inside(self, out: StrPath) -> None:
        """Refuse to overwrite the reference.

        Raises:
            FastshardError: ``FS505`` if the reference is OUT or is inside it.
        """
        at, to = Path(self.path).resolve(), Path(out).resolve()
        if at == to or at.is_relative_to(to):
            raise FastshardError.of(
                codes.OUT_INSIDE_SOURCE,
                "the reference (--like) is inside OUT",
                file=self.path,
                expected="a directory other than OUT",
                got=os.fspath(out),
                help="choose another OUT",
            )


def read(path: StrPath, opened: Callable[..., Whole]) -> Reference:
    """Read a reference: a checkpoint of any kind, a tensor file, an index, or a config.

    Args:
        path: the path, as the caller gave it.
        opened: opens a checkpoint by reading its headers; ``accept`` lists what it accepts.

    Raises:
        FastshardError: ``FS501`` if the path does not exist, ``FS502`` without read permission; the findings
            about it, each naming it as the reference; ``FS514`` for a lone config whose tensors cannot be
            listed.
    """
    at, given = Path(path), show_text(os.fspath(path))
    try:
        is_there = at.exists()
    except OSError as error:
        raise FastshardError.of(codes.PERMISSION, f"--like: {error.strerror}", file=given) from None
    if not is_there:
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            "--like: no such file or directory",
            file=given,
            help="name a good checkpoint of the same model: a directory, a file of tensors, an index or a "
            "config.json",
        )
    try:
        return _read(at, given, opened)
    except FastshardError as error:
        raise error_for([_of_reference(f, given) for f in error.findings]) from None
    except OSError as error:
        what = f"the reference {given} (--like) cannot be read: {error.strerror}"
        raise FastshardError.of(codes.PERMISSION, what, file=error.filename or given) from None


def _of_reference(finding: Finding, given: str) -> Finding:
    if finding.severity != "error":
        return finding
    return finding.replace(message=f"the reference {given} (--like) cannot be used: {finding.message}")


def _read(at: Path, given: str, opened: Callable[..., Whole]) -> Reference:
    if at.is_file() and at.name.endswith(_INDEX):
        return _of_index(at, given, opened)
    if at.is_file() and at.suffix == ".json":
        content = safe_files.read_object(at, safe_files.MAX_INDEX)
        return (
            _of_list(from_document(content, given), given) if "schema" in content else _of_config(at, given)
        )
    if at.is_dir() and (config_file := Folder.named(at).file("config.json")) and not _holds_more(at):
        return _of_config(config_file, given)
    if at.is_file() and (named := _SHARD.search(at.name)) and int(named[1]) > 1:
        raise FastshardError.of(
            codes.USAGE,
            "the file is only one of several files of the model",
            file=given,
            expected="a complete model",
            got=at.name,
            help="name its directory, or its index",
        )
    whole = opened(at)
    config, file = whole.source.model.config, whole.source.model.config_file
    if file is None or not is_model(config):
        config, file = _beside(at)
    roster = _core.Roster(list(_entries(whole)))
    places = whole.source.files.folders if at.is_dir() else []
    return Reference(given, roster, config, file, list(places), whole.files)


def _holds_more(folder: Path) -> bool:
    """Return True if a folder contains possible tensors or subfolders, besides a model's small files."""
    small = (".json", ".txt", ".model", ".md", ".jinja", ".py", ".tiktoken")
    found = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return any(
        entry.is_dir() or entry.name.endswith(_INDEX) or not entry.name.endswith(small) for entry in found
    )


def _entries(whole: Whole) -> Iterable[tuple[str, list[int | None] | None, str | None, bool]]:
    """Yield the model's tensors by its own names.

    These names omit the prefix and parts that wrappers add. Optimizer state is not part of the model.

    Raises:
        FastshardError: the findings about the checkpoint; ``FS106`` if it contains several copies of the
            model.
    """
    if any(f.severity == "error" for f in whole.findings):
        raise error_for(whole.findings)
    source = whole.source
    if source.names.other_prefixes:
        copies = (source.names.prefix, *source.names.other_prefixes)
        raise FastshardError.of(
            codes.AMBIGUOUS,
            "the reference holds several copies of the model",
            got=", ".join(f"{prefix}*" for prefix in copies),
            help="pass a reference with a single copy",
        )
    names = source.names.own or bare([name for name, *_ in whole.tensors])
    for name, dtype, shape in whole.tensors:
        own = names.get(name, name)
        if own.startswith(source.names.prefix) and not is_state(own):
            yield own.removeprefix(source.names.prefix), list(shape), dtype, False


def _of_index(at: Path, given: str, opened: Callable[..., Whole]) -> Reference:
    """Read a reference from an index: the headers if all its files are next to it, else only the names."""
    content = safe_files.read_object(at, safe_files.MAX_INDEX)
    listed = content.get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(n, str) for n in listed.values()):
        raise FastshardError.of(codes.BAD_VALUE, "the index has no weight_map", file=given)
    config, file = _beside(at)
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    known: dict[str, tuple[str, list[int]]] = {}
    files = []
    for name in sorted(set(listed.values())):
        path = at.parent / name
        if path.parent != at.parent or not safe_files.is_file(path):
            continue
        files.append(path)
        whole = opened(path, accept=("part",))
        if any(f.severity == "error" for f in whole.findings):
            raise error_for(whole.findings)
        known |= {
            tensor: (dtype, shape) for tensor, dtype, shape in whole.tensors if listed.get(tensor) == name
        }
        if lost := sorted(t for t, of in listed.items() if of == name and t not in known):
            raise FastshardError.of(
                codes.MISSING_TENSOR,
                f"its index names {len(lost)} tensors that are missing from their files",
                file=str(path),
                tensor=lost[0],
            )
    names = bare(list(listed))
    entries: list[tuple[str, list[int | None] | None, str | None, bool]] = []
    for name in listed:
        dtype, shape = known.get(name, (None, None))
        entries.append((names.get(name, name), None if shape is None else list(shape), dtype, False))
    has_shapes = len(known) == len(listed)
    total = total if type(total) is int and total > 0 and not has_shapes else None
    return Reference(given, _core.Roster(entries), config, file, [], files, total, has_shapes)


def _of_config(at: Path, given: str) -> Reference:
    config = safe_files.read_object(at, safe_files.MAX_CONFIG)
    if not is_model(config):
        raise FastshardError.of(
            codes.BAD_VALUE,
            "the file is not a model's config",
            file=given,
            expected="model_type",
            got="a file without a model type and without tensors",
        )
    # Its folder is the user's choice if it was named; what else lies beside a file that was may be anybody's.
    folder = Folder(at.parent, linked(at.parent), at if Path(given) == at else None)
    if config_json.layout_of(config, given) is None:
        if not config.get("architectures"):
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "the config names no class (architectures), so it is unclear whether the model has a head",
                file=given,
                help="add architectures to the config, or pass a good checkpoint of the model",
            )
        return replace(
            _of_list(list_for(config, given), given), config=config, config_file=at, places=[folder]
        )
    # A source that is read with this config is judged by the layout table.
    return Reference(given, None, config, at, [folder], [], has_shapes=False)


def _of_list(listed: ExpectedTensors, given: str) -> Reference:
    if listed.quantised:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "the config is of a quantised model, and the tensors that transformers lists have no scales",
            file=given,
            help="pass a good checkpoint of the model with the same quantisation",
        )
    return Reference(given, roster_of(listed), listed=listed)


def _beside(at: Path) -> tuple[dict[str, Any] | None, Path | None]:
    """Return the config.json in the folder of a path, if it is the config of a model."""
    folder = Folder.named(at) if at.is_dir() else Folder(at.parent, linked(at.parent), at)
    file = folder.file("config.json")
    if file is None:
        return None, None
    config = safe_files.read_object(file, safe_files.MAX_CONFIG)
    return (config, file) if is_model(config) else (None, None)
