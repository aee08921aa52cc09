"""Logits of the converted model against a forward that simulates tensor parallelism from the shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from helpers import at_once, cli, edit_safetensors
from neox_forward import logits, read_shards
from neox_maker import Spec, write

TOLERANCE = 1e-4


def logits_of_result(out: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        return model(tokens).logits


def largest_difference(root: Path, out: Path, vocab: int) -> float:
    tokens = torch.randint(0, vocab, (2, 24), generator=torch.Generator().manual_seed(5))
    shards, config = read_shards(root)
    want = logits(shards, config, tokens)
    have = logits_of_result(out, tokens)
    assert want.std() > 0.1, "logits that say nothing"
    return float((have - want[..., : have.shape[-1]]).abs().max())


@pytest.mark.parametrize("vocab", [None, 600], ids=["padded", "trimmed"])
@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "sequential"])
@pytest.mark.parametrize("residual", [True, False], ids=["parallel_residual", "sequential_residual"])
@pytest.mark.parametrize("tp", at_once([4, 8], [4]))
def test_random_model_gives_the_logits_of_its_shards(
    tp: int, residual: bool, pipeline: bool, vocab: int | None, tmp_path: Path
) -> None:
    spec = Spec(tp=tp, residual=residual, seed=tp + 100)
    root = write(tmp_path / "ckpt", spec, pipeline=pipeline)
    options = () if vocab is None else ("--vocab-size", vocab)
    assert cli("convert", root, tmp_path / "out", "--to", "hf", *options).code == 0
    assert largest_difference(root, tmp_path / "out", 600) < TOLERANCE


def test_tied_model_gives_the_logits_of_its_shards(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(tp=4, tied=True))
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    assert largest_difference(root, tmp_path / "out", 600) < TOLERANCE


def test_bf16_model_widened_to_f32_gives_the_logits_of_its_shards(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(tp=4, dtype=torch.bfloat16, rotary_pct=1.0))
    assert cli("convert", root, tmp_path / "out", "--to", "hf", "--dtype", "f32").code == 0
    assert largest_difference(root, tmp_path / "out", 600) < TOLERANCE


def test_fixture_gives_the_logits_of_its_shards(neox_fixture: Path, tmp_path: Path) -> None:
    drifted = "diverged" in neox_fixture.name
    options = ("--replicas", "mean") if drifted else ()
    assert cli("convert", neox_fixture, tmp_path / "out", "--to", "hf", *options).code == 0
    # Norms that drifted make another function of the mean; the fixture's own figure is 0.115.
    assert largest_difference(neox_fixture, tmp_path / "out", 509) < (0.2 if drifted else TOLERANCE)


def test_the_check_can_fail(tmp_path: Path) -> None:
    """Biases that are summed where they must not be move the logits far beyond the tolerance."""
    root = write(tmp_path / "ckpt", Spec(tp=4, residual=False))
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0

    def sum_them(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("attention.dense.bias")]:
            tensors[name] = tensors[name] * 4

    (file,) = (tmp_path / "out").glob("*.safetensors")
    edit_safetensors(file, sum_them)
    assert largest_difference(root, tmp_path / "out", 600) > 0.1
