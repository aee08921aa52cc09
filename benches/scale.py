"""What must hold at scale, not in a few megabytes: models of 175 billion parameters and more (P13 of
all_bars.py), kills and resumes.

    python benches/scale.py [kills] [gpt3-whole] [--kill-size 1GiB] [--kills 50] [--dir DIR]

Exits with 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import sparse_gpt3
import synthetic
from measure import MIB, Place, Result, Side, Target, digests, find_load, remove, run, show_size, workplace
from report import experts as write_experts


def expected(specs: list[synthetic.Spec], tp: int) -> dict[str, str]:
    """SHA-256 of every merged tensor, from the data's seeds and without the product."""
    return {s.name: synthetic.whole_digest(s, tp) for s in specs}


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


def measure_p13(place: Place) -> Iterator[Result]:
    """GPT-3 175B as Paxml with optimizer state and as GPT-NeoX, and models of many experts: opened, proven
    and planned."""
    source = place.disk / "sparse"
    layers, mesh = (96, sparse_gpt3.MESH) if place.full else (2, (8, 4))
    limits: Mapping[str, float] = {"seconds": 1, "peak_mib": 128}

    def measure(what: str, limits: Mapping[str, float], verb: str, *more: str) -> Result:
        targets = tuple(Target(name, limit) for name, limit in limits.items()) if place.full else ()
        return measure_command(f"{verb} of {what}", source, targets, verb, *more)

    size, _ = sparse_gpt3.paxml(source, layers, optimizer=True, mesh=mesh)
    about = f"GPT-3, {layers} layers, Paxml, {show_size(size)}"
    yield measure(about, limits, "inspect")
    yield measure(f"{about}, to MaxText", limits, "plan", "--to", "maxtext", "--optimizer")
    remove(source)
    size, _ = sparse_gpt3.neox(source, layers)
    about = f"GPT-3, {layers} layers, GPT-NeoX, {show_size(size)}"
    yield measure(about, limits, "inspect")
    yield measure(f"{about}, to Hugging Face", limits, "plan", "--to", "hf")
    remove(source)
    for experts, blocks, limits in ((384, 61, {"seconds": 5, "peak_mib": 512}), (896, 93, {"seconds": 15})):
        if not place.full:
            experts, blocks = 8, 2
        count = write_experts(source, blocks, experts)
        yield measure(f"{count:,} tensors, {blocks} layers of {experts} experts", limits, "plan")
        remove(source)
    yield Result("verify of the manifest of GPT-3", "verify", "", (), 0, reason="no case is written yet")


def measure_command(case: str, source: Path, targets: tuple[Target, ...], verb: str, *more: str) -> Result:
    """One command on a checkpoint of holes, its start not included."""
    side = Side(verb, "cli", {"command": [verb, str(source), *more, "--accept", "holes"]})
    result = Result(case, side.label, "", targets, 0, state="headers of sparse files, warm")
    load = find_load()
    result.records[side.label] = [run(side) | {"load": load}]
    print(f"  {case}: {result.records[side.label][0]['wall']:.3f} s", file=sys.stderr)
    return result


def gpt3_whole(folder: Path) -> bool:
    """The Paxml form converted to MaxText in bf16 from end to end; its chunks of 144 MiB need --memory
    1GiB."""
    source, out = folder / "paxml", folder / "out"
    size, chunks = sparse_gpt3.paxml(source)
    command = ["convert", str(source), str(out), "--to", "maxtext", "--dtype", "bf16", "--memory", "1GiB"]
    command += ["--fsync", "none", "--progress", "none", "-q"]
    record = run(Side("convert", "cli", {"command": command}))
    print(
        f"gpt3-whole: {size:,} bytes in {chunks:,} chunks: {record['wall']:.0f} s, CPU {record['cpu']:.0f} "
        "s, "
        f"peak RssAnon {record['anonymous'] / MIB:.0f} MiB"
    )
    remove(source)
    remove(out)
    return record["anonymous"] <= 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", nargs="*", help="kills (default), gpt3-whole")
    parser.add_argument("--kill-size", default="1GiB", type=synthetic.parse_size)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--dir", type=workplace, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastshard-scale-", dir=args.dir) as name:
        checks = {
            "kills": lambda: kills(Path(name), args.kill_size, args.kills),
            "gpt3-whole": lambda: gpt3_whole(Path(name)),
        }
        fine = {name: checks[name]() for name in args.check or ["kills"]}
    print(", ".join(f"{name}: {'holds' if ok else 'MISSED'}" for name, ok in fine.items()))
    return 0 if all(fine.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
