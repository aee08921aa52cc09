"""Writes streams as EasyLM does, from the state dict of a Llama of transformers; needs neither flax nor
msgpack.

source: EasyLM checkpoint.py (StreamingCheckpointer.save_train_state_to_file),
    models/llama/convert_easylm_to_hf.py, reversed; flax serialization.py (_ndarray_to_bytes, _chunk)

When this was written, the bytes were those of flax 0.12.8 with msgpack 1.2.4, for arrays of float32, bfloat16
and int32, scalars and divided arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Bytes above which Flax divides an array. source: flax serialization.py (MAX_CHUNK_SIZE)
MOST = 1 << 30
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"} | {
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
Keys = tuple[str, ...]


class Raw(NamedTuple):
    """Bytes that stand for a value as they are."""

    content: bytes


def pack_header(small: int, below: int, sizes: Sequence[tuple[int, int]], length: int) -> bytes:
    """The header of a list, a map, a text or bytes, as short as may be."""
    if length < below:
        return bytes([small + length])
    first, size = next((first, size) for first, size in sizes if length < 1 << 8 * size)
    return bytes([first]) + length.to_bytes(size, "big")


def pack_text(text: str) -> bytes:
    content = text.encode()
    return pack_header(0xA0, 32, ((0xD9, 1), (0xDA, 2), (0xDB, 4)), len(content)) + content


def pack_bytes(content: bytes) -> bytes:
    return pack_header(0, 0, ((0xC4, 1), (0xC5, 2), (0xC6, 4)), len(content)) + content


def pack_list(items: Iterable[bytes]) -> bytes:
    items = list(items)
    return pack_header(0x90, 16, ((0xDC, 2), (0xDD, 4)), len(items)) + b"".join(items)


def pack_map(items: Mapping[str, bytes]) -> bytes:
    pairs = [pack_text(key) + value for key, value in items.items()]
    return pack_header(0x80, 16, ((0xDE, 2), (0xDF, 4)), len(pairs)) + b"".join(pairs)


def pack_number(number: int) -> bytes:
    return pack_header(0, 128, ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)), number)


def pack_ext(kind: int, content: bytes) -> bytes:
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(len(content))
    head = bytes([fixed]) if fixed else pack_header(0, 0, ((0xC7, 1), (0xC8, 2), (0xC9, 4)), len(content))
    return head + struct.pack("b", kind) + content


def pack_array(shape: Sequence[int], dtype: str, content: bytes, kind: int = 1) -> bytes:
    """An array as Flax has it: shape, numpy's name of its type, elements."""
    parts = [pack_list(map(pack_number, shape)), pack_text(dtype), pack_bytes(content)]
    return pack_ext(kind, pack_list(parts))


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def to_bytes(tensor: torch.Tensor, most: int = MOST) -> bytes:
    """What flax.serialization.to_bytes makes of an array: divided if it is large."""
    name = NAMES[tensor.dtype]
    if tensor.nbytes <= most:
        return pack_array(tensor.shape, name, as_bytes(tensor))
    parts = tensor.reshape(-1).split(max(1, most // tensor.itemsize))
    chunks = {str(n): pack_array(part.shape, name, as_bytes(part)) for n, part in enumerate(parts)}
    shape = {str(n): pack_number(extent) for n, extent in enumerate(tensor.shape)}
    return pack_map(
        {"__msgpack_chunked_array__": b"\xc3", "shape": pack_map(shape), "chunks": pack_map(chunks)}
    )


def pack_record(keys: Keys, value: torch.Tensor | Raw, most: int = MOST) -> bytes:
    content = value.content if isinstance(value, Raw) else to_bytes(value, most)
    return pack_list([pack_list(map(pack_text, keys)), pack_bytes(content)])


def write_stream(path: Path, arrays: Iterable[tuple[Keys, torch.Tensor | Raw]], *, most: int = MOST) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(pack_record(keys, value, most) for keys, value in arrays))
    return path


def as_easylm(model: Any) -> dict[Keys, torch.Tensor]:
    """The weights of a Llama under EasyLM's names: inputs first, rotary pairs side by side."""
    config = model.config
    names = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    heads = {"attention.wq": config.num_attention_heads, "attention.wk": config.num_key_value_heads}
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    out: dict[Keys, torch.Tensor] = {("transformer", "wte", "embedding"): state["model.embed_tokens.weight"]}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in heads:
                rows, inputs = weight.shape
                halves = weight.view(heads[ours], 2, rows // heads[ours] // 2, inputs)
                weight = halves.transpose(1, 2).reshape(rows, inputs)
            if weight.ndim == 2:
                weight = weight.T
            out[("transformer", "h", str(layer), *ours.split("."), "kernel")] = weight.contiguous()
    out["transformer", "ln_f", "kernel"] = state["model.norm.weight"]
    out["lm_head", "kernel"] = state["lm_head.weight"].T.contiguous()
    return out


def below(root: Keys, arrays: Mapping[Keys, torch.Tensor]) -> dict[Keys, torch.Tensor]:
    return {(*root, *keys): tensor for keys, tensor in arrays.items()}


def as_train_state(arrays: Mapping[Keys, torch.Tensor]) -> dict[Keys, torch.Tensor]:
    """The weights among what a trainer keeps; the moments are what the weights must not be taken for."""
    state: dict[Keys, torch.Tensor] = {("step",): torch.tensor(80, dtype=torch.int32)}
    state |= below(("params", "params"), arrays)
    for slot, factor in (("mu", 3.0), ("nu", 5.0)):
        moments = {keys: tensor.float() * factor for keys, tensor in arrays.items()}
        state |= below(("opt_state", "1", "0", slot, "params"), moments)
    state["opt_state", "1", "0", "count"] = torch.tensor(80, dtype=torch.int32)
    return state
