"""The way to Megatron-LM and back, by the command line."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import cli, read_result


def convert(source: Path, out: Path, form: str, *degrees: object) -> None:
    """Converts to one of Megatron-LM's forms."""
    ran = cli("convert", source, out, "--to", f"megatron:{form}", *degrees)
    assert ran.code == 0, ran.out


def to_hf(source: Path, out: Path, *more: object) -> dict[str, torch.Tensor]:
    """Converts back, and returns the tensors."""
    ran = cli("convert", source, out, "--to", "hf", "--vocab-size", 250, *more)
    assert ran.code == 0, ran.out
    return read_result(out)


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Asserts that names, dtypes and values are equal."""
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype and torch.equal(have[name], tensor), name
