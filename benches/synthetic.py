"""Checkpoints to measure with: random, incompressible, finite values, written in bounded memory.

`tp_safetensors` writes one safetensors file per tensor-parallel rank with a `layout.json`; the files
also carry the metadata by which torch's distributed checkpoint consolidates them, so that both sides
of a comparison read the very same bytes. `neox` writes GPT-NeoX layer files, `sparse` files of real
headers and holes for data.

    python benches/synthetic.py OUT --size 4GiB --tp 4 [--huge 4GiB] [--kind row|column|mixed]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fastshard.layouts import tables

BLOCK = 32 << 20
ITEM = {"F32": 4, "BF16": 2, "F16": 2}
#: Clears the top bit of the exponent, so that every value is finite.
FINITE = {"F32": 0xBFFFFFFFBFFFFFFF, "BF16": 0xBFFFBFFFBFFFBFFF, "F16": 0xBFFFBFFFBFFFBFFF}


@dataclass(frozen=True)
class Spec:
    """A whole tensor and the dimension along which ranks divide it (None: each has a copy)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = 0
    dtype: str = "BF16"

    def local(self, tp: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        return tuple(n // tp if d == self.dim else n for d, n in enumerate(self.shape))

    def nbytes(self, tp: int = 1) -> int:
        """Bytes of one rank's shard."""
        return math.prod(self.local(tp)) * ITEM[self.dtype]


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `64MiB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG])iB", text)
    if not match:
        raise ValueError(f"a size like 64MiB or 4GiB, not {text!r}")
    return int(float(match[1]) * (1 << {"K": 10, "M": 20, "G": 30}[match[2]]))


def blocks(seed: object, nbytes: int, dtype: str) -> Iterator[memoryview]:
    """Random bytes of finite values; the same for the same seed."""
    state = np.random.SeedSequence(list(str(seed).encode()))
    rng = np.random.Generator(np.random.SFC64(state))
    while nbytes > 0:
        take = min(BLOCK, nbytes)
        words = rng.integers(0, 2**64, -(-take // 8), dtype=np.uint64)
        words &= np.uint64(FINITE[dtype])
        yield memoryview(words).cast("B")[:take]
        nbytes -= take


def values(seed: object, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A shard's content as an array of raw items: for computing what should come out."""
    data = np.empty(math.prod(shape) * ITEM[dtype], np.uint8)
    at = 0
    for block in blocks(seed, data.size, dtype):
        data[at : at + len(block)] = block
        at += len(block)
    return data.view(f"u{ITEM[dtype]}").reshape(shape)


def whole(spec: Spec, tp: int, seed: int = 0) -> np.ndarray:
    """The merged tensor, computed without the product."""
    if spec.dim is None:
        return values(f"{seed}/{spec.name}/all", spec.shape, spec.dtype)
    parts = [values(f"{seed}/{spec.name}/{rank}", spec.local(tp), spec.dtype) for rank in range(tp)]
    return np.concatenate(parts, axis=spec.dim)


def whole_digest(spec: Spec, tp: int, seed: int = 0) -> str:
    """SHA-256 of the merged tensor; row shards are taken one block at a time."""
    digest = hashlib.sha256()
    if spec.dim != 0:
        digest.update(whole(spec, tp, seed))
    else:
        for rank in range(tp):
            for block in blocks(f"{seed}/{spec.name}/{rank}", spec.nbytes(tp), spec.dtype):
                digest.update(block)
    return digest.hexdigest()


def header(entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """A safetensors header, its length included, padded to 8 bytes."""
    table: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape in entries:
        end = at + math.prod(shape) * ITEM[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _dcp(specs: list[Spec], tp: int, rank: int) -> dict[str, str]:
    """What torch's HuggingFaceStorageWriter says of a rank's shards."""
    info = {}
    for spec in specs:
        local = spec.local(tp)
        offsets = [local[d] * rank if d == spec.dim else 0 for d in range(len(local))]
        info[spec.name] = {"saved_offsets": offsets}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}


def tp_safetensors(
    folder: Path, specs: list[Spec], tp: int, *, seed: int = 0, layout: bool = True, holes: bool = False
) -> int:
    """Writes one file per rank; returns the bytes of all tensors merged."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(tp):
        head = header(((s.name, s.dtype, s.local(tp)) for s in specs), _dcp(specs, tp, rank))
        with (folder / f"tp_rank_{rank:02d}.safetensors").open("wb") as file:
            file.write(head)
            if holes:
                file.truncate(len(head) + sum(s.nbytes(tp) for s in specs))
                continue
            for spec in specs:
                source = "all" if spec.dim is None else rank
                for block in blocks(f"{seed}/{spec.name}/{source}", spec.nbytes(tp), spec.dtype):
                    file.write(block)
    if layout:
        table = {"tp": tp, "tp_dim": {s.name: s.dim for s in specs}}
        (folder / "layout.json").write_text(json.dumps(table))
    return sum(s.nbytes() for s in specs)


def model(size: int, kind: str = "row", huge: int = 0, dtype: str = "BF16") -> list[Spec]:
    """Tensors of about `size` bytes in all: matrices divided by rows, columns, or both in turn, and norms.

    `huge` is the size of one further row-divided tensor, which counts towards `size`.
    """
    width = 4096 if size >= 1 << 30 else 512
    item = ITEM[dtype]
    specs = []
    if huge:
        specs.append(Spec("huge.weight", (huge // (width * item), width), 0, dtype))
    rows = 4 * width
    count = max(1, (size - huge) // (rows * width * item))
    for i in range(count):
        dim = {"row": 0, "column": 1, "mixed": i % 2}[kind]
        shape = (rows, width) if dim == 0 else (width, rows)
        specs.append(Spec(f"layers.{i}.dense.weight", shape, dim, dtype))
        specs.append(Spec(f"layers.{i}.norm.weight", (width,), None, dtype))
    return specs


def gpt3(layers: int, hidden: int = 12288, vocab: int = 51200) -> list[Spec]:
    """GPT-3 175B's tensors (96 layers of 12 tensors), head tied."""
    specs = [Spec("transformer.wte.weight", (vocab, hidden), 0)]
    if layers == 96:
        specs.append(Spec("transformer.wpe.weight", (2048, hidden), None))
    for layer in range(layers):
        p = f"transformer.h.{layer}."
        specs += [
            Spec(p + "ln_1.weight", (hidden,), None),
            Spec(p + "ln_1.bias", (hidden,), None),
            Spec(p + "attn.qkv.weight", (3 * hidden, hidden), 0),
            Spec(p + "attn.qkv.bias", (3 * hidden,), 0),
            Spec(p + "attn.proj.weight", (hidden, hidden), 1),
            Spec(p + "attn.proj.bias", (hidden,), None),
            Spec(p + "ln_2.weight", (hidden,), None),
            Spec(p + "ln_2.bias", (hidden,), None),
            Spec(p + "mlp.fc.weight", (4 * hidden, hidden), 0),
            Spec(p + "mlp.fc.bias", (4 * hidden,), 0),
            Spec(p + "mlp.proj.weight", (hidden, 4 * hidden), 1),
            Spec(p + "mlp.proj.bias", (hidden,), None),
        ]
    if layers == 96:
        specs += [Spec(f"transformer.ln_f.{part}", (hidden,), None) for part in ("weight", "bias")]
    return specs


def llama(folder: Path, size: int, *, single: bool = False, tp: int = 4) -> list[Spec]:
    """A Llama in float32 with every matrix stored transposed, its config and the layout table for it.

    `single` makes nearly all of it one tensor, the embedding.
    """
    hidden, inner, vocab = (2048, 8192, 4096) if size >= 1 << 30 else (256, 1024, 512)
    layer = (4 * hidden + 3 * inner) * hidden * 4
    layers = 1 if single else max(1, (size - vocab * hidden * 4) // layer)
    if single:
        vocab = max(512, (size - layer) // (hidden * 4) // 512 * 512)
    specs = [Spec("model.embed_tokens.weight", (hidden, vocab), 1, "F32")]
    for n in range(layers):
        p = f"model.layers.{n}."
        for name, shape, dim in (
            ("self_attn.q_proj", (hidden, hidden), 1),
            ("self_attn.k_proj", (hidden, hidden), 1),
            ("self_attn.v_proj", (hidden, hidden), 1),
            ("self_attn.o_proj", (hidden, hidden), 0),
            ("mlp.gate_proj", (hidden, inner), 1),
            ("mlp.up_proj", (hidden, inner), 1),
            ("mlp.down_proj", (inner, hidden), 0),
            ("input_layernorm", (hidden,), None),
            ("post_attention_layernorm", (hidden,), None),
        ):
            specs.append(Spec(f"{p}{name}.weight", shape, dim, "F32"))
    specs.append(Spec("model.norm.weight", (hidden,), None, "F32"))
    tp_safetensors(folder, specs, tp, layout=False)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    table = Path(tables.__file__).with_name("hf.llama.toml").read_text()
    table = table.replace('layout = "hf.llama"', 'layout = "transposed"')
    (folder / "transposed.toml").write_text(re.sub(r'shape = "\[(.+), (.+)\]"', r'shape = "[\2, \1]"', table))
    return specs


def transposed_bf16(spec: Spec, tp: int, seed: int = 0) -> str:
    """SHA-256 of the tensor transposed and rounded to bfloat16, computed by numpy, a rank at a time."""
    digest = hashlib.sha256()
    if spec.dim == 1:
        parts = (values(f"{seed}/{spec.name}/{rank}", spec.local(tp), spec.dtype) for rank in range(tp))
    else:
        parts = iter([whole(spec, tp, seed)])
    for part in parts:
        rows = np.ascontiguousarray(part.T)
        rows += 0x7FFF + ((rows >> 16) & 1)
        rows >>= 16
        digest.update(rows.astype("<u2").tobytes())
    return digest.hexdigest()


def sparse(folder: Path, files: int = 512) -> int:
    """About 74,000 shard entries of GPT-3 175B's shapes, with holes for data; returns their number.

    512 files hold twelve layers (145 tensors) each at tp 512; 64 files hold all 96 layers at tp 64.
    """
    specs = gpt3(12 if files == 512 else 96)
    tp_safetensors(folder, specs, files, holes=True)
    return files * len(specs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--huge", default=None)
    parser.add_argument("--kind", choices=("row", "column", "mixed"), default="mixed")
    parser.add_argument("--sparse", type=int, choices=(64, 512), help="175B shapes in so many files of holes")
    args = parser.parse_args()
    if args.sparse:
        print(f"{sparse(args.out, args.sparse)} entries")
        return
    huge = parse_size(args.huge) if args.huge else 0
    total = tp_safetensors(args.out, model(parse_size(args.size), args.kind, huge), args.tp)
    print(f"{total} bytes")


if __name__ == "__main__":
    main()
