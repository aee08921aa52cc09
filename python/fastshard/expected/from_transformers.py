"""The tensors that a config promises, listed by the transformers that is installed (``fastshard expected``)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from ..common import safe_files
from ..common.config_text import shown
from ..common.dtypes import TORCH_NAMES
from ..common.errors import FastshardError
from ..common.formatting import printable
from ..common.listing import Folder
from ..common.options import StrPath
from . import cached_lists

__all__ = [
    "SCHEMA", "ExpectedTensor", "ExpectedTensors", "Part", "class_name", "complaints", "document_of", "expected_tensors", "from_document", "is_model", "list_for", "patterns", "roster_of",
    "unexpected_allowed",
]  # fmt: skip

SCHEMA = "fastshard.expected.v1"
#: Changes with the rules of this module and of the worker: what they made before is made again.
RULES = 2
TIMEOUT = 60.0
#: Private memory that building may take. An import of torch and transformers takes 0.8 GiB, a model on `meta` next to nothing.
MEMORY = 4 << 30
_WORKER = Path(__file__).with_name("transformers_worker.py")
_DTYPES = {torch: name for name, torch in TORCH_NAMES.items()}
#: Keys that name code, files, kernels or how numbers are stored: nothing of the model's shape. What a hub's kernel is named
#: by is loaded while a model is built. source: transformers 5.24 configuration_utils.py, integrations/hub_kernels.py
_NO_SHAPE = {
    "auto_map", "quantization_config", "compression_config", "use_kernels", "kernel_config", "custom_generate",
    "custom_pipelines", "trust_remote_code", "code_revision", "token", "use_pretrained_backbone", "transformers_version",
}  # fmt: skip
#: Keys that say that weights are quantised.
_QUANTISED = ("quantization_config", "compression_config")
#: What the worker has of the environment: where programs and libraries lie, and the language.
_ENVIRONMENT = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "SYSTEMROOT",
)


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a config promises."""

    name: str
    #: As safetensors spells it, e.g. ``BF16``.
    dtype: str
    shape: tuple[int, ...]


class Part(NamedTuple):
    """A box of a tensor on disk, and where its elements lie in one tensor in memory."""

    #: Name in memory.
    name: str
    #: Its first element there.
    offset: int
    #: First index of the box in each dimension.
    start: tuple[int, ...]
    #: Digits of each dimension, the outermost first: extent, and stride in memory in elements. An extent of 1 has none.
    dims: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a config promises; iterating gives those on disk, ``len`` is their number."""

    #: The class that was built, and its model_type.
    model_class: str
    model_type: str
    #: Version of transformers.
    transformers: str
    #: As `save_pretrained` would write them.
    tensors: tuple[ExpectedTensor, ...]
    #: As the model holds them.
    in_memory: tuple[ExpectedTensor, ...]
    #: Names on disk that are no tensor in memory as it is, and the parts that tile each; None for one that is computed. Of tied
    #: tensors those are among them that are not written.
    made: Mapping[str, tuple[Part, ...] | None]
    #: Names in memory that are one tensor.
    ties: tuple[tuple[str, ...], ...]
    #: Patterns (regular expressions) of names that may be missing, and of names that may be there besides.
    may_be_missing: tuple[str, ...]
    may_be_unexpected: tuple[str, ...]
    #: True if the config says that weights are quantised: the list has them as they are without that, and no scales.
    quantised: bool = False

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<ExpectedTensors {self.model_class}: {len(self)} tensors, transformers {self.transformers}>"

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @cached_property
    def mapping(self) -> dict[str, tuple[str, ...]]:
        """Names on disk that a tensor in memory has a part in, where they are not its own."""
        found: dict[str, dict[str, None]] = {}
        for name, parts in self.made.items():
            for part in parts or ():
                found.setdefault(part.name, {})[name] = None
        return {name: tuple(disk) for name, disk in found.items() if tuple(disk) != (name,)}

    def to_document(self) -> dict[str, Any]:
        """The JSON document that ``--like`` takes."""
        return {
            "schema": SCHEMA,
            "class": self.model_class,
            "model_type": self.model_type,
            "transformers": self.transformers,
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "in_memory": [[t.name, t.dtype, list(t.shape)] for t in self.in_memory],
            "made": {name: None if parts is None else list(parts) for name, parts in self.made.items()},
            "ties": [list(group) for group in self.ties],
            "may_be_missing": list(self.may_be_missing),
            "may_be_unexpected": list(self.may_be_unexpected),
            "quantised": self.quantised,
        }


def from_document(document: object, file: str) -> ExpectedTensors:
    """Reads a list of expected tensors.

    Args:
        document: parsed JSON.
        file: its path, for messages.

    Raises:
        FastshardError: ``FS211`` if it is no such list.
    """
    try:
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return ExpectedTensors(
            _text(document["class"]),
            _text(document["model_type"]),
            _text(document["transformers"]),
            _tensors(document["tensors"]),
            _tensors(document["in_memory"]),
            {_text(name): _parts_of(parts) for name, parts in document["made"].items()},
            tuple(_texts(group) for group in document["ties"]),
            _texts(document["may_be_missing"]),
            _texts(document["may_be_unexpected"]),
            document["quantised"] is True,
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise FastshardError.of(
            "FS211",
            f"not a list of expected tensors: {why}",
            file=file,
            help="make it again: fastshard expected CONFIG -o FILE",
        ) from None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a name in it is not a text")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list in it is none")
    return tuple(map(_text, value))


def _parts_of(value: object) -> tuple[Part, ...] | None:
    if value is None:
        return None
    try:
        return tuple(
            Part(
                _text(name),
                int(offset),
                tuple(map(int, start)),
                tuple(tuple((int(n), int(stride)) for n, stride in digits) for digits in dims),
            )
            for name, offset, start, dims in value  # type: ignore[attr-defined]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"a part in it is none: {error}") from None


def _tensors(value: object) -> tuple[ExpectedTensor, ...]:
    if not isinstance(value, list):
        raise ValueError("its tensors are no list")
    found = {}
    for name, dtype, shape in value:
        if dtype not in TORCH_NAMES or not isinstance(shape, list):
            raise ValueError(f"a tensor in it has no known dtype or no shape: {name!r}")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ValueError(f"a tensor in it has a shape that is none: {name!r}")
        found[_text(name)] = ExpectedTensor(name, dtype, tuple(shape))
    if len(found) < len(value):
        raise ValueError("it names a tensor twice")
    return tuple(found.values())


def expected_tensors(
    path: StrPath, *, timeout: float = TIMEOUT, memory: int = MEMORY, cache: bool = True
) -> ExpectedTensors:
    """Lists the tensors that a config.json promises, by the transformers that is installed.

    The class that the config names is built on the ``meta`` device by a process of its own: without weights, network, tokens or
    code of the checkpoint. The list is kept in the user's cache (``$XDG_CACHE_HOME/fastshard``).

    Args:
        path: a config.json, or a directory that has one.
        timeout: seconds that it may take.
        memory: bytes of private memory that it may take.
        cache: False to neither read nor keep a list.

    Raises:
        FastshardError: ``FS501`` if there is no config, ``FS211`` if it is none of a model, ``FS514`` if transformers is not installed, does
            not know the model, or cannot build it within these limits.
    """
    at = Path(path)
    file = at if not at.is_dir() else Folder.named(at).file("config.json")
    if file is None or not file.exists():
        raise FastshardError.of(
            "FS501",
            "no config.json",
            file=os.fspath(path),
            help="name a config.json, or a directory that has one",
        )
    config = safe_files.read_object(file, safe_files.MAX_CONFIG)
    if not is_model(config):
        raise FastshardError.of(
            "FS211", "not the config of a model", file=str(file), expected="model_type", got="no such key"
        )
    return list_for(config, str(file), timeout=timeout, memory=memory, cache=cache)


def list_for(
    config: Mapping[str, Any],
    file: str,
    *,
    timeout: float = TIMEOUT,
    memory: int = MEMORY,
    cache: bool = True,
) -> ExpectedTensors:
    """The list for a config that was read.

    Raises:
        FastshardError: ``FS514``, as :func:`expected_tensors`.
    """
    if not timeout > 0 or not memory > 0:
        raise FastshardError.of(
            "FS515", "a limit is more than 0", expected="seconds and bytes", got=f"{timeout:g}, {memory}"
        )
    version = _installed(file)
    name = class_name(config)
    if name is None and config.get("architectures"):
        raise FastshardError.of(
            "FS211", f"architectures names no class: {shown(config['architectures'])}", file=file
        )
    asked = {"config": cleaned(config), "class": name}
    quantised = any(part.get(key) for part in _parts(config) for key in _QUANTISED)
    key = hashlib.sha256(json.dumps([RULES, version, asked, quantised], sort_keys=True).encode()).hexdigest()
    # Versions in development change under one number.
    keeps = cache and "dev" not in version
    if keeps and (kept := cached_lists.read(key)) is not None:
        with contextlib.suppress(FastshardError):
            found = from_document(kept, "the cache")
            if found.transformers == version and name in (None, found.model_class) and len(found):
                return found
    told = _asked(asked, timeout, memory)
    if "error" in told:
        raise _refused(told, config, file, version)
    document = document_of(told, quantised)
    made = from_document(document, file)
    if keeps:
        cached_lists.keep(key, document)
    return made


def document_of(told: Mapping[str, Any], quantised: bool = False) -> dict[str, Any]:
    """The document of a worker's answer, with dtypes as safetensors spells them."""
    tensors = {
        part: [[name, _DTYPES.get(dtype, dtype), shape] for name, dtype, shape in told[part]]
        for part in ("tensors", "in_memory")
    }
    return {"schema": SCHEMA, **told, **tensors, "quantised": quantised}


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A config and those of its parts."""
    return [
        config,
        *(part for inner in config.values() if isinstance(inner, Mapping) for part in _parts(inner)),
    ]


def is_model(config: Mapping[str, Any] | None) -> bool:
    """True for the config of a model, which others of the name are not."""
    return config is not None and bool(config.keys() & {"model_type", "architectures"})


def class_name(config: Mapping[str, Any]) -> str | None:
    """The class that a config names first; None if it names none."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) and first.isidentifier() else None


def complaints(
    config: Mapping[str, Any], stored: Iterable[tuple[str, str, Sequence[int]]]
) -> list[str] | None:
    """What from_pretrained would complain about, given what is stored: missing tensors, and those of another shape.

    Args:
        config: content of the config.json that was listed.
        stored: names, dtypes (as safetensors spells them) and shapes.

    Returns:
        Names or messages; None if nothing can tell.
    """
    told = _asked(
        {
            "config": cleaned(config),
            "class": class_name(config),
            "stored": [
                (name, TORCH_NAMES.get(dtype, "float32"), list(shape)) for name, dtype, shape in stored
            ],
        },
        TIMEOUT,
        MEMORY,
    )
    found = told.get("complaints")
    return found if isinstance(found, list) else None


def cleaned(value: Any) -> Any:
    """A config, or a part of one, with nothing but what shapes the model: no code, no kernels, no form of storage."""
    if isinstance(value, Mapping):
        return {
            key: cleaned(inner)
            for key, inner in value.items()
            if not (
                (key.startswith("_") and key != "__float__")
                or key.endswith("_implementation")
                or key in _NO_SHAPE
            )
        }
    return [cleaned(inner) for inner in value] if isinstance(value, list) else value


def _installed(file: str) -> str:
    """Version of transformers, which is not imported for it."""
    from importlib import metadata

    try:
        metadata.version("torch")
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise FastshardError.of(
            "FS514",
            f"{error.name} is not installed: transformers, built on torch, lists the tensors that a config promises",
            file=file,
            help="install it (pip install torch transformers), or pass a good checkpoint of the model with --like",
        ) from None
    if not re.match(r"[5-9]|\d\d", version):
        raise FastshardError.of(
            "FS514",
            f"transformers {version} is too old to list the tensors that a config promises",
            file=file,
            expected="version 5 or later",
            got=version,
            help="install a newer transformers, or pass a good checkpoint of the model with --like",
        )
    return version


def _packages() -> list[str]:
    """Where the worker looks for packages: where this process does, but for folders that anybody may fill."""
    here = Path.cwd().resolve()
    own = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "platstdlib")}
    found = []
    for entry in sys.path:
        path = Path(entry)
        if not entry or not path.is_absolute() or path.resolve() == here or str(path.resolve()) in own:
            continue
        if (path / "transformers").is_dir() or (path / "torch").is_dir() or "site-packages" in path.parts:
            found.append(entry)
    return found


def _environment(own: Path) -> dict[str, str]:
    """The environment of the worker: no secrets, nothing of the network, no device; it keeps what it must in a folder of its own."""
    kept = {
        name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("LC_")
    }
    return kept | {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "",
        "USE_TORCH_XLA": "0", "USE_HUB_KERNELS": "0", "OMP_NUM_THREADS": "1",
        **dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), str(own)),
    }  # fmt: skip


def _asked(asked: dict[str, Any], timeout: float, memory: int) -> dict[str, Any]:
    """What the worker answers, within its limits."""
    if not sys.executable:
        return {"error": "there is no Python to run it by (sys.executable)", "kind": "import"}
    try:
        return _answered(asked, timeout, memory)
    except OSError as error:
        return {"error": f"its process could not be started: {error.strerror}", "kind": "import"}


def _answered(asked: dict[str, Any], timeout: float, memory: int) -> dict[str, Any]:
    """Runs the worker in a folder of its own, which goes with it.

    Raises:
        OSError: if there is no room for that.
    """
    if Path(tempfile.gettempdir()).resolve() == Path.cwd().resolve():
        raise OSError(errno.ENOENT, "no folder for temporary files")
    with tempfile.TemporaryDirectory(prefix="fastshard-expected-") as folder:
        root = Path(folder)
        for name in ("cwd", "home"):
            (root / name).mkdir()
        (root / "asked.json").write_text(json.dumps(asked | {"path": _packages(), "memory": memory}), "utf-8")
        words = [sys.executable, "-I", str(_WORKER), str(root / "asked.json"), str(root / "answer.json")]
        with (root / "said").open("wb") as said:
            process = subprocess.Popen(
                words, cwd=root / "cwd", env=_environment(root / "home"), stdin=subprocess.DEVNULL, stdout=said,
                stderr=said, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"it takes longer than {timeout:g} s", "kind": "limit"}
            finally:
                if process.poll() is None:
                    # All that it has started, however this ends.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        try:
            answer: dict[str, Any] = json.loads((root / "answer.json").read_text("utf-8"))
            return answer
        except (OSError, ValueError):
            last = (root / "said").read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
            why = f"its process ended with {process.returncode}" + (f": {last[-1]}" if last else "")
            return {"error": f"{why}; it may take {memory >> 20:,} MiB of memory", "kind": "limit"}


def _refused(told: Mapping[str, Any], config: Mapping[str, Any], file: str, version: str) -> FastshardError:
    what = {"unknown": "does not know this model", "import": "cannot be imported"}.get(
        told["kind"], "cannot build this model"
    )
    code = (
        "; its code is part of the checkpoint (auto_map), which is never executed"
        if "auto_map" in config
        else ""
    )
    help_ = "pass a good checkpoint of the model with --like"
    if told["kind"] == "unknown" and not code:
        help_ = f"install a newer transformers, or {help_}"
    return FastshardError.of(
        "FS514",
        f"transformers {version} {what}: {printable(told['error'][:300])}{code}",
        file=file,
        help=help_,
    )


def roster_of(listed: ExpectedTensors, in_memory: bool = False) -> _core.Roster:
    """The list as what a checkpoint is compared with: its names on disk or in memory, and of tied tensors any.

    Dtypes are not compared: a model is saved in the dtype that it was trained in, whatever its config says.
    """
    optional = patterns(listed.may_be_missing)
    shapes = {t.name: t.shape for t in listed.in_memory}
    entries: dict[str, tuple[str, list[int | None] | None, str | None, bool]] = {
        t.name: (t.name, list(t.shape), None, any(p.search(t.name) for p in optional))
        for t in (listed.in_memory if in_memory else listed.tensors)
    }
    groups: list[list[str]] = []
    for group in listed.ties:
        mapping = {} if in_memory else listed.mapping
        spelled = {one: name for name in group for one in mapping.get(name, (name,))}
        if not spelled.keys() & entries.keys():
            continue
        for one, name in spelled.items():
            if one not in entries and name in shapes:
                entries[one] = (one, list(shapes[name]), None, False)
        groups.append([one for one in spelled if one in entries])
    return _core.Roster(list(entries.values()), groups)


def patterns(texts: Iterable[str]) -> list[re.Pattern[str]]:
    """Those of a class's patterns that are some."""
    found = []
    for text in texts:
        with contextlib.suppress(re.error):
            found.append(re.compile(text))
    return found


def unexpected_allowed(listed: ExpectedTensors, names: Iterable[str]) -> set[str]:
    """Of names that the list has not, those that the class accepts besides."""
    allowed = patterns(listed.may_be_unexpected)
    return {name for name in names if any(pattern.search(name) for pattern in allowed)}
