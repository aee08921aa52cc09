"""gpt-oss to Megatron-LM and back: sinks, windows in some layers, YaRN, and biases of experts and router."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt_oss_maker
import moe_maker
import pytest
import torch
import yaml
from helpers import assert_refused, cli, edit_pt, load_pt
from megatron_trips import convert, same, to_hf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

YARN = gpt_oss_maker.YARN
FULL, WINDOW = "full_attention", "sliding_attention"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unscaled": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "other_windows": {"layer_types": [FULL, WINDOW, WINDOW, FULL], "sliding_window": 3},
    "no_windows": {"layer_types": [FULL] * 4},
    "tied": {"tie_word_embeddings": True, "rope_parameters": YARN | {"truncate": True}},
}


@pytest.mark.parametrize(
    ("form", "degrees"),
    [
        ("legacy", ("--tp", 2, "--pp", 2, "--ep", 2, "--etp", 1)),
        ("legacy-local", ("--tp", 4, "--ep", 4, "--etp", 2)),
        ("torch_dist", ("--tp", 2, "--pp", 4, "--ep", 2)),
        ("torch_dist-local", ()),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_with_the_logits(
    kind: str, form: str, degrees: tuple[object, ...], tmp_path: Path
) -> None:
    model = gpt_oss_maker.model(**KINDS[kind])
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, *degrees)
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert type(after).__name__ == "GptOssForCausalLM"
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


def test_experts_in_mxfp4_are_written_with_their_values(tmp_path: Path) -> None:
    values = gpt_oss_maker.save_mxfp4(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", "--tp", 2, "--dtype", "bf16")
    back = to_hf(tmp_path / "megatron", tmp_path / "back")
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name], value.to(torch.bfloat16)) for name, value in values.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files of two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    gpt_oss_maker.model().save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "run", "legacy", "--tp", 2)
    (folder / "run/fastshard.manifest.json").unlink()
    return folder / "run"


def change(run: Path, folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change the first rank's file in a copy of the run."""
    for file in run.rglob("*"):
        if file.is_file():
            copy = folder / file.relative_to(run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    edit_pt(folder / "release/mp_rank_00/model_optim_rng.pt", edit)
    return folder


def change_args(run: Path, folder: Path, **args: Any) -> Path:
    """Change the arguments in both ranks' files."""
    change(run, folder, lambda state: vars(state["args"]).update(args))
    edit_pt(folder / "release/mp_rank_01/model_optim_rng.pt", lambda state: vars(state["args"]).update(args))
    return folder


@pytest.mark.parametrize(
    "lost",
    [
        "decoder.layers.1.self_attention.core_attention.softmax_offset",
        "decoder.layers.2.mlp.router.bias",
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.bias",
        "decoder.layers.3.mlp.experts.local_experts.0.linear_fc2.bias",
    ],
)
def test_a_lost_tensor_is_named(lost: str, run: Path, tmp_path: Path) -> None:
    broken = change(run, tmp_path / "run", lambda state: state["model"].pop(lost))
    ran = assert_refused(broken, tmp_path / "out", "FS102", exit=3, command=("convert", "--to", "hf"))
    assert any(lost in json.dumps(finding) for finding in ran.errors), ran.errors


def test_sinks_that_every_rank_lacks_are_named(run: Path, tmp_path: Path) -> None:
    def drop(state: dict[str, Any]) -> None:
        for name in [name for name in state["model"] if name.endswith(("softmax_offset", "router.bias"))]:
            del state["model"][name]

    broken = change(run, tmp_path / "run", drop)
    edit_pt(broken / "release/mp_rank_01/model_optim_rng.pt", drop)
    ran = assert_refused(broken, tmp_path / "out", "FS102", exit=3, command=("convert", "--to", "hf"))
    assert any("softmax_offset" in json.dumps(f) for f in ran.errors)
    assert any("router.bias" in json.dumps(f) for f in ran.errors)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"softmax_type": "vanilla"}, "softmax_type"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"glu_linear_offset": 0.0}, "glu_linear_offset"),
        ({"activation_func_clamp_value": None}, "activation"),
        ({"activation_func_clamp_value": 9.0}, "activation_func_clamp_value"),
        ({"window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq"),
        ({"window_size": (4, 2)}, "window_size"),
        ({"rotary_percent": 0.5}, "rotary_percent"),
        ({"rotary_scaling_factor": None}, "rotary_scaling_factor"),
        ({"enable_gpt_oss": True}, "enable_gpt_oss"),
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
    ],
)
def test_arguments_of_another_model_are_refused(
    args: dict[str, Any], word: str, run: Path, tmp_path: Path
) -> None:
    """No tensor shows any of these."""
    other = change_args(run, tmp_path / "run", **args)
    ran = assert_refused(other, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", "hf"))
    assert any(word in finding["message"] for finding in ran.errors), ran.errors
    assert cli("merge", other, tmp_path / "merged").code == 0


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        ({"window_attn_skip_freq": 2}, "layer_types", [WINDOW, FULL, WINDOW, FULL]),
        ({"window_attn_skip_freq": 3}, "layer_types", [WINDOW, WINDOW, FULL, WINDOW]),
        ({"window_attn_skip_freq": None}, "layer_types", [WINDOW] * 4),
        ({"window_size": None}, "layer_types", [FULL] * 4),
        ({"yarn_correction_range_round_to_int": True}, "truncate", None),
        ({"mscale": 0.5}, "attention_factor", 0.05 * 1.3862943611198906 + 1.0),
        ({"mscale": 0.5, "mscale_all_dim": 0.5}, "mscale_all_dim", 0.5),
        ({"yarn_beta_fast": 16.0}, "beta_fast", 16.0),
        ({"yarn_beta_fast": None}, "beta_fast", 32.0),
        ({"rotary_scaling_factor": 1.0}, "rope_type", "default"),
    ],
)
def test_arguments_are_read(args: dict[str, Any], key: str, value: Any, run: Path, tmp_path: Path) -> None:
    other = change_args(run, tmp_path / "run", **args)
    to_hf(other, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    config |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert config.get(key) == pytest.approx(value) if isinstance(value, float) else config.get(key) == value


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": YARN | {"attention_factor": 0.9}}, "rope_scaling (attention_factor)"),
        ({"rope_parameters": YARN | {"truncate": "false"}}, "rope_scaling (truncate)"),
        ({"rope_parameters": YARN | {"factor": None}}, "rope_scaling (factor)"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"swiglu_limit": 9.0}, "swiglu_limit"),
        ({"attention_bias": False}, "set of biases"),
    ],
)
def test_a_computation_that_megatron_does_not_have_is_refused(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    gpt_oss_maker.model(**{k: v for k, v in changes.items() if k == "attention_bias"}).save_pretrained(
        tmp_path / "in"
    )
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | changes))
    command = ("convert", "--to", "megatron")
    ran = assert_refused(tmp_path / "in", tmp_path / "out", "FS514", exit=2, command=command)
    (finding,) = ran.errors
    assert f"no gpt-oss model with this {word}" in finding["message"], finding


def test_a_config_states_what_older_arguments_do_not(run: Path, tmp_path: Path) -> None:
    """Arguments without any of the model's own settings, and its config.json."""
    keys = ("position_embedding_type", "window_size", "window_attn_skip_freq", "quick_geglu", "softmax_type")
    other = change_args(run, tmp_path / "run", **dict.fromkeys(keys))
    config = run.parent / "hf/config.json"
    same(
        to_hf(other, tmp_path / "back", "--config", config),
        load_file(run.parent / "hf/model.safetensors"),
    )
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(gpt_oss_maker.model()))


def test_other_models_with_yarn_go_there_and_back(tmp_path: Path) -> None:
    """YaRN is one of Megatron-LM's rotary embeddings whatever the model is."""
    model = moe_maker.qwen(3, rope_parameters=YARN)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "torch_dist")
    args = vars(load_pt(tmp_path / "megatron/release/common.pt")["args"])
    assert (args["position_embedding_type"], args["rotary_scaling_factor"]) == ("yarn", 4.0)
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


def test_the_fields_of_megatron_bridge_are_read(tmp_path: Path) -> None:
    """Its settings are in a YAML file, by the fields of its provider."""
    model = gpt_oss_maker.model()
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "torch_dist", "--tp", 2)
    folder = tmp_path / "bridge/iter_0000001"
    folder.parent.mkdir()
    (tmp_path / "megatron/release").rename(folder)
    edit_pt(folder / "common.pt", lambda common: common.pop("args"))
    fields = {
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "gated_linear_unit": True,
        "activation_func": {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu", "_call_": False},
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": [4, 0],
        "window_attn_skip_freq": 2,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "yarn",
        "rotary_base": 150000,
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 16,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_correction_range_round_to_int": False,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "seq_length": 64,
    }
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": fields}))
    same(to_hf(folder.parent, tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_it_goes_to_the_other_trainers_and_back(form: str, tmp_path: Path) -> None:
    """Their tables name layers by a cycle of two."""
    pytest.importorskip("tensorstore")
    gpt_oss_maker.model().save_pretrained(tmp_path / "hf")
    want = load_file(tmp_path / "hf/model.safetensors")
    convert(tmp_path / "hf", tmp_path / "megatron", form, "--tp", 2)
    for to in ("maxtext", "maxtext:unscan", "dcp:torchtitan"):
        there, again = tmp_path / to.replace(":", "_"), tmp_path / f"again_{to.replace(':', '_')}"
        ran = cli("convert", tmp_path / "megatron", there, "--to", to, "--vocab-size", 250)
        assert ran.code == 0, ran.out
        more = ("--config", tmp_path / "hf/config.json") if to.startswith("dcp") else ()
        ran = cli("convert", there, again, "--to", "megatron:legacy", "--ep", 2, *more)
        assert ran.code == 0, ran.out
        same(to_hf(again, tmp_path / f"hf_{to.replace(':', '_')}"), want)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_factor": 1.5},
        {"attention_factor": 1.0},
        {"attention_factor": 1.1386294361119891, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"mscale": 0.7},
        {"truncate": None},
        {"truncate": True},
        {"beta_fast": 16, "beta_slow": 2},
    ],
)
def test_every_setting_of_yarn_comes_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """The logits decide: a setting has several spellings."""
    model = moe_maker.qwen(3, rope_parameters=YARN | changes)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "torch_dist")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert difference(model, tmp_path / "back") < 1e-5


def difference(model: Any, folder: Path) -> float:
    """The largest difference between the logits of a model and of a saved one."""
    after = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return float((moe_maker.logits(after) - moe_maker.logits(model)).abs().max())


def test_the_length_of_the_original_may_be_outside_of_the_scaling(tmp_path: Path) -> None:
    """transformers looks for it at the top of config.json, too."""
    moe_maker.qwen(3, rope_parameters=YARN).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    key = "original_max_position_embeddings"
    config[key] = config["rope_parameters"].pop(key)
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    convert(tmp_path / "hf", tmp_path / "megatron", "torch_dist")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert difference(model, tmp_path / "back") < 1e-5


DEFAULT = {"rope_type": "default", "rope_theta": 150000.0}


@pytest.mark.parametrize("own", [YARN, DEFAULT, YARN | {"factor": 8.0, "attention_factor": 1.0}])
@pytest.mark.parametrize("stated", [YARN, DEFAULT, None, YARN | {"mscale": 0.5}])
def test_a_config_goes_before_the_arguments(
    own: dict[str, Any], stated: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The weights are the same; the config says how they are computed with."""
    moe_maker.qwen(3, rope_parameters=own).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    if stated is None:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    else:
        config["rope_parameters"] = stated
    path.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    to_hf(tmp_path / "megatron", tmp_path / "back", "--config", path)
    assert difference(model, tmp_path / "back") < 1e-5


@pytest.mark.parametrize("changes", [{"swiglu_limit": 9.0}, {"swiglu_alpha": 1.5}])
def test_a_config_of_another_activation_is_refused(
    changes: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    config = json.loads((run.parent / "hf/config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ("convert", "--to", "hf", "--config", tmp_path / "config.json")
    ran = assert_refused(run, tmp_path / "out", "FS514", exit=2, command=command)
    assert any(next(iter(changes)) in finding["message"] for finding in ran.errors)
