"""Merges, casts and verify, against what people use: P1 to P7, P10 and P11.

    python benches/all_bars.py --only P1,P3

P1 and P2 are whole processes, their start included; of the others imports are done before the clock starts.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import synthetic
from measure import (
    RANKS,
    THREADS,
    Place,
    Result,
    Side,
    Target,
    compare,
    digests,
    expect_same,
    find_file_system,
    find_lack,
    find_load,
    remove,
    run,
    show_size,
    touch,
    warm,
)

GIB = 1 << 30
#: Small results have targets of their own at a quarter of the size.
QUARTER = 4
NO_DISK = "needs a disk: files in memory are never cold"


def build_command(*arguments: object) -> list[str]:
    """A command of fastshard as a process of its own."""
    return [sys.executable, "-m", "fastshard", *map(str, arguments)]


def merge_by_command(source: Path, out: Path, *more: object, label: str = "fastshard") -> Side:
    command = build_command("merge", source, out, "-q", "--threads", THREADS, "--memory", "256MiB", *more)
    return Side(label, "command", {"command": command})


def merge(source: Path, out: Path, label: str = "fastshard", **more: object) -> Side:
    """A merge by the library, not synced."""
    arguments = {"src": str(source), "out": str(out), "threads": THREADS, "memory": "256MiB", "fsync": False}
    return Side(label, "fastshard", {**arguments, **more})


def peer(label: str, run: str, source: Path, out: Path, **more: object) -> Side:
    return Side(label, run, {"src": str(source), "out": str(out), "threads": THREADS, **more})


@functools.cache
def compute_hashes(size: int, kind: str, ranks: int = RANKS) -> dict[str, str]:
    """The SHA-256 of merged tensors, from the data's seeds and without the product."""
    return {spec.name: synthetic.whole_digest(spec, ranks) for spec in synthetic.model(size, kind)}


def measure_copy(
    place: Place,
    case: str,
    base: Path,
    size: int,
    targets: tuple[Target, ...],
    *,
    fsync: bool,
    chill: bool = False,
) -> Result:
    """A row merge against ``cp`` of the same bytes, below a folder."""
    source, nbytes = place.source("row", size)
    if base != place.disk:
        copied = base / source.name
        if not copied.exists():
            synthetic.tp_safetensors(copied, synthetic.model(size, "row"), RANKS)
        source = copied
    out = base / "out"
    ours = merge_by_command(source, out, "--fsync", "full" if fsync else "none")
    theirs = peer("cp + fsync" if fsync else "cp", "copy", source, out, fsync=fsync)
    check = expect_same(digests, compute_hashes(size, "row"), skip=theirs.label)
    result = Result(case, ours.label, theirs.label, targets, nbytes)
    compare(result, [theirs, ours], place.rounds, source=source, out=out, check=check, chill=chill)
    if base != place.disk:
        remove(source)
    return result


def measure_p1(place: Place) -> Iterator[Result]:
    """Durable row merge against cp and fsync."""
    cpu = Target("cpu_seconds_per_gb", 0.48, least_bytes=2 * GIB)
    small, disk = place.size // QUARTER, place.disk
    wall = Target("wall_ratio", 0.30, least_bytes=2 * GIB)
    yield measure_copy(place, "row merge, durable", disk, place.size, (wall, cpu), fsync=True)
    wall = Target("wall_ratio", 0.70, least_bytes=GIB // 2)
    yield measure_copy(place, "row merge, durable, small", disk, small, (wall,), fsync=True)
    if find_file_system(disk) == "tmpfs":
        yield Result("row merge, durable, cold", "fastshard", "cp + fsync", (), 0, reason=NO_DISK)
        return
    wall = Target("wall_ratio", 0.40, least_bytes=2 * GIB)
    yield measure_copy(place, "row merge, durable, cold", disk, place.size, (wall,), fsync=True, chill=True)


def measure_p2(place: Place) -> Iterator[Result]:
    """Row merge against cp, both without fsync."""
    large, small = (
        Target("wall_ratio", 0.70, least_bytes=2 * GIB),
        Target("wall_ratio", 1.0, least_bytes=GIB // 2),
    )
    for base in (place.disk, place.memory):
        where = "" if base == place.disk else ", in memory"
        yield measure_copy(place, f"row merge{where}", base, place.size, (large,), fsync=False)
        yield measure_copy(
            place, f"row merge{where}, small", base, place.size // QUARTER, (small,), fsync=False
        )


def measure_p3(place: Place) -> Iterator[Result]:
    """Row merge against DCP's consolidation."""
    targets = (
        Target("wall_ratio", 0.15, least_bytes=2 * GIB),
        Target("cpu_ratio", 0.17, least_bytes=2 * GIB),
        Target("wall_ratio", 0.07, least_bytes=2 * GIB, least_cores=16),
    )
    yield measure_consolidation(place, "row", targets)


def measure_p4(place: Place) -> Iterator[Result]:
    """Column merge against DCP's consolidation, and against our row merge."""
    yield measure_consolidation(place, "column", (Target("cpu_ratio", 0.17, least_bytes=2 * GIB),))
    (row, _), (column, nbytes) = place.source("row"), place.source("column")
    out = place.disk / "out"
    ours, theirs = merge(column, out), merge(row, out, "own row merge")
    warm(row)
    result = Result(
        "column merge", ours.label, theirs.label, (Target("wall_ratio", 1.05, least_bytes=2 * GIB),), nbytes
    )
    yield compare(result, [theirs, ours], place.rounds, source=column, out=out)


def measure_consolidation(place: Place, kind: str, targets: tuple[Target, ...]) -> Result:
    source, nbytes = place.source(kind)
    out = place.disk / "out"
    ours, theirs = merge(source, out), peer("DCP consolidate", "consolidate", source, out)
    result = Result(f"{kind} merge", ours.label, theirs.label, targets, nbytes)
    return compare(result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(digests))


def measure_p5(place: Place) -> Iterator[Result]:
    """Row merge against the script everybody writes."""
    source, nbytes = place.source("row")
    out = place.disk / "out"
    ours, theirs = merge(source, out), peer("load + cat + save", "script", source, out)
    targets = (
        Target("wall_ratio", 0.15, least_bytes=2 * GIB),
        Target("memory_ratio", 0.01, least_bytes=2 * GIB),
    )
    result = Result("row merge", ours.label, theirs.label, targets, nbytes)
    yield compare(result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(digests))


def measure_p6(place: Place) -> Iterator[Result]:
    """Peak anonymous memory of a transposing, casting convert, and of a merge, within a budget of 256 MiB."""
    peaks, limit = list[float](), Target("peak_mib", 64)
    source, out = place.disk / "transposed", place.disk / "out"
    for times, single in ((0.5, False), (2, False), (8, False), (4, True)):
        size = int(times * place.size)
        specs = synthetic.llama(source, size, single=single)
        side = merge(
            source,
            out,
            to="hf",
            dtype="bf16",
            layout=str(source / "transposed.toml"),
            config=str(source / "config.json"),
        )
        largest = max(spec.nbytes() for spec in specs)
        result = Result(
            f"transpose + cast, largest tensor {show_size(largest)}",
            side.label,
            "",
            (limit,),
            sum(s.nbytes() for s in specs),
        )
        measure_once(result, side, out)
        found = digests(out)
        for spec in specs[:2]:
            assert found[spec.name] == synthetic.transposed_bf16(spec, RANKS), spec.name
        peaks.append(result.figures()["peak_mib"])
        result.more["spread_mib"] = max(peaks) - min(peaks)
        if single:
            result.targets += (Target("spread_mib", 16),)
        yield result
        remove(out)
        remove(source)
    size = place.size * 4
    specs = synthetic.model(size, "mixed", size // 2)
    nbytes = synthetic.tp_safetensors(source, specs, RANKS)
    side = merge(source, out)
    result = Result("merge, half of it one tensor", side.label, "", (limit,), nbytes)
    yield measure_once(result, side, out)
    assert digests(out) == {spec.name: synthetic.whole_digest(spec, RANKS) for spec in specs}
    remove(out)
    remove(source)
    # Of quantised scales, short runs, and of every verb.
    yield Result("no verb exceeds --memory", "fastshard", "", (), 0, reason="`.ci/run bounds` measures it")


def measure_once(result: Result, side: Side, out: Path | None) -> Result:
    """One run without a peer, whose output stays."""
    result.state = find_file_system(out.parent) if out else ""
    os.sync()
    touch(result.nbytes)
    load = find_load()
    result.records[side.label] = [run(side) | {"load": load}]
    print(f"  {result.case}: {result.records[side.label][0]['wall']:.3f} s", file=sys.stderr)
    return result


def measure_p7(place: Place) -> Iterator[Result]:
    """Verify against b3sum and sha256sum."""
    source, nbytes = place.source("row")
    merged = place.disk / "merged"
    run(merge(source, merged))
    names = [str(path) for path in sorted(merged.glob("*.safetensors"))]
    ours = Side("fastshard verify", "verify", {"src": str(merged), "threads": THREADS})
    b3sum = Side("b3sum", "command", {"command": ["b3sum", "--num-threads", str(THREADS), *names]})
    sha256sum = Side("sha256sum", "command", {"command": ["sha256sum", *names]})
    in_memory = find_file_system(merged) == "tmpfs"
    large = 2 * GIB
    for side, chill, targets in (
        (b3sum, False, (Target("wall_ratio", 0.90, least_bytes=large),)),
        (b3sum, True, (Target("wall_ratio", 1.0, least_bytes=large),)),
        (
            sha256sum,
            False,
            (
                Target("wall_ratio", 0.07, least_bytes=large),
                Target("gb_per_second", 20, at_least=True, least_bytes=large, least_cores=16),
            ),
        ),
    ):
        result = Result(f"verify, {'cold' if chill else 'warm'}", ours.label, side.label, targets, nbytes)
        result.reason = find_lack(program=side.label)
        if chill and in_memory:
            result.reason = NO_DISK
        yield (
            result
            if result.reason
            else compare(result, [side, ours], place.rounds, source=merged, out=None, chill=chill)
        )
    remove(merged)


def find_kernel_bench() -> Path | None:
    """The program that times the core's kernels, where it is built."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", Path(__file__).parents[1] / "target"))
    program = target / "release/examples/kernel_bench"
    return program if program.exists() else None


def measure_kernel(
    place: Place, case: str, work: str, dtype: str, name: str, shape: tuple[int, int], limit: float
) -> Result:
    """A kernel on one thread against torch or numpy."""
    nbytes = shape[0] * shape[1] * {"bfloat16": 2, "float32": 4}[dtype]
    targets = (Target("wall_ratio", limit),)
    result = Result(case, "fastshard", work.partition(" ")[0], targets, nbytes)
    program = find_kernel_bench()
    if program is None:
        result.reason = "needs cargo build --release -p fastshard --example kernel_bench"
        return result
    ours = Side(result.ours, "program_speed", {"program": str(program), "filter": name, "nbytes": nbytes})
    theirs = Side(result.peer, "kernel", {"work": work, "dtype": dtype, "shape": shape, "threads": 1})
    result.state = "in memory"
    return compare(result, [theirs, ours], place.rounds, source=Path(__file__), out=None)


def measure_p10(place: Place) -> Iterator[Result]:
    """The transpose of bfloat16 on one thread."""
    for work, limit in (("torch transpose", 0.20), ("numpy transpose", 0.05)):
        name, shape = "transpose 2 B 4096x12288", (4096, 12288)
        yield measure_kernel(place, "bf16 transpose, 1 thread", work, "bfloat16", name, shape, limit)


def measure_p11(place: Place) -> Iterator[Result]:
    """float32 to bfloat16: the kernel, and merged."""
    name, shape = f"convert F32 BF16 {1 << 26}", (1 << 13, 1 << 13)
    yield measure_kernel(place, "f32 to bf16, 1 thread", "torch cast", "float32", name, shape, 1.0)
    source, out = place.memory / "float32", place.memory / "out"
    specs = synthetic.model(place.size, "row", dtype="F32")
    nbytes = synthetic.tp_safetensors(source, specs, RANKS)
    ours = merge(source, out, dtype="bf16")
    for theirs, limits, check in (
        (
            merge(source, out, "own merge without a cast"),
            (Target("wall_ratio", 1.05, least_bytes=2 * GIB),),
            None,
        ),
        (peer("load + cat + bfloat16 + save", "cast_script", source, out), (), expect_same(digests)),
    ):
        result = Result("f32 to bf16, merged", ours.label, theirs.label, limits, nbytes)
        yield compare(result, [theirs, ours], place.rounds, source=source, out=out, check=check)
    remove(source)
