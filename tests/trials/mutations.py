"""Changes one thing in a checkpoint's structure and has it read: no traceback, no hang, no memory without
bound.

    python tests/trials/mutations.py --count 20000 --fixtures-dir DIR             # open, plan, read
    python tests/trials/mutations.py --count 2000 --commands --fixtures-dir DIR   # the commands

A hundred changes are tried in one process, so that what one leaves behind meets the next. What can come of a
change:

==========
=====================================================================================================
refused     errors
same        what would come out is what the good checkpoint gives
other       something else comes out: the change says something else (of a file without checksums)
TRACEBACK   an exception that is no finding, or the finding of a defect (FS520)
HANG        no outcome within a minute
MEMORY      the process took more than 2 GiB
LEFT        (commands) a refused command left something at its destination or beside it
==========
=====================================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import fastshard
from fastshard.cli import main as command_line
from mutate import mutate
from pairs import roots_of

FOLDERS = ("deepspeed", "gpt_neox", "maxtext_twins", "orbax", "sharded", "universal", "broken")
#: Changes in one process; seconds without an outcome; bytes of a process.
EACH, PATIENCE, MEMORY = 100, 60, 2 << 30
_BAD = ("TRACEBACK", "HANG", "MEMORY", "LEFT")
_OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {"to": "hf"},
    {"optimizer": True},
    {"to": "gpt_neox", "tp": 2},
    {"to": "maxtext"},
    {"to": "megatron"},
]
_COMMANDS = (
    ["inspect"],
    ["verify"],
    ["merge", "OUT"],
    ["merge", "OUT", "--optimizer"],
    ["convert", "OUT", "--to", "hf"],
    ["master-weights"],
    ["convert", "OUT", "--to", "dcp"],
    ["plan"],
    ["stats"],
    ["manifest", "-o", "OUT"],
    ["master-weights", "--repair", "OUT"],
)


def fixtures_of(folder: Path) -> list[Path]:
    return [
        f
        for name in FOLDERS
        if (folder / name).is_dir()
        for f in sorted((folder / name).iterdir())
        if f.is_dir()
    ]


def placed(fixture: Path, place: Path) -> Path:
    """The fixture as links to its files, without what is expected of it; who changes a file puts a new one in
    its place."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(
        shutil.copytree(
            fixture, place, copy_function=os.link, ignore=shutil.ignore_patterns("expected*.json")
        )
    )


def read(roots: list[Path], options: dict[str, Any]) -> tuple[str, str]:
    """Opens, plans and reads; whether it was refused, and the hashes of what would come out or the codes."""
    try:
        plan = fastshard.plan(fastshard.open(*roots), **options)
        found = [f.to_dict() for f in plan.findings]
        if not any(f["severity"] == "error" for f in found):
            came_up, hashes, _ = plan.core.check({"memory": 256 << 20, "threads": 2}, None)
            found += [f.to_dict() for f in came_up]
            if not any(f["severity"] == "error" for f in found):
                return "same", json.dumps(hashes, sort_keys=True)
    except fastshard.FastshardError as error:
        found = [f.to_dict() for f in error.findings]
    except fastshard._core.CoreError as error:
        found = [f.to_dict() for f in error.args[0]]
    codes = sorted({f["code"] for f in found if f["severity"] == "error"})
    return "TRACEBACK" if "FS520" in codes else "refused", " ".join(codes)


def command(roots: list[Path], place: Path, words: list[str]) -> tuple[str, str]:
    """Runs a command; what it came to, and its exit code."""
    out = place / "out"
    argv = [words[0], *map(str, roots), *(str(out) if word == "OUT" else word for word in words[1:])]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = command_line([*argv, "--memory", "1GiB"] if words[0] != "inspect" else argv)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    left = sorted(p.name for p in place.iterdir())
    if "Traceback" in said.getvalue() or "FS520" in said.getvalue():
        return "TRACEBACK", said.getvalue()[-1500:]
    if code and left:
        return "LEFT", f"exit {code}: {left}"
    return ("refused" if code else "same"), f"exit {code}"


def tried(a: argparse.Namespace, first: int) -> None:
    """Tries the changes of one process, and prints a line of JSON for each."""
    fixtures = fixtures_of(a.fixtures_dir)
    good: dict[tuple[str, int], tuple[str, str]] = {}
    for index in range(first, min(first + EACH, a.count)):
        rng = Random(f"{a.seed} {index}")
        fixture = rng.choice(fixtures)
        place = a.folder / f"{first}" / fixture.name
        which = rng.randrange(len(_OPTIONS))
        said = None
        while said is None:
            placed(fixture, place)
            said = mutate(rng, place)
        print(
            json.dumps({"index": index, "said": f"{fixture.parent.name}/{fixture.name}: {said}"}), flush=True
        )
        out = a.folder / f"{first} out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        try:
            if a.commands:
                result, detail = command(roots_of(place), out, list(rng.choice(_COMMANDS)))
            else:
                result, detail = read(roots_of(place), _OPTIONS[which])
                if result == "same":
                    key = (str(fixture), which)
                    if key not in good:
                        good[key] = read(roots_of(fixture), _OPTIONS[which])
                    if good[key] != (result, detail):
                        result, detail = "other", ""
        except BaseException:
            result, detail = "TRACEBACK", traceback.format_exc()[-1500:]
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if taken > MEMORY:
            result, detail = "MEMORY", f"{taken >> 20} MiB"
        print(json.dumps({"result": result, "detail": detail[:2000] if result in _BAD else ""}), flush=True)
        if taken > MEMORY:
            return
    shutil.rmtree(a.folder / f"{first}", ignore_errors=True)
    shutil.rmtree(a.folder / f"{first} out", ignore_errors=True)


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any] | None]:
    """What a process prints; None if it prints nothing for too long."""
    assert process.stdout is not None
    buffer = b""
    while select.select([process.stdout], [], [], PATIENCE)[0]:
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            return
        *lines, buffer = (buffer + more).split(b"\n")
        yield from (json.loads(line) for line in lines if line.startswith(b'{"'))
    yield None


@dataclass
class Counts:
    """How often each thing came of a kind of change."""

    others: bool
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, result: str, detail: str, about: dict[str, Any]) -> None:
        kind = about["said"].split(": ")[1].split(" ")[0]
        with self._lock:
            self.rows.setdefault(kind, Counter())[result] += 1
            if result in _BAD or (self.others and result == "other"):
                print(f"{result} {about['index']} {about['said']}\n{detail}", flush=True)

    def end(self) -> int:
        """Prints the table; the exit code."""
        for kind, row in sorted(self.rows.items()):
            print(f"{kind:16} {dict(sorted(row.items()))}")
        total: Counter[str] = sum(self.rows.values(), Counter())
        print(f"all: {dict(sorted(total.items()))}, changes: {sum(total.values())}")
        return 1 if any(total[result] for result in _BAD) else 0


def hundred(argv: list[str], counts: Counts) -> None:
    """Tries a hundred changes in a process of their own."""
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        about: dict[str, Any] = {}
        for line in lines_of(process):
            if line is None:
                counts.add("HANG", "", about)
                process.kill()
                return
            if "said" in line:
                about = line
            else:
                counts.add(line["result"], line["detail"], about)
                about = {}
        if process.wait() or about:
            # Of an uncaught error of a process the last line says which change it was.
            said.seek(0)
            detail = (
                f"the process ended with {process.returncode}: {said.read()[-1500:].decode(errors='replace')}"
            )
            counts.add("TRACEBACK", detail, about or {"index": -1, "said": "?: ended: "})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fixtures-dir", type=Path, default=Path(__file__).parent.parent / "fixtures", metavar="DIR"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "mutations", metavar="DIR"
    )
    parser.add_argument("--count", type=int, default=20000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--only", type=int, metavar="I", help="the hundred changes that begin at I, and all that is printed"
    )
    parser.add_argument("--from", type=int, default=0, dest="start", metavar="I", help="begin at I")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time (default: 2)")
    parser.add_argument("--commands", action="store_true", help="through the commands")
    parser.add_argument("--others", action="store_true", help="print what comes out otherwise, too")
    a = parser.parse_args()
    if a.only is not None:
        tried(a, a.only)
        return 0
    # Links to files need them on one file system, and the originals stay out of reach.
    shutil.rmtree(a.folder, ignore_errors=True)
    for folder in {f.parent for f in fixtures_of(a.fixtures_dir)}:
        shutil.copytree(folder, a.folder / "good" / folder.name)
    counts = Counts(others=a.others)
    with ThreadPoolExecutor(a.jobs) as pool:
        argv = [
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--folder",
            str(a.folder),
            "--fixtures-dir",
            str(a.folder / "good"),
        ]
        for done in [
            pool.submit(hundred, [*argv, "--only", str(i)], counts) for i in range(a.start, a.count, EACH)
        ]:
            done.result()
    shutil.rmtree(a.folder, ignore_errors=True)
    return counts.end()


if __name__ == "__main__":
    sys.exit(main())
