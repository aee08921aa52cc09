"""What keeps its dtype where all else is cast: biases of routers, and what a class keeps in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import cli, read_result
from safetensors.torch import load_file, save_file

BIAS = "e_score_correction_bias"
#: What the class computes with in float32.
KEPT = (f".{BIAS}", ".gate.weight")


def routed(folder: Path, bias: torch.dtype = torch.float32) -> Path:
    """A small glm4_moe in float32, whose router has biases that bfloat16 cannot tell apart."""
    torch.manual_seed(5)
    config = transformers.Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=False,
    )
    transformers.Glm4MoeForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(BIAS):
            tensors[name] = (torch.arange(16) * 1e-4 + 9.0).to(bias)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def dtypes(folder: Path) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Those of what the class computes with in float32, and of all else."""
    have = read_result(folder)
    kept = {t.dtype for n, t in have.items() if n.endswith(KEPT)}
    return kept, {t.dtype for n, t in have.items() if not n.endswith(KEPT)}


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("verb", [["merge"], ["convert", "--to", "hf"]])
def test_routers_keep_their_dtype(
    verb: list[str], off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = routed(tmp_path / "in")
    if off:
        monkeypatch.setenv("FASTSHARD_TRANSFORMERS", "off")
    ran = cli(verb[0], folder, tmp_path / "out", *verb[1:], "--dtype", "bf16")
    if ran.code == 2 and off:
        pytest.skip("no target without a list")
    assert ran.code == 0, ran.out
    assert dtypes(tmp_path / "out") == ({torch.float32}, {torch.bfloat16})
    (note,) = [f for f in ran.findings if f["code"] == "FS212" and "float32" in f["message"]]
    assert note["tensor"].endswith(KEPT) and note["severity"] == "note"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    want = load_file(folder / "model.safetensors")
    for name in (n for n in want if n.endswith(KEPT)):
        assert loaded[name].dtype == torch.float32 and torch.equal(loaded[name], want[name])


def test_everything_is_cast_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = routed(tmp_path / "in")
    assert cli("merge", folder, tmp_path / "out", "--dtype", "bf16", "--keep-dtype", "none").code == 0
    assert dtypes(tmp_path / "out") == ({torch.bfloat16}, {torch.bfloat16})
    assert cli("merge", folder, tmp_path / "no", "--keep-dtype", "some").code == 2
    # A wider dtype loses nothing.
    assert (
        cli("merge", routed(tmp_path / "narrow", torch.bfloat16), tmp_path / "wide", "--dtype", "f32").code
        == 0
    )
    assert dtypes(tmp_path / "wide") == ({torch.float32}, {torch.float32})


@pytest.mark.parametrize(
    "name", ["mixer.A_log", "mixer.dt_bias", "mlp.router.expert_bias", f"mlp.gate.{BIAS}"]
)
def test_what_routes_or_integrates_keeps_its_dtype_in_any_model(name: str, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {f"layers.{n}.{name}": torch.rand(16) + 1 for n in range(2)}
    tensors |= {f"layers.{n}.fc.weight": torch.randn(16, 16) for n in range(2)}
    tensors |= {f"layers.{n}.fc.bias": torch.randn(16) for n in range(2)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in/model.safetensors")
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        assert cli("merge", tmp_path / "in", tmp_path / dtype, "--dtype", dtype).code == 0
        have = read_result(tmp_path / dtype)
        assert {n: t.dtype for n, t in have.items() if n.endswith(name)} == dict.fromkeys(
            (n for n in tensors if n.endswith(name)), torch.float32
        )
        assert all(t.dtype == torch_dtype for n, t in have.items() if "fc" in n)
