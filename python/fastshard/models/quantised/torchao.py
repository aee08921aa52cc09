"""torchao: tensor subclasses, whose parts a file's header describes.

source: torchao 0.18 prototype/safetensors
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...common import codes, json_text
from ...common.errors import FastshardError, Finding
from ...common.records import dataclass
from .settings import ImpossibleSettingError, Settings
from .sizes import Stored

__all__ = ["NAMES", "Record", "find_impossible", "is_of_torchao", "missing", "records_of", "without_header"]

#: The header key that lists the described tensors.
NAMES = "tensor_names"
#: Suffix of the parts that contain codes.
_CODES = "_qdata"


@dataclass(frozen=True)
class Record:
    """The description of a tensor in a header."""

    #: The text in the header.
    text: str
    fields: Mapping[str, Any]
    #: The stored tensors that make up a subclass; empty for a plain tensor. A header may also list plain
    #: tensors that no file contains: tied weights, and names in memory. source: transformers 5.24
    #: save_pretrained
    parts: tuple[str, ...]


def is_of_torchao(header: Any) -> bool:
    """Return True for the metadata of a safetensors file that describes torchao tensors."""
    if not isinstance(header, Mapping) or NAMES not in header:
        return False
    return any("_tensor_data_names" in _read_record(name, text) for name, text in header.items())


def records_of(headers: Iterable[Mapping[str, object]]) -> tuple[dict[str, Record], list[Finding]]:
    """Return the descriptions in the headers of all files, by tensor name, and report problems with them.

    Problems are contradictory headers, impossible values, and tensors that are listed but not described.
    """
    found: dict[str, Record] = {}
    listed: dict[str, None] = {}
    differing: dict[str, Finding] = {}
    for header in headers:
        listed |= dict.fromkeys(_listed(header.get(NAMES)))
        for name, text in header.items():
            fields = _read_record(name, text)
            if "_type" not in fields:
                continue
            try:
                _check_numbers(fields)
            except ImpossibleSettingError as error:
                differing[name] = _impossible(name, error)
            record = Record(str(text), fields, tuple(_parts(name, fields)))
            if found.setdefault(name, record).fields != fields:
                differing[name] = Finding.of(
                    codes.BAD_VALUE,
                    "two files describe a tensor of torchao differently, so one of them is from another "
                    "model",
                    tensor=name,
                    help="copy all files of the checkpoint again from the host that saved it",
                )
    unsaid = [
        Finding.of(
            codes.BAD_VALUE,
            "a header of torchao lists a tensor without describing it, so nothing can load it",
            tensor=name,
            help="copy the file again from the host that saved it",
        )
        for name in listed
        if name not in found
    ]
    return found, [*differing.values(), *unsaid]


def find_impossible(config: Mapping[str, Any]) -> list[Finding]:
    """Find impossible sizes of groups or blocks in ``quant_type`` of a config, at any depth."""
    below: list[Settings] = [Settings({"quant_type": config.get("quant_type")}, "quantization_config.")]
    while below:
        settings = below.pop()
        try:
            _check_sizes(settings)
        except ImpossibleSettingError as error:
            return [_impossible("config.json", error)]
        below += settings.each()
    return []


def _check_numbers(content: Mapping[str, Any]) -> None:
    """Check the sizes and the part names in a tensor's record.

    Raises:
        ImpossibleSettingError: for impossible values.
    """
    record = Settings(content)
    parts = content.get("_tensor_data_names")
    if parts is not None and not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
        raise record.refuse("_tensor_data_names", "a list of names")
    if (attributes := record.below("_data")) is not None:
        _check_sizes(attributes)


def _check_sizes(settings: Settings) -> None:
    """Check the sizes of groups and blocks: an integer, or one integer per dimension.

    source: torchao 0.18 quantization/

    Raises:
        ImpossibleSettingError: for impossible values.
    """
    for key in ("group_size", "block_size"):
        value = settings.values.get(key)
        for one in value if isinstance(value, list) else [value]:
            if one == -1 and type(one) is int:
                # It stands for all columns.
                continue
            Settings({key: one}, settings.path).integer(key)


def _impossible(name: str, error: ImpossibleSettingError) -> Finding:
    is_file = name.endswith(".json")
    return Finding.of(
        codes.CONFIG_DISAGREES,
        f"{name} states {error.key} {error.got} for torchao, so no code has a value",
        file=name if is_file else None,
        tensor=None if is_file else name,
        expected=f"{error.key}: {error.expected}",
        got=error.got,
        help=f"copy {name if is_file else 'the file'} again from the host that saved it",
    )


def missing(
    records: Mapping[str, Record], names: Collection[str], lost: Collection[str]
) -> Iterator[Finding]:
    """Yield findings for parts that headers require and no file contains, unless ``lost`` with a file."""
    for name, record in records.items():
        for part in record.parts:
            if part not in names and part not in lost:
                yield Finding.of(
                    codes.MISSING_TENSOR,
                    f"{name} is stored as a tensor of torchao, but a part of it is missing",
                    tensor=part,
                    help="copy the file that holds it from the original checkpoint",
                )


def without_header(tensors: Mapping[str, Stored]) -> list[Finding]:
    """Report the first torchao codes with scales in files whose headers do not describe any."""
    for name, (dtype, _) in tensors.items():
        base = name.removesuffix(_CODES)
        if base == name or not base.rpartition(".")[2].startswith("_") or dtype[0] == "B":
            continue
        if f"{base}_scale" in tensors:
            return [
                Finding.of(
                    codes.CONFIG_DISAGREES,
                    f"{name} holds codes of torchao with their scales, but no header describes them, which "
                    "quantization_config requires",
                    tensor=name,
                    expected="a description of each tensor in the headers of the files",
                    got="none",
                    help="copy the file again from the host that saved it: a tool that rewrote it has "
                    "dropped its __metadata__",
                )
            ]
    return []


def _listed(text: object) -> list[str]:
    """Return the names that a header lists."""
    try:
        names = json_text.value(text, "") if isinstance(text, str) else []
    except FastshardError:
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _read_record(name: str, text: object) -> dict[str, Any]:
    """Read the record in a header's text; empty for other text."""
    return json_text.object_in(text) if isinstance(text, str) and name != NAMES else {}


def _parts(name: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the stored tensors that make up one torchao tensor."""
    parts = fields.get("_tensor_data_names")
    if not isinstance(parts, list):
        return []
    module, _, leaf = name.rpartition(".")
    return [f"{module}{'.' if module else ''}_{leaf}_{part}" for part in parts if isinstance(part, str)]
