"""ZeRO checkpoints to safetensors, against DeepSpeed's own zero_to_fp32: a markdown table of paired ratios.

    python benches/zero.py [--size 4GiB] [--rounds 5] [--stages 1,3] [--world 4] [--dir DIR]

Needs DeepSpeed (see CONTRIBUTING.md). The checkpoints are made here, without training, with fp32 master weights
of `--size` bytes and no moments; they are deleted afterwards. Neither side brings its output to disk
(fsync): zero_to_fp32 cannot. fastshard proves the partitions whole, checks their checksums, hashes what
it writes and, for ZeRO-1, compares every master with the bf16 parameter; zero_to_fp32 does none of that.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measure import Result, Side, compare, digests, machine, workplace
from synthetic import parse_size

TAG = "global_step10"
MIB = 1 << 20
THREADS = 2


def shapes(nbytes: int) -> OrderedDict[str, torch.Size]:
    """Blocks of a transformer until they hold `nbytes` of fp32; biases make partitions end inside tensors."""
    hidden = max(64, min(2048, 1 << int(math.log2(max(1, nbytes // 4 // 200)) / 2)))
    found = OrderedDict({"embed.weight": torch.Size([4 * hidden + 1, hidden])})
    for layer in itertools.count():
        for name, shape in (
            ("norm.weight", [hidden]), ("qkv.weight", [3 * hidden, hidden]), ("qkv.bias", [3 * hidden]),
            ("dense.weight", [hidden, hidden]), ("up.weight", [4 * hidden, hidden]), ("up.bias", [4 * hidden + 3]),
            ("down.weight", [hidden, 4 * hidden]),
        ):  # fmt: skip
            found[f"layers.{layer}.{name}"] = torch.Size(shape)
        if 4 * sum(s.numel() for s in found.values()) >= nbytes:
            return found
    raise AssertionError


def values(numel: int, seed: int) -> torch.Tensor:
    """Incompressible, and no two ranks' alike."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def model_state(module: dict[str, torch.Tensor], groups: list[Any], stage: int, world: int) -> dict[str, Any]:
    return {
        "module": OrderedDict(module), "buffer_names": [], "optimizer": None, "param_shapes": groups,
        "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "global_steps": 10,
        "dp_world_size": world, "mp_world_size": 1, "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": stage}},
    }  # fmt: skip


def write(folder: Path, size: int, stage: int, world: int) -> int:
    """A checkpoint of ZeRO-1 or 3 in bf16; bytes of its masters."""
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    step = folder / TAG
    step.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    parameters = shapes(size)

    def optimizer(rank: int, state: dict[str, Any]) -> None:
        content = {"optimizer_state_dict": {"zero_stage": ZeroStageEnum(stage), "loss_scaler": None, **state}}
        torch.save(content, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    total = sum(s.numel() for s in parameters.values())
    if stage == 3:
        part = sum(-(-s.numel() // world) for s in parameters.values())
        module = {name: torch.empty(0, dtype=torch.bfloat16) for name in parameters}
        for rank in range(world):
            base = {"state": {}, "param_groups": []}
            flat = values(part, rank)
            optimizer(
                rank, {"partition_count": world, "optimizer_state_dict": base, "fp32_flat_groups": [flat]}
            )
            content = model_state(module, [parameters], stage, world) | {"frozen_param_shapes": {}}
            content["frozen_param_fragments"] = {}
            torch.save(content, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        return 4 * total
    part = -(-total // (2 * world)) * 2
    rounded = torch.empty(part * world, dtype=torch.bfloat16)
    ends = list(itertools.accumulate(s.numel() for s in parameters.values()))
    spans = [(end - s.numel(), end) for end, s in zip(ends, parameters.values(), strict=True)]
    for rank in range(world):
        lo, hi = rank * part, (rank + 1) * part
        flat = values(part, rank)
        rounded[lo:hi] = flat
        mapping = OrderedDict(
            (name, fragment_address(min(end, hi) - max(start, lo), max(start, lo) - lo))
            for name, (start, end) in zip(parameters, spans, strict=True)
            if max(start, lo) < min(end, hi)
        )
        padding = max(0, min(hi - total, part))
        base = {"state": {}, "param_groups": []}
        optimizer(rank, {
            "base_optimizer_state": base, "single_partition_of_fp32_groups": [flat[: part - padding]],
            "group_paddings": [padding], "partition_count": [world], "param_slice_mappings": [mapping],
        })  # fmt: skip
    module = {
        name: rounded[start:end].view(shape)
        for (name, shape), (start, end) in zip(parameters.items(), spans, strict=True)
    }
    torch.save(model_state(module, [parameters], stage, world), step / "mp_rank_00_model_states.pt")
    return 4 * total


def measure(folder: Path, stage: int, size: int, world: int, rounds: int) -> Result:
    """Both sides on one checkpoint; their outputs must be the same tensors."""
    source, out = folder / f"zero{stage}", folder / "out"
    nbytes = write(source, size, stage, world)
    common = {"src": str(source), "out": str(out), "threads": THREADS}
    ours = Side(
        "fastshard", "fastshard", {**common, "weights": "masters", "fsync": False, "memory": "256MiB"}
    )
    theirs = Side("zero_to_fp32", "zero_to_fp32", common)
    seen: dict[str, dict[str, str]] = {}

    def check(side: Side, written: Path | None) -> None:
        assert written is not None
        seen[side.label] = digests(written)
        if len(seen) == 2:
            assert seen[ours.label] == seen[theirs.label], "the two results differ"
            assert len(seen[ours.label]) == len(shapes(size))

    result = Result(f"P12 ZeRO-{stage}, {world} ranks", ours.label, theirs.label, "wall <= 0.20", nbytes)
    return compare(result, [theirs, ours], rounds, source=source, out=out, check=check)


def table(results: list[Result], folder: Path, rounds: int) -> str:
    def spread(ratios: list[float]) -> str:
        return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"

    facts = ", ".join(f"{k} {v}" for k, v in machine(folder).items())
    lines = [
        f"{facts}; {rounds} interleaved rounds, {THREADS} threads", "",
        "| case | bytes | wall ratio: median (min to max), target 0.20 | CPU ratio | wall s ours / theirs "
        "| peak resident ours / theirs, MiB | peak anonymous, MiB | anonymous ratio, target 0.06 |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in results:
        wall, rss, own = ([r.median(s, k) for s in (r.ours, r.peer)] for k in ("wall", "rss", "anonymous"))
        lines.append(
            f"| {r.case} | {r.nbytes:,} | {spread(r.ratios('wall'))} | {spread(r.ratios('cpu'))} "
            f"| {wall[0]:.2f} / {wall[1]:.2f} | {rss[0] / MIB:.0f} / {rss[1] / MIB:.0f} "
            f"| {own[0] / MIB:.0f} / {own[1] / MIB:.0f} | {own[0] / own[1]:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="4GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", default="1,3", help="separated by commas")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--dir", type=workplace, default=None, help="a folder on the filesystem to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastshard-bench-", dir=args.dir) as name:
        folder = Path(name)
        results = []
        for stage in map(int, args.stages.split(",")):
            results.append(measure(folder, stage, parse_size(args.size), args.world, args.rounds))
            for path in sorted((folder / f"zero{stage}").rglob("*.pt")):
                path.unlink()
        print(table(results, folder, args.rounds))


if __name__ == "__main__":
    main()
