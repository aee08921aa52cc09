"""The tensors that a config promises, listed by the installed transformers (``fastshard expected``)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common import codes, json_text, safe_files
from ..common.addresses import check_settings, is_address
from ..common.config_text import shown
from ..common.dtypes import TORCH_NAMES
from ..common.errors import FastshardError
from ..common.formatting import printable
from ..common.listing import Folder
from ..common.options import StrPath
from ..common.records import dataclass
from ..models.config_json import QUANTISED
from . import cached_lists, transformers_process
from .expected_list import ExpectedTensors, document_of, from_document

__all__ = [
    "LoadReport",
    "class_name",
    "expected_tensors",
    "installed_version",
    "is_model",
    "list_for",
    "try_load",
]

#: Version of the rules of this module and of the worker; lists from other versions are computed again.
RULES = 3
TIMEOUT = 60.0
#: Private memory limit for building a model. Importing torch and transformers takes 0.8 GiB; a model on
#: `meta` takes almost nothing.
MEMORY = 4 << 30
#: Keys that name code, files, kernels or number formats, and do not affect shapes. Kernels that a config
#: names are loaded from the Hub while a model is built. source: transformers 5.24 configuration_utils.py,
#: integrations/hub_kernels.py
_NO_SHAPE = {
    "auto_map",
    "quantization_config",
    "compression_config",
    "use_kernels",
    "kernel_config",
    "custom_generate",
    "custom_pipelines",
    "trust_remote_code",
    "code_revision",
    "token",
    "use_pretrained_backbone",
    "transformers_version",
}


def expected_tensors(
    path: StrPath,
    *,
    timeout: float = TIMEOUT,
    memory: int = MEMORY,
    cache: bool = True,
    storage_options: Mapping[str, str] | None = None,
) -> ExpectedTensors:
    """Lists the tensors that a config.json promises according to the installed transformers.

    A separate process builds the class that the config names on the ``meta`` device. It uses no weights,
    network, tokens or code of the checkpoint. The function stores the list in the user's cache
    (``$XDG_CACHE_HOME/fastshard``).

    Args:
        path: a config.json, or a directory that has one, or the address of one in a store.
        timeout: limit on CPU time in seconds; the limit on elapsed time is ten times as long.
        memory: limit in bytes on the private memory of the process.
        cache: False to disable reading and storing the list.
        storage_options: settings of the store that an address names, as for :func:`fastshard.open`.

    Raises:
        FastshardError: ``FS501`` if the config is missing, ``FS211`` if it is not the config of a model,
            ``FS514`` if transformers is not installed, does not know the model, or cannot build it within
            these limits.

    Examples:
        >>> fastshard.expected_tensors("model")  # the version is that of the installed transformers
        <ExpectedTensors GPTNeoXForCausalLM: 40 tensors, transformers ...>
    """
    if is_address(path):
        from ..stores.placeholders import find_local_paths

        (path,), _ = find_local_paths([path], check_settings(storage_options))
    at = Path(path)
    file = at if not at.is_dir() else Folder.named(at).file("config.json")
    if file is None or not file.exists():
        raise FastshardError.of(
            codes.NO_SUCH_PATH,
            "no config.json",
            file=os.fspath(path),
            help="name a config.json, or a directory that has one",
        )
    config = safe_files.read_object(file, safe_files.MAX_CONFIG)
    if not is_model(config):
        raise FastshardError.of(
            codes.BAD_VALUE,
            "the file is not a model config",
            file=str(file),
            expected="model_type",
            got="no such key",
        )
    return list_for(config, str(file), timeout=timeout, memory=memory, cache=cache)


def list_for(
    config: Mapping[str, Any],
    file: str,
    *,
    timeout: float = TIMEOUT,
    memory: int = MEMORY,
    cache: bool = True,
    only_kept: bool = False,
) -> ExpectedTensors:
    """Return the list for a parsed config.

    Raises:
        FastshardError: ``FS514``, as :func:`expected_tensors`, and, with ``only_kept``, if the cache has no
            list.
    """
    if not timeout > 0 or not memory > 0:
        raise FastshardError.of(
            codes.USAGE,
            "timeout and memory must be more than 0",
            expected="seconds and bytes",
            got=f"{timeout:g}, {memory}",
        )
    version = installed_version(file)
    name = class_name(config)
    if name is None and config.get("architectures"):
        raise FastshardError.of(
            codes.BAD_VALUE, f"architectures names no class: {shown(config['architectures'])}", file=file
        )
    request = {"config": cleaned(config), "class": name}
    quantised = any(part.get(key) for part in _parts(config) for key in QUANTISED)
    key = hashlib.sha256(json_text.canonical([RULES, version, request, quantised]).encode()).hexdigest()
    # Versions in development change under one number.
    keeps = cache and "dev" not in version
    if keeps and (kept := cached_lists.read(key)) is not None:
        with contextlib.suppress(FastshardError):
            found = from_document(kept, "the cache")
            if found.transformers == version and name in (None, found.model_class) and len(found):
                return found
    if only_kept:
        raise FastshardError.of(codes.UNSUPPORTED, "no list for this config is cached", file=file)
    answer = transformers_process.answer_of(request, timeout, memory)
    if "error" in answer:
        raise _refused(answer, config, file, version)
    document = document_of(answer, quantised)
    expected = from_document(document, file)
    if keeps:
        cached_lists.keep(key, document)
    return expected


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List a config and the configs of its parts."""
    return [
        config,
        *(part for inner in config.values() if isinstance(inner, Mapping) for part in _parts(inner)),
    ]


def is_model(config: Mapping[str, Any] | None) -> bool:
    """Return True for the config of a model; other files of the same name are not."""
    return config is not None and bool(config.keys() & {"model_type", "architectures"})


def class_name(config: Mapping[str, Any]) -> str | None:
    """Return the class that a config names first; None if it names none."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) and first.isidentifier() else None


@dataclass(frozen=True)
class LoadReport:
    """The problems that from_pretrained would report for stored names and shapes."""

    #: Names in memory that it would initialise itself, and its other complaints.
    missing: tuple[str, ...]
    #: The prefix that its class adds to the names of the model without a head; may be empty.
    base: str


def try_load(
    config: Mapping[str, Any], stored: Iterable[tuple[str, str, Sequence[int]]]
) -> LoadReport | None:
    """Check with from_pretrained whether tensors load, using only their names and shapes.

    Args:
        config: content of the config.json.
        stored: names, dtypes (safetensors names) and shapes.

    Returns:
        Missing tensors and tensors with another shape; None if the check is not possible.
    """
    answer = transformers_process.answer_of(
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
    missing, base = answer.get("complaints"), answer.get("base")
    if not isinstance(missing, list) or not isinstance(base, str):
        return None
    return LoadReport(tuple(map(str, missing)), base)


def cleaned(value: Any) -> Any:
    """Remove keys that do not affect the model's shapes from a config, e.g. those for code and kernels."""
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


def installed_version(file: str) -> str:
    """Return the version of transformers without importing it."""
    from importlib import metadata

    try:
        metadata.version("torch")
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError as error:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"{error.name} is not installed; fastshard needs transformers with torch to list the tensors "
            "that a config promises",
            file=file,
            help="pass a good checkpoint of the model with --like, or install transformers",
            run=["pip install torch transformers"],
        ) from None
    if not re.match(r"[5-9]|\d\d", version):
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"transformers {version} is too old to list the tensors that a config requires",
            file=file,
            expected="version 5 or later",
            got=version,
            help="pass a good checkpoint of the model with --like, or install a newer transformers",
            run=["pip install -U transformers"],
        )
    return version


#: Message for a class or model_type that the installed transformers lacks.
UNKNOWN_CLASS = "does not know this model"


def _refused(answer: Mapping[str, Any], config: Mapping[str, Any], file: str, version: str) -> FastshardError:
    what = {"unknown": UNKNOWN_CLASS, "import": "cannot be imported"}.get(
        answer["kind"], "cannot build this model"
    )
    code = (
        "; its code is part of the checkpoint (auto_map), and fastshard never runs it"
        if "auto_map" in config
        else ""
    )
    help_ = "pass a good checkpoint of the model with --like"
    if answer["kind"] == "unknown" and not code:
        help_ = f"install a newer transformers, or {help_}"
    return FastshardError.of(
        codes.UNSUPPORTED,
        f"transformers {version} {what}: {printable(answer['error'][:300])}{code}",
        file=file,
        help=help_,
    )
