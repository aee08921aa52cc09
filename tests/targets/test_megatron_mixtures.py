"""Mixtures of experts that are written for Megatron-LM: against real megatron-core's files, and there and
back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import deepseek_maker
import delta_maker
import moe_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import FIXTURES, cli, copy, edit_pt, edit_safetensors, load_pt, read_result, sha256
from megatron_trips import same, to_hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

SHARDED = FIXTURES / "sharded"
MIXTRAL = SHARDED / "moe_hf_mixtral"
LEGACY = SHARDED / "moe_megatron_legacy_tp2_ep2"
DIST = SHARDED / "moe_megatron_torch_dist_tp2_ep2"
FORMS = ["legacy", "legacy-local", "torch_dist", "torch_dist-local"]
#: tp, pp, ep, etp
DEGREES = [(1, 1, 1, 1), (2, 2, 2, 1), (2, 1, 2, 2), (2, 1, 4, 1), (4, 1, 2, 2), (4, 2, 1, 1), (4, 1, 2, 1)]


def convert(source: Path, out: Path, form: str, degrees: tuple[int, int, int, int]) -> None:
    tp, pp, ep, etp = degrees
    placing = ("--tp", tp, "--pp", pp, "--ep", ep, "--etp", etp)
    ran = cli("convert", source, out, "--to", f"megatron:{form}", *placing)
    assert ran.code == 0, ran.out


def change_config(folder: Path, key: str, value: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda d: "tp{}_pp{}_ep{}_etp{}".format(*d))
def test_mixtral_and_back_is_bit_exact(form: str, degrees: tuple[int, int, int, int], tmp_path: Path) -> None:
    heads = {"num_key_value_heads": 4}
    moe_maker.model(**heads).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, degrees)
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalised", [True, False])
def test_qwen3_comes_back_with_its_logits(form: str, normalised: bool, tmp_path: Path) -> None:
    model = moe_maker.qwen(3, norm_topk_prob=normalised)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 2, 2, 1))
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert after.config.model_type == "qwen3_moe" and after.config.norm_topk_prob is normalised
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": deepseek_maker.YARN},
        {"q_lora_rank": None},
        {"first_k_dense_replace": 3, "n_shared_experts": 2},
        {"first_k_dense_replace": 0},
        {"first_k_dense_replace": 4},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    ],
    ids=["plain", "yarn", "queries", "dense", "none_dense", "all_dense", "one_group"],
)
def test_deepseek_comes_back_with_its_logits(form: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = deepseek_maker.model(**changes)
    model.save_pretrained(tmp_path / "hf")
    tp = 1 if form == "legacy-local" else 2
    convert(tmp_path / "hf", tmp_path / "megatron", form, (tp, 2, 4, 1))
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert after.config.model_type == "deepseek_v3"
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


@pytest.mark.parametrize("form", ["legacy", "torch_dist", "torch_dist-local"])
@pytest.mark.parametrize("depth", [1, 2])
def test_layers_that_predict_further_tokens_come_back(form: str, depth: int, tmp_path: Path) -> None:
    want = deepseek_maker.save_with_further_layers(tmp_path / "hf", depth)
    # The last of several stages would have a copy of the embedding, in rank files.
    pp = 1 if form == "legacy" else 2
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, pp, 2, 1))
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    args = load_pt(next((tmp_path / "megatron/release").rglob("*.pt")))["args"]
    assert (args.num_layers, args.mtp_num_layers, args.moe_layer_freq) == (4, depth, [0, 1, 1, 1])
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), want)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (4, depth)


def test_rank_files_of_stages_with_further_layers_are_refused(tmp_path: Path) -> None:
    deepseek_maker.save_with_further_layers(tmp_path / "hf", 1)
    command = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron:legacy", "--pp", 2)
    ran = cli(*command)
    assert ran.code == 2 and ran.having("FS514", message="copy of the embedding")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_in_a_further_layer_that_differs_is_not_lost(name: str, tmp_path: Path) -> None:
    deepseek_maker.save_with_further_layers(tmp_path / "hf", 1)
    assert cli("convert", tmp_path / "hf", tmp_path / "same", "--to", "megatron").code == 0

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.4.{name}.weight"][7, 3] += 1

    edit_safetensors(tmp_path / "hf/model.safetensors", change)
    # Under names of its own it stays what it is; Megatron-LM has one embedding and one head.
    assert cli("merge", tmp_path / "hf", tmp_path / "merged").code == 0
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 1 and not (tmp_path / "out").exists()
    assert f"model.layers.4.{name}.weight" in ran.out


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_interleave": False}, "rope_interleave"),
        ({"attention_bias": True}, "biases"),
        ({"topk_group": 1}, "number of best experts"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rope_parameters": deepseek_maker.YARN | {"attention_factor": 2.0}}, "attention_factor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_computes_otherwise_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    deepseek_maker.model(**changes).save_pretrained(tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2 and ran.having("FS514", message=named), ran.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy"), ("moe_layer_freq", 2)]
)
def test_what_the_code_beside_the_weights_computes_otherwise_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    deepseek_maker.model().save_pretrained(tmp_path / "hf")
    change_config(tmp_path / "hf", key, value)
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2 and ran.having("FS514", message=key), ran.out


def test_kimi_is_deepseek_by_another_name(tmp_path: Path) -> None:
    deepseek_maker.model(n_group=1, topk_group=1).save_pretrained(tmp_path / "deepseek")
    convert(tmp_path / "deepseek", tmp_path / "want", "torch_dist", (2, 1, 2, 1))
    kimi = copy(tmp_path / "deepseek", tmp_path / "kimi")
    change_config(kimi, "model_type", "kimi_k2")
    convert(kimi, tmp_path / "have", "torch_dist", (2, 1, 2, 1))
    for file in (tmp_path / "want/release").glob("*.distcp"):
        assert file.read_bytes() == (tmp_path / "have/release" / file.name).read_bytes(), file.name


def test_stages_need_not_divide_the_layers_of_torch_dist(tmp_path: Path) -> None:
    deepseek_maker.model().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "torch_dist", (1, 3, 2, 1))
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron:legacy", "--pp", 3)
    assert ran.code == 2 and ran.having("FS204"), ran.out


def change_args(root: Path, **changes: Any) -> Path:
    for file in sorted((root / "release").rglob("*.pt")):
        edit_pt(
            file, lambda content: [setattr(content["args"], key, value) for key, value in changes.items()]
        )
    (root / "fastshard.manifest.json").unlink(missing_ok=True)
    return root


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek with YaRN as `hf`, and as rank files and chunks of Megatron-LM."""
    root = tmp_path_factory.mktemp("deepseek")
    deepseek_maker.model(rope_parameters=deepseek_maker.YARN).save_pretrained(root / "hf")
    for form in ("legacy", "torch_dist"):
        convert(root / "hf", root / form, form, (2, 1, 2, 1))
    return root


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(
    "changes",
    [
        {"moe_mlp_glu_interleave_size": 8},
        {"moe_router_topk_limited_devices": 2},
        {"moe_shared_expert_intermediate_size": 36},
        {"moe_router_enable_expert_bias": False},
        {"qk_layernorm": False},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 4},
        {"mscale": 2.0, "mscale_all_dim": 0.0},
        {"norm_epsilon": 1e-5},
        {"moe_router_topk": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_arguments_of_another_computation_are_refused(
    changes: dict[str, Any], form: str, deepseek: Path, tmp_path: Path
) -> None:
    root = change_args(copy(deepseek / form, tmp_path / "ckpt"), **changes)
    ran = cli("convert", root, tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code in (1, 2) and ran.errors and not (tmp_path / "out").exists(), ran.out


def test_ranks_that_disagree_on_the_model_are_told_apart(deepseek: Path, tmp_path: Path) -> None:
    root = copy(deepseek / "legacy", tmp_path / "ckpt")
    file = next((root / "release/mp_rank_01_001").glob("*.pt"))
    edit_pt(file, lambda content: setattr(content["args"], "moe_router_topk_scaling_factor", 9.0))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code == 1 and not (tmp_path / "out").exists()
    assert "moe_router_topk_scaling_factor" in ran.out


def test_its_own_config_changes_nothing_and_another_one_is_said(deepseek: Path, tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
        config = json.loads((deepseek / "hf/config.json").read_text()) | changes
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        command = ("--to", "hf", "--vocab-size", 250, "--config", tmp_path / f"{name}.json")
        ran = cli("convert", deepseek / "legacy", tmp_path / name, *command)
        made = tmp_path / name / "config.json"
        return ran, json.loads(made.read_text()) if made.exists() else {}

    plain = tmp_path / "plain"
    to_hf(deepseek / "legacy", plain)
    ran, config = run("own")
    assert ran.code == 0 and not ran.having("FS215") and not ran.having("FS212"), ran.out
    assert config == json.loads((plain / "config.json").read_text())
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")
    ran, config = run("scaled", routed_scaling_factor=1.5)
    assert ran.code == 0 and config["routed_scaling_factor"] == 1.5
    assert "moe_router_topk_scaling_factor" in ran.out
    for name, changes in (
        ("unnormalised", {"norm_topk_prob": False}),
        ("halves", {"rope_interleave": False}),
        ("dense", {"first_k_dense_replace": 2}),
    ):
        ran, config = run(name, **changes)
        assert ran.code != 0 and not config, (name, ran.out)


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_a_tied_head_has_copies_in_further_layers(form: str, tmp_path: Path) -> None:
    want = deepseek_maker.save_with_further_layers(tmp_path / "hf", 1)
    del want["lm_head.weight"]
    want["model.layers.4.shared_head.head.weight"] = want["model.embed_tokens.weight"].clone()
    save_file(want, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path / "hf", "tie_word_embeddings", True)
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 1, 2, 1))
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), want)


@pytest.mark.parametrize("value", [[1, 1], 1])
def test_layers_are_numbered_if_the_arguments_list_them(value: object, tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    for file in sorted(root.rglob("*.pt")):
        edit_pt(file, lambda content: setattr(content["args"], "moe_layer_freq", value))
    convert(root, tmp_path / "out", "torch_dist", (1, 1, 2, 1))
    names = dcp.FileSystemReader(tmp_path / "out/iter_0000010").read_metadata().state_dict_metadata
    number = "0." if isinstance(value, list) else ""
    assert f"decoder.layers.{number}mlp.router.weight" in names
    same(to_hf(tmp_path / "out", tmp_path / "back"), load_file(MIXTRAL / "model.safetensors"))


def test_one_expert_whose_weight_is_made_one_is_refused(tmp_path: Path) -> None:
    moe_maker.model(num_experts_per_tok=1).save_pretrained(tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2 and ran.having("FS514", message="number of best experts"), ran.out


def test_torchtitans_mixtures_lead_to_megatron(tmp_path: Path) -> None:
    for name, model in (
        ("deepseek", deepseek_maker.model()),
        ("qwen", moe_maker.qwen(3, norm_topk_prob=True)),
    ):
        model.save_pretrained(tmp_path / name)
        assert cli("convert", tmp_path / name, tmp_path / f"{name}_dcp", "--to", "dcp:torchtitan").code == 0
        convert(tmp_path / f"{name}_dcp", tmp_path / f"{name}_megatron", "torch_dist", (2, 1, 2, 1))
        have = to_hf(tmp_path / f"{name}_megatron", tmp_path / f"{name}_back")
        same(have, load_file(tmp_path / name / "model.safetensors"))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_dense_layers_lie_where_they_lay(form: str, tmp_path: Path) -> None:
    model = moe_maker.qwen(3, mlp_only_layers=[1, 2], num_hidden_layers=4)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 2, 2, 1))
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    args = load_pt(next((tmp_path / "megatron/release").rglob("*.pt")))["args"]
    assert args.moe_layer_freq == [1, 0, 0, 1] and args.moe_ffn_hidden_size == 24
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))
    convert(tmp_path / "megatron", tmp_path / "again", "legacy", (1, 1, 1, 1))
    state = load_pt(tmp_path / "again/release/mp_rank_00/model_optim_rng.pt")["model"]
    want = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(
        state["decoder.layers.2.mlp.linear_fc2.weight"], want["model.layers.2.mlp.down_proj.weight"]
    )
    assert torch.equal(
        state["decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight"],
        want["model.layers.3.mlp.experts.3.down_proj.weight"],
    )


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({}, (2, 2, 4, 1)),
        ({"num_hidden_layers": 6, "full_attention_interval": 3}, (4, 1, 2, 2)),
        ({"tie_word_embeddings": True, "mlp_only_layers": [1, 3]}, (2, 4, 2, 1)),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, (1, 1, 8, 1)),
        ({"linear_num_value_heads": 4, "norm_topk_prob": False}, (4, 2, 1, 1)),
    ],
    ids=["plain", "interval", "dense", "types", "heads"],
)
def test_delta_nets_come_back_with_their_logits(
    changes: dict[str, Any], degrees: tuple[int, int, int, int], form: str, tmp_path: Path
) -> None:
    model = delta_maker.model(**changes)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, degrees)
    ran = cli("verify", tmp_path / "megatron")
    assert ran.code == 0, ran.out
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert after.config.model_type == "qwen3_next"
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_a_rank_of_delta_nets_holds_its_heads_kind_by_kind(form: str, tmp_path: Path) -> None:
    """Against transformers' own split of the projection."""
    model = delta_maker.model()
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 1, 1, 1))
    net, hidden = model.model.layers[0].linear_attn, torch.eye(32)[None]
    with torch.no_grad():
        mixed = net.in_proj_qkvz(hidden), net.in_proj_ba(hidden)
        kinds = [part.flatten(2)[0].T for part in net.fix_query_key_value_ordering(*mixed)]
    name = "decoder.layers.0.self_attention.in_proj.weight"
    if form == "torch_dist":
        words = ["query", "key", "value", "z", "beta", "alpha"]
        state = {f"{name}.{word}": torch.empty(part.shape) for word, part in zip(words, kinds, strict=True)}
        dcp.load(state, checkpoint_id=tmp_path / "megatron/release", no_dist=True)
        assert all(map(torch.equal, state.values(), kinds))
        return
    for rank in range(2):
        state = load_pt(tmp_path / f"megatron/release/mp_rank_0{rank}/model_optim_rng.pt")["model"]
        assert torch.equal(state[name], torch.cat([part.chunk(2)[rank] for part in kinds]))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_delta_nets_come_back_with_their_further_layer(form: str, tmp_path: Path) -> None:
    want = delta_maker.save_with_further_layer(tmp_path / "hf")
    pp = 1 if form == "legacy" else 2
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, pp, 2, 1))
    args = load_pt(next((tmp_path / "megatron/release").rglob("*.pt")))["args"]
    assert (args.num_layers, args.mtp_num_layers, args.linear_attention_freq) == (4, 1, [1, 1, 1, 0])
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), want)


def test_a_config_of_the_hub_without_types_of_layers_means_the_same(tmp_path: Path) -> None:
    """The keys that Qwen3-Next-80B-A3B-Instruct has, in version 4's spelling."""
    delta_maker.save_with_further_layer(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "want", "torch_dist", (2, 1, 2, 1))
    hub = copy(tmp_path / "hf", tmp_path / "hub")
    config = json.loads((hub / "config.json").read_text())
    for key in (
        "layer_types",
        "rope_parameters",
        "linear_conv_kernel_dim",
        "mlp_only_layers",
        "attention_bias",
    ):
        del config[key]
    config |= {"full_attention_interval": 4, "rope_theta": 10000, "partial_rotary_factor": 0.5}
    (hub / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    convert(hub, tmp_path / "have", "torch_dist", (2, 1, 2, 1))
    for file in (tmp_path / "want/release").iterdir():
        assert file.read_bytes() == (tmp_path / "have/release" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("gone", ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"])
def test_a_part_of_a_further_layer_is_missed(gone: str, tmp_path: Path) -> None:
    delta_maker.save_with_further_layer(tmp_path / "hf")
    edit_safetensors(tmp_path / "hf/model.safetensors", lambda tensors: tensors.pop(gone))
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code != 0 and gone in ran.out and not (tmp_path / "out").exists()


#: Arguments of which the first finding names the one that rules the table out.
NAMED = ("apply_layernorm_1p", "attention_output_gate", "experimental_attention_variant")


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(
    "changes",
    [
        {"apply_layernorm_1p": False},
        {"attention_output_gate": False},
        {"experimental_attention_variant": None},
        {"experimental_attention_variant": "dsa"},
        {"linear_attention_freq": [1, 1, 0, 1]},
        {"linear_num_value_heads": 4},
        {"moe_shared_expert_gate": False},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_arguments_of_other_delta_nets_are_refused(
    changes: dict[str, Any], form: str, tmp_path: Path
) -> None:
    delta_maker.model().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 1, 2, 1))
    root = change_args(tmp_path / "megatron", **changes)
    ran = cli("convert", root, tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code in (1, 2, 3) and ran.errors and not (tmp_path / "out").exists(), ran.out
    if form == "torch_dist" and next(iter(changes)) in NAMED:
        assert next(iter(changes)) in json.dumps(ran.errors[0]), ran.out


def test_a_config_of_other_delta_nets_is_not_passed_over(tmp_path: Path) -> None:
    delta_maker.model().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", (2, 1, 2, 1))
    own = json.loads((tmp_path / "hf/config.json").read_text())
    plain = to_hf(tmp_path / "megatron", tmp_path / "plain")
    plain_config = json.loads((tmp_path / "plain/config.json").read_text())
    for name, changes, code in (
        ("own", {}, 0),
        ("unnormalised", {"norm_topk_prob": False}, 0),
        ("types", {"layer_types": ["full_attention", *own["layer_types"][1:]]}, None),
        ("dense", {"mlp_only_layers": [2]}, None),
        ("heads", {"linear_num_value_heads": 4}, None),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(own | changes))
        out = tmp_path / name
        command = ("--to", "hf", "--vocab-size", 250, "--config", tmp_path / f"{name}.json")
        ran = cli("convert", tmp_path / "megatron", out, *command)
        if code is None:
            assert ran.code != 0 and not out.exists(), (name, ran.out)
            continue
        assert ran.code == 0 and json.loads((out / "config.json").read_text()) == plain_config | changes, (
            ran.out
        )
        assert ("moe_router_pre_softmax" in ran.out) is (name == "unnormalised")
        same(read_result(out), plain)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"layer_types": ["full_attention", *["linear_attention"] * 3]}, "a gated delta net"),
        ({"mlp_only_layers": [3]}, "an MLP"),
    ],
    ids=["delta", "dense"],
)
def test_further_layers_of_another_kind_than_the_last_are_refused(
    changes: dict[str, Any], got: str, tmp_path: Path
) -> None:
    """Megatron-LM builds them as it builds the last layer."""
    delta_maker.save_with_further_layer(tmp_path / "hf", **changes)
    state = load_file(tmp_path / "hf/model.safetensors")
    delta_maker.save_with_further_layer(tmp_path / "other")
    other = load_file(tmp_path / "other/model.safetensors")
    block = {name: tensor for name, tensor in other.items() if name.startswith("mtp.layers.")}
    state = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.layers.")} | block
    save_file(state, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2 and ran.having("FS514", message="last layer", got=got), ran.out


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_layers_of_one_kind_of_attention_come_back(kind: str, form: str, tmp_path: Path) -> None:
    delta_maker.model(layer_types=[kind] * 4).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 1, 2, 1))
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    assert json.loads((tmp_path / "back/config.json").read_text())["layer_types"] == [kind] * 4


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(("version", "promised"), [(2, "linear_qkv.bias"), (3, "q_layernorm.weight")])
def test_biases_and_norms_that_arguments_promise_are_missed(
    version: int, promised: str, form: str, tmp_path: Path
) -> None:
    moe_maker.qwen(version).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 1, 2, 1))
    root = change_args(tmp_path / "megatron")
    if form == "legacy":
        for file in (root / "release").rglob("*.pt"):
            edit_pt(
                file,
                lambda content: [
                    content["model"].pop(name) for name in [*content["model"]] if promised in name
                ],
            )
    else:
        reader = dcp.FileSystemReader(root / "release")
        metadata = reader.read_metadata()
        for name in [name for name in metadata.state_dict_metadata if promised in name]:
            del metadata.state_dict_metadata[name]
        (root / "release/.metadata").write_bytes(pickle.dumps(metadata))
    ran = cli("convert", root, tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code != 0 and promised in ran.out and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize(("key", "value"), [("linear_num_value_heads", 9), ("num_attention_heads", 9)])
def test_heads_that_no_groups_divide_are_refused(key: str, value: int, tmp_path: Path) -> None:
    delta_maker.model().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", "legacy", (1, 1, 1, 1))
    root = change_args(tmp_path / "megatron", **{key: value})
    ran = cli("convert", root, tmp_path / "out", "--to", "hf", "--vocab-size", 250)
    assert ran.code == 2 and ran.having("FS211", message=key), ran.out


def test_delta_nets_without_any_experts_are_refused(tmp_path: Path) -> None:
    delta_maker.model(num_experts=0, num_experts_per_tok=1).save_pretrained(tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2 and ran.having("FS514", message="mixture of experts"), ran.out


@pytest.mark.parametrize("key", ["partial_rotary_factor", "rotary_pct"])
def test_a_share_of_heads_that_the_class_does_not_rotate_is_refused(key: str, tmp_path: Path) -> None:
    """transformers computes the same with and without it."""
    moe_maker.qwen(2).save_pretrained(tmp_path / "hf")
    change_config(tmp_path / "hf", key, 0.5)
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2 and ran.having("FS514", message="partial_rotary_factor", got="0.5"), ran.out


def test_local_modules_of_delta_nets_are_refused(tmp_path: Path) -> None:
    delta_maker.model().save_pretrained(tmp_path / "hf")
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron:torch_dist-local")
    assert ran.code == 2 and ran.having("FS514", message="Transformer Engine"), ran.out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dense", [[], [0]])
def test_a_gated_shared_expert_comes_back(form: str, dense: list[int], tmp_path: Path) -> None:
    model = moe_maker.qwen(2, shared_expert_intermediate_size=20, mlp_only_layers=dense)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 2, 2, 1))
    same(to_hf(tmp_path / "megatron", tmp_path / "back"), load_file(tmp_path / "hf/model.safetensors"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert after.config.model_type == "qwen2_moe"
    assert torch.equal(moe_maker.logits(after), moe_maker.logits(model))


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize("maker", [deepseek_maker, delta_maker], ids=["deepseek", "delta_nets"])
def test_each_file_is_missed(maker: Any, form: str, tmp_path: Path) -> None:
    maker.model().save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", form, (2, 2, 2, 1))
    (tmp_path / "megatron/fastshard.manifest.json").unlink()
    for file in sorted((tmp_path / "megatron/release").rglob("*.*")):
        if file.name in ("metadata.json", ".metadata"):
            continue
        content = file.read_bytes()
        file.unlink()
        ran = cli("convert", tmp_path / "megatron", tmp_path / "out", "--to", "hf", "--vocab-size", 250)
        assert ran.code != 0 and not (tmp_path / "out").exists(), file
        file.write_bytes(content)


def test_rank_files_hold_what_megatron_core_holds(tmp_path: Path) -> None:
    convert(MIXTRAL, tmp_path / "out", "legacy-local", (2, 1, 2, 2))
    folders = sorted(path.name for path in (tmp_path / "out/release").iterdir())
    assert folders == sorted(path.name for path in (LEGACY / "iter_0000010").iterdir())
    for folder in folders:
        ours = load_pt(tmp_path / f"out/release/{folder}/model_optim_rng.pt")
        theirs = load_pt(LEGACY / f"iter_0000010/{folder}/model_optim_rng.pt")
        assert ours["model"].keys() == theirs["model"].keys()
        for name, tensor in theirs["model"].items():
            have = ours["model"][name]
            assert have is tensor is None or torch.equal(have, tensor), name
        want = vars(theirs["args"]) | {"iteration": 0, "moe_router_load_balancing_type": None}
        known = {key: value for key, value in want.items() if hasattr(ours["args"], key)}
        assert {key: getattr(ours["args"], key) for key in known} == known
        assert not want.keys() - known.keys() - {"moe_router_load_balancing_type", "moe_aux_loss_coeff"}


def test_torch_dist_holds_what_megatron_core_holds(tmp_path: Path) -> None:
    convert(MIXTRAL, tmp_path / "out", "torch_dist-local", (2, 1, 2, 2))

    def read(folder: Path) -> tuple[dict[str, str], set[str]]:
        described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {name: entry for name, entry in described.items() if hasattr(entry, "chunks")}
        state: dict[str, Any] = {name: torch.empty(entry.size) for name, entry in tensors.items()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return {name: sha256(tensor) for name, tensor in state.items()}, described.keys() - tensors.keys()

    ours, their_objects = read(tmp_path / "out/release"), read(DIST / "iter_0000010")[1]
    assert ours[0] == read(DIST / "iter_0000010")[0]
    assert their_objects <= ours[1]


@pytest.mark.parametrize("source", [LEGACY, DIST], ids=["legacy", "torch_dist"])
@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_degrees_change_without_a_detour(source: Path, form: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", form, (1, 2, 4, 1))
    args = load_pt(next((tmp_path / "out/iter_0000010").rglob("*.pt")))["args"]
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == (4, 1)
    assert args.moe_aux_loss_coeff == 0.01
    same(to_hf(tmp_path / "out", tmp_path / "back"), load_file(MIXTRAL / "model.safetensors"))


@pytest.mark.parametrize("name", ["grouped", "flat", "sequential"])
def test_rank_files_of_grouped_experts_stay_grouped(name: str, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(MIXTRAL, dtype=torch.float32).state_dict()
    grouped, local = name != "sequential", name != "grouped"
    implementation = "local" if local else "transformer_engine"
    changes = {"moe_grouped_gemm": grouped, "transformer_impl": implementation}
    source = moe_maker.save_legacy(tmp_path / "source", whole, (2, 1, 2), name, **changes)
    convert(source, tmp_path / "out", "legacy", (1, 1, 2, 1))
    state = load_pt(tmp_path / "out/iter_0000010/mp_rank_00_001/model_optim_rng.pt")
    assert state["args"].moe_grouped_gemm is (name == "grouped")
    inside = "linear_fc2.weight1" if name == "grouped" else "local_experts.1.linear_fc2.weight"
    third = whole["model.layers.1.mlp.experts.down_proj"][3]
    assert torch.equal(state["model"][f"decoder.layers.1.mlp.experts.{inside}"], third)
    same(to_hf(tmp_path / "out", tmp_path / "back"), load_file(MIXTRAL / "model.safetensors"))


def test_what_no_rank_of_megatron_has_is_refused(tmp_path: Path) -> None:
    def refused(*argv: object, source: Path = MIXTRAL) -> str:
        ran = cli("convert", source, tmp_path / "out", "--to", "megatron:legacy", *argv)
        assert ran.code == 2 and not (tmp_path / "out").exists()
        return ran.out

    assert "--etp: files of several ranks" in refused("--tp", 1, "--etp", 2, "--ep", 2)
    assert "experts" in refused("--ep", 3)
    assert "no experts to divide" in refused("--ep", 2, source=SHARDED / "hf_sharded")
    assert "no experts to divide" in refused("--etp", 2, source=SHARDED / "hf_sharded")
