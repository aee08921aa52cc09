"""Paxml GPT-3 to MaxText, against a plain script of tensorstore and numpy: P16 of all_bars.py.

A scanned checkpoint of random float32 in zstd chunks is transposed to MaxText's order of axes and written as
OCDBT + zarr v3. The script reads one array after another whole, as MaxText's own converter does. fastshard
proves the chunks complete and hashes what it writes besides. Nothing is brought to disk (fsync) on either
side.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from compare import merge, peer
from measure import Place, Result, Target, compare, expect_same, remove

STACK = "transformer.repeat.sub.x_layers_0."
#: Paxml's name -> MaxText's, and the order of axes. source: MaxText convert_gpt3_ckpt_from_paxml.py
MAPPING: dict[str, tuple[str, tuple[int, ...]]] = {
    "softmax.logits_ffn.linear.w": ("token_embedder.embedding", (1, 0)),
    "position_emb.emb_var": ("decoder.position_embedder.embedding", (0, 1)),
    "final_ln.scale": ("decoder.decoder_norm.scale", (0,)),
    "final_ln.bias": ("decoder.decoder_norm.bias", (0,)),
    f"{STACK}layer_norm.scale": ("decoder.layers.pre_self_attention_norm.scale", (1, 0)),
    f"{STACK}layer_norm.bias": ("decoder.layers.pre_self_attention_norm.bias", (1, 0)),
    f"{STACK}ff_layer.layer_norm.scale": ("decoder.layers.mlp.mlp_layer_norm.scale", (1, 0)),
    f"{STACK}ff_layer.layer_norm.bias": ("decoder.layers.mlp.mlp_layer_norm.bias", (1, 0)),
    f"{STACK}self_attention.combined_qkv.w": (
        "decoder.layers.self_attention.qkv_proj.kernel",
        (2, 0, 1, 3, 4),
    ),
    f"{STACK}self_attention.combined_qkv.b": ("decoder.layers.self_attention.qkv_proj.bias", (1, 0, 2, 3)),
    f"{STACK}self_attention.post.w": ("decoder.layers.self_attention.out.kernel", (2, 0, 3, 1)),
    f"{STACK}self_attention.post.b": ("decoder.layers.self_attention.out.bias", (1, 0)),
    f"{STACK}ff_layer.ffn_layer1.linear.w": ("decoder.layers.mlp.wi.kernel", (1, 0, 2)),
    f"{STACK}ff_layer.ffn_layer1.bias.b": ("decoder.layers.mlp.wi.bias", (1, 0)),
    f"{STACK}ff_layer.ffn_layer2.linear.w": ("decoder.layers.mlp.wo.kernel", (1, 0, 2)),
    f"{STACK}ff_layer.ffn_layer2.bias.b": ("decoder.layers.mlp.wo.bias", (1, 0)),
}


def shapes(layers: int, width: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shape and chunk of each variable: what one of 8 x 4 devices held."""
    n, h, f, v, p, k = width // 128, 128, 4 * width, 50304, 2048, layers
    rows, columns = width // 8, 4
    return {
        "softmax.logits_ffn.linear.w": ((width, v), (rows, v // columns)),
        "position_emb.emb_var": ((p, width), (p, width // columns)),
        "final_ln.scale": ((width,), (width,)),
        "final_ln.bias": ((width,), (width,)),
        f"{STACK}layer_norm.scale": ((k, width), (k, width)),
        f"{STACK}layer_norm.bias": ((k, width), (k, width)),
        f"{STACK}ff_layer.layer_norm.scale": ((k, width), (k, width)),
        f"{STACK}ff_layer.layer_norm.bias": ((k, width), (k, width)),
        f"{STACK}self_attention.combined_qkv.w": ((k, 3, width, n, h), (k, 3, rows // 2, n // columns, h)),
        f"{STACK}self_attention.combined_qkv.b": ((k, 3, n, h), (k, 3, n, h)),
        f"{STACK}self_attention.post.w": ((k, width, n, h), (k, rows, n // columns, h)),
        f"{STACK}self_attention.post.b": ((k, width), (k, width)),
        f"{STACK}ff_layer.ffn_layer1.linear.w": ((k, width, f), (k, rows // 2, f // columns)),
        f"{STACK}ff_layer.ffn_layer1.bias.b": ((k, f), (k, f)),
        f"{STACK}ff_layer.ffn_layer2.linear.w": ((k, f, width), (k, 2 * rows, width // columns)),
        f"{STACK}ff_layer.ffn_layer2.bias.b": ((k, width), (k, width)),
    }


def write(folder: Path, size: int) -> int:
    """A checkpoint of about `size` bytes; its bytes."""
    width = 512 if size < 1 << 30 else 2048
    per_layer = 12 * width * width * 4
    layers = max(1, (size - 2 * 50304 * width) // per_layer)
    rng = np.random.default_rng(0)
    context = ts.Context({"file_io_sync": False})
    total = 0
    for name, (shape, chunk) in shapes(layers, width).items():
        path = folder / "checkpoints" / "checkpoint_00004000" / f"mdl_vars.params.lm.{name}"
        array = ts.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "file", "path": f"{path}/"},
                "metadata": {
                    "shape": shape,
                    "chunks": chunk,
                    "dtype": "<f4",
                    "compressor": {"id": "zstd", "level": 1},
                    "fill_value": None,
                    "order": "C",
                    "filters": None,
                    "dimension_separator": ".",
                },
            },
            create=True,
            context=context,
        ).result()
        for index in itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
            part = tuple(slice(i, min(i + c, n)) for i, c, n in zip(index, chunk, shape, strict=True))
            extent = [s.stop - s.start for s in part]
            array[part].write(rng.standard_normal(extent, dtype=np.float32)).result()
        total += 4 * int(np.prod(shape))
    step = {"driver": "file", "path": f"{folder}/checkpoints/checkpoint_00004000/step/"}
    spec: dict[str, Any] = {
        "driver": "zarr",
        "kvstore": step,
        "metadata": {"shape": [], "chunks": [], "dtype": "<u4", "fill_value": None},
    }
    ts.open(spec, create=True).result().write(np.uint32(4000)).result()
    return total


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of every array of a checkpoint's OCDBT store, but the step."""
    item = next(out.glob("*/items"))
    base = {"driver": "ocdbt", "base": f"file://{item}/"}
    keys = ts.KvStore.open(base).result().list().result()
    names = [k.decode().removesuffix("/zarr.json") for k in keys if k.endswith(b"/zarr.json")]
    found = {}
    for name in sorted(set(names) - {"step"}):
        array = ts.open({"driver": "zarr3", "kvstore": {**base, "path": f"{name}/"}}).result()
        found[name] = hashlib.sha256(array.read().result().tobytes()).hexdigest()
    return found


def measure_p16(place: Place) -> Iterator[Result]:
    """Both sides on one checkpoint; their results must be the same arrays."""
    source, out = place.disk / "paxml", place.disk / "out"
    targets = tuple(
        Target(figure, limit, least_bytes=2 << 30)
        for figure, limit in (("wall_ratio", 0.75), ("cpu_ratio", 0.85), ("memory_ratio", 1 / 16))
    )
    result = Result(
        "Paxml to MaxText", "fastshard", "tensorstore + numpy", targets, write(source, place.size)
    )
    ours = merge(source, out, to="maxtext")
    theirs = peer(result.peer, "paxml_script", source, out, mapping=MAPPING)
    yield compare(result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(digests))
    remove(source)
