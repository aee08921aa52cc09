"""Fastshard against what people use: a markdown table of paired ratios.

    python benches/compare.py [--size 4GiB] [--rounds 5] [--only P1,P3] [--dir DIR] [--save]

Each side runs in a process of its own, imports done before the clock starts; sides take turns, round
by round, on the same bytes; outputs are compared by hash once per case.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import synthetic
from measure import Result, Side, compare, digests, file_digest, files, machine, remove, run, touch, workplace

THREADS = 2
MIB = 1 << 20


class Bench:
    def __init__(self, folder: Path, size: int, rounds: int) -> None:
        self.folder, self.size, self.rounds = folder, size, rounds
        self.out = folder / "out"
        self.results: list[Result] = []
        self.memory: list[tuple[str, int, int, float, int]] = []
        self.notes: list[str] = []

    def source(self, kind: str) -> tuple[Path, int]:
        """A checkpoint of four ranks; made on first use."""
        folder = self.folder / kind
        specs = synthetic.model(self.size, kind)
        if not folder.exists():
            synthetic.tp_safetensors(folder, specs, 4)
        return folder, sum(s.nbytes() for s in specs)

    def ours(self, source: Path, **more: object) -> Side:
        arguments = {"src": str(source), "out": str(self.out), "threads": THREADS, "memory": "256MiB", **more}
        return Side("fastshard", "fastshard", arguments)

    def peer(self, label: str, run: str, source: Path, **more: object) -> Side:
        return Side(label, run, {"src": str(source), "out": str(self.out), "threads": THREADS, **more})

    def case(self, name: str, bar: str, source: Path, nbytes: int, ours: Side, peer: Side) -> Result:
        """Ours against a peer that writes the same tensors (or, cp, the same files)."""
        seen: dict[str, dict[str, str]] = {}

        def check(side: Side, out: Path | None) -> None:
            assert out is not None
            if side.run == "copy":
                want = {p.relative_to(source): file_digest(p) for p in files(source)}
                assert want == {p.relative_to(out): file_digest(p) for p in files(out)}, "the copy differs"
                return
            seen[side.label] = digests(out)

        result = Result(name, ours.label, peer.label, bar, nbytes)
        compare(result, [peer, ours], self.rounds, source=source, out=self.out, check=check)
        if peer.label in seen:
            assert seen[peer.label] == seen[ours.label], f"{name}: outputs differ"
        else:
            self.check_merged(source, seen[ours.label])
        self.results.append(result)
        return result

    def check_merged(self, source: Path, got: dict[str, str]) -> None:
        """Compares with tensors merged by numpy, from the data's seeds."""
        import hashlib

        specs = synthetic.model(self.size, source.name)
        assert got == {s.name: hashlib.sha256(synthetic.whole(s, 4).tobytes()).hexdigest() for s in specs}

    def p1(self) -> None:
        """Durable row merge against cp and fsync."""
        source, n = self.source("row")
        cp = self.peer("cp + fsync", "copy", source, fsync=True)
        self.case("P1 row merge, durable", "wall <= 1.00", source, n, self.ours(source), cp)

    def p2(self) -> None:
        """Row merge against cp, both without fsync."""
        source, n = self.source("row")
        cp = self.peer("cp", "copy", source, fsync=False)
        self.case("P2 row merge", "wall <= 1.15", source, n, self.ours(source, fsync=False), cp)

    def p3(self) -> None:
        """Row merge against DCP's consolidation."""
        source, n = self.source("row")
        dcp = self.peer("DCP consolidate", "consolidate", source)
        self.case("P3 row merge", "wall, CPU <= 0.25", source, n, self.ours(source, fsync=False), dcp)

    def p4(self) -> None:
        """Column merge against DCP's consolidation."""
        source, n = self.source("column")
        dcp = self.peer("DCP consolidate", "consolidate", source)
        self.case("P4 column merge", "CPU <= 0.17", source, n, self.ours(source, fsync=False), dcp)

    def p5(self) -> None:
        """Row merge against the script everybody writes."""
        source, n = self.source("row")
        script = self.peer("load + cat + save", "script", source)
        self.case(
            "P5 row merge", "wall <= 0.25, memory <= 1/16", source, n, self.ours(source, fsync=False), script
        )

    def p6(self) -> None:
        """Peak anonymous memory of a transposing, casting convert."""
        for size, single in ((self.size // 4, False), (self.size, False), (self.size, True)):
            source = self.folder / "transposed"
            specs = synthetic.llama(source, size, single=single)
            n = sum(s.nbytes() for s in specs)
            largest = max(s.nbytes() for s in specs)
            label = f"one tensor of {largest:,} bytes" if single else f"largest tensor {largest:,} bytes"
            touch(n)
            side = self.ours(
                source, to="hf", dtype="bf16", layout=str(source / "transposed.toml"),
                config=str(source / "config.json"),
            )  # fmt: skip
            record = run(side)
            got = digests(self.out)
            for spec in specs[:2]:
                assert got[spec.name] == synthetic.transposed_bf16(spec, 4), spec.name
            self.memory.append((label, n, int(record["anonymous"]), record["wall"], int(record["rss"])))
            print(f"  P6 {label}: {record['anonymous'] / MIB:.0f} MiB", file=sys.stderr)
            remove(self.out)
            remove(source)

    def p7(self) -> None:
        """Verify against b3sum and sha256sum."""
        source, n = self.source("row")
        merged = self.folder / "merged"
        if not merged.exists():
            run(Side("fastshard", "fastshard", {"src": str(source), "out": str(merged), "threads": THREADS}))
        ours = Side("fastshard verify", "verify", {"src": str(merged), "threads": THREADS})
        names = [str(p) for p in sorted(merged.glob("*.safetensors"))]
        b3sum = shutil.which("b3sum")
        if b3sum is None:
            self.notes.append("P7 against b3sum: not installed")
        else:
            command = {"command": [b3sum, "--num-threads", str(THREADS), *names]}
            for chill in (False, True):
                name = f"P7 verify, {'cold' if chill else 'warm'}"
                result = Result(name, ours.label, "b3sum", "wall <= 1.05", n)
                peer = Side("b3sum", "command", command)
                compare(result, [peer, ours], self.rounds, source=merged, out=None, chill=chill)
                self.results.append(result)
        result = Result("P7 verify, warm", ours.label, "sha256sum", "wall <= 0.10", n)
        peer = Side("sha256sum", "command", {"command": ["sha256sum", *names]})
        compare(result, [peer, ours], self.rounds, source=merged, out=None)
        self.results.append(result)
        remove(merged)

    def table(self) -> str:
        """Everything measured, as markdown."""

        def spread(values: list[float]) -> str:
            ordered = sorted(values)
            middle = ordered[len(ordered) // 2]
            if len(ordered) % 2 == 0:
                middle = (middle + ordered[len(ordered) // 2 - 1]) / 2
            return f"**{middle:.2f}** ({ordered[0]:.2f} to {ordered[-1]:.2f})"

        facts = ", ".join(f"{k} {v}" for k, v in machine(self.folder).items())
        loads = [record["load"] for r in self.results for side in r.records.values() for record in side]
        # A core of which others have a tenth is no idle one.
        busy = sum(load > 0.1 * len(os.sched_getaffinity(0)) for load in loads)
        state = "idle" if not busy else f"LOADED: others had cores before {busy} of {len(loads)} runs"
        lines = [
            f"{facts}; {self.rounds} interleaved rounds, {THREADS} threads; {state}", "",
            "| case | bytes | against | target | wall ratio: median (min to max) | CPU ratio "
            "| GB/s ours / theirs | CPU s ours / theirs | peak resident ours / theirs, MiB |",
            "|---|---|---|---|---|---|---|---|---|",
        ]  # fmt: skip
        for r in self.results:
            speed = [r.nbytes / r.median(s, "wall") / 1e9 for s in (r.ours, r.peer)]
            cpu = [r.median(s, "cpu") for s in (r.ours, r.peer)]
            peak = [max(r.median(s, k) for k in ("rss", "children")) / MIB for s in (r.ours, r.peer)]
            ratios = " | ".join(spread(r.ratios(key)) for key in ("wall", "cpu"))
            lines.append(
                f"| {r.case} | {r.nbytes:,} | {r.peer} | {r.bar} | {ratios} "
                f"| {speed[0]:.2f} / {speed[1]:.2f} | {cpu[0]:.2f} / {cpu[1]:.2f} "
                f"| {peak[0]:.0f} / {peak[1]:.0f} |"
            )
        if self.memory:
            lines += ["", "| P6 transpose + cast to bf16 | input bytes | peak anonymous | GB/s read |"]
            lines.append("|---|---|---|---|")
            for label, n, anonymous, wall, _ in self.memory:
                lines.append(f"| {label} | {n:,} | {anonymous / MIB:.1f} MiB | {n / wall / 1e9:.2f} |")
            peaks = [m[2] for m in self.memory]
            flat = (max(peaks) - min(peaks)) / MIB
            lines.append(f"\n--memory 256MiB; flat within {flat:.1f} MiB (target: 32)")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="P1,P2,P3,P4,P5,P6,P7", help="cases, separated by commas")
    parser.add_argument("--dir", type=workplace, default=None, help="a folder on the filesystem to measure")
    parser.add_argument("--save", action="store_true", help="write results/DATE.json too")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fastshard-bench-", dir=args.dir))
    try:
        bench = Bench(folder, synthetic.parse_size(args.size), args.rounds)
        try:
            for name in re.split(r"\s*,\s*", args.only.lower()):
                getattr(bench, name)()
        except KeyboardInterrupt:
            bench.notes.append("interrupted: the cases that were finished")
        print(bench.table())
        if args.save:
            path = Path(__file__).parent / "results" / f"{datetime.date.today()}.json"
            path.parent.mkdir(exist_ok=True)
            results = [asdict(r) for r in bench.results]
            document = {"machine": machine(folder), "results": results, "memory": bench.memory}
            path.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
