"""How sides are run against each other: interleaved rounds, pre-touched memory, paired ratios."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
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

import synthetic

SIDES = Path(__file__).with_name("sides.py")
MIB = 1 << 20
#: Ranks of the checkpoints that `Place` makes.
RANKS = 4
THREADS = len(os.sched_getaffinity(0))
#: More cores than these, taken by other processes, make a machine loaded.
IDLE = 0.2

Check = Callable[["Side", Path | None], None]


@dataclass(frozen=True)
class Side:
    """What one side runs: a function of `sides.py` and its arguments."""

    label: str
    run: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A limit of one of :meth:`Result.figures`."""

    figure: str
    limit: float
    at_least: bool = False
    #: The limit is stated for results of so many bytes or more, and for machines of so many cores or more.
    least_bytes: int = 0
    least_cores: int = 0

    def judge(self, figures: dict[str, float], nbytes: int, cores: int) -> str:
        """Compares a figure with the limit, where the limit is stated for such a run."""
        if cores < self.least_cores:
            return f"needs {self.least_cores} cores"
        if nbytes < 0.9 * self.least_bytes:
            return f"needs {show_size(self.least_bytes)}"
        if self.figure not in figures:
            return "not measured"
        value = figures[self.figure]
        return "reached" if (value >= self.limit if self.at_least else value <= self.limit) else "missed"


@dataclass
class Result:
    """Figures of one case: per side, one record per round."""

    case: str
    ours: str
    #: Empty where a limit is no ratio.
    peer: str
    targets: tuple[Target, ...]
    nbytes: int
    records: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    #: Figures that no record has.
    more: dict[str, float] = field(default_factory=dict)
    #: Where and how: the file system, and inputs in memory or not.
    state: str = ""
    #: Why the case was not run.
    reason: str = ""

    def ratios(self, key: str) -> list[float]:
        """Ours over the peer's, round by round."""
        pairs = zip(self.records[self.ours], self.records[self.peer], strict=True)
        return [ours[key] / max(peer[key], 1e-6) for ours, peer in pairs]

    def median(self, label: str, key: str) -> float:
        return statistics.median(r[key] for r in self.records[label])

    def loads(self) -> list[float]:
        """Cores that other processes had before each run."""
        return [r["load"] for records in self.records.values() for r in records]

    def figures(self) -> dict[str, float]:
        """Everything that a limit can be stated for: ratios are ours over the peer's, others are ours or
        `peer_`."""
        if not self.records:
            return {}
        found = dict(self.more)
        if self.peer:
            for name, key in (("wall", "wall"), ("cpu", "cpu"), ("memory", "anonymous")):
                ratios = self.ratios(key)
                found[f"{name}_ratio"] = statistics.median(ratios)
                found[f"{name}_ratio_min"], found[f"{name}_ratio_max"] = min(ratios), max(ratios)
            found["above_ms"] = 1e3 * (self.median(self.ours, "wall") - self.median(self.peer, "wall"))
        for label, prefix in ((self.ours, ""), (self.peer, "peer_")):
            if label:
                wall, cpu = self.median(label, "wall"), self.median(label, "cpu")
                found |= {f"{prefix}seconds": wall, f"{prefix}cpu_seconds": cpu}
                found[f"{prefix}imports"] = self.median(label, "imports")
                found[f"{prefix}peak_mib"] = self.median(label, "anonymous") / MIB
                if self.nbytes:
                    found[f"{prefix}gb_per_second"] = self.nbytes / wall / 1e9
                    found[f"{prefix}cpu_seconds_per_gb"] = cpu / self.nbytes * 1e9
        return found


@dataclass
class Place:
    """Where bars are measured, and how large: checkpoints are made on first use and kept for the bars that
    follow."""

    disk: Path
    memory: Path
    size: int
    rounds: int

    def source(self, kind: str, size: int = 0) -> tuple[Path, int]:
        """Four ranks' shards of matrices divided by rows or columns, on the disk; and the bytes of its
        tensors."""
        size = size or self.size
        folder = self.disk / f"{kind}-{size}"
        specs = synthetic.model(size, kind)
        if not folder.exists():
            synthetic.tp_safetensors(folder, specs, RANKS)
        return folder, sum(spec.nbytes() for spec in specs)

    @property
    def full(self) -> bool:
        """Whether cases whose size is none of bytes (layers, names) take their full one."""
        return self.size >= 1 << 30


def find_lack(package: str = "", program: str = "", memory: int = 0) -> str:
    """What is missing for a case: a package, a program or free memory; empty if nothing is."""
    if package and importlib.util.find_spec(package) is None:
        return f"needs {package}"
    if program and shutil.which(program) is None:
        return f"needs {program}"
    return f"needs {show_size(memory)} of free memory" if find_free_memory() < memory else ""


def find_free_memory() -> int:
    """Bytes that programs can have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def show_size(nbytes: float) -> str:
    """Bytes as people write them."""
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = max(0, min(len(units) - 1, (int(nbytes).bit_length() - 1) // 10))
    return f"{nbytes / (1 << 10 * power):.4g} {units[power]}"


def workplace(folder: str) -> Path:
    """The folder of that name, made if it is not there: what ``--dir`` names. Sides run in other folders, so
    it is absolute."""
    path = Path(folder).resolve()
    path.mkdir(parents=True, exist_ok=True)
    return path


def touch(nbytes: int) -> None:
    """Has the system fault `nbytes` in, half of its free memory at most, so that no run pays for what the
    host took back."""
    nbytes = min(nbytes, find_free_memory() // 2)
    if not nbytes:
        return
    count = -(-nbytes // (4 << 20))
    code = (
        f"import mmap; b = b'1' * {4 << 20}; m = mmap.mmap(-1, {count} * len(b)); [m.write(b) for _ in "
        f"range({count})]"
    )
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
    check: Check | None = None,
    chill: bool = False,
) -> Result:
    """Runs sides in turn, `rounds` times; `check` looks at each side's first output."""
    result.state = f"{find_file_system(source)}, {'cold' if chill else 'warm'}"
    if not chill:
        warm(source)
    load, looked = 0.0, 0.0
    for number in range(rounds):
        for side in sides:
            remove(out)
            os.sync()
            touch(result.nbytes if out else min(result.nbytes, 256 << 20))
            if chill:
                cold(source)
            # Once a second is enough where runs are short.
            if time.monotonic() - looked > 1:
                load, looked = find_load(), time.monotonic()
            record = run(side) | {"load": load}
            result.records.setdefault(side.label, []).append(record)
            print(f"  {result.case}, {side.label}: {record['wall']:.3f} s", file=sys.stderr)
            if number == 0 and check:
                check(side, out)
    remove(out)
    return result


def expect_same(
    read: Callable[[Path], dict[str, str]], expected: dict[str, str] | None = None, skip: str = ""
) -> Check:
    """A check that all sides write the same tensors: those expected, or the first side's; one side may be
    skipped."""
    known = [] if expected is None else [expected]

    def check(side: Side, out: Path | None) -> None:
        assert out is not None
        if side.label != skip:
            known.append(read(out))
            assert known[0] == known[-1], f"{side.label}: other tensors than expected"

    return check


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


def find_file_system(path: Path) -> str:
    """The kind of file system that holds a path."""
    found = subprocess.run(["findmnt", "-no", "FSTYPE", "-T", str(path)], capture_output=True, text=True)
    return found.stdout.partition("\n")[0] or "unknown"


def machine(folder: Path) -> dict[str, str]:
    """What the figures belong to."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / (1 << 20)
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "kernel": ".".join(platform.release().split(".")[:2]),
        "filesystem": find_file_system(folder),
        "python": platform.python_version(),
    }
