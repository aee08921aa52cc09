"""FIFOs, devices, sockets and folders where a file is read: named, never waited for, never read without
end."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fastshard.common import safe_files
from helpers import FIXTURES, HF, NEOX, TP4, Ran, at_once, cli, copy, spawn
from holding import HANG

ORBAX = sorted((FIXTURES / "orbax").iterdir())[0]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    # The name of a socket has at most 108 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def full(path: Path) -> None:
    path.symlink_to("/dev/full")


SPECIAL: dict[str, Callable[[Path], None]] = {"fifo": fifo, "socket": bound_socket, "zero": zeros}


def bounded(*argv: object) -> Ran:
    """In a process of its own, which must end soon and stay small."""
    process = spawn(*argv, "--json")
    try:
        out, err = process.communicate(timeout=HANG)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    assert "Traceback" not in err
    return Ran(process.returncode, out, err)


def in_place(path: Path, make: Callable[[Path], None]) -> None:
    if path.exists() or path.is_symlink():
        path.unlink()
    make(path)


@pytest.fixture
def dcp_ckpt(tmp_path: Path) -> Path:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


#: (checkpoint, file of it that readers open)
MEMBERS = [
    (HF, "model.safetensors.index.json"),
    (HF, "config.json"),
    (HF, "model-00001-of-00004.safetensors"),
    (TP4, "layout.json"),
    (TP4, "tp_rank_01.safetensors"),
    (NEOX, "latest"),
    (NEOX, "global_step4/mp_rank_00_model_states.pt"),
]


@pytest.mark.parametrize("kind", at_once(SPECIAL, ("fifo", "zero")))
@pytest.mark.parametrize("source, name", MEMBERS, ids=[name for _, name in MEMBERS])
def test_member_that_is_no_file_is_one_finding(source: Path, name: str, kind: str, tmp_path: Path) -> None:
    ckpt = copy(source, tmp_path / "ckpt")
    in_place(ckpt / name, SPECIAL[kind])
    ran = bounded("merge", ckpt, tmp_path / "out")
    # The link to /dev/zero leaves the checkpoint besides.
    found = ran.having("FS603" if kind == "zero" else "FS601", file=name)
    assert ran.code == 1 and len(found) == 1, ran.out
    assert not (tmp_path / "out").exists()
    assert bounded("verify", ckpt).code == 1


@pytest.mark.parametrize("kind", ["fifo", "socket"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_dcp_member_that_is_no_file(name: str, kind: str, dcp_ckpt: Path, tmp_path: Path) -> None:
    in_place(dcp_ckpt / name, SPECIAL[kind])
    ran = bounded("merge", dcp_ckpt, tmp_path / "out")
    assert ran.code in (1, 3) and (ran.having("FS601", file=name) or ran.having("FS104")), ran.out


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_orbax_member_that_is_no_file(kind: str, tmp_path: Path) -> None:
    ckpt = copy(ORBAX, tmp_path / "ckpt")
    name = next(p for p in sorted(ckpt.rglob("_METADATA")))
    in_place(name, SPECIAL[kind])
    ran = bounded("merge", ckpt, tmp_path / "out")
    assert ran.code == 1 and ran.having("FS601", file="_METADATA"), ran.out


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_folder_named_like_a_file_is_a_finding(name: str, tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (ckpt / name).unlink()
    (ckpt / name).mkdir()
    ran = bounded("merge", ckpt, tmp_path / "out")
    assert ran.code == 1 and ran.having("FS601", file=name, got="a directory")


def test_folder_named_latest_is_anybodys(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/model.safetensors").write_bytes(
        (HF / "model-00001-of-00004.safetensors").read_bytes()
    )
    assert bounded("inspect", tmp_path).code == 0


@pytest.mark.parametrize("kind", SPECIAL)
def test_checkpoint_that_is_no_file_and_no_folder(kind: str, tmp_path: Path) -> None:
    SPECIAL[kind](tmp_path / "model.safetensors")
    ran = bounded("inspect", tmp_path / "model.safetensors")
    assert ran.code == 2 and len(ran.having("FS513", message="not a regular file")) == 1


def test_names_that_nobody_reads_are_let_be(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    fifo(ckpt / "log.pipe")
    bound_socket(ckpt / "run.sock")
    assert bounded("merge", ckpt, tmp_path / "out").code == 0


#: Option that names a file -> verb
OPTIONS = [
    ("merge", "--config"),
    ("merge", "--expect"),
    ("merge", "--layout"),
    ("verify", "--expect"),
    ("verify", "--config"),
    ("convert", "--config"),
    ("plan", "--layout"),
    ("diff", "--config"),
]


@pytest.mark.parametrize("kind", [*SPECIAL, "directory", "null"])
@pytest.mark.parametrize(
    "verb, option",
    [pytest.param(*o, id="".join(o), marks=() if o[0] == "merge" else pytest.mark.slow) for o in OPTIONS],
)
def test_option_that_names_no_file(verb: str, option: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    make = {**SPECIAL, "directory": Path.mkdir, "null": lambda p: p.symlink_to("/dev/null")}[kind]
    make(path)
    more = {"merge": [tmp_path / "out"], "convert": [tmp_path / "out", "--to", "hf"], "diff": [HF]}
    ran = bounded(verb, HF, *more.get(verb, []), option, path)
    assert ran.code == 2, ran.out
    assert [f["code"] for f in ran.errors] in (["FS211"], ["FS501"]), ran.out
    assert "given.json" in ran.errors[0]["file"]


@pytest.mark.parametrize("kind", [*SPECIAL, "directory"])
def test_tokenizer_file_that_is_none(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    {**SPECIAL, "directory": Path.mkdir}[kind](tmp_path / "tokenizer/tokenizer.json")
    ran = bounded("merge", HF, tmp_path / "out", "--tokenizer", tmp_path / "tokenizer")
    assert ran.code == 1 and ran.having("FS601", file="tokenizer.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [*SPECIAL, "directory", "full"])
def test_manifest_is_written_to_a_file_only(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    {**SPECIAL, "directory": Path.mkdir, "full": full}[kind](path)
    before = (path.lstat().st_mode, path.lstat().st_ino)
    ran = bounded("manifest", TP4, "-o", path)
    assert ran.code == 2 and ran.having(
        "FS515", message="a directory, not a file" if kind == "directory" else "not a regular file"
    ), ran.out
    assert (path.lstat().st_mode, path.lstat().st_ino) == before and [p.name for p in tmp_path.iterdir()] == [
        "m.json"
    ]


def test_manifest_replaces_manifests_only(tmp_path: Path) -> None:
    mine = tmp_path / "weights.safetensors"
    mine.write_bytes(b"not to be lost")
    ran = cli("manifest", TP4, "-o", mine)
    assert ran.code == 2 and ran.having("FS504", file=str(mine))
    assert mine.read_bytes() == b"not to be lost"
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "m.json")
    for _ in range(2):
        assert cli("manifest", TP4, "-o", link).code == 0
    assert link.is_symlink() and json.loads((tmp_path / "m.json").read_text())["kind"] == "inventory"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "m.json", "weights.safetensors"]


def test_manifest_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / f".m.json.{os.getpid()}").symlink_to(tmp_path / "victim")
    with pytest.raises(fastshard.CannotRunError):
        fastshard.manifest(TP4, tmp_path / "m.json", memory="2GiB")
    assert (tmp_path / "victim").read_text() == "as it was"


def test_text_larger_than_its_bound_is_not_read(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    with (ckpt / "config.json").open("ab") as file:
        file.truncate(safe_files.MAX_TEXT + 1)
    ran = bounded("merge", ckpt, tmp_path / "out")
    assert ran.code == 1 and ran.having("FS601", file="config.json", expected="at most 67108864 bytes")


@pytest.mark.parametrize("option", ["--config", "--layout"])
def test_text_that_is_no_utf8(option: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(b"a: \xff\xfe")
    ran = bounded("merge", HF, tmp_path / "out", option, tmp_path / "given")
    assert ran.code == 2 and ran.having("FS211", message="not UTF-8 text")


# --- the helper itself


def test_reading_is_bounded_whatever_the_size_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert safe_files.read_bytes(path, 100) == b"x" * 100
    assert safe_files.read_bytes(path, 7, whole=False) == b"x" * 7
    with pytest.raises(fastshard.ProblemError, match="at most 99 bytes"):
        safe_files.read_bytes(path, 99)
    # A file of /proc has the size 0.
    assert b"Name:" in safe_files.read_bytes("/proc/self/status", 1 << 16)
    with pytest.raises(fastshard.ProblemError):
        safe_files.read_bytes("/proc/self/status", 10)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_same_compares_bytes(size: int, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(bytes(size))
    other.write_bytes(bytes(size))
    assert safe_files.same(one, other) and safe_files.same(one, one)
    other.write_bytes(bytes(size) + b"x")
    assert not safe_files.same(one, other)
    if size:
        other.write_bytes(bytes(size - 1) + b"x")
        assert not safe_files.same(one, other)
    other.unlink()
    fifo(other)
    with pytest.raises(fastshard.FastshardError, match="FIFO"):
        safe_files.same(one, other)


def test_failed_replacement_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text("before")
    safe_files.replace(path, "after")
    assert path.read_text() == "after"
    with pytest.raises(UnicodeEncodeError):
        safe_files.replace(path, "\udcff")
    assert path.read_text() == "after" and [p.name for p in tmp_path.iterdir()] == ["m.json"]


# --- nothing else opens files


#: Calls that open a file by its name.
_OPENING = {"open", "read_text", "read_bytes", "memmap", "fromfile", "cmp", "copyfile", "copy2"}
#: The package's own tables, libraries that open stores themselves, /dev/null, /proc, and a program's own
#: temporary folder and cache.
_EXCUSED = {
    "layouts/tables.py": {"read_text"},
    "reporting/page.py": {"read_text"},
    "zarr/array_reader.py": {"open"},
    "zarr/array_writer.py": {"open"},
    "zarr/ocdbt_index.py": {"open"},
    "cli/std_streams.py": {"open"},
    "checkpoint/promised.py": {"read_text"},
    "expected/transformers_process.py": {"open", "read_text", "read_bytes"},
    "expected/transformers_worker.py": {"read_text"},
    "expected/cached_lists.py": {"open"},
    # A request of urllib, and a placeholder that is made.
    "stores/objects.py": {"open"},
    "stores/placeholders.py": {"open"},
    # Metadata of installed packages, and files that an author's own test makes.
    "common/plugins.py": {"read_text"},
    "testing.py": {"read_bytes"},
    # Files that this run has made.
    "stores/hub_upload.py": {"open"},
    "stores/result_prefix.py": {"read_bytes"},
}


def opening_calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in _OPENING:
            yield node.lineno, node.func.id
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _OPENING:
            receiver = ast.unparse(node.func.value)
            # Listing.read_text and fastshard.common.safe_files are the way to read; os.open of /dev/null
            # reads nothing.
            if not receiver.endswith("listing") and receiver != "safe_files":
                yield node.lineno, f"{receiver}.{node.func.attr}"


def test_files_are_opened_in_one_place() -> None:
    root = Path(fastshard.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name == "common/safe_files.py":
            continue
        excused = _EXCUSED.get(name, set())
        found += [
            f"{name}:{line} {call}"
            for line, call in opening_calls(path)
            if call.rpartition(".")[2] not in excused
        ]
    assert found == []
    assert [call for _, call in opening_calls(root / "common/safe_files.py")] != [], (
        "the search itself finds nothing"
    )
    assert sys.modules["fastshard.common.safe_files"] is safe_files


@pytest.mark.parametrize("option", ["--config", "--expect"])
def test_a_file_of_gigabytes_is_refused_before_it_is_read(option: str, tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as large:
        large.write(b'{"format": "fastshard.manifest", ')
        os.truncate(large.fileno(), 40 << 30)
    started = time.process_time()
    ran = cli("verify", HF, option, file)
    assert time.process_time() - started < 5
    assert ran.code == 2 and [f["got"] for f in ran.errors] == [f"{40 << 30} bytes"]


#: A process of root reads whatever it likes, unless it has given that up.
WITHOUT_ROOT = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def without_root(*argv: object) -> dict[str, Any]:
    """The document that a command prints which may read what its user may."""
    command = [*WITHOUT_ROOT, sys.executable, "-m", "fastshard", *map(str, argv), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", [0o000, 0o600], ids=["neither listed nor entered", "not entered"])
@pytest.mark.parametrize(
    ("source", "folder"),
    [
        (HF, ""),
        (HF, "."),
        (NEOX, "global_step4"),
        (FIXTURES / "sharded/megatron_legacy_tp2_pp2", "iter_0000010/mp_rank_01_001"),
        (FIXTURES / "sharded/megatron_legacy_tp2_pp2", "iter_0000010"),
        (FIXTURES / "orbax/mp2_shared_good_063_zarr3_elided_zeros", "checkpoints/4000/items"),
    ],
    ids=str,
)
def test_a_directory_without_rights_is_named(source: Path, folder: str, mode: int, tmp_path: Path) -> None:
    """Not what it would have held: a file is not missing of which nobody could see whether it is there."""
    root = copy(source, tmp_path / "above/ckpt")
    closed = root / folder if folder else root.parent
    before = closed.stat().st_mode
    closed.chmod(mode)
    try:
        ran = without_root("verify", root)
    finally:
        closed.chmod(before)
    errors = [f for f in ran["findings"] if f["severity"] == "error"]
    assert ran["exit_code"] == 2, ran
    assert [(f["code"], f["file"]) for f in errors] == [("FS502", str(closed))], errors


@pytest.mark.parametrize("mode", [0o000, 0o600])
def test_a_destination_in_a_directory_without_rights(mode: int, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "within").mkdir(parents=True)
    closed.chmod(mode)
    try:
        ran = without_root("merge", HF, closed / "within/out")
    finally:
        closed.chmod(0o700)
    assert ran["exit_code"] == 2
    assert [(f["code"], f["file"]) for f in ran["findings"] if f["severity"] == "error"] == [
        ("FS502", str(closed))
    ], ran
