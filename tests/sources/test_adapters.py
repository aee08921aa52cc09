"""LoRA adapters: what is merged is what peft's own merge_and_unload makes, in float32 bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import tiny_models
import torch
import zero_maker
from helpers import cli, copy, edit_safetensors, read_result
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: An adapter's options, and the model that it is for.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
    "all_linear": ("qwen3", {"r": 16, "lora_alpha": 32, "target_modules": ALL}),
    "rank_one": ("llama", {"r": 1, "lora_alpha": 3, "target_modules": ALL}),
    "rslora": ("llama", {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ALL}),
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ALL,
            "rank_pattern": {r"layers\.0\..*q_proj": 2, "v_proj": 6},
            "alpha_pattern": {"model.layers.1.self_attn.k_proj": 64, "o_proj": 1},
        },
    ),
    "biases": (
        "llama_biases",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "all"},
    ),
    "lora_bias": (
        "llama_biases",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    ),
    "modules_to_save": (
        "llama",
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "embeddings": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens"]}),
    "tokens": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 199, 17]},
        },
    ),
    "layers": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ALL, "layers_to_transform": [1, 3]}),
    "conv1d": (
        "gpt2",
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True},
    ),
    "experts": (
        "mixtral",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "dora": ("llama", {"r": 8, "lora_alpha": 16, "target_modules": ALL, "use_dora": True}),
    "dora_embeddings": (
        "llama",
        {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    ),
}
#: Norms are summed in another order: a few units in the last place.
NORMED = ("dora", "dora_embeddings")


def base(kind: str, folder: Path) -> Any:
    if kind in ("gpt2", "mixtral"):
        torch.manual_seed(3)
        config = (
            GPT2Config(vocab_size=200, n_embd=48, n_layer=2, n_head=4, n_positions=64)
            if kind == "gpt2"
            else MixtralConfig(**tiny_models.SIZES, num_local_experts=4)
        )
        made = AutoModelForCausalLM.from_config(config)
        made.save_pretrained(folder)
        return made
    return tiny_models.model(kind, folder)


def trained(model: Any, options: dict[str, Any]) -> Any:
    """An adapter that does something: factors, biases, magnitudes, rows."""
    made = get_peft_model(model, LoraConfig(**options))
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if "magnitude" in name:
                parameter.mul_(1.3)
    return made


def made(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Base, adapter, and what peft merges them to."""
    which, options = KINDS[kind]
    base(which, folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=dtype)
    model.save_pretrained(folder / "base")
    adapter = trained(model, options)
    adapter.save_pretrained(folder / "adapter")
    merged = adapter.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    return folder / "base", folder / "adapter", read_result(folder / "merged")


@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_what_peft_merges(kind: str, tmp_path: Path) -> None:
    ckpt, adapter, want = made(kind, tmp_path)
    ran = cli("merge", ckpt, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert set(have) == set(want)
    assert any(not torch.equal(have[n], t) for n, t in read_result(ckpt).items() if n in have)
    for name, tensor in want.items():
        if kind in NORMED:
            torch.testing.assert_close(have[name], tensor, rtol=5e-7, atol=0)
        else:
            assert torch.equal(have[name], tensor), (name, (have[name] - tensor).abs().max())
    left = [name for name in have if "lora" in name]
    assert not left


@pytest.mark.parametrize("kind", ["plain", "all_linear", "experts", "dora"])
def test_in_half_precision_a_value_is_rounded_once(kind: str, tmp_path: Path) -> None:
    """The sum in float32, rounded; peft, whose factors are float32 then, does the same."""
    ckpt, adapter, want = made(kind, tmp_path, torch.bfloat16)
    assert cli("merge", ckpt, tmp_path / "out", "--adapter", adapter).code == 0
    have = read_result(tmp_path / "out")
    wide = {n: t.float() for n, t in read_result(ckpt).items()}
    shutil.copytree(ckpt, tmp_path / "wide")
    edit_safetensors(tmp_path / "wide/model.safetensors", lambda tensors: tensors.update(wide))
    assert cli("merge", tmp_path / "wide", tmp_path / "exact", "--adapter", adapter).code == 0
    exact = read_result(tmp_path / "exact")
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype
        assert torch.equal(have[name], exact[name].to(torch.bfloat16)), name
        if kind in ("plain", "all_linear"):
            assert torch.equal(have[name], tensor), name


@pytest.mark.parametrize("kind", ["plain", "modules_to_save", "embeddings", "tokens"])
def test_logits_are_those_of_the_adapted_model(kind: str, tmp_path: Path) -> None:
    which, options = KINDS[kind]
    base(which, tmp_path / "base")
    live = trained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), options).eval()
    live.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        want = live(tokens).logits
    ran = cli("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--adapter", tmp_path / "adapter")
    assert ran.code == 0, ran.out
    with torch.no_grad():
        have = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
        without = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(tokens).logits
    assert (have - want).abs().max() < 1e-4 < (without - want).abs().max()


def test_through_other_layouts(tmp_path: Path) -> None:
    """What is added follows the weight through fused, divided and turned tensors, and is the same there and
    back."""
    ckpt, adapter, want = made("all_linear", tmp_path)
    for to, options in (
        ("megatron:legacy", ("--tp", 2)),
        ("gpt_neox", ("--tp", 2)),
        ("dcp", ("--tp", 2)),
        ("dcp:torchtitan", ()),
    ):
        at = tmp_path / to.replace(":", "_")
        ran = cli("convert", ckpt, at, "--to", to, *options, "--adapter", adapter, "--vocab-size", 200)
        if to == "gpt_neox":
            # It has no norms of queries and keys.
            assert ran.code == 2
            continue
        assert ran.code == 0, ran.out
        assert cli("convert", at, tmp_path / f"{at.name}-back", "--to", "hf", "--vocab-size", 200).code == 0
        have = read_result(tmp_path / f"{at.name}-back")
        assert all(torch.equal(have[name], want[name]) for name in want)


def test_seen_before_it_is_written(tmp_path: Path) -> None:
    ckpt, adapter, want = made("plain", tmp_path)
    name = "model.layers.2.self_attn.v_proj.weight"
    with fastshard.open(ckpt, adapter=adapter) as checkpoint:
        assert torch.equal(checkpoint[name].torch(), want[name])
        assert set(checkpoint) == set(want)
    with fastshard.open(ckpt, to="hf", adapter=adapter) as view:
        assert torch.equal(view[name].torch(), want[name])
    plan = fastshard.plan(ckpt, adapter=adapter)
    assert plan.summary["changes"] == {"add a product of rank 8 x 2": 8}, plan.summary
    ran = cli("inspect", ckpt, "--adapter", adapter)
    assert ran.code == 0 and ran.doc["complete"]
    assert cli("verify", ckpt, "--adapter", adapter).code == 0


def damaged(adapter: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    edit_safetensors(adapter / "adapter_model.safetensors", change)


def said(adapter: Path, **changes: Any) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text()) | changes
    (adapter / "adapter_config.json").write_text(json.dumps(config))


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


def write_mlx_config(adapter: Path) -> None:
    """Puts a config as mlx-lm's trainer writes it in the place of PEFT's."""
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 8, "scale": 20.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    "no B": (lambda a: damaged(a, lambda t: t.pop(B)), "FS102", 3),
    "B of another shape": (lambda a: damaged(a, lambda t: t.update({B: t[B][:-2].clone()})), "FS201", 1),
    "A of another rank": (lambda a: damaged(a, lambda t: t.update({A: t[A][:4].clone()})), "FS201", 1),
    "another rank in the config": (lambda a: said(a, r=4), "FS215", 1),
    "a layer too many": (
        lambda a: damaged(
            a, lambda t: t.update({n.replace("layers.1", "layers.9"): t[n].clone() for n in (A, B)})
        ),
        "FS102",
        3,
    ),
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "FS101", 3),
    "a config that is none": (lambda a: (a / "adapter_config.json").write_text("{}"), "FS211", 2),
    "a config cut short": (lambda a: (a / "adapter_config.json").write_text('{"peft_type"'), "FS211", 2),
    "alpha is no number": (lambda a: said(a, lora_alpha="16"), "FS211", 2),
    "another kind": (lambda a: said(a, peft_type="LOHA"), "FS514", 2),
    "an adapter of mlx-lm": (write_mlx_config, "FS514", 2),
    "a variant": (lambda a: said(a, use_qalora=True), "FS514", 2),
    "an initialisation that changed the base": (
        lambda a: said(a, init_lora_weights="pissa_niter_4"),
        "FS514",
        2,
    ),
    "a pattern that is none": (lambda a: said(a, rank_pattern={"(a+": 4}), "FS211", 2),
    "a pattern without an end": (
        lambda a: said(a, rank_pattern={"(.*)" * 9 + r"\3\4\5\6(?=x)": 4}),
        "FS514",
        2,
    ),
    "DoRA without magnitudes": (lambda a: said(a, use_dora=True), "FS102", 3),
    "no tensors": (lambda a: (a / "adapter_model.safetensors").unlink(), "FS101", 3),
    "cut": (
        lambda a: (a / "adapter_model.safetensors").write_bytes(
            (a / "adapter_model.safetensors").read_bytes()[:-9]
        ),
        "FS312",
        1,
    ),
    "not there": (lambda a: shutil.rmtree(a), "FS501", 2),
}


def test_an_adapter_of_mlx_by_itself_is_refused_by_name(tmp_path: Path) -> None:
    _, adapter, _ = made("plain", tmp_path)
    write_mlx_config(adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapters.safetensors")
    for verb in ("verify", "inspect"):
        ran = cli(verb, adapter)
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"], ran.out
        assert "mlx" in ran.errors[0]["message"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_adapter_is_told(damage: str, tmp_path: Path) -> None:
    ckpt, adapter, _ = made("plain", tmp_path)
    do, code, exit_code = DAMAGE[damage]
    do(adapter)
    ran = cli("merge", ckpt, tmp_path / "out", "--adapter", adapter)
    assert ran.code == exit_code and code in [f["code"] for f in ran.errors], ran.out
    assert len(ran.errors) == 1, ran.out
    assert ran.errors[0].get("help") or code == "FS501"
    assert not (tmp_path / "out").exists()


def test_bases_that_it_is_not_for(tmp_path: Path) -> None:
    ckpt, adapter, _ = made("plain", tmp_path)
    tiny_models.model("qwen3", tmp_path / "other")
    small = copy(ckpt, tmp_path / "small")
    edit_safetensors(
        small / "model.safetensors",
        lambda t: t.update({n: v[:, :48].clone() for n, v in t.items() if n.endswith("q_proj.weight")}),
    )
    (small / "config.json").unlink()
    ran = cli("merge", small, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 1 and {f["code"] for f in ran.errors} == {"FS201"}, ran.out
    neox = Path(__file__).parents[1] / "fixtures/gpt_neox/neox_pp_tp2"
    ran = cli("merge", neox, tmp_path / "out", "--adapter", adapter)
    assert ran.code == 2 and "full tensors under Hugging Face's own names" in ran.errors[0]["message"]
    tied = copy(ckpt, tmp_path / "tied")
    assert not (tmp_path / "out").exists() and tied


def test_a_tied_base(tmp_path: Path) -> None:
    """A head of its own unties it; what changes one of two tied tensors is refused."""
    base("llama_tied", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    head = trained(model, {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    head.save_pretrained(tmp_path / "head")
    with torch.no_grad():
        want = head.eval()(torch.arange(20)[None]).logits
    ran = cli("convert", tmp_path / "base", tmp_path / "out", "--to", "hf", "--adapter", tmp_path / "head")
    assert ran.code == 0, ran.out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.config.tie_word_embeddings is False
    with torch.no_grad():
        assert (merged(torch.arange(20)[None]).logits - want).abs().max() < 1e-4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained(model, {"r": 2, "target_modules": ["embed_tokens"]}).save_pretrained(tmp_path / "embed")
    ran = cli("convert", tmp_path / "base", tmp_path / "no", "--to", "hf", "--adapter", tmp_path / "embed")
    assert ran.code == 2 and "only one of two tied tensors" in ran.errors[0]["message"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_adapter_in_a_zero_run(stage: int, tmp_path: Path) -> None:
    """DeepSpeed saves what PEFT's model calls its tensors: base behind wrappers, factors with the adapter's
    name."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "modules_to_save": ["lm_head"]}
    live = trained(base("llama", tmp_path / "plain"), options)
    tensors = {name: tensor.detach().float().clone() for name, tensor in live.state_dict().items()}
    run = zero_maker.Run(stage, 2, torch.float32, [tensors])
    zero_maker.write(tmp_path / "run", run)
    shutil.copy(tmp_path / "plain/config.json", tmp_path / "run")
    live.peft_config["default"].save_pretrained(tmp_path / "adapter")
    live.merge_and_unload().save_pretrained(tmp_path / "merged")
    want = read_result(tmp_path / "merged")
    ran = cli("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--adapter", tmp_path / "adapter")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    assert set(have) == set(want) and all(torch.equal(have[name], want[name]) for name in want)


def test_an_adapter_by_itself(tmp_path: Path) -> None:
    """Looked at as a checkpoint, and merged as one: its own tensors, complete or not."""
    _, adapter, _ = made("plain", tmp_path)
    ran = cli("inspect", adapter)
    assert ran.code == 0 and ran.doc["complete"] and ran.doc["framework"] == "PEFT adapter", ran.out
    assert ran.doc["metadata"]["r"] == 8 and ran.doc["metadata"]["lora_alpha"] == 16
    assert cli("verify", adapter).code == 0
    damaged(adapter, lambda tensors: tensors.pop(B))
    ran = cli("verify", adapter)
    assert ran.code == 3 and [(f["code"], f["tensor"]) for f in ran.errors] == [("FS102", B)], ran.out
    ran = cli("convert", adapter, tmp_path / "out", "--to", "hf")
    assert ran.code == 2 and "--adapter" in json.dumps(ran.errors), ran.out
