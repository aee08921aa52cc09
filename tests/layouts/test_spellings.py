"""Names of torchtitan, Meta and OLMo-core for models that Hugging Face has: both ways, and logits decide.

torchtitan's model is computed here by the formula of its own rotary embedding (pairs side by side, as complex
numbers).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers import cli, read_result
from names_maker import olmo, titan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from transformers import AutoModelForCausalLM

TOKENS = torch.arange(3, 40)[None]


def model(kind: str, folder: Path) -> Any:
    if kind == "olmo2":
        from transformers import Olmo2Config

        torch.manual_seed(3)
        sizes = {k: v for k, v in tiny_models.SIZES.items() if k != "head_dim"}
        made = AutoModelForCausalLM.from_config(Olmo2Config(**sizes))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        made.save_pretrained(folder)
        return made.eval()
    return tiny_models.model(kind, folder)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turn(x: torch.Tensor, theta: float) -> torch.Tensor:
    """torchtitan's ComplexRoPE: two neighbours are one complex number."""
    length, size = x.shape[1], x.shape[-1]
    rates = theta ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.outer(torch.arange(length).double(), rates)
    turned = (
        torch.view_as_complex(x.double().view(*x.shape[:-1], -1, 2))
        * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    )
    return torch.view_as_real(turned).flatten(-2).float()


def titan_logits(state: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    heads, groups, d, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    h = F.embedding(TOKENS, state["tok_embeddings.weight"])
    for n in range(config.num_hidden_layers):
        w = {
            name.removeprefix(f"layers.{n}."): t
            for name, t in state.items()
            if name.startswith(f"layers.{n}.")
        }
        x = rms(h, w["attention_norm.weight"], eps)
        q, k, v = (
            F.linear(x, w[f"attention.qkv_linear.w{p}.weight"]).view(1, x.shape[1], -1, d) for p in "qkv"
        )
        q, k = turn(q, config.rope_parameters["rope_theta"]), turn(k, config.rope_parameters["rope_theta"])
        k, v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        h = h + F.linear(attended.transpose(1, 2).flatten(2), w["attention.wo.weight"])
        x = rms(h, w["ffn_norm.weight"], eps)
        inner = F.silu(F.linear(x, w["feed_forward.w1.weight"])) * F.linear(x, w["feed_forward.w3.weight"])
        h = h + F.linear(inner, w["feed_forward.w2.weight"])
    return F.linear(rms(h, state["norm.weight"], eps), state["lm_head.weight"])


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors as torch itself loads them."""
    found: dict[str, torch.Tensor] = {}

    def flatten(at: Any, path: str) -> None:
        if isinstance(at, torch.Tensor):
            found[path] = at
        else:
            for key, value in at.items():
                flatten(value, f"{path}.{key}" if path else key)

    flatten(_load_state_dict_from_keys(checkpoint_id=folder), "")
    return found


def equal(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(have) == set(want)
    assert all(torch.equal(have[name], want[name]) for name in want)


def test_torchtitan_computes_the_same(tmp_path: Path) -> None:
    """What is written for it, computed as it computes."""
    of = model("llama", tmp_path / "hf")
    assert (
        cli("convert", tmp_path / "hf", tmp_path / "titan", "--to", "dcp:torchtitan", "--tp", "2").code == 0
    )
    state = loaded(tmp_path / "titan")
    with torch.no_grad():
        want = of(TOKENS).logits
    assert (titan_logits(state, of.config) - want).abs().max() < 1e-4
    # Unturned, all shapes are right and the logits are not.
    plain = titan(dict(of.state_dict()), 8, 4, turned=False)
    assert (titan_logits(plain, of.config) - want).abs().max() > 1e-2


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3", "qwen3_tied"])
def test_torchtitans_names_both_ways(kind: str, meta: bool, tmp_path: Path) -> None:
    of = model(kind, tmp_path / "hf")
    state = {n: t for n, t in of.state_dict().items() if n != "lm_head.weight" or not kind.endswith("tied")}
    want = titan(state, 8, 4, turned=kind.startswith("llama"), meta=meta)
    if not meta:
        assert cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "dcp:torchtitan").code == 0
        equal({n: t for n, t in loaded(tmp_path / "out").items() if n in want}, want)
    extra = {
        "optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(3)}}},
        "train_state": {"step": torch.tensor(4)},
    }
    dcp.save({**want, **extra}, checkpoint_id=tmp_path / "step-10", no_dist=True)
    ran = cli(
        "convert",
        tmp_path / "step-10",
        tmp_path / "back",
        "--to",
        "hf",
        "--config",
        tmp_path / "hf/config.json",
    )
    assert ran.code == 0, ran.out
    equal({n: t for n, t in read_result(tmp_path / "back").items() if n in state}, state)
    with torch.no_grad():
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path / "back")(TOKENS).logits, of(TOKENS).logits
        )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2"])
def test_olmo_cores_names_both_ways(kind: str, tmp_path: Path) -> None:
    of = model(kind, tmp_path / "hf")
    want = olmo(dict(of.state_dict()), kind)
    assert cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "dcp:olmo_core").code == 0
    equal(loaded(tmp_path / "out"), want)
    state = {**want, "optim.state.embeddings.weight.exp_avg": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path / "step10/model_and_optim", no_dist=True)
    ran = cli(
        "convert",
        tmp_path / "step10",
        tmp_path / "back",
        "--to",
        "hf",
        "--config",
        tmp_path / "hf/config.json",
    )
    assert ran.code == 0, ran.out
    equal(read_result(tmp_path / "back"), dict(of.state_dict()))
    with torch.no_grad():
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path / "back")(TOKENS).logits, of(TOKENS).logits
        )


def test_from_one_spelling_to_another(tmp_path: Path) -> None:
    """And through other frameworks: the values follow the canonical tensors."""
    of = model("llama", tmp_path / "hf")
    steps = ("dcp:torchtitan", "dcp:olmo_core", "megatron:torch_dist", "dcp:torchtitan", "hf")
    at = tmp_path / "hf"
    for n, to in enumerate(steps):
        # Megatron's vocabulary is padded.
        ran = cli("convert", at, tmp_path / str(n), "--to", to, "--vocab-size", "200")
        assert ran.code == 0, (to, ran.out)
        at = tmp_path / str(n)
    equal(read_result(at), dict(of.state_dict()))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    of = model("llama", tmp_path / "hf")
    state = titan(dict(of.state_dict()), 8, 4, turned=True)
    for lacking, code in (("layers.2.attention.wo.weight", "FS102"), ("norm.weight", "FS102")):
        ckpt = tmp_path / lacking
        dcp.save({n: t for n, t in state.items() if n != lacking}, checkpoint_id=ckpt, no_dist=True)
        ran = cli("convert", ckpt, tmp_path / "out", "--to", "hf", "--config", tmp_path / "hf/config.json")
        assert ran.code == 3 and [(f["code"], f["tensor"]) for f in ran.errors] == [(code, lacking)], ran.out


def test_models_that_the_trainer_does_not_have_are_refused(tmp_path: Path) -> None:
    """Nothing says how their rotary pairs lie there."""
    for kind in ("mistral", "qwen2"):
        of = model(kind, tmp_path / kind)
        for to in ("dcp:torchtitan", "dcp:olmo_core"):
            ran = cli("convert", tmp_path / kind, tmp_path / "out", "--to", to)
            assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"], ran.out
            assert repr(kind) in ran.errors[0]["message"]
        state = titan({n: t for n, t in of.state_dict().items() if "bias" not in n}, 8, 4, turned=True)
        dcp.save(state, checkpoint_id=tmp_path / f"{kind}-titan", no_dist=True)
        ran = cli(
            "convert",
            tmp_path / f"{kind}-titan",
            tmp_path / "out",
            "--to",
            "hf",
            "--config",
            tmp_path / kind / "config.json",
        )
        assert ran.code == 2 and "torchtitan has no model of the type" in json.dumps(ran.errors), ran.out


def test_a_computation_that_the_trainer_does_not_have_is_refused(tmp_path: Path) -> None:
    """No tensor shows it: an activation, and a scaled rotary embedding."""
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for name, changes, word in (
        ("gelu", {"hidden_act": "relu"}, "hidden_act"),
        ("scaled", {"rope_parameters": scaled}, "rope"),
    ):
        model("llama", tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        for to in ("dcp:torchtitan", "dcp:olmo_core"):
            ran = cli("convert", tmp_path / name, tmp_path / "out", "--to", to)
            (finding,) = ran.errors
            assert ran.code == 2 and finding["code"] == "FS514", ran.out
            assert f"has no Llama model with this {word}" in finding["message"]
