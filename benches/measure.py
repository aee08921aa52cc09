"""How sides are run against each other: interleaved rounds, pre-touched memory, paired ratios."""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIDES = Path(__file__).with_name("sides.py")


@dataclass(frozen=True)
class Side:
    """What one side runs: a function of `sides.py` and its arguments."""

    label: str
    run: str
    arguments: dict[str, Any]


@dataclass
class Result:
    """Figures of one case: per side, one record per round."""

    case: str
    ours: str
    peer: str
    bar: str
    nbytes: int
    records: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def ratios(self, key: str) -> list[float]:
        """Ours over the peer's, round by round."""
        pairs = zip(self.records[self.ours], self.records[self.peer], strict=True)
        return [ours[key] / max(peer[key], 1e-6) for ours, peer in pairs]

    def median(self, label: str, key: str) -> float:
        return statistics.median(r[key] for r in self.records[label])


def workplace(folder: str) -> Path:
    """The folder of that name, made if it is not there: what ``--dir`` names."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def touch(nbytes: int) -> None:
    """Has the system fault `nbytes` in, so that no run pays for memory that the host took back."""
    count = -(-nbytes // (4 << 20))
    code = f"import mmap; b = b'1' * {4 << 20}; m = mmap.mmap(-1, {count} * len(b)); [m.write(b) for _ in range({count})]"
    subprocess.run([sys.executable, "-c", code], check=True)


def run(side: Side) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, str(SIDES), side.run, json.dumps(side.arguments)]
    # Without bytecode each run would compile what it imports.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=kept)
    if done.returncode:
        raise RuntimeError(f"{side.label}: exit {done.returncode}")
    record: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return record


def remove(path: Path | None) -> None:
    if path is not None and path.exists():
        shutil.rmtree(path)


def warm(path: Path) -> None:
    """Reads every file once."""
    for file in files(path):
        with file.open("rb", buffering=0) as f:
            buffer = bytearray(8 << 20)
            while f.readinto(buffer):
                pass


def cold(path: Path) -> None:
    """Drops every file from the page cache and makes sure that it is gone."""
    os.sync()
    for file in files(path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        left = resident(file)
        if left > 0.01 * max(1, file.stat().st_size):
            raise RuntimeError(f"{file.name}: {left} bytes are still in memory")


def resident(file: Path) -> int:
    """Bytes of a file in the page cache."""
    size = file.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    access = mmap.PROT_READ | mmap.PROT_WRITE
    with file.open("rb") as f, mmap.mmap(f.fileno(), size, mmap.MAP_PRIVATE, access) as m:
        view = ctypes.c_char.from_buffer(m)
        failed = libc.mincore(ctypes.addressof(view), size, flags)
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(f & 1 for f in flags) * mmap.PAGESIZE


def files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def compare(
    result: Result,
    sides: list[Side],
    rounds: int,
    *,
    source: Path,
    out: Path | None,
    check: Callable[[Side, Path | None], None] | None = None,
    chill: bool = False,
) -> Result:
    """Runs sides in turn, `rounds` times; `check` looks at each side's first output."""  # fmt: skip
    if not chill:
        warm(source)
    for number in range(rounds):
        for side in sides:
            remove(out)
            os.sync()
            touch(result.nbytes if out else 256 << 20)
            if chill:
                cold(source)
            load = find_load()
            record = run(side) | {"load": load}
            result.records.setdefault(side.label, []).append(record)
            speed = result.nbytes / record["wall"] / 1e9
            print(f"  {result.case} {side.label}: {record['wall']:.2f} s, {speed:.2f} GB/s", file=sys.stderr)
            if number == 0 and check:
                check(side, out)
    remove(out)
    return result


def tensors(folder: Path) -> Iterator[tuple[str, Path, int, int]]:
    """(name, file, offset, bytes) of every tensor of a folder's safetensors files."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(length))
        for name, entry in table.items():
            if name != "__metadata__":
                lo, hi = entry["data_offsets"]
                yield name, path, 8 + length + lo, hi - lo


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, read without the product."""
    out = {}
    for name, path, offset, nbytes in tensors(folder):
        out[name] = file_digest(path, offset, nbytes)
    return out


def file_digest(path: Path, offset: int = 0, nbytes: int | None = None) -> str:
    """SHA-256 of a range of a file."""
    digest, left = hashlib.sha256(), path.stat().st_size if nbytes is None else nbytes
    with path.open("rb") as file:
        file.seek(offset)
        while left:
            block = file.read(min(left, 8 << 20))
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def find_load(seconds: float = 0.3) -> float:
    """How many cores other processes have had of late: of this machine, counted over some time."""

    def count() -> tuple[int, int]:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        return sum(fields[:8]), fields[3] + fields[4]

    before = count()
    time.sleep(seconds)
    after = count()
    passed = max(1, after[0] - before[0])
    return round((1 - (after[1] - before[1]) / passed) * (os.cpu_count() or 1), 2)


def machine(folder: Path) -> dict[str, str]:
    """What the figures belong to."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    found = subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True)
    kind = found.stdout.strip()
    return {
        "cpu": models[0] if models else platform.processor(), "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB", "kernel": platform.release(), "filesystem": kind,
        "python": platform.python_version(),
    }  # fmt: skip
