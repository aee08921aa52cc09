"""Values of quantised weights, written down naively from the formats' own descriptions: one form after
another, all of it in torch."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stream(words: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """The codes of each row, which lie one after another, the lowest bits first."""
    raw = words.contiguous().view(torch.uint8).numpy()
    every = np.unpackbits(raw, axis=-1, bitorder="little")[..., : n * bits]
    weights = 1 << np.arange(bits)
    return torch.from_numpy((every.reshape(*raw.shape[:-1], n, bits) * weights).sum(-1))


def spread(scale: torch.Tensor, o: int, i: int) -> torch.Tensor:
    """One scale for each element, of as many blocks as there are scales."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(o, i)
    scale = scale.reshape(scale.shape[0], -1)
    for size in (scale.shape[0], scale.shape[1]):
        assert size > 0
    high = 128 if scale.shape[0] == -(-o // 128) != o else -(-o // scale.shape[0])
    wide = 128 if scale.shape[1] == -(-i // 128) and scale.shape[0] != o else -(-i // scale.shape[1])
    return scale.repeat_interleave(high, 0)[:o].repeat_interleave(wide, 1)[:, :i]


def powers(codes: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(codes.shape), codes.view(torch.uint8).int() - 127)


def fp8(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    scale = next(t[n] for n in ("weight_scale_inv", "weight_scale", "scale") if n in t)
    scale = powers(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
    return (t["weight"].float() * spread(scale, o, i)).to(dtype)


def ct_float(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    kind = t["weight_scale"].dtype
    return (t["weight"].to(kind) * spread(t["weight_scale"], o, i)).to(dtype)


def ct_pack(bits: int):
    def values(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
        codes = stream(t["weight_packed"], bits, i).float() - 2 ** (bits - 1)
        scale = t["weight_scale"]
        if "weight_zero_point" in t:
            zeros = stream(t["weight_zero_point"].T, bits, o).T.float() - 2 ** (bits - 1)
            codes = codes - spread(zeros, o, i)
        return (codes.to(scale.dtype) * spread(scale, o, i)).to(dtype)

    return values


def ct_nvfp4(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    scale = t["weight_scale"].to(torch.bfloat16) / t["weight_global_scale"]
    return (E2M1[stream(t["weight_packed"], 4, i)] * spread(scale.float(), o, i)).to(torch.bfloat16).to(dtype)


def ct_mxfp4(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    return (
        (E2M1[stream(t["weight_packed"], 4, i)] * spread(powers(t["weight_scale"]), o, i))
        .to(torch.bfloat16)
        .to(dtype)
    )


def modelopt_fp8(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    return t["weight"].to(dtype) * spread(t["weight_scale"].to(dtype), o, i)


def modelopt_nvfp4(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    scale = t["weight_scale"].float() * t["weight_scale_2"]
    table = torch.where(E2M1 == 0, 0.0, E2M1)
    return (table[stream(t["weight"], 4, i)] * spread(scale, o, i)).to(dtype)


def modelopt_awq(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    codes = stream(t["weight"].T, 4, o).T
    codes = torch.where(codes > 7, codes - 16, codes)
    return codes.to(dtype) * spread(t["weight_scale"].to(dtype), o, i)


def gptq(bits: int, low: int = 1):
    def values(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
        codes = stream(t["qweight"].T, bits, i).T
        zeros = stream(t["qzeros"], bits, o) + low
        groups = t["g_idx"].long()
        return (t["scales"][groups] * (codes - zeros[groups]).to(t["scales"].dtype)).T.to(dtype)

    return values


def awq(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    def columns(words: torch.Tensor) -> torch.Tensor:
        nibbles = stream(words, 4, o).reshape(words.shape[0], -1, 8)
        found = torch.empty_like(nibbles)
        for lane, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            found[..., column] = nibbles[..., lane]
        return found.reshape(words.shape[0], -1)

    groups = torch.arange(i) // (i // t["scales"].shape[0])
    codes, zeros = columns(t["qweight"]), columns(t["qzeros"])
    return ((codes - zeros[groups]).to(t["scales"].dtype) * t["scales"][groups]).T.to(dtype)


def bnb(t: Tensors, o: int, i: int, dtype: torch.dtype) -> torch.Tensor:
    said: dict[str, Any] = json.loads(bytes(t["weight.quant_state.bitsandbytes__nf4"].tolist()))
    absmax = t["weight.absmax"]
    if "nested_blocksize" in said:
        outer = t["weight.nested_absmax"].repeat_interleave(said["nested_blocksize"])[: absmax.numel()]
        absmax = t["weight.nested_quant_map"][absmax.long()] * outer + torch.tensor(said["nested_offset"])
    raw = t["weight"].flatten()
    codes = torch.stack((raw >> 4, raw & 15), 1).flatten()[: o * i]
    found = t["weight.quant_map"][codes.long()] * absmax.repeat_interleave(said["blocksize"])[: o * i]
    return found.to(getattr(torch, said["dtype"])).reshape(said["shape"]).to(dtype)


#: The oracle of each form of `quantised_maker.FORMS` whose values are made.
ORACLES = {
    "fp8 blocks": fp8,
    "fp8 V4": fp8,
    "fp8 tensor": fp8,
    "mxfp8": fp8,
    "ct 4 bit": ct_pack(4),
    "ct 4 bit asymmetric": ct_pack(4),
    "ct 3 bit": ct_pack(3),
    "ct int8": ct_float,
    "ct fp8": ct_float,
    "ct nvfp4": ct_nvfp4,
    "ct mxfp4": ct_mxfp4,
    "modelopt fp8": modelopt_fp8,
    "modelopt nvfp4": modelopt_nvfp4,
    "gptq 4 bit": gptq(4),
    "gptq 3 bit": gptq(3),
    "gptq 8 bit": gptq(8),
    "awq": awq,
    "bnb nf4": bnb,
    "bnb nf4 nested": bnb,
}
