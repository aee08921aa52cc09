"""GPT-NeoX's architectures and Transformer Engine's modules: merged tensors and logits, at tp 1, 2 and 4."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import assert_refused, at_once, cli, edit_pt, read_result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neox_maker import Spec, make_shards, merge, write
from test_neox_logits import TOLERANCE, largest_difference
from test_neox_parallel import edit_yaml, same_bits

LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "biases": False,
    "residual": False,
    "rotary_pct": 1.0,
    "inner": 96,
}
FLASH = {"attention-config": [[["flash"], 2]]}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama_mha": LLAMA,
    "llama_mha_stated": LLAMA | {"kv_heads": 8},
    "llama_gqa": LLAMA | {"kv_heads": 4},
    "llama_tied": LLAMA | {"kv_heads": 4, "tied": True},
    "llama_w1_w3": LLAMA | {"split_gate": True, "activation": "silu"},
    "llama_biases": LLAMA | {"biases": True, "activation": "geglu", "kv_heads": 4},
    "llama_rope_base": LLAMA | {"more": {"rotary_emb_base": 500}},
    "llama_te_rmsnorm": LLAMA | {"norm": "te_rmsnorm", "kv_heads": 4},
    "mistral": LLAMA | {"kv_heads": 4, "more": FLASH | {"sliding_window_width": 7}},
    "flash": LLAMA | {"more": FLASH},
    "phi3": LLAMA | {"kv_heads": 4, "rotary_pct": 0.5},
    "neox_tanh": {"more": {"bias_gelu_fusion": True}},
    "neox_rope_base": {"more": {"rotary_emb_base": 500}},
    "neox_te_layernorm": {"norm": "te_layernorm"},
    "te_mha": {"te_mha": True, "residual": False},
    "te_mlp": {"te_mlp": True, "residual": False},
    "te_both": {"te_mha": True, "te_mlp": True, "residual": False},
    "te_stale_norm": {"te_mha": True, "te_mlp": True, "residual": False, "stale_norm": True},
    # GPT-NeoX's own sub-module sums its row biases, Transformer Engine's does not.
    "te_mha_parallel": {"te_mha": True},
    "te_mlp_parallel": {"te_mlp": True},
    "te_linear_parallel": {"te_linear": True, "more": {"te_rowparallel": True}},
    "te_mha_gqa": LLAMA | {"te_mha": True, "kv_heads": 4},
    "te_mlp_glu": LLAMA | {"te_mlp": True},
    "te_gqa_glu": LLAMA | {"te_mha": True, "te_mlp": True, "kv_heads": 4},
}


def variant(name: str, **more: Any) -> Spec:
    return Spec(**{"seed": len(name), **VARIANTS[name], **more})


@pytest.mark.parametrize("tp", at_once([1, 2, 4], [2]))
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_gives_the_logits_of_its_shards(name: str, tp: int, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", variant(name, tp=tp))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf")
    assert (ran.code, ran.errors) == (0, []), ran.out
    assert largest_difference(root, tmp_path / "out", 600) < TOLERANCE


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "sequential"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_merged_as_a_run_with_tp_1_would_hold_it(
    name: str, pipeline: bool, tmp_path: Path
) -> None:
    spec = variant(name, tp=4, dtype=torch.bfloat16)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards, pipeline=pipeline)
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=spec.residual, spec=spec))


@pytest.mark.parametrize("name", ["llama_gqa", "te_gqa_glu", "te_mlp"])
def test_architecture_is_known_without_the_yaml(name: str, tmp_path: Path) -> None:
    """Names and shapes tell GQA, gated activations and Transformer Engine's modules."""
    spec = variant(name)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    (root / "global_step7/configs/config.yml").write_text("gpt_j_residual: false\n")
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=spec.residual, spec=spec))


def test_three_digit_layers_of_a_llama(tmp_path: Path) -> None:
    spec = variant("llama_gqa", tp=2, layers=101, hidden=16, heads=4, kv_heads=2, inner=8, vocab=128)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    assert (root / "global_step7/layer_102-model_01-model_states.pt").exists()
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=False, spec=spec))
    assert cli("convert", root, tmp_path / "hf", "--to", "hf").code == 0
    assert "model.layers.100.mlp.down_proj.weight" in read_result(tmp_path / "hf")


# What transformers computes with no class is merged, and refused by name towards it.
REFUSED = {
    "rmsnorm": ({"norm": "rmsnorm"}, "norm"),
    "gated": ({"activation": "swiglu"}, "MLP"),
    "gqa": ({"kv_heads": 4}, "num_kv_heads"),
    "llama_parallel": (LLAMA | {"residual": True}, "norm"),
    "no_biases": ({"biases": False}, "set of biases"),
    # Phi-3 alone rotates a part of each head, and has no biases.
    "rotary_pct": (LLAMA | {"rotary_pct": 0.5, "biases": True}, "rotary_pct"),
    "mistral_biases": (
        LLAMA | {"biases": True, "more": FLASH | {"sliding_window_width": 7}},
        "sliding_window_width",
    ),
    "window": ({"more": FLASH | {"sliding_window_width": 7}}, "sliding_window_width"),
    "window_unstated": (LLAMA | {"more": {"sliding_window_width": 7}}, "sliding_window_width"),
    "window_global": (
        LLAMA | {"more": {"sliding_window_width": 7, "attention-config": [[["global"], 2]]}},
        "sliding_window_width",
    ),
    "window_mixed": (
        LLAMA | {"more": {"sliding_window_width": 7, "attention-config": [[["global", "flash"], 1]]}},
        "sliding_window_width",
    ),
    "gpt_j_tied": ({"more": {"gpt_j_tied": True}}, "gpt_j_tied"),
    "mup": ({"more": {"use_mup": True}}, "use_mup"),
    "activation": ({"activation": "softsign"}, "activation"),
    "alibi": ({"more": {"pos-emb": "alibi"}}, "pos_emb"),
    "sparse": ({"more": {"attention-config": [[["global", "local"], 1]]}}, "attention_config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_that_transformers_lacks_is_merged_but_not_converted(name: str, tmp_path: Path) -> None:
    changes, word = REFUSED[name]
    spec = Spec(**changes)
    shards = make_shards(spec)
    root = write(tmp_path / "ckpt", spec, shards)
    command = ("convert", "--to", "hf")
    assert_refused(root, tmp_path / "out", "FS514", exit=2, command=command, message=f"this {word}")
    assert cli("merge", root, tmp_path / "out").code == 0
    same_bits(read_result(tmp_path / "out"), merge(shards, residual=spec.residual, spec=spec))


def each_layer(root: Path, change: Any) -> None:
    for file in sorted((root / "global_step7").glob("layer_*")):
        edit_pt(file, lambda content: change(content) if "input_layernorm.weight" in content else None)


def test_tensors_of_rarer_models_are_merged(tmp_path: Path) -> None:
    """Learned positions, a norm of queries and keys, ScaleNorm, the reward head: shapes by the source."""
    spec = Spec(tp=2, more={"pos-emb": "learned", "use_qk_layernorm": True})
    root = write(tmp_path / "ckpt", spec)
    own: dict[str, list[torch.Tensor]] = {"qk": [], "reward": []}

    def change(content: dict) -> None:
        own["qk"].append(torch.randn(4, 8))
        content["attention.qk_layernorm.weight"] = own["qk"][-1]
        content["attention.qk_layernorm.bias"] = torch.zeros(4, 8)

    each_layer(root, change)
    step = root / "global_step7"
    positions = torch.randn(64, 64)
    for rank in range(2):
        edit_pt(
            step / f"layer_00-model_{rank:02d}-model_states.pt",
            lambda c: c.update({"position_embeddings.weight": positions}),
        )
        own["reward"].append(torch.randn(1, 32))
        torch.save(
            {"rm_linear.weight": own["reward"][-1]}, step / f"layer_06-model_{rank:02d}-model_states.pt"
        )
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    out = read_result(tmp_path / "out")
    assert torch.equal(out["0.position_embeddings.weight"], positions)
    assert torch.equal(out["2.attention.qk_layernorm.weight"], torch.cat(own["qk"][:2]))
    assert torch.equal(out["6.rm_linear.weight"], torch.cat(own["reward"], dim=1))
    ran = assert_refused(root, tmp_path / "hf", "FS514", exit=2, command=("convert", "--to", "hf"))
    assert {"pos_emb", "use_qk_layernorm", "head"} <= {f["message"].split()[-1] for f in ran.having("FS514")}


def test_scale_norm_is_one_number(tmp_path: Path) -> None:
    spec = Spec(tp=2)
    shards = make_shards(spec)
    for shard in shards:
        for name in [n for n in shard if "norm." in n]:
            tensor = shard.pop(name)
            if name.endswith("weight"):
                shard[name.replace("weight", "g")] = tensor[:1].clone()
        for name, tensor in shard.items():
            assert not name.endswith(".g") or torch.equal(tensor, shards[0][name])
    root = write(tmp_path / "ckpt", spec, shards)
    edit_yaml(root, norm="scalenorm")
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert read_result(tmp_path / "out")["2.input_layernorm.g"].shape == (1,)
    assert_refused(root, tmp_path / "hf", "FS514", exit=2, command=("convert", "--to", "hf"))


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"activation": "swiglu"}, "activation"),
        ({"norm": "rmsnorm"}, "norm"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
    ],
)
def test_config_that_contradicts_the_names_is_refused(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    root = write(tmp_path / "ckpt", Spec())
    edit_yaml(root, **changes)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 1 and not (tmp_path / "out").exists()
    (said,) = ran.errors
    assert (said["code"], said["message"]) == ("FS215", f"config: {key}")


def test_key_value_heads_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec())
    edit_yaml(root, num_kv_heads=3)
    assert_refused(root, tmp_path / "out", "FS211", exit=2)


def test_features_go_to_the_manifest(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", variant("te_gqa_glu"))
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    features = manifest["values"]["features"]
    told = {
        k: features[k] for k in ("te_mha", "te_layernorm_mlp", "gated", "gqa", "kv_heads", "norm", "residual")
    }
    assert told == {
        "te_mha": True,
        "te_layernorm_mlp": True,
        "gated": True,
        "gqa": True,
        "kv_heads": 4,
        "norm": "rmsnorm",
        "residual": "sequential",
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    tp=st.sampled_from([1, 2, 4]),
    kv_heads=st.sampled_from([None, 4, 8]),
    activation=st.sampled_from(["gelu", "swiglu", "geglu"]),
    norm=st.sampled_from(["layernorm", "rmsnorm", "te_layernorm", "te_rmsnorm"]),
    flags=st.tuples(*[st.booleans()] * 6),
    pipeline=st.booleans(),
)
def test_any_combination_is_merged_or_refused(
    tp: int,
    kv_heads: int | None,
    activation: str,
    norm: str,
    flags: tuple[bool, ...],
    pipeline: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Every combination merges as a run with tp 1 would hold it; what is converted gives its logits."""
    te_mha, te_mlp, te_linear, residual, biases, tied = flags
    spec = Spec(
        tp=tp,
        kv_heads=kv_heads,
        activation=activation,
        norm=norm,
        te_mha=te_mha,
        te_mlp=te_mlp,
        te_linear=te_linear,
        residual=residual,
        biases=biases,
        tied=tied,
        rotary_pct=1.0,
        inner=96,
        layers=1,
        more={"te_rowparallel": True} if te_linear else {},
    )
    folder = tmp_path_factory.mktemp("any")
    shards = make_shards(spec)
    root = write(folder / "ckpt", spec, shards, pipeline=pipeline)
    ran = cli("merge", root, folder / "out")
    assert (ran.code, ran.errors) == (0, []), ran.out
    same_bits(read_result(folder / "out"), merge(shards, residual=residual, spec=spec))
    ran = cli("convert", root, folder / "hf", "--to", "hf")
    if ran.code == 0:
        assert largest_difference(root, folder / "hf", 600) < TOLERANCE
    else:
        assert ran.code == 2 and {f["code"] for f in ran.errors} == {"FS514"}
        gated, rms = activation != "gelu", "rms" in norm
        assert not (gated and rms and not residual), "a Llama"
        assert not (not gated and not rms and not spec.gqa and biases), "a GPT-NeoX"


# Transformer Engine: what gpt-neox#1353 lost is used once or said.


def test_stale_norm_is_dropped_with_a_notice(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", variant("te_stale_norm", tp=1))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf")
    assert ran.code == 0
    (said,) = [f for f in ran.having("FS212", message="stale") if f["severity"] == "warning"]
    assert "post_attention_layernorm" in said["message"]
    dropped = {f["tensor"] for f in ran.having("FS212", message="stale") if f["severity"] == "note"}
    assert dropped == {
        f"{layer}.post_attention_layernorm.{part}" for layer in (2, 3) for part in ("weight", "bias")
    }


@pytest.mark.parametrize("kind", ["empty", "bytes", "object"])
def test_extra_state_is_dropped_with_a_reason(kind: str, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3)}, buffer)
    state: Any = {
        "empty": torch.empty(0, dtype=torch.uint8),
        "bytes": torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8),
        "object": buffer,
    }[kind]
    root = write(tmp_path / "ckpt", variant("te_both", extra_state=state))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf")
    assert (ran.code, ran.errors) == (0, [])
    modules = ("attention.qkv", "attention.proj", "attention.core_attention", "mlp")
    dropped = {f["tensor"] for f in ran.having("FS212", message="FP8 state")}
    assert dropped == {f"{layer}.{module}._extra_state" for layer in (2, 3) for module in modules}
    assert not any("extra_state" in name for name in read_result(tmp_path / "out"))


def test_eps_that_transformer_engine_did_not_use_is_said(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", variant("te_mlp", more={"layernorm_epsilon": 1e-3}))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf")
    assert ran.code == 0
    (said,) = ran.having("FS215", message="layernorm_epsilon")
    assert (said["severity"], said["expected"][:5], said["got"]) == ("warning", "1e-05", "0.001")
    root = write(tmp_path / "other", variant("te_mha", more={"layernorm_epsilon": 1e-3}))
    ran = cli("convert", root, tmp_path / "out2", "--to", "hf")
    assert ran.code == 0 and not ran.having("FS215")


def test_numbers_of_the_yaml_may_be_text_but_must_be_numbers(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(more={"layernorm_epsilon": "1e-3", "rotary_emb_base": "500"}))
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["layer_norm_eps"], config["rotary_emb_base"]) == (1e-3, 500)
    for key, value in (("layernorm_epsilon", "small"), ("rotary_emb_base", -1), ("rotary_pct", True)):
        root = write(tmp_path / key, Spec(more={key: value}))
        command = ("convert", "--to", "hf")
        assert_refused(root, tmp_path / "out2", "FS211", exit=2, command=command, message=f"config: {key}")


def test_one_norm_may_not_be_filled_twice(tmp_path: Path) -> None:
    """A table that takes the stale norm as well: the structure says no, not the values."""
    from fastshard import layouts

    root = write(tmp_path / "ckpt", variant("te_stale_norm", tp=1))
    text = layouts.get("gpt_neox.neox")
    start = text.index('name = "{L+2}.post_attention_layernorm.(weight|bias')
    end = text.index("[[tensor]]", start)
    both = (
        'name = "{L+2}.post_attention_layernorm.%s"\nshape = "[H]"\nas = "norm2.%s"\nwhen = '
        '"te_mlp"\n\n[[tensor]]\n'
    )
    table = text[:start] + both % ("weight", "weight") + both % ("bias", "bias")
    table = table.removesuffix("[[tensor]]\n") + text[end:]
    (tmp_path / "table.toml").write_text(table.replace('"gpt_neox.neox"', '"twice"'))
    options = ("--layout", tmp_path / "table.toml")
    for command in (("merge",), ("convert", "--to", "hf")):
        assert_refused(root, tmp_path / "out", "FS206", exit=1, command=command, options=options)


DAMAGED = {
    # name: (variant, change of each layer's content, code, exit code)
    "norm_left_over": ("te_mha", lambda c: c.update({"mlp.layer_norm_weight": torch.ones(64)}), "FS207", 1),
    "norm_missing_beside_a_stale_one": (
        "te_stale_norm",
        lambda c: c.pop("mlp.layer_norm_weight"),
        "FS102",
        3,
    ),
    "two_projections": (
        "te_both",
        lambda c: c.update({"mlp.linear1.weight": torch.ones(256, 64)}),
        "FS207",
        1,
    ),
    "two_outputs": (
        "te_mha",
        lambda c: c.update({"attention.dense.weight": c["attention.proj.weight"] * 2}),
        "FS206",
        1,
    ),
    "no_norm_at_all": ("te_mha", lambda c: c.pop("post_attention_layernorm.weight"), "FS102", 3),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_norms_and_projections_are_used_exactly_once(name: str, tmp_path: Path) -> None:
    spec, change, code, status = DAMAGED[name]
    root = write(tmp_path / "ckpt", variant(spec, tp=1))
    each_layer(root, change)
    assert_refused(root, tmp_path / "out", code, exit=status, command=("convert", "--to", "hf"))


def test_one_layer_with_other_modules_is_refused(tmp_path: Path) -> None:
    spec = variant("te_both", tp=1)
    shards = make_shards(spec)
    own = make_shards(variant("te_mha", tp=1))[0]
    shards[0] = {n: t for n, t in shards[0].items() if not n.startswith("3.mlp")}
    shards[0] |= {n: t for n, t in own.items() if n.startswith(("3.mlp", "3.post"))}
    root = write(tmp_path / "ckpt", spec, shards)
    assert_refused(root, tmp_path / "out", "FS207", exit=1, tensor="3.mlp.linear1.weight")


def test_the_saved_yaml_may_claim_what_it_likes_of_transformer_engine(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", variant("te_mlp"))
    path = root / "global_step7/configs/config.yml"
    config = yaml.safe_load(path.read_text()) | {"te_mha": True, "te_layernorm_mlp": False}
    path.write_text(yaml.safe_dump(config))
    assert cli("convert", root, tmp_path / "out", "--to", "hf").code == 0
    assert largest_difference(root, tmp_path / "out", 600) < TOLERANCE


#: source: gpt-neox megatron/model/{moe,router,gmlp}.py, mamba/mamba.py, rwkv/v6/rwkv.py
OTHER_BLOCKS = {
    "MoE layers": ["mlp.router.layer.weight", "mlp.experts.mlp.w1", "mlp.experts.mlp.w2"],
    "Mamba": ["norm.weight", "mixer.A_log", "mixer.D", "mixer.in_proj.weight", "mixer.conv1d.weight"],
    "RWKV": ["ln1.weight", "att.time_maa_x", "att.receptance.weight", "ffn.key.weight"],
    "gMLP": ["norm.weight", "input_linear.weight", "sgu.proj.weight", "output_linear.weight"],
}


@pytest.mark.parametrize("kind", OTHER_BLOCKS)
@pytest.mark.parametrize("pipeline", [True, False])
def test_blocks_that_are_not_read_are_named_once(tmp_path: Path, kind: str, pipeline: bool) -> None:
    spec = Spec()
    shards = make_shards(spec)
    for shard in shards:
        # One layer of two, as in hybrid models.
        for name in [n for n in shard if n.startswith("3.mlp" if kind == "MoE layers" else "3.")]:
            del shard[name]
        shard |= {f"3.{name}": torch.rand(4, 6) for name in OTHER_BLOCKS[kind]}
    root = write(tmp_path / "ckpt", spec, shards, pipeline=pipeline)
    for command in ("merge",), ("convert", "--to", "hf"):
        ran = assert_refused(root, tmp_path / "out", "FS514", exit=2, command=command, message=kind)
        assert len(ran.errors) == 1, ran.out
        assert any(name in ran.errors[0]["tensor"] for name in OTHER_BLOCKS[kind])
