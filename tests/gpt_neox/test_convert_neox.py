"""GPT-NeoX fixtures: every tensor of a merge and of a conversion has the hash that it must have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import FIXTURES, assert_refused, cli, read_result, sha256

DRIFTED = FIXTURES / "gpt_neox/neox_pp_tp2_normdiverged"


def described(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, object]]:
    return {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "sha256": sha256(t)}
        for name, t in tensors.items()
    }


def replicas(fixture: Path) -> tuple[str, ...]:
    return ("--replicas", "mean") if "diverged" in fixture.name else ()


def expected_of(fixture: Path, *, trimmed: bool = False) -> dict[str, dict[str, object]]:
    """Tensors by Hugging Face names; a tied head is left out of the files."""
    document = json.loads((fixture / "expected.json").read_text())
    expected = dict(document["hf"])
    if trimmed:
        expected |= document["hf_trimmed_to_true_vocab"]
    if document["tied"]:
        del expected["embed_out.weight"]
    return expected


def test_conversion_to_hf_gives_the_expected_tensors(neox_fixture: Path, tmp_path: Path) -> None:
    ran = cli("convert", neox_fixture, tmp_path / "out", "--to", "hf", *replicas(neox_fixture))
    assert ran.code == 0, ran.out
    assert described(read_result(tmp_path / "out")) == expected_of(neox_fixture)


def test_true_vocabulary_drops_the_pad_rows(neox_fixture: Path, tmp_path: Path) -> None:
    options = ("--to", "hf", "--vocab-size", 509, *replicas(neox_fixture))
    assert cli("convert", neox_fixture, tmp_path / "out", *options).code == 0
    assert described(read_result(tmp_path / "out")) == expected_of(neox_fixture, trimmed=True)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 509


def test_merge_keeps_names_and_pad_rows(neox_fixture: Path, tmp_path: Path) -> None:
    assert cli("merge", neox_fixture, tmp_path / "out", *replicas(neox_fixture)).code == 0
    merged = json.loads((neox_fixture / "expected.json").read_text())["merged"]
    assert described(read_result(tmp_path / "out")) == merged


def test_config_json_says_what_the_training_config_says(neox_fixture: Path, tmp_path: Path) -> None:
    assert cli("convert", neox_fixture, tmp_path / "out", "--to", "hf", *replicas(neox_fixture)).code == 0
    expected = json.loads((neox_fixture / "expected.json").read_text())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["tie_word_embeddings"] is expected["tied"]
    assert config["vocab_size"] == expected["padded_vocab"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (32, 3, 4)
    if expected["arch"] == "llama":
        # The YAML's intermediate_size is 288: a third of it is gone before it comes to tensors.
        assert (config["model_type"], config["intermediate_size"], config["hidden_act"]) == (
            "llama",
            96,
            "silu",
        )
        assert config["num_key_value_heads"] == (2 if "gqa" in neox_fixture.name else 4)
        assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-6, 10000, 8)
        assert (config["attention_bias"], config["mlp_bias"]) == (False, False)
        embedding = "model.embed_tokens.weight"
    else:
        assert (config["model_type"], config["intermediate_size"], config["hidden_act"]) == (
            "gpt_neox",
            128,
            "gelu",
        )
        assert config["use_parallel_residual"] is (expected["row_bias"] == "partial")
        assert (config["rotary_pct"], config["attention_bias"]) == (0.5, True)
        embedding = "gpt_neox.embed_in.weight"
    assert config["torch_dtype"] == expected["hf"][embedding]["dtype"]


def test_result_is_verified_by_its_own_manifest(neox_fixture: Path, tmp_path: Path) -> None:
    assert cli("convert", neox_fixture, tmp_path / "out", "--to", "hf", *replicas(neox_fixture)).code == 0
    ran = cli("verify", tmp_path / "out")
    assert (ran.code, ran.errors) == (0, [])


@pytest.mark.parametrize("command", [("merge",), ("convert", "--to", "hf")], ids=["merge", "convert"])
def test_norms_that_drift_are_refused_by_default(command: tuple[str, ...], tmp_path: Path) -> None:
    ran = assert_refused(DRIFTED, tmp_path / "out", "FS302", command=command, tensor="layernorm.weight")
    named = {f["tensor"] for f in ran.having("FS302")}
    # All replicated tensors of the three layers and the final norm, not only the first.
    assert len(named) == 14


def test_averaging_is_reported_with_the_largest_difference(tmp_path: Path) -> None:
    ran = cli("merge", DRIFTED, tmp_path / "out", "--replicas", "mean")
    assert ran.code == 0
    averaged = ran.having("FS310", tensor="layernorm.weight")
    assert averaged and all(f["severity"] == "warning" for f in averaged)
    assert any(character.isdigit() for f in averaged for character in f["message"] + str(f.get("got", "")))


@pytest.mark.parametrize(
    "dtype, name", [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_dtype_is_cast_once(dtype: str, name: torch.dtype, tmp_path: Path) -> None:
    source = FIXTURES / "gpt_neox/neox_pp_tp2_stdres"
    assert cli("convert", source, tmp_path / "kept", "--to", "hf").code == 0
    assert cli("convert", source, tmp_path / "cast", "--to", "hf", "--dtype", dtype).code == 0
    kept, cast = read_result(tmp_path / "kept"), read_result(tmp_path / "cast")
    assert {t.dtype for t in cast.values()} == {name}
    assert all(torch.equal(cast[k], kept[k].to(name)) for k in kept) and set(cast) == set(kept)
