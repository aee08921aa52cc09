"""Weights stored as 8-bit floats: kept as they are, or given their values by their scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import assert_refused, cli, read_result
from safetensors.torch import save_file

KINDS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def expanded(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """One scale per element."""
    rows = scale.float().reshape(scale.shape[0], -1).repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def write(root: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> Path:
    root.mkdir()
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (root / "config.json").write_text(json.dumps({"model_type": "other", **config}))
    return root


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_value_is_torchs(kind: torch.dtype, tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(kind)
    root = write(tmp_path / "ckpt", {"a.weight": every.reshape(16, 16), "a.weight_scale": torch.tensor(1.0)})
    # All codes, those of NaN and the infinities too.
    ran = cli("merge", root, tmp_path / "out", "--dtype", "f32", "--accept", "non-finite")
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out")["a.weight"].flatten(), every.float()
    assert torch.equal(have.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal(have[number].view(torch.int32), want[number].view(torch.int32))


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_weights_are_multiplied_by_the_scale_of_their_block(kind: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape = torch.Size([300, 200])
    raw = torch.randn(shape).to(kind)
    blocks = torch.rand(3, 2) + 0.5
    small = torch.rand(10, 5) + 0.5
    rows = torch.rand(300, 1).to(torch.bfloat16)
    tensors = {
        "usual.weight": raw,
        "usual.weight_scale_inv": blocks,
        "rows.weight": raw.clone(),
        "rows.weight_scale": rows,
        "flat.weight": raw.clone(),
        "flat.weight_scale": rows.reshape(-1).clone(),
        "one.weight": raw.clone(),
        "one.weight_scale_inv": torch.tensor([0.25]),
        "norm.weight": torch.ones(7, dtype=torch.bfloat16),
    }
    root = write(tmp_path / "ckpt", tensors)
    assert cli("merge", root, tmp_path / "out", "--dtype", "bf16").code == 0
    have = read_result(tmp_path / "out")
    scales = {
        "usual": expanded(blocks, shape, (128, 128)),
        "rows": expanded(rows, shape, (1, 200)),
        "flat": expanded(rows, shape, (1, 200)),
        "one": torch.full(shape, 0.25),
    }
    assert set(have) == {"norm.weight", *(f"{name}.weight" for name in scales)}
    for name, scale in scales.items():
        assert torch.equal(have[f"{name}.weight"], (raw.float() * scale).to(torch.bfloat16)), name
    # Blocks of other extents are those that the config states.
    config = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 40]},
        "torch_dtype": "float8",
    }
    root = write(tmp_path / "stated", {"a.weight": raw, "a.weight_scale_inv": small}, config)
    assert cli("merge", root, tmp_path / "small", "--dtype", "f32").code == 0
    want = raw.float() * expanded(small, shape, (32, 40))
    assert torch.equal(read_result(tmp_path / "small")["a.weight"], want)
    written = json.loads((tmp_path / "small/config.json").read_text())
    assert "quantization_config" not in written
    assert written["torch_dtype"] == "float32"


def test_nothing_is_dequantised_unless_asked(tmp_path: Path) -> None:
    raw = torch.randn(128, 128).to(torch.float8_e4m3fn)
    root = write(tmp_path / "ckpt", {"a.weight": raw, "a.weight_scale_inv": torch.ones(1, 1)})
    assert cli("merge", root, tmp_path / "out").code == 0
    have = read_result(tmp_path / "out")
    assert torch.equal(have["a.weight"].view(torch.uint8), raw.view(torch.uint8))
    assert set(have) == {"a.weight", "a.weight_scale_inv"}


def test_scales_that_are_missing_or_fit_nothing_are_refused(tmp_path: Path) -> None:
    raw = torch.randn(300, 200).to(torch.float8_e4m3fn)
    options = ("--dtype", "bf16")
    root = write(tmp_path / "none", {"a.weight": raw})
    assert_refused(root, tmp_path / "out", "FS514", exit=2, options=options, tensor="a.weight")
    root = write(tmp_path / "odd", {"a.weight": raw, "a.weight_scale_inv": torch.ones(7, 3)})
    assert_refused(root, tmp_path / "out", "FS201", exit=1, options=options, got="[7, 3]")
    root = write(tmp_path / "kind", {"a.weight": raw, "a.weight_scale": torch.ones(1, dtype=torch.int32)})
    assert_refused(root, tmp_path / "out", "FS202", exit=1, options=options, got="I32")
