"""GPT-3 175B at full size on paper-thin disks: every chunk and shard is there, nearly all of it zeros that
take no space.

    python benches/sparse_gpt3.py OUT [--kind paxml|neox] [--layers 96] [--optimizer]

Each chunk of the Paxml form begins with values of its own, so that a chunk in the wrong place shows.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

#: GPT-3 175B. source: MLPerf's Paxml configuration
WIDTH, HEADS, HEAD, FFN, VOCAB, POSITIONS = 12288, 96, 128, 49152, 50304, 16384
LAYERS = 96
#: Devices by which rows and columns were divided: the mesh 1 x 64 x 24 of the published checkpoint.
MESH = (64, 24)
#: Values of a chunk that are not zero: at its beginning, in C order.
MARKED = 1024
#: Largest block of a zstd frame. source: RFC 8878, 3.1.1.2.4
_BLOCK = 128 << 10
_STACK = "transformer.repeat.sub.x_layers_0."


@dataclass(frozen=True)
class Variable:
    """An array of the checkpoint and the extent of its chunks."""

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str = "<f4"

    def chunks(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(-(-n // c)) for n, c in zip(self.shape, self.chunk, strict=True)))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * 4


def variables(layers: int = LAYERS, optimizer: bool = False, mesh: tuple[int, int] = MESH) -> list[Variable]:
    """All variables; chunks are what one device held."""
    rows, columns = mesh
    d, n, h, f, v, p, k = WIDTH, HEADS, HEAD, FFN, VOCAB, POSITIONS, layers
    found = [
        ("softmax.logits_ffn.linear.w", (d, v), (d // rows, v // columns)),
        ("position_emb.emb_var", (p, d), (p, d // columns)),
        ("final_ln.scale", (d,), (d,)),
        ("final_ln.bias", (d,), (d,)),
        (f"{_STACK}layer_norm.scale", (k, d), (k, d)),
        (f"{_STACK}layer_norm.bias", (k, d), (k, d)),
        (f"{_STACK}ff_layer.layer_norm.scale", (k, d), (k, d)),
        (f"{_STACK}ff_layer.layer_norm.bias", (k, d), (k, d)),
        (f"{_STACK}self_attention.combined_qkv.w", (k, 3, d, n, h), (k, 3, d // rows, n // columns, h)),
        (f"{_STACK}self_attention.combined_qkv.b", (k, 3, n, h), (k, 3, n // columns, h)),
        (f"{_STACK}self_attention.post.w", (k, d, n, h), (k, d // rows, n // columns, h)),
        (f"{_STACK}self_attention.post.b", (k, d), (k, d)),
        (f"{_STACK}ff_layer.ffn_layer1.linear.w", (k, d, f), (k, d // rows, f // columns)),
        (f"{_STACK}ff_layer.ffn_layer1.bias.b", (k, f), (k, f // columns)),
        (f"{_STACK}ff_layer.ffn_layer2.linear.w", (k, f, d), (k, f // columns, d // rows)),
        (f"{_STACK}ff_layer.ffn_layer2.bias.b", (k, d), (k, d)),
    ]
    out = [Variable(f"mdl_vars.params.lm.{name}", shape, chunk) for name, shape, chunk in found]
    if optimizer:
        for slot in ("m", "v"):
            for name, shape, chunk in found:
                group = f"p#{k}#i-1_2" if name.startswith(_STACK) else "no_prefix_2"
                out.append(Variable(f"opt_states_0.{group}.{slot}.params.lm.{name}", shape, chunk))
        out.append(Variable("opt_states_0.no_prefix_0.count", (), (), "<i4"))
    return [*out, Variable("step", (), (), "<u4")]


def marks(name: str, index: tuple[int, ...], count: int = MARKED) -> np.ndarray:
    """The first values of a chunk in C order, float32."""
    seed = hashlib.sha256(f"{name}/{index}".encode()).digest()[:8]
    return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(count, dtype=np.float32)


def frame(head: bytes, size: int) -> bytes:
    """A zstd frame of ``size`` bytes: ``head``, then zeros, each block of which takes four bytes.

    source: RFC 8878, 3.1.1
    """
    blocks = [(0, head)] if head else []
    left = size - len(head)
    blocks += [(1, left - at) for at in range(0, left, _BLOCK)]
    out = [struct.pack("<IBQ", 0xFD2FB528, 0xE0, size)]
    for number, (kind, what) in enumerate(blocks):
        last = number + 1 == len(blocks)
        length = len(what) if isinstance(what, bytes) else min(what, _BLOCK)
        out.append(struct.pack("<I", last | kind << 1 | length << 3)[:3])
        out.append(what if isinstance(what, bytes) else b"\0")
    return b"".join(out)


def paxml(
    folder: Path, layers: int = LAYERS, optimizer: bool = False, mesh: tuple[int, int] = MESH
) -> tuple[int, int]:
    """Writes the Paxml form (zarr v2, zstd); (bytes of the arrays, number of chunks)."""
    root = folder / "checkpoints" / "checkpoint_00004000"
    total = count = 0
    for variable in variables(layers, optimizer, mesh):
        path = root / variable.name
        path.mkdir(parents=True)
        metadata = {
            "zarr_format": 2,
            "shape": variable.shape,
            "chunks": variable.chunk,
            "dtype": variable.dtype,
            "compressor": {"id": "zstd", "level": 1},
            "fill_value": None,
            "filters": None,
            "order": "C",
            "dimension_separator": ".",
        }
        (path / ".zarray").write_text(json.dumps(metadata))
        size = math.prod(variable.chunk) * 4
        for index in variable.chunks():
            head = marks(variable.name, index, min(MARKED, size // 4)).tobytes()
            if not variable.shape:
                head = (4000).to_bytes(4, "little")
            (path / (".".join(map(str, index)) or "0")).write_bytes(frame(head, size))
            count += 1
        total += variable.nbytes
    return total, count


@functools.cache
def crc_of_zeros(size: int) -> int:
    """CRC32 of so many zeros."""
    crc, block = 0, bytes(min(size, 16 << 20))
    for at in range(0, size, len(block) or 1):
        crc = zlib.crc32(block[: size - at], crc)
    return crc


def checksum(path: Path) -> None:
    """Gives the storages in a torch file that was saved without data the checksums of holes."""
    with zipfile.ZipFile(path) as archive, path.open("r+b") as file:
        at = archive.start_dir
        for info in archive.infolist():
            file.seek(at)
            head = file.read(46)
            names = struct.unpack("<3H", head[28:34])
            if "/data/" in info.filename:
                crc = struct.pack("<I", crc_of_zeros(info.file_size))
                for place in (at + 16, info.header_offset + 14):
                    file.seek(place)
                    file.write(crc)
            at += len(head) + sum(names)


def neox(folder: Path, layers: int = LAYERS, tp: int = 8) -> tuple[int, int]:
    """Writes the pipeline form of GPT-NeoX in fp16, the storages as holes; (bytes of the tensors, files)."""
    import torch
    from neox import model

    step = folder / "global_step10"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    total = files = 0
    for layer, specs in model(WIDTH, layers, VOCAB // 1024 * 1024 + 1024).items():
        for rank in range(tp):
            # Memory that is never touched takes none.
            state = {s.name: torch.empty(s.local(tp), dtype=torch.float16) for s in specs}
            file = step / f"layer_{layer}-model_{rank:02d}-model_states.pt"
            with torch.serialization.skip_data():
                torch.save(state, file)
            checksum(file)
            total += sum(t.numel() * 2 for t in state.values())
            files += 1
    sizes = {"num_layers": layers, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    for rank in range(tp):
        state = {"module": None, "iteration": 10, "args": {**sizes, "model_parallel_size": tp}}
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
    config = {**sizes, "model_parallel_size": tp, "no_weight_tying": True, "gpt_j_residual": False}
    config |= {
        "pos_emb": "rotary",
        "norm": "layernorm",
        "activation": "gelu",
        "max_position_embeddings": 2048,
    }
    config |= {"layernorm_epsilon": 1e-5, "rotary_pct": 0.25}
    (step / "configs" / "run.yml").write_text(json.dumps(config))
    return total, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=("paxml", "neox"), default="paxml")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--optimizer", action="store_true")
    args = parser.parse_args()
    size, count = (
        paxml(args.out, args.layers, args.optimizer) if args.kind == "paxml" else neox(args.out, args.layers)
    )
    print(f"{size:,} bytes in {count:,} {'chunks' if args.kind == 'paxml' else 'files'}")


if __name__ == "__main__":
    main()
