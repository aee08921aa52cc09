"""Changes that a checkpoint does not survive, made of what its files are: one at a time, chosen by chance.

A change knows the file's structure, so that it reaches what lies behind the first check: values of a header,
opcodes of a pickle whose archive is then written anew, fields of a container, names and places of files.
Random bytes come too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickletools
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

#: What stands where something else should.
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "a",
    "../a",
    "/etc/passwd",
    "\0",
    "\ud800",
    "é",
    "x" * 5000,
    "F32",
    "BF16",
    [],
    [[]],
    {},
    [0],
    [-1],
    [2**63, 2**63],
    [1] * 70,
    {"": None},
    {"a": {"a": {}}},
    ["a", 1, None],
]
#: Names of small files that are text but no JSON.
_TEXTS = re.compile(r"latest.*|.*\.(txt|ya?ml|gin)|.*tracker.*")
_NUMBER = re.compile(r"\d+")

Change = Callable[[Random, Path], str | None]


def mutate(rng: Random, root: Path) -> str | None:
    """Changes something below ``root``; what, or None if the draw fits nothing there."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    # What describes the others is few files, and the most is decided there.
    telling = [p for p in files if _is_telling(p)]
    file = rng.choice(telling if telling and rng.random() < 0.5 else files)
    changes = _ANY if rng.random() < 0.25 else _changes_of(file)
    change = rng.choice(changes)
    try:
        said = change(rng, file)
    except zipfile.BadZipFile:  # Of a fixture that is damaged already.
        return None
    return said and f"{change.__name__.strip('_')} {file.relative_to(root)}: {said}"


def _is_telling(file: Path) -> bool:
    return (
        file.suffix in (".json", ".metadata", ".yml", ".txt") or not file.suffix or file.name.startswith(".")
    )


def _changes_of(file: Path) -> list[Change]:
    head = file.read_bytes()[:64]
    if file.suffix == ".safetensors":
        return [_header, _header, _header, _header_length]
    if head.startswith(b"PK\x03\x04"):
        return [_pickled, _pickled, _pickled, _container, _members]
    if file.name == ".metadata":
        return [_pickle]
    if head.lstrip()[:1] in (b"{", b"["):
        return [_json, _json, _json_text]
    if _TEXTS.fullmatch(file.name):
        return [_text]
    if b"PK\x03\x04" in head or file.suffix == ".distcp":
        return [_record, _record, _bits]
    return [_bits, _span]


def _write(file: Path, data: bytes) -> None:
    """Puts a new file in the place of one that may be a link to the original."""
    file.unlink()
    file.write_bytes(data)


# -- what a JSON document says


def _nodes(document: Any) -> list[tuple[Any, Any]]:
    """Containers and keys of every value."""
    found, left = [], [document]
    while left:
        node = left.pop()
        items = (
            list(node.items())
            if isinstance(node, dict)
            else list(enumerate(node))
            if isinstance(node, list)
            else []
        )
        found += [(node, key) for key, _ in items]
        left += [value for _, value in items]
    return found


def changed(rng: Random, document: Any) -> tuple[Any, str]:
    """The document with one value replaced, moved, renamed or left out."""
    nodes = _nodes(document)
    if not nodes:
        return rng.choice(VALUES), "all"
    node, key = rng.choice(nodes)
    old, how = node[key], rng.randrange(6)
    if how == 0:
        del node[key]
        return document, f"{key!r} left out"
    if how == 1 and isinstance(node, dict):
        new = rng.choice([*node, "", "x", str(key) + "0", *map(str, VALUES[:8])])
        node[new] = node.pop(key)
        return document, f"{key!r} is called {new[:40]!r}"
    if how == 2:
        other, place = rng.choice(nodes)
        with contextlib.suppress(IndexError, KeyError):  # One of the two lies in the other.
            node[key], other[place] = json.loads(json.dumps(other[place])), json.loads(json.dumps(old))
        return document, f"{key!r} and {place!r} swapped"
    if how == 3 and isinstance(old, int):
        node[key] = rng.choice(
            [old + 1, old - 1, old * 2, -old, old // 2, old + 2**32, old * 10**6, str(old), float(old)]
        )
    elif how == 4 and isinstance(old, list):
        node[key] = rng.choice([old + old, old[:-1], old[::-1], [old], old * 1000])
    else:
        node[key] = rng.choice(VALUES)
    return document, f"{key!r} is {str(node[key])[:40]!r}"


def _json(rng: Random, file: Path) -> str | None:
    try:
        document, said = changed(rng, json.loads(file.read_bytes()))
    except (ValueError, RecursionError):
        return None
    _write(file, json.dumps(document).encode("utf-8", "surrogatepass"))
    return said


def _json_text(rng: Random, file: Path) -> str:
    text = file.read_bytes()
    places = [m.start() for m in re.finditer(rb'[{}\[\],:"0-9]', text)]
    at = rng.choice(places)
    new = rng.choice(
        [
            b"",
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b'"',
            b"NaN",
            b"1e999",
            b"-",
            b"\xff\xfe",
            b"[" * 200000,
            b'{"a":' * 5000,
            b"9" * 5000,
        ]
    )
    _write(file, text[:at] + new + text[at + 1 :])
    return f"byte {at} is {new[:20]!r}"


def _text(rng: Random, file: Path) -> str:
    text = file.read_bytes()
    new = rng.choice(
        [
            b"",
            b"\0",
            b"\xff\xfe\xff",
            b"../..",
            b"/",
            b"global_step99999999999999999999999",
            b"release",
            b"x" * 100000,
            b"\n" * 1000,
            text * 2,
            text[: len(text) // 2],
            b"&a [*a,*a]",
            b"? " * 500,
            b"a: &a [*a]",
            b"!!python/object/apply:os.abort []",
            re.sub(rb"\d+", lambda m: str(int(m[0]) + 1).encode() if rng.random() < 0.3 else m[0], text),
            re.sub(
                rb"\d+",
                lambda m: str(rng.choice(VALUES[2:18])).encode() if rng.random() < 0.1 else m[0],
                text,
            ),
        ]
    )
    _write(file, new)
    return f"{new[:40]!r}"


# -- safetensors


def _header(rng: Random, file: Path) -> str | None:
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    try:
        document, said = changed(rng, json.loads(data[8 : 8 + length]))
    except ValueError:
        return None
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    _write(file, struct.pack("<Q", len(text)) + text + data[8 + length :])
    return said


def _header_length(rng: Random, file: Path) -> str:
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    new = (
        rng.choice(
            [0, 1, length - 1, length + 1, length + 8, len(data), 2**32, 2**63, 2**64 - 1, 100_000_001]
        )
        % 2**64
    )
    _write(file, struct.pack("<Q", new) + data[8:])
    return f"{new} bytes"


# -- pickles and their archives


def _opcodes(rng: Random, stream: bytes) -> tuple[bytes, str] | None:
    """The stream with one opcode changed, left out, put in or put twice."""
    try:
        found = [(op, arg, at) for op, arg, at in pickletools.genops(stream) if at is not None]
    except (ValueError, IndexError):
        return None
    ends = [at for _, _, at in found[1:]] + [len(stream)]
    index = rng.randrange(len(found))
    op, arg, at = found[index]
    end, how = ends[index], rng.randrange(6)
    piece = stream[at:end]
    if how == 0:
        return stream[:at] + stream[end:], f"{op.name} left out at {at}"
    if how == 1:
        return stream[:end] + piece * rng.choice([1, 1, 1000]) + stream[end:], f"{op.name} again at {at}"
    if how == 2:
        other = rng.choice(found)
        i = found.index(other)
        return stream[:at] + stream[other[2] : ends[i]] + stream[
            end:
        ], f"{other[0].name} for {op.name} at {at}"
    if how == 3:
        new = rng.choice(
            [
                b"N",
                b"\x88",
                b"]",
                b"}",
                b")",
                b"0",
                b"(",
                b"t",
                b"R",
                b"b",
                b"s",
                b"u",
                b"e",
                b"Q",
                b"\x81",
                b".",
                b"2",
                b"K\x00",
                b"K\xff",
                b"M\xff\xff",
                b"J\xff\xff\xff\xff",
                b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
                b"h\x00",
                b"j\xff\xff\xff\xff",
                b"G\x7f\xf0\0\0\0\0\0\0",
                b"X\x01\0\0\0a",
                b"cos\nsystem\n",
                b"cbuiltins\neval\n",
                b"ctorch\nfloat32\n",
                b"\x8b\xff\xff\xff\x7f",
                b"\x95" + b"\xff" * 8,
            ]
        )
        return stream[:at] + new + stream[at if rng.random() < 0.5 else end :], f"{new[:12]!r} at {at}"
    if isinstance(arg, str) and op.name in ("BINUNICODE", "SHORT_BINUNICODE"):
        new_text = rng.choice(
            [arg + "x", arg[:-1], _NUMBER.sub(lambda m: str(int(m[0]) + 1), arg), "", "a\0b", "é" * 300]
        ).encode()
        return stream[:at] + b"X" + struct.pack("<I", len(new_text)) + new_text + stream[
            end:
        ], f"{new_text[:30]!r} for {arg[:30]!r}"
    if (
        isinstance(arg, int)
        and not isinstance(arg, bool)
        and op.name in ("BININT", "BININT1", "BININT2", "LONG1")
    ):
        number = rng.choice([arg + 1, arg - 1, -arg, 0, arg * 2, 2**31 - 1, 2**62, -(2**40)])
        raw = number.to_bytes(9, "little", signed=True)
        return stream[:at] + b"\x8a\x09" + raw + stream[end:], f"{number} for {arg}"
    if isinstance(arg, str) and op.name == "GLOBAL":
        name = rng.choice(
            [
                "torch HalfStorage",
                "torch FloatStorage",
                "torch._utils _rebuild_parameter",
                "collections OrderedDict",
                "builtins getattr",
                "torch Size",
                "numpy dtype",
                "a b",
            ]
        )
        return stream[:at] + b"c" + name.replace(" ", "\n").encode() + b"\n" + stream[
            end:
        ], f"{name} for {arg}"
    return None


def _archive(
    data: bytes, change: Callable[[str, bytes], bytes], *, more: dict[str, bytes] | None = None
) -> bytes:
    """A zip archive written anew, its members stored at multiples of 64 bytes as torch's are."""
    into = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(into, "w") as new:
        for name, content in [
            *((m.filename, change(m.filename, old.read(m))) for m in old.infolist()),
            *(more or {}).items(),
        ]:
            info = zipfile.ZipInfo(name)
            info.extra = (
                b"FB" + struct.pack("<H", pad := -(into.tell() + 34 + len(name.encode())) % 64) + b"Z" * pad
            )
            new.writestr(info, content)
    return into.getvalue()


def _pickled(rng: Random, file: Path) -> str | None:
    found = _pickled_bytes(rng, file.read_bytes())
    if found is None:
        return None
    _write(file, found[0])
    return found[1]


def _pickled_bytes(rng: Random, data: bytes) -> tuple[bytes, str] | None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        stream = next((archive.read(n) for n in archive.namelist() if n.endswith("data.pkl")), None)
    made = stream and _opcodes(rng, stream)
    if not made:
        return None
    return _archive(data, lambda name, old: made[0] if name.endswith("data.pkl") else old), made[1]


def _pickle(rng: Random, file: Path) -> str | None:
    made = _opcodes(rng, file.read_bytes())
    if made is None:
        return None
    _write(file, made[0])
    return made[1]


def _record(rng: Random, file: Path) -> str | None:
    """Changes an archive inside a `.distcp` file; where its length changes, the ones behind it move."""
    data = file.read_bytes()
    ends = [m.end() + 18 for m in re.finditer(rb"PK\x05\x06", data)]
    if not ends:
        return None
    i = rng.randrange(len(ends))
    start, end = ([0, *ends][i], ends[i])
    made = _pickled_bytes(rng, data[start:end])
    if made is None:
        return None
    _write(file, data[:start] + made[0] + data[end:])
    return made[1]


def _container(rng: Random, file: Path) -> str:
    """Changes a field of a local header, of the directory or of an end record."""
    data = bytearray(file.read_bytes())
    places = [
        m.start() for m in re.finditer(rb"PK(\x01\x02|\x03\x04|\x05\x06|\x06\x06|\x06\x07|\x07\x08)", data)
    ]
    at = rng.choice(places) + rng.randrange(46)
    size = rng.choice([1, 2, 4, 8])
    new = rng.choice([bytes(size), b"\xff" * size, (1).to_bytes(size, "little"), rng.randbytes(size)])
    data[at : at + size] = new
    _write(file, bytes(data))
    return f"{new.hex()} at {at}"


def _members(rng: Random, file: Path) -> str:
    """Leaves a member out, renames it, cuts it, puts another of its name beside it, or deflates all."""
    data = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
    name, how = rng.choice(names), rng.randrange(5)
    if how == 0:
        new = _archive(data, lambda n, old: old[: len(old) // 2] if n == name else old)
    elif how == 1:
        new = _archive(data, lambda n, old: old + old if n == name else old)
    elif how == 2:
        new = _archive(
            data,
            lambda _, old: old,
            more={rng.choice(["a/data.pkl", "data.pkl", "x", names[0] + "/../y"]): b"\x80\x02}."},
        )
    else:
        into = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(data)) as old,
            zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as made,
        ):
            for member in old.namelist():
                called = (
                    member
                    if member != name or how == 4
                    else rng.choice(["x", member + "0", member.replace("data", "datb")])
                )
                made.writestr(called, b"" if member == name and rng.random() < 0.3 else old.read(member))
        new = into.getvalue()
    _write(file, new)
    return f"{name} ({how})"


# -- bytes


def _bits(rng: Random, file: Path) -> str:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    _write(file, bytes(data))
    return "bits"


def _span(rng: Random, file: Path) -> str:
    data = bytearray(file.read_bytes())
    size = rng.choice([1, 4, 8, 64, 1000])
    at = rng.randrange(len(data) + 1)
    data[at : at + size] = rng.choice(
        [b"", bytes(size), b"\xff" * size, rng.randbytes(size), bytes(data[:size])]
    )
    _write(file, bytes(data))
    return f"{size} bytes at {at}"


# -- files


def _cut(rng: Random, file: Path) -> str:
    data = file.read_bytes()
    size = rng.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1, rng.randrange(len(data) + 1)])
    _write(file, data[: max(0, size)])
    return f"{size} bytes"


def _longer(rng: Random, file: Path) -> str:
    data = file.read_bytes()
    _write(file, data + rng.choice([b"\0", bytes(4096), data, b"PK\x05\x06" + bytes(18)]))
    return "bytes at the end"


def _lost(rng: Random, file: Path) -> str:
    if rng.random() < 0.5:
        file.unlink()
        return "file"
    shutil.rmtree(file.parent)
    return "folder"


def _other_kind(rng: Random, file: Path) -> str:
    how = rng.randrange(5)
    file.unlink()
    if how == 0:
        file.mkdir()
    elif how == 1:
        os.mkfifo(file)
    elif how == 2:
        file.symlink_to(file)
    elif how == 3:
        file.symlink_to("/dev/zero")
    else:
        file.symlink_to(file.parent)
    return ("a folder", "a pipe", "a link to itself", "/dev/zero", "a link to its folder")[how]


def _renamed(rng: Random, file: Path) -> str:
    """Moves the file, or its folder, to another number, or copies it there."""
    old = file if rng.random() < 0.7 or not file.parent.name else file.parent
    numbers = [*_NUMBER.finditer(old.name)]
    if numbers:
        m = rng.choice(numbers)
        n = rng.choice(
            [
                str(int(m[0]) + 1),
                str(max(0, int(m[0]) - 1)),
                m[0] + "9",
                "0" + m[0],
                "9" * 25,
                "99999",
                "x",
                "",
            ]
        )
        name = old.name[: m.start()] + n + old.name[m.end() :]
    else:
        name = rng.choice(
            [
                old.name + "0",
                "x" + old.name,
                old.name.upper(),
                "é" + old.name,
                old.name + ".tmp",
                os.fsdecode(b"\xff"),
            ]
        )
    name = name or "x"
    new = old.with_name(name)
    if not new.exists():
        if rng.random() < 0.5 and old.is_file():
            shutil.copyfile(old, new)
        else:
            old.rename(new)
    return f"{old.name} -> {name!r}"


def _instead(rng: Random, file: Path) -> str:
    other = rng.choice(sorted(p for p in file.parent.iterdir() if p.is_file() and not p.is_symlink()))
    _write(file, other.read_bytes())
    return other.name


_ANY: list[Change] = [_cut, _longer, _lost, _other_kind, _renamed, _instead, _bits, _span]
