"""Scales and codes are read in pieces: a budget holds however large they are, and what is found in pieces is
what lies there."""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from fastshard.checkpoint import code_blocks, stored_bytes
from fastshard.checkpoint.code_blocks import Blocks, count_lost
from fastshard.checkpoint.stored_bytes import StoredBytes
from fastshard.models.quantised import gptq_awq
from fastshard.models.quantised.values import ValueAccess
from fastshard.sources.base import Contents
from helpers import cli
from test_long_names import measured

MIB = 1 << 20
WIDTHS = {"U8": 1, "F8_E4M3": 1, "F16": 2, "F32": 4, "I32": 4}
Stored = dict[str, tuple[str, list[int]]]


def write_sparse(folder: Path, config: dict[str, Any], tensors: Stored, filled: dict[str, bytes]) -> Path:
    """A file of zeros that takes no room, with the first bytes of some tensors."""
    folder.mkdir()
    entries, at, begins = {}, 0, {}
    for name, (dtype, shape) in tensors.items():
        size = WIDTHS[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        begins[name], at = at, at + size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = file.tell()
        file.truncate(begin + at)
        for name, content in filled.items():
            file.seek(begin + begins[name])
            file.write(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "other", "quantization_config": config}))
    return folder


def gpt_oss(folder: Path) -> Path:
    """Scales in the shape of a layer of gpt-oss-120b beside codes in theirs, of fewer experts."""
    codes: Stored = {
        "m.experts.gate_up_proj_blocks": ("U8", [24, 5760, 90, 16]),
        "m.experts.gate_up_proj_scales": ("U8", [24, 5760, 90]),
    }
    return write_sparse(folder, {"quant_method": "mxfp4"}, codes, {})


def fp8(folder: Path) -> Path:
    """One scale of zero for all codes, which are zero, so that all are read."""
    tensors: Stored = {"a.weight": ("F8_E4M3", [2048, 65536]), "a.weight_scale": ("F32", [])}
    return write_sparse(folder, {"quant_method": "fp8"}, tensors, {})


def nvfp4(folder: Path) -> Path:
    """Scales of which all are zero, over codes of zero."""
    tensors: Stored = {
        "a.weight": ("U8", [8192, 8192]),
        "a.weight_scale": ("F8_E4M3", [8192, 1024]),
        "a.weight_scale_2": ("F32", []),
    }
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    return write_sparse(folder, config, tensors, {"a.weight_scale_2": struct.pack("<f", 1)})


def gptq(folder: Path) -> Path:
    """Very many zero points and indices."""
    tensors: Stored = {
        "a.qweight": ("I32", [1024, 32768]),
        "a.qzeros": ("I32", [1024, 4096]),
        "a.scales": ("F16", [1024, 32768]),
        "a.g_idx": ("I32", [8192]),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}
    indices = np.arange(8192, dtype="<i4") // 8
    return write_sparse(
        folder,
        config,
        tensors,
        {"a.g_idx": indices.tobytes(), "a.scales": np.ones(1024 * 32768, "<f2").tobytes()},
    )


def bitsandbytes(folder: Path) -> Path:
    """Maxima of which all are zero, over codes of one number."""
    record = json.dumps(
        {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32768, 4096]}
    ).encode()
    tensors: Stored = {
        "a.weight": ("U8", [64 * MIB, 1]),
        "a.weight.absmax": ("F32", [2 * MIB]),
        "a.weight.quant_map": ("F32", [16]),
        "a.weight.quant_state.bitsandbytes__nf4": ("U8", [len(record)]),
    }
    filled = {
        "a.weight.quant_state.bitsandbytes__nf4": record,
        "a.weight.quant_map": struct.pack("<16f", *range(16)),
    }
    return write_sparse(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True}, tensors, filled)


@pytest.mark.parametrize("make", [gpt_oss, fp8, nvfp4, gptq, bitsandbytes])
def test_a_budget_holds_for_quantised_weights(make: Any, tmp_path: Path) -> None:
    """The process begins with what all extras import; what it takes besides is what this is about."""
    folder = make(tmp_path / "in")
    code, beyond, output = measured("verify", str(folder), "--memory", "400MiB", "--transformers", "off")
    assert code == 0, output[-2000:]
    assert beyond < 64


def test_no_piece_that_is_read_is_larger_than_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever is judged, and of whatever is looked at for values."""
    lengths: list[int] = []
    read_bytes = StoredBytes.raw

    def raw(stored: StoredBytes, name: str, start: int, length: int) -> Any:
        lengths.append(length)
        return read_bytes(stored, name, start, length)

    monkeypatch.setattr(StoredBytes, "raw", raw)
    folder = gptq(tmp_path / "in")
    # Of all zero points: those that readers differ in are counted.
    ran = cli("plan", folder, "--dtype", "f16", "--transformers", "off")
    assert ran.code == 0, ran.out
    assert sum(lengths) >= 16 * MIB and max(lengths) <= MIB
    lengths.clear()
    assert cli("verify", fp8(tmp_path / "fp8"), "--transformers", "off").code == 0
    # The codes once, since a scale of zero is over them.
    assert sum(lengths) >= 128 * MIB and max(lengths) <= MIB


def test_tensors_are_not_listed_to_learn_that_none_are_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each 100,000 of them, in which no signal was looked at."""
    listed: list[int] = []

    def tensors(contents: Contents, file: int) -> Any:
        listed.append(file)
        return contents._catalog.tensors(file)

    monkeypatch.setattr(Contents, "tensors", tensors)
    folder = write_sparse(tmp_path / "in", {}, {"a.weight": ("F32", [4])}, {})
    (folder / "config.json").unlink()
    assert list(fastshard.open(folder)) == ["a.weight"]
    assert listed == []


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0])
def test_what_is_no_scale_is_counted_over_all_pieces(odd: float, tmp_path: Path) -> None:
    rows = 3000
    tensors: Stored = {"a.weight": ("F8_E4M3", [128 * rows, 128]), "a.weight_scale_inv": ("F32", [rows, 1])}
    values = np.ones(rows, "<f4")
    values[[5, 2000]] = odd
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = write_sparse(tmp_path / "in", config, tensors, {"a.weight_scale_inv": values.tobytes()})
    window, stored_bytes.WINDOW = stored_bytes.WINDOW, 1024
    try:
        (found,) = [
            f for f in cli("verify", folder).findings if f["code"] == "FS306" and f["tensor"].endswith("_inv")
        ][:1]
    finally:
        stored_bytes.WINDOW = window
    assert found["message"].startswith("2 scales of a.weight are invalid (NaN")
    assert found["got"] == str(np.float32(odd))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("window", [64, 96, 1024, 1 << 16])
def test_zero_points_in_pieces_are_those_of_the_rows(
    bits: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows in a piece, and rows in several pieces, the last word of which is filled in part."""
    monkeypatch.setattr(gptq_awq, "_MANY", window)
    numbers = np.random.default_rng(bits)
    for rows in (8, 32, 100, 1000, 1024):
        groups, words = 5, -(-rows * bits // 32)
        codes = numbers.integers(0, 1 << bits, (groups, rows))
        each = (codes[..., None] >> np.arange(bits) & 1).reshape(groups, -1).astype(np.uint8)
        padded = np.pad(each, ((0, 0), (0, words * 32 - rows * bits)), constant_values=1)
        content = np.packbits(padded, bitorder="little").tobytes()
        lengths: list[int] = []

        def read(
            name: str, start: int, length: int, content: bytes = content, lengths: list[int] = lengths
        ) -> bytes:
            lengths.append(length)
            return content[start : start + length]

        found = list(gptq_awq._read_zero_points(bits, ValueAccess("F32", read), rows, "z", groups))
        assert np.concatenate(found).tolist() == codes.ravel().tolist()
        assert max(lengths) <= window and sum(lengths) == len(content)


class InMemory(StoredBytes):
    """Tensors that lie in memory."""

    def __init__(self, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
        self._tensors = tensors

    def dtype(self, name: str) -> str:
        return self._tensors[name][0]

    def size(self, name: str) -> int:
        return self._tensors[name][1].nbytes

    def raw(self, name: str, start: int, length: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._tensors[name][1].tobytes()[start : start + length], np.uint8)


def count_slowly(codes: np.ndarray[Any, Any], zero: np.ndarray[Any, Any], blocks: Blocks, dtype: str) -> int:
    """The same count, block by block."""
    count, share = 0, blocks.share
    for matrix, row, column in np.argwhere(zero):
        top, left = row // share * blocks.height, column * blocks.length
        block = codes[matrix, top : top + blocks.height, left : left + blocks.length]
        if share == 2:
            count += bool((block & (0xF0 if row % 2 else 0x0F)).any())
        elif blocks.mask is not None:
            count += bool((block & blocks.mask).any())
        else:
            count += bool(block.size) and bool((block != block.flat[0]).any())
    return count


@pytest.mark.parametrize("seed", range(40))
def test_lost_blocks_are_counted_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids whose last blocks are short or empty, stacks, rows longer than a window and shorter."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    for _ in range(40):
        window = rng.choice([4, 16, 64, 256])
        monkeypatch.setattr(stored_bytes, "WINDOW", window)
        monkeypatch.setattr(code_blocks, "WINDOW", window)
        dtype = rng.choice(["F8_E4M3", "U8", "I8"])
        shape = (rng.randint(1, 3), rng.randint(1, 12), rng.randint(1, 40))
        down = 2 * shape[1] if dtype == "U8" and rng.random() < 0.4 else rng.randint(1, shape[1])
        grid = (shape[0], down, rng.randint(1, shape[2]))
        codes = numbers.choice([0, 0, 0, 0x80, 0x88, 1, 0x10], shape).astype(np.uint8)
        codes[numbers.random(shape[:2]) < 0.5] = rng.choice([0, 0x80, 7])
        scales = numbers.choice([0, 1], grid).astype(np.float32)
        blocks = Blocks.of_matrices("codes", shape, codes.size, grid, dtype)
        assert blocks is not None
        stored = InMemory({"codes": (dtype, codes), "scales": ("F32", scales)})
        assert count_lost("scales", blocks, stored) == count_slowly(codes, scales == 0, blocks, dtype)


@pytest.mark.parametrize("seed", range(10))
def test_lost_runs_are_counted_as_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    for kind in ("", "maxima") * 20:
        window = rng.choice([4, 16, 64])
        monkeypatch.setattr(stored_bytes, "WINDOW", window)
        monkeypatch.setattr(code_blocks, "WINDOW", window)
        size = rng.randint(1, 300)
        codes = numbers.choice([0, 7, 0x77, 0x77, 0x77], (1, 1, size)).astype(np.uint8)
        maxima = numbers.choice([0, 1], (1, 1, rng.randint(1, size))).astype(np.float32)
        blocks = Blocks.in_turn("codes", size, maxima.size, kind)
        stored = InMemory({"codes": ("U8", codes), "maxima": ("F32", maxima)})
        assert count_lost("maxima", blocks, stored) == count_slowly(codes, maxima == 0, blocks, "U8")


@pytest.mark.parametrize("row", [0, 1, 5, 127])
def test_zero_scales_of_a_row_whose_codes_share_bytes_with_another(row: int, tmp_path: Path) -> None:
    """ModelOpt's integers: a byte holds two rows, and -8 is a number."""
    tensors: Stored = {"a.weight": ("U8", [64, 64]), "a.weight_scale": ("F32", [128, 1])}
    config = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64}
    codes = np.zeros((64, 64), np.uint8)
    values = np.ones(128, "<f4")
    values[row] = 0
    for number, (nibble, count) in enumerate(
        ((0x80 if row % 2 == 0 else 0x08, 0), (0x08 if row % 2 == 0 else 0x80, 1))
    ):
        codes[row // 2] = nibble
        filled = {"a.weight": codes.tobytes(), "a.weight_scale": values.tobytes()}
        folder = write_sparse(tmp_path / str(number), config, tensors, filled)
        ran = cli("verify", folder)
        found = [f for f in ran.findings if f["severity"] == "error"]
        assert [(f["code"], f["tensor"]) for f in found] == [("FS313", "a.weight_scale")] * count, ran.out
