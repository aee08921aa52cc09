"""What must hold at scale, not in a few megabytes: memory, kills and resumes, 74,000 shard entries.

    python benches/scale.py [memory] [kills] [index] [gpt3] [gpt3-whole] [--size 8GiB] [--kill-size 1GiB] [--kills 50] [--dir DIR]

Exits with 1 if something does not hold. Times are printed and decide only for `index` and `gpt3`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sparse_gpt3
import synthetic
from measure import Side, digests, remove, run, workplace

MIB = 1 << 20
BUDGET = 256 * MIB


def expected(specs: list[synthetic.Spec], tp: int) -> dict[str, str]:
    """SHA-256 of every merged tensor, from the data's seeds and without the product."""
    return {s.name: synthetic.whole_digest(s, tp) for s in specs}


def memory(folder: Path, size: int) -> bool:
    """A merge of row and column shards, half of it one tensor, within --memory 256MiB."""
    source, out = folder / "source", folder / "out"
    specs = synthetic.model(size, "mixed", size // 2)
    n = synthetic.tp_safetensors(source, specs, 4)
    arguments = {"src": str(source), "out": str(out), "threads": 2, "memory": "256MiB"}
    record = run(Side("fastshard", "fastshard", arguments))
    same = digests(out) == expected(specs, 4)
    print(
        f"memory: {n:,} bytes, largest tensor {max(s.nbytes() for s in specs):,}: peak RssAnon "
        f"{record['anonymous'] / MIB:.1f} MiB, VmHWM {record['rss'] / MIB:.1f} MiB, {record['wall']:.1f} s, "
        f"{'hashes as expected' if same else 'HASHES DIFFER'}"
    )
    remove(source)
    remove(out)
    return same and max(record["anonymous"], record["rss"]) <= BUDGET


def merge(source: Path, out: Path, *more: str) -> list[str]:
    common = ["--threads", "2", "--memory", "256MiB", "--progress", "none", "-q"]
    return [sys.executable, "-m", "fastshard", "merge", str(source), str(out), *common, *more]


def content(out: Path) -> str:
    """One digest of a result: every file but the manifest, whose plan is the same anyway."""
    digest = hashlib.sha256()
    for name, value in sorted(digests(out).items()):
        digest.update(f"{name} {value}\n".encode())
    return digest.hexdigest()


def told(out: Path) -> dict[str, Any]:
    """The result's manifest, without the times at which its files were written."""
    manifest: dict[str, Any] = json.loads((out / "fastshard.manifest.json").read_text())
    for file in manifest["files"]:
        file.pop("mtime_ns", None)
    return manifest


def kills(folder: Path, size: int, count: int, seed: int = 0) -> bool:
    """kill -9 at random instants, also of runs that resume; what is published is always right."""
    source, out = folder / "source", folder / "out"
    specs = synthetic.model(size, "mixed", size // 4)
    synthetic.tp_safetensors(source, specs, 4)
    start = time.perf_counter()
    subprocess.run(merge(source, out), check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - start
    assert digests(out) == expected(specs, 4)
    want, manifest = content(out), told(out)
    remove(out)
    rng = random.Random(seed)
    kinds = ("killed", "too late", "resumed with work done", "published before the kill", "staging left")
    seen = dict.fromkeys(kinds, 0)
    bad = []
    while seen["killed"] < count:
        resumes = 0
        while True:
            process = subprocess.Popen(
                merge(source, out, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            time.sleep(rng.uniform(0.02, whole * 1.1))
            late = process.poll() is not None
            process.kill()
            process.wait()
            seen["too late" if late else "killed"] += 1
            journals = list(folder.glob(".out.fastshard-*/journal"))
            seen["resumed with work done"] += any(j.stat().st_size > 1000 for j in journals)
            if out.exists():
                seen["published before the kill"] += not late
                break
            resumes += 1
            if rng.random() < 0.6 or seen["killed"] >= count:
                done = subprocess.run(merge(source, out, "--resume"), capture_output=True, text=True)
                if done.returncode:
                    bad.append(f"resume: exit {done.returncode}: {done.stderr[-300:]}")
                break
        if not out.exists() or content(out) != want:
            what = "other hashes" if out.exists() else "nothing published"
            bad.append(f"after {resumes} kills: {what}")
        elif told(out) != manifest:
            bad.append("another manifest")
        left = [p.name for p in folder.glob(".out.fastshard-*")]
        if left:
            # Killed after the result appeared and before the staging folder was cleared.
            subprocess.run(merge(source, out, "--resume"), capture_output=True)
            seen["staging left"] += 1
            for name in left:
                remove(folder / name)
        remove(out)
    print(f"kills: {size:,} bytes, a run takes {whole:.1f} s; {seen}; {len(bad)} bad {bad[:3]}")
    remove(source)
    return not bad


def index(folder: Path) -> bool:
    """inspect and plan of 74,000 entries within 5 s and 256 MiB each."""
    fine = True
    for files in (512, 64):
        source = folder / "sparse"
        entries = synthetic.sparse(source, files)
        for command in ("inspect", "plan"):
            start = time.perf_counter()
            record = run(Side(command, "cli", {"command": [command, str(source), "--accept", "holes"]}))
            wall = time.perf_counter() - start
            print(
                f"index: {command} of {entries:,} entries in {files} files: {wall:.2f} s with the "
                f"interpreter's start, {record['wall']:.2f} s without, VmHWM {record['rss'] / MIB:.0f} MiB"
            )
            fine &= wall <= 5 and record["rss"] <= BUDGET
        remove(source)
    return fine


def gpt3(folder: Path) -> bool:
    """GPT-3 175B in Paxml's form, with optimizer state, and in GPT-NeoX's: opened and planned within 2 s and 256 MiB."""
    paxml, neox = folder / "paxml", folder / "neox"
    size, chunks = sparse_gpt3.paxml(paxml, optimizer=True)
    print(f"gpt3: Paxml, {size:,} bytes in {chunks:,} chunks")
    other, files = sparse_gpt3.neox(neox)
    print(f"gpt3: GPT-NeoX, {other:,} bytes in {files:,} files")
    fine = True
    for command in (
        ["inspect", str(paxml)],
        ["plan", str(paxml), "--to", "maxtext", "--optimizer"],
        ["inspect", str(neox)],
        ["plan", str(neox), "--to", "hf"],
    ):
        start = time.perf_counter()
        record = run(Side(command[0], "cli", {"command": [*command, "--accept", "holes"]}))
        wall = time.perf_counter() - start
        what = " ".join([command[0], Path(command[1]).name, *command[2:]])
        print(
            f"gpt3: {what}: {wall:.2f} s with the interpreter's start, {record['wall']:.2f} s without, "
            f"anonymous {record['anonymous'] / MIB:.0f} MiB, VmHWM {record['rss'] / MIB:.0f} MiB"
        )
        fine &= record["wall"] <= 2 and record["anonymous"] <= BUDGET
    remove(paxml)
    remove(neox)
    return fine


def gpt3_whole(folder: Path) -> bool:
    """The Paxml form converted to MaxText in bf16 from end to end; its chunks of 144 MiB need --memory 1GiB."""
    source, out = folder / "paxml", folder / "out"
    size, chunks = sparse_gpt3.paxml(source)
    command = ["convert", str(source), str(out), "--to", "maxtext", "--dtype", "bf16", "--memory", "1GiB"]
    command += ["--fsync", "none", "--progress", "none", "-q"]
    record = run(Side("convert", "cli", {"command": command}))
    print(
        f"gpt3-whole: {size:,} bytes in {chunks:,} chunks: {record['wall']:.0f} s, CPU {record['cpu']:.0f} s, "
        f"peak RssAnon {record['anonymous'] / MIB:.0f} MiB"
    )
    remove(source)
    remove(out)
    return record["anonymous"] <= 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", nargs="*", help="memory, kills, index, gpt3 (default: these), gpt3-whole")
    parser.add_argument("--size", default="8GiB")
    parser.add_argument("--kill-size", default="1GiB")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--dir", type=workplace, default=None)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fastshard-scale-", dir=args.dir))
    checks = {
        "memory": lambda: memory(folder, synthetic.parse_size(args.size)),
        "kills": lambda: kills(folder, synthetic.parse_size(args.kill_size), args.kills),
        "index": lambda: index(folder),
        "gpt3": lambda: gpt3(folder),
        "gpt3-whole": lambda: gpt3_whole(folder),
    }
    try:
        held = {name: checks[name]() for name in args.check or [c for c in checks if c != "gpt3-whole"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(", ".join(f"{name}: {'holds' if ok else 'MISSED'}" for name, ok in held.items()))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
