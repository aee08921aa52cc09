"""ZeRO checkpoints to safetensors, against DeepSpeed's own zero_to_fp32: P12 of all_bars.py.

Needs DeepSpeed (see CONTRIBUTING.md). The checkpoints are made here, without training, with fp32 master
weights and no moments; they are deleted afterwards. Neither side brings its output to disk (fsync):
zero_to_fp32 cannot. fastshard proves the partitions whole, checks their checksums, hashes what it writes and,
for ZeRO-1, compares every master with the bf16 parameter; zero_to_fp32 does none of that.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compare import merge, peer
from measure import Place, Result, Target, compare, digests, expect_same, find_lack, remove

TAG = "global_step10"
WORLD = 4


def shapes(nbytes: int) -> OrderedDict[str, torch.Size]:
    """Blocks of a transformer until they hold `nbytes` of fp32; biases make partitions end inside tensors."""
    hidden = max(64, min(2048, 1 << int(math.log2(max(1, nbytes // 4 // 200)) / 2)))
    found = OrderedDict({"embed.weight": torch.Size([4 * hidden + 1, hidden])})
    for layer in itertools.count():
        for name, shape in (
            ("norm.weight", [hidden]),
            ("qkv.weight", [3 * hidden, hidden]),
            ("qkv.bias", [3 * hidden]),
            ("dense.weight", [hidden, hidden]),
            ("up.weight", [4 * hidden, hidden]),
            ("up.bias", [4 * hidden + 3]),
            ("down.weight", [hidden, 4 * hidden]),
        ):
            found[f"layers.{layer}.{name}"] = torch.Size(shape)
        if 4 * sum(s.numel() for s in found.values()) >= nbytes:
            return found
    raise AssertionError


def values(numel: int, seed: int) -> torch.Tensor:
    """Incompressible, and no two ranks' alike."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def model_state(module: dict[str, torch.Tensor], groups: list[Any], stage: int, world: int) -> dict[str, Any]:
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 10,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": stage}},
    }


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
        optimizer(
            rank,
            {
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [flat[: part - padding]],
                "group_paddings": [padding],
                "partition_count": [world],
                "param_slice_mappings": [mapping],
            },
        )
    module = {
        name: rounded[start:end].view(shape)
        for (name, shape), (start, end) in zip(parameters.items(), spans, strict=True)
    }
    torch.save(model_state(module, [parameters], stage, world), step / "mp_rank_00_model_states.pt")
    return 4 * total


def measure_p12(place: Place) -> Iterator[Result]:
    """Both sides on one checkpoint of each stage; their outputs must be the same tensors."""
    out = place.disk / "out"
    for stage in (1, 3):
        targets = (
            Target("wall_ratio", 0.12, least_bytes=2 << 30),
            Target("memory_ratio", 1 / 64, least_bytes=2 << 30),
        )
        result = Result(f"ZeRO-{stage}, {WORLD} ranks", "fastshard", "zero_to_fp32", targets, 0)
        if reason := find_lack("deepspeed"):
            result.reason = reason
            yield result
            continue
        source = place.disk / f"zero{stage}"
        result.nbytes = write(source, place.size, stage, WORLD)
        ours = merge(source, out, weights="masters")
        theirs = peer(result.peer, "zero_to_fp32", source, out)
        yield compare(
            result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(digests)
        )
        remove(source)
