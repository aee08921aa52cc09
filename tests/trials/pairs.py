"""Copies one file of a checkpoint over another of its kind, and swaps the two: every pair of every fixture.

    python tests/trials/pairs.py --fixtures-dir DIR --folder /dev/shm/pairs

Files are of a kind where their paths differ in numbers alone. Each damaged checkpoint is verified as it is
read by default, and with its optimizer where it holds one. What can come of it:

=========
====================================================================================================
caught     an error
harmless   the two files are the same, or the same comes out
named      something else comes out, and `not checked` says that nothing tells which is which (FS114)
MISSED     something else comes out with no word
false      (of the good checkpoint itself) an error, or a warning of equal contents
=========
====================================================================================================
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard

#: Folders of good checkpoints below the fixtures' folder.
FOLDERS = ("deepspeed", "gpt_neox", "maxtext_twins", "orbax", "sharded", "universal")
#: Files that hold no tensors.
_WORDS = (
    "latest",
    "layout.json",
    "_METADATA",
    "_CHECKPOINT_METADATA",
    "_sharding",
    "manifest.ocdbt",
    ".zarray",
    ".zattrs",
    ".zgroup",
    ".metadata",
    "_strings.json",
)
#: Most pairs of one kind in one fixture, unless told; more are thinned out evenly.
MOST = 40


def kind_of(path: Path) -> str:
    """A path without its numbers; files of a database have names made of hexadecimal digits."""
    parts = ["<hex>" if re.fullmatch(r"[0-9a-f]{32}", part) else part for part in path.parts]
    return re.sub(r"\d+", "#", "/".join(parts))


def pairs(root: Path, most: int) -> Iterator[tuple[Path, Path]]:
    """Pairs of like files that differ."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.name not in _WORDS):
        if path.suffix not in (".json", ".txt", ".yml"):
            kinds.setdefault(kind_of(path.relative_to(root)), []).append(path)
            # Another tensor's, where each has a file of its own.
            kinds.setdefault(f"{kind_of(Path(path.name))} of {path.stat().st_size} bytes", []).append(path)
    told = set()
    for files in kinds.values():
        found = [pair for pair in itertools.combinations(files, 2) if pair not in told]
        told.update(found)
        yield from found[:: max(1, -(-len(found) // most))]


def roots_of(fixture: Path) -> list[Path]:
    """The fixture as it is given to a command: the directories of several hosts are several roots."""
    return sorted(fixture.glob("node*")) or [
        fixture / "sharded" if (fixture / "sharded").is_dir() else fixture
    ]


def outcome(fixture: Path) -> tuple[list[str], str, list[dict[str, Any]]]:
    """Codes of errors, hashes of what would come out, and all findings."""
    findings, hashes = [], []
    accept = ["uncommitted"] if "ABORTED" in fixture.name else []
    # One whose norms were let drift is refused but for this.
    common: dict[str, Any] = {"replicas": "mean"} if "diverged" in fixture.name else {}
    for options in ({}, {"optimizer": True}, {"weights": "masters"}):
        try:
            plan = fastshard.plan(fastshard.open(*roots_of(fixture), accept=accept), **common, **options)
            found = [f.to_dict() for f in plan.findings]
            if not any(f["severity"] == "error" for f in found):
                came_up, of_plan, _ = plan.core.check({"memory": 512 << 20, "threads": 2}, None)
                hashes.append(of_plan)
                found += [f.to_dict() for f in came_up]
        except fastshard.FastshardError as error:
            found = [f.to_dict() for f in error.findings]
            if options and {f["code"] for f in found} <= {"FS402", "FS514"}:
                continue  # It holds no such state.
        except fastshard._core.CoreError as error:
            found = [f.to_dict() for f in error.args[0]]
        findings += found
    errors = sorted({f["code"] for f in findings if f["severity"] == "error"})
    return errors, json.dumps(hashes, sort_keys=True), findings


def judged(errors: list[str], content: str, good: str, findings: list[dict[str, Any]]) -> str:
    if errors:
        return "caught"
    if content == good:
        return "harmless"
    return "named" if any(f["code"] == "FS114" for f in findings) else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixtures-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "pairs", metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT", help="fixtures whose path holds TEXT")
    parser.add_argument(
        "--most",
        type=int,
        default=MOST,
        metavar="N",
        help=f"most pairs of one kind in one fixture (default: {MOST})",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print each trial")
    a = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    fixtures = [f for folder in FOLDERS for f in sorted((a.fixtures_dir / folder).iterdir()) if f.is_dir()]
    for fixture in (f for f in fixtures if a.only in str(f)):
        row = counts.setdefault(f"{fixture.parent.name}/{fixture.name}", Counter())
        errors, good, findings = outcome(fixture)
        equal = [f for f in findings if f["code"] in ("FS303", "FS304")]
        if equal or (errors and "BROKEN" not in fixture.name):
            row["false"] += 1
            print(f"false {fixture.name}: {errors} {[f['message'] for f in equal][:3]}")
        for first, second in pairs(fixture, a.most):
            for how in ("copy", "swap"):
                place = a.folder / fixture.name
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(fixture, place)
                x, y = (place / path.relative_to(fixture) for path in (first, second))
                if how == "copy":
                    shutil.copyfile(x, y)
                else:
                    x.rename(place / "aside")
                    y.rename(x)
                    (place / "aside").rename(y)
                result = judged(*(lambda e, c, f: (e, c, good, f))(*outcome(place)))
                row[f"{how} {result}"] += 1
                if a.verbose or result == "MISSED":
                    print(
                        f"{result} {how} {fixture.name}: {first.relative_to(fixture)} -> "
                        f"{second.relative_to(fixture)}"
                    )
        print(f"{fixture.parent.name}/{fixture.name}: {dict(row)}", flush=True)
    shutil.rmtree(a.folder, ignore_errors=True)
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"all: {dict(total)}, pairs: {sum(n for what, n in total.items() if what.startswith('copy'))}")
    return 1 if total["copy MISSED"] + total["swap MISSED"] + total["false"] else 0


if __name__ == "__main__":
    sys.exit(main())
