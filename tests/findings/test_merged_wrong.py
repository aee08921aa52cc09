"""Models that were merged wrong before fastshard saw them: one rank's part in another's place, a matrix that
was never filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import assert_refused, cli, edit_safetensors, spawn
from safetensors.torch import save_file
from tiny_models import SIZES
from tiny_models import model as save_model

#: Matrices of a layer, and the dimension that tensor parallelism divides.
SPLIT = {
    "self_attn.q_proj": 0,
    "self_attn.k_proj": 0,
    "self_attn.v_proj": 0,
    "self_attn.o_proj": 1,
    "mlp.gate_proj": 0,
    "mlp.up_proj": 0,
    "mlp.down_proj": 1,
}
H, F = 48, 96


def model(layers: int = 2, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    tensors = {
        "model.embed_tokens.weight": normal(64, H),
        "lm_head.weight": normal(64, H),
        "model.norm.weight": torch.ones(H),
    }
    for layer in range(layers):
        for name in SPLIT:
            shape = {"mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}.get(
                name, (H, H)
            )
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(H)
    return tensors


def copied(tensors: dict[str, torch.Tensor], tp: int, source: int, over: int, layers: range) -> None:
    """Puts one rank's part in another's place, as a merge of wrong files does."""
    for layer in layers:
        for name, dim in SPLIT.items():
            parts = tensors[f"model.layers.{layer}.{name}.weight"].chunk(tp, dim)
            parts[over].copy_(parts[source])


def saved(folder: Path, tensors: dict[str, torch.Tensor], form: str = "safetensors") -> Path:
    folder.mkdir()
    if form == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    elif form == "torch":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("tp", "source", "over"), [(2, 0, 1), (2, 1, 0), (3, 0, 2), (4, 2, 3), (8, 1, 6), (6, 0, 5)]
)
def test_a_rank_that_was_merged_twice_is_refused(tmp_path: Path, tp: int, source: int, over: int) -> None:
    tensors = model()
    copied(tensors, tp, source, over, range(2))
    folder = saved(tmp_path / "ckpt", tensors)
    ran = cli("verify", folder)
    (finding,) = ran.having("FS303", severity="error", file="model.safetensors")
    assert (ran.code, finding["tensor"]) == (1, "model.layers.0.mlp.down_proj.weight")
    width = F // tp
    first, second = sorted((source, over))
    assert f"columns {second * width}-{second * width + width - 1}" in finding["message"]
    assert f"copies of {first * width}-{first * width + width - 1}" in finding["message"]
    assert "6 more matrices" in finding["message"] and "1 more layers" in finding["message"]
    assert_refused(folder, tmp_path / "out", "FS303")


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_in_other_formats(tmp_path: Path, form: str) -> None:
    tensors = model()
    assert cli("verify", saved(tmp_path / "good", tensors, form)).code == 0
    copied(tensors, 2, 0, 1, range(1, 2))
    ran = cli("verify", saved(tmp_path / "ckpt", tensors, form))
    assert ran.code == 1 and len(ran.having("FS303")) == 1


@pytest.mark.parametrize(
    ("to", "told"),
    [
        (
            "maxtext:scan",
            "mlp.wi_0.kernel: indices 48-95 of dimension 2 are copies of 0-47, and 2 more matrices of all",
        ),
        (
            "maxtext:unscan",
            "mlp.wi_0.kernel: columns 48-95 are copies of 0-47, and 2 more matrices of this layer",
        ),
        (
            "orbax",
            "self_attn.o_proj.weight: columns 96-191 are copies of 0-95, and 6 more matrices of this layer",
        ),
    ],
)
def test_in_compressed_blocks_and_in_arrays_of_all_layers(tmp_path: Path, to: str, told: str) -> None:
    """What is decoded is sampled then: it is not decoded again."""
    save_model("llama", tmp_path / "model")
    good, bad = tmp_path / "good", tmp_path / "bad"
    assert cli("convert", tmp_path / "model", good, "--to", to).code == 0
    edit_safetensors(
        tmp_path / "model/model.safetensors",
        lambda tensors: copied(tensors, 2, 0, 1, range(SIZES["num_hidden_layers"])),
    )
    assert cli("convert", tmp_path / "model", bad, "--to", to, "--accept", "copies").code == 0
    for folder in (good, bad):
        (folder / "fastshard.manifest.json").unlink()
    assert not cli("verify", good).having("FS303")
    for verb in (["verify", bad], ["merge", bad, tmp_path / "out"]):
        ran = cli(*verb)
        (finding,) = ran.having("FS303", severity="error")
        assert ran.code == 1 and told in f"{finding['tensor']}: {finding['message']}", finding
    # Two processes, each of which decodes a part.
    ranks = [spawn("merge", bad, tmp_path / "out", "--rank", rank, "--world", 2) for rank in range(2)]
    assert [("FS303" in "".join(rank.communicate()), rank.returncode) for rank in ranks] == [(True, 1)] * 2
    assert not (tmp_path / "out").exists()


def test_it_can_be_accepted(tmp_path: Path) -> None:
    tensors = model()
    copied(tensors, 2, 0, 1, range(2))
    folder = saved(tmp_path / "ckpt", tensors)
    ran = cli("merge", folder, tmp_path / "out", "--accept", "copies")
    assert ran.code == 0 and ran.having("FS303", severity="warning")
    assert cli("verify", tmp_path / "out").code == 0, "its manifest says what was accepted"


def test_what_repeats_itself_for_a_reason_is_taken(tmp_path: Path) -> None:
    tensors = model()
    generator = torch.Generator().manual_seed(9)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        # Keys and values of two groups, copied for each head; experts in one array, made of one.
        for name in ("k_proj", "v_proj"):
            group = tensors[f"{prefix}.self_attn.{name}.weight"][: H // 4]
            tensors[f"{prefix}.self_attn.{name}.weight"] = group.repeat(4, 1)
        expert = torch.randn(1, 32, H, generator=generator)
        tensors[f"{prefix}.mlp.experts.gate_up_proj"] = expert.repeat(4, 1, 1)
        for e in range(4):
            tensors[f"{prefix}.mlp.experts.{e}.w1.weight"] = expert[0].repeat(2, 1)
        # Nothing but one value.
        tensors[f"{prefix}.mask"] = torch.full((H, H), 2.0)
        tensors[f"{prefix}.other_mask"] = torch.full((H, H), 3.0)
    ran = cli("verify", saved(tmp_path / "ckpt", tensors))
    assert ran.code == 0 and not [f for f in ran.findings if f["code"] == "FS303"], ran.out


@pytest.mark.parametrize(
    ("name", "others", "told"),
    [
        ("model.embed_tokens.weight", False, True),
        ("lm_head.weight", False, True),
        ("model.layers.1.mlp.up_proj.weight", False, True),
        ("model.layers.1.mlp.up_proj.weight", True, True),
        ("model.layers.1.anything.weight", True, True),
        ("model.layers.1.anything.weight", False, False),
        ("model.layers.1.q_proj.bias", True, False),
        ("model.layers.1.input_layernorm.weight", True, False),
        ("model.layers.1.attn.relative_position_bias_table", True, False),
        ("model.layers.1.self_attn.q_proj.lora_B.weight", True, False),
        ("model.mask_token", False, False),
    ],
)
def test_a_matrix_of_zeros(tmp_path: Path, name: str, others: bool, told: bool) -> None:
    tensors = model()
    tensors[name] = torch.zeros(24, 16)
    if others:
        tensors[name.replace("layers.1", "layers.0")] = torch.randn(24, 16)
    ran = cli("verify", saved(tmp_path / "ckpt", tensors))
    found = [f for f in ran.findings if f["code"] == "FS313"]
    assert [f["tensor"] for f in found] == ([name] if told else []), ran.out
    assert all(f["severity"] == "warning" and f["got"] == "zeros" for f in found)
    if others and told:
        assert "of other layers is not" in found[0]["message"]
