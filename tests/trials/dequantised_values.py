"""Values of quantised weights against the code of those who write them: every element, several shapes, edges
of blocks.

    python tests/trials/dequantised_values.py [--packages DIR]

Needs compressed-tensors, bitsandbytes and transformers (DIR is put before the path of modules). Weights are
random codes, or random numbers that the package itself has quantised; each is merged with ``--dtype`` and
compared with what the package makes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
#: Name, quantization_config, what is stored, and what the package makes of it: one tensor, or one for each
#: dtype.
Case = tuple[str, dict[str, Any], Tensors, "torch.Tensor | dict[torch.dtype, torch.Tensor] | None"]
#: Rows and columns: whole blocks, edges, a single row.
SHAPES = ((128, 256), (320, 384), (1, 64), (200, 320), (129, 448))
F8 = torch.float8_e4m3fn


def random_codes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Codes of which each may occur, but for those that are no number."""
    raw = torch.randint(0, 256, shape, dtype=torch.uint8)
    if dtype == F8:
        return torch.where((raw & 127) == 127, 0, raw).view(F8)
    if dtype == torch.int32:
        return torch.randint(-(1 << 31), (1 << 31) - 1, shape).int()
    return raw.view(dtype) if dtype == torch.int8 else raw


def up(n: int, by: int) -> int:
    return -(-n // by)


def compressed_tensors(o: int, i: int) -> Iterator[Case]:
    """Each format with each strategy: what is stored, and what decompress makes of it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    def one(format_: str, stored: Tensors, **weights: Any) -> Case:
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format_)
        made: torch.Tensor | None = None
        # Its own code does not take each shape.
        with contextlib.suppress(RuntimeError):
            made = BaseCompressor.get_value_from_registry(format_).decompress(dict(stored), scheme)["weight"]
        said = {
            "quant_method": "compressed-tensors",
            "format": format_,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": format_}},
        }
        said["config_groups"]["group_0"]["weights"] = json.loads(json.dumps(weights, default=str))
        strategy, bits = weights.get("strategy"), weights["num_bits"]
        named = (
            f"{format_}, {bits} bit, {strategy}, {'' if weights.get('symmetric', True) else 'a'}symmetric, "
            f"{stored['weight_scale'].dtype}"
        )
        return named, said, stored, made

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        grids = {"channel": (o, 1), "group": (o, i // 32)}
        for strategy, grid in grids.items():
            scale = (torch.rand(grid) * 0.1 + 0.001).to(dtype)
            of = {"strategy": strategy} | ({"group_size": 32} if strategy == "group" else {})
            for bits in range(1, 9):
                packed = random_codes((o, up(i * bits, 32)), torch.int32)
                stored = {
                    "weight_packed": packed,
                    "weight_scale": scale,
                    "weight_shape": torch.tensor([o, i]),
                }
                yield one("pack-quantized", stored, num_bits=bits, type="int", symmetric=True, **of)
                zeros = random_codes((up(o * bits, 32), grid[1]), torch.int32)
                yield one(
                    "pack-quantized",
                    stored | {"weight_zero_point": zeros},
                    num_bits=bits,
                    type="int",
                    symmetric=False,
                    **of,
                )
            stored = {"weight": random_codes((o, i), torch.int8), "weight_scale": scale}
            yield one("int-quantized", stored, num_bits=8, type="int", symmetric=True, **of)
            zeros = random_codes(grid, torch.int8)
            yield one(
                "int-quantized",
                stored | {"weight_zero_point": zeros},
                num_bits=8,
                type="int",
                symmetric=False,
                **of,
            )
        for strategy, grid, more in (
            ("tensor", (1,), {}),
            ("channel", (o, 1), {}),
            ("group", (o, i // 32), {"group_size": 32}),
            ("block", (up(o, 128), up(i, 128)), {"block_structure": [128, 128]}),
        ):
            scale = (torch.rand(grid) * 0.1 + 0.001).to(dtype)
            stored = {"weight": random_codes((o, i), F8), "weight_scale": scale}
            yield one(
                "float-quantized", stored, num_bits=8, type="float", symmetric=True, strategy=strategy, **more
            )
    scale = random_codes((o, i // 16), F8).float().abs().clamp(0.01).to(F8)
    for shape in ((1,), ()):
        stored = {
            "weight_packed": random_codes((o, i // 2), torch.uint8),
            "weight_scale": scale,
            "weight_global_scale": (torch.rand(1) * 100 + 1).reshape(shape),
            "input_global_scale": torch.ones(1),
        }
        yield one(
            "nvfp4-pack-quantized",
            stored,
            num_bits=4,
            type="float",
            symmetric=True,
            strategy="tensor_group",
            group_size=16,
        )
    powers = torch.randint(100, 140, (o, i // 32), dtype=torch.uint8)
    of = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    stored = {"weight_packed": random_codes((o, i // 2), torch.uint8), "weight_scale": powers}
    yield one("mxfp4-pack-quantized", stored, num_bits=4, scale_dtype=torch.uint8, **of)
    stored = {"weight_packed": random_codes((o, i * 3 // 4), torch.uint8), "weight_scale": powers}
    yield one("mxfp6-pack-quantized", stored, num_bits=6, scale_dtype=torch.uint8, **of)
    stored = {"weight": random_codes((o, i), F8), "weight_scale": powers}
    yield one("mxfp8-quantized", stored, num_bits=8, scale_dtype=torch.uint8, **of)


def fp8_blocks(o: int, i: int) -> Iterator[Case]:
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scale = (torch.rand(up(o, 128), up(i, 128)) * 0.01 + 1e-4).to(dtype)
        stored = {"weight": random_codes((o, i), F8), "weight_scale_inv": scale}
        made = {
            asked: FP8BlockDequantizer(targets=["a"], dtype=asked).process(
                {f"a.{n}": t for n, t in stored.items()}
            )["a.weight"]
            for asked in (torch.bfloat16, torch.float32)
        }
        yield (
            f"fp8 blocks, scales {dtype}",
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            stored,
            made,
        )


def bitsandbytes(o: int, i: int) -> Iterator[Case]:
    """By its generic implementation: the one for CPUs takes the maxima of other blocks where blocks run over
    the ends of rows."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for size in (64, 128, 4096):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    weight = torch.randn(o, i).to(dtype)
                    codes, state = quantize_4bit(
                        weight, blocksize=size, compress_statistics=nested, quant_type=kind
                    )
                    stored = {"weight": codes} | {
                        f"weight.{name}": t for name, t in state.as_dict(packed=True).items()
                    }
                    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
                    maxima = (
                        dequantize_blockwise(state.absmax, state.state2) + state.offset
                        if nested
                        else state.absmax
                    )
                    made = _dequantize_4bit_compute(
                        codes.reshape(-1), maxima, state.code, size, [o, i], dtype
                    )
                    yield f"bitsandbytes {kind}, nested {nested}, {size}, {dtype}", said, stored, made


def mxfp4(o: int, i: int) -> Iterator[Case]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if i % 32:
        return
    blocks = random_codes((3, o, i // 32, 16), torch.uint8)
    scales = torch.randint(90, 150, (3, o, i // 32), dtype=torch.uint8)
    stored = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    yield "MXFP4 (gpt-oss)", {"quant_method": "mxfp4"}, stored, convert_moe_packed_tensors(blocks, scales)


def differing(
    folder: Path, said: dict[str, Any], stored: Tensors, made: torch.Tensor | dict[torch.dtype, torch.Tensor]
) -> tuple[int, str]:
    """How many elements differ from what the package makes, rounded to each dtype."""
    for old in folder.glob("**/*"):
        if old.is_file():
            old.unlink()
    source = folder / "in"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(json.dumps({"model_type": "other", "quantization_config": said}))
    save_file(
        {f"a.{name}": t.contiguous() for name, t in stored.items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    count = 0
    for asked, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        out = folder / f"out_{asked}"
        try:
            fastshard.merge(source, out, dtype=asked, overwrite=True, accept=("non-finite",))
        except fastshard.FastshardError as error:
            return -1, str(error)
        have = {}
        for file in out.glob("*.safetensors"):
            have |= load_file(file)
        (ours,) = (t for name, t in have.items() if name.startswith("a."))
        # What the package rounds to its own dtype stays so.
        want = made[dtype] if isinstance(made, dict) else made.to(dtype)
        if ours.shape != want.shape:
            return -1, f"{list(ours.shape)} for {list(want.shape)}"
        bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
        count += int((ours.view(bits) != want.contiguous().view(bits)).logical_and(~want.isnan()).sum())
    return count, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", help="folder of packages")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many shapes")
    options = parser.parse_args()
    if options.packages:
        sys.path.insert(0, options.packages)
    for package in ("compressed-tensors", "bitsandbytes", "transformers", "torch"):
        print(package, importlib.metadata.version(package))
    torch.manual_seed(1)
    wrong = 0
    done: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as place:
        for o, i in SHAPES[: options.shapes]:
            for forms in (fp8_blocks, mxfp4, compressed_tensors, bitsandbytes):
                for name, said, stored, want in forms(o, i):
                    if want is None:
                        print(f"not made by the package: {name} {o} x {i}")
                        continue
                    count, why = differing(Path(place), said, stored, want)
                    done.setdefault(name, []).append(count)
                    if count:
                        wrong += 1
                        print(f"WRONG {name} {o} x {i}: {count} {why[-400:]}")
    for name, counts in done.items():
        print(f"{name}: {len(counts)} shapes, differing {sum(counts)}")
    print(f"{sum(map(len, done.values()))} weights in {len(done)} forms: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
