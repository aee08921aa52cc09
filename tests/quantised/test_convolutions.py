"""Convolutions in fp8: one scale in all, or one for each output channel, as tools spell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, cli, read_result
from safetensors.torch import load_file, save_file

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Conv1d", "Conv2d", "Conv3d"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}
TOOLS = {"fp8": FP8, "modelopt": MODELOPT, "compressed-tensors": COMPRESSED}
#: Kernels of one to three dimensions, and one of each channel by itself.
SHAPES = [(6, 4, 3), (6, 1, 4), (6, 4, 3, 3), (6, 4, 2, 3, 3)]


def saved(folder: Path, config: dict[str, Any], shape: tuple[int, ...], scales: tuple[int, ...]) -> Path:
    torch.manual_seed(7)
    folder.mkdir()
    scale = torch.rand(scales) + 0.5
    tensors = {
        "conv.weight": (torch.randn(shape) * 8).to(torch.float8_e4m3fn),
        "conv.weight_scale": scale,
        "conv.bias": torch.randn(shape[0]),
        "proj.weight": (torch.randn(8, 6) * 8).to(torch.float8_e4m3fn),
        "proj.weight_scale": torch.rand(8, 1) + 0.5,
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "unet", "quantization_config": config}))
    return folder


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_output_channel_has_its_scale(tool: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    for scales in ((6,), (6, 1), (6, *(1 for _ in shape[1:]))):
        folder = saved(tmp_path / f"in{len(scales)}", TOOLS[tool], shape, scales)
        assert cli("verify", folder).code == 0
        out = tmp_path / f"out{len(scales)}"
        assert cli("merge", folder, out, "--dtype", "f32").code == 0
        tensors = load_file(folder / "model.safetensors")
        scale = tensors["conv.weight_scale"].reshape(6, *(1 for _ in shape[1:]))
        assert torch.equal(read_result(out)["conv.weight"], tensors["conv.weight"].float() * scale)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("scales", [(5,), (4,), (4, 6), (6, 3, 3), (1, 6, 1, 1)])
def test_scales_of_no_channels_are_refused(tool: str, scales: tuple[int, ...], tmp_path: Path) -> None:
    folder = saved(tmp_path / "in", TOOLS[tool], (6, 4, 3, 3), scales)
    assert cli("verify", folder).code == 1
    assert_refused(folder, tmp_path / "out", "FS201", exit=1, tensor="conv.weight_scale")
