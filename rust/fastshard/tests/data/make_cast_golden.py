"""Writes cast_golden.json: what torch's ``Tensor.to`` makes of chosen bit patterns.

Run it with ATEN_CPU_CAPABILITY=default, the scalar code, whose NaN rule for bf16 does not depend on the
memory layout or on the position in the tensor:

    ATEN_CPU_CAPABILITY=default python make_cast_golden.py

Values are hexadecimal bit patterns. For f64 to f16 and f16 to f32 no NaN is listed: there torch's scalar and
vector code disagree and fastshard follows the vector code (see kernel/convert.rs).
"""

import json
import pathlib

import numpy as np
import torch

FLOATS = {
    "F16": (torch.float16, np.uint16, np.int16),
    "BF16": (torch.bfloat16, np.uint16, np.int16),
    "F32": (torch.float32, np.uint32, np.int32),
    "F64": (torch.float64, np.uint64, np.int64),
}


def tensor(dtype, patterns):
    torch_dtype, unsigned, signed = FLOATS[dtype]
    return torch.from_numpy(np.array(patterns, dtype=unsigned).view(signed)).view(torch_dtype)


def cast(source, target, patterns):
    """Bit patterns after ``to``; one element a tensor, so that no element depends on its position."""
    _, unsigned, signed = FLOATS[target]
    signed_torch = getattr(torch, np.dtype(signed).name)
    out = []
    for pattern in patterns:
        bits = tensor(source, [pattern]).to(FLOATS[target][0]).view(signed_torch)
        out.append(int(bits.numpy().view(unsigned)[0]))
    return out


def f32_patterns(rng):
    bits = {0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F7FFFFE, 0x7F800000}
    # NaNs: quiet and signalling, payload in the high, the low and all bits.
    bits |= {0x7F800001, 0x7F80FFFF, 0x7F810000, 0x7FA12345, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFFFFFF}
    # Ties of both narrow types, one bit either side, above even and odd neighbours.
    for exponent in (0x00000000, 0x00800000, 0x38800000, 0x3F800000, 0x47000000, 0x7F000000):
        for kept in (0, 1, 2, 3, 0x7E, 0x7F):
            for low in (0x7FFF, 0x8000, 0x8001, 0xFFFF):
                bits.add(exponent + (kept << 16) + low)
        for kept in (0, 1, 2, 3, 0x3FE, 0x3FF):
            for low in (0x0FFF, 0x1000, 0x1001):
                bits.add(exponent + (kept << 13) + low)
    # The limits of f16 (max finite, overflow tie, denormals down to half the smallest) and of bf16.
    for value in (65504.0, 65519.99, 65520.0, 65536.0, 2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 3 * 2.0**-25):
        at = int(np.float32(value).view(np.uint32))
        bits |= {at - 1, at, at + 1}
    bits |= {0x7F7F7FFF, 0x7F7F8000, 0x7F7F8001, 0x00007FFF, 0x00008000, 0x00008001, 0x00018000}
    bits |= {int(b) for b in rng.integers(0, 0x7F800000, 120)}
    return sorted(b | sign for b in bits for sign in (0, 0x80000000))


def f64_patterns(rng):
    values = [0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, np.inf]
    values += [65520 - 2.0**-20, 65520.0, 3.4028235677973366e38, 3.3961775292304949e38]
    # Just off a tie of a narrow type, lost in f32: these show whether the cast rounds twice.
    for ulp in (8, 11, 24):
        for odd in (1, 3, 5):
            for off in (-(2.0**-45), 0, 2.0**-45):
                for scale in (1.0, 2.0**-14, 2.0**-126, 2.0**-130, 2.0**-24):
                    values.append((1 + odd * 2.0**-ulp + off) * scale)
    values += list(rng.standard_normal(60) * 10.0 ** rng.integers(-46, 40, 60))
    bits = {int(np.float64(v).view(np.uint64)) & (2**63 - 1) for v in values}
    return sorted(b | sign for b in bits for sign in (0, 1 << 63))


def main():
    assert torch.backends.cpu.get_cpu_capability() == "DEFAULT", "set ATEN_CPU_CAPABILITY=default"
    rng = np.random.default_rng(20)
    f32, f64 = f32_patterns(rng), f64_patterns(rng)
    nan64 = [
        p | s for p in (0x7FF0000000000001, 0x7FF4000000000000, 0x7FF8123456789ABC) for s in (0, 1 << 63)
    ]
    half = [p for p in range(0, 0x10000, 97) if p & 0x7C00 != 0x7C00] + [0x7C00, 0xFC00]
    brain = [*range(0, 0x10000, 97), 0x7F80, 0xFF80]
    finite_brain = [p for p in brain if p & 0x7FFF <= 0x7F80]
    cases = [
        ("F32", "BF16", f32),
        ("F32", "F16", f32),
        ("F32", "F64", f32),
        ("F64", "BF16", f64 + nan64),
        ("F64", "F16", f64),
        ("F64", "F32", f64 + nan64),
        ("F16", "F32", half),
        ("F16", "BF16", half),
        ("BF16", "F32", brain),
        ("BF16", "F16", finite_brain),
    ]
    width = {name: np.dtype(unsigned).itemsize * 2 for name, (_, unsigned, _) in FLOATS.items()}
    lines = []
    for source, target, patterns in cases:
        pairs = [
            f'["{a:0{width[source]}x}", "{b:0{width[target]}x}"]'
            for a, b in zip(patterns, cast(source, target, patterns), strict=True)
        ]
        lines.append(
            f'  {{"from": "{source}", "to": "{target}", "pairs": [\n    ' + ",\n    ".join(pairs) + "\n  ]}"
        )
    text = f'{{"torch": "{torch.__version__}", "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    json.loads(text)
    pathlib.Path(__file__).with_name("cast_golden.json").write_text(text)


if __name__ == "__main__":
    main()
