"""Megatron-LM checkpoints that are written: against the files of real megatron-core, and there and back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import HF, assert_refused, cli, edit_pt, load_pt, read_result, sha256
from test_megatron import DIST, LEGACY, expected, hashes, rank_file
from tiny_models import MODELS, model
from transformers import AutoModelForCausalLM

#: The fixtures pad the vocabulary to a multiple of this times tp.
PADDING = ("--make-vocab-size-divisible-by", 64)
FORMS = ["megatron:legacy", "megatron:legacy-local", "megatron:torch_dist"]


def same(have: Path, want: Path) -> None:
    ours, theirs = read_result(have), read_result(want)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_hugging_face_and_back_is_bit_exact(form: str, tp: int, pp: int, tmp_path: Path) -> None:
    ran = cli("convert", HF, tmp_path / "megatron", "--to", form, "--tp", tp, "--pp", pp)
    assert ran.code == 0, ran.out
    assert cli("verify", tmp_path / "megatron").code == 0
    assert (
        cli("convert", tmp_path / "megatron", tmp_path / "hf", "--to", "hf", "--vocab-size", "1000").code == 0
    )
    same(tmp_path / "hf", HF)


def test_rank_files_hold_what_megatron_core_holds(tmp_path: Path) -> None:
    command = ("--to", "megatron:legacy-local", "--tp", 2, "--pp", 2, *PADDING)
    assert cli("convert", HF, tmp_path / "out", *command).code == 0
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "release"
    for tp in (0, 1):
        for pp in (0, 1):
            ours = load_pt(tmp_path / "out/release" / f"mp_rank_{tp:02d}_{pp:03d}/model_optim_rng.pt")
            theirs = load_pt(LEGACY / rank_file(tp, pp))
            assert set(ours["model"]) == set(theirs["model"])
            assert list(ours) == [key for key in theirs if key != "opt_param_scheduler"]
            for name, tensor in theirs["model"].items():
                have = ours["model"][name]
                assert have is tensor is None or (have.dtype == tensor.dtype and torch.equal(have, tensor)), (
                    name
                )


def test_arguments_say_what_the_model_is(tmp_path: Path) -> None:
    assert (
        cli("convert", HF, tmp_path / "out", "--to", "megatron:legacy-local", "--tp", 2, *PADDING).code == 0
    )
    ours = load_pt(tmp_path / "out/release/mp_rank_00/model_optim_rng.pt")["args"]
    theirs = load_pt(LEGACY / rank_file(0, 0))["args"]
    assert type(ours) is argparse.Namespace
    run = {"pipeline_model_parallel_size": 1, "iteration": 0}
    assert {key: getattr(ours, key) for key in vars(theirs)} == vars(theirs) | run


def test_whole_tensors_are_those_of_the_other_form(tmp_path: Path) -> None:
    for source in (DIST, LEGACY):
        out = tmp_path / source.name
        assert cli("convert", source, out, "--to", "megatron:legacy").code == 0
        state = load_pt(out / "iter_0000010/mp_rank_00/model_optim_rng.pt")
        assert state["iteration"] == 10
        have = {name: sha256(t) for name, t in state["model"].items() if t is not None}
        assert have == expected(DIST, "expected_global.json")


def test_torch_reads_the_chunks_of_torch_dist(tmp_path: Path) -> None:
    command = ("--to", "megatron", "--tp", 4, "--pp", 2, *PADDING)
    assert cli("convert", DIST, tmp_path / "out", *command).code == 0
    assert cli("verify", tmp_path / "out").code == 0
    folder = tmp_path / "out/iter_0000010"
    described = dcp.FileSystemReader(folder).read_metadata()
    wanted = json.loads((DIST / "expected.json").read_text())["tensors"]
    state = {n: torch.empty(t["shape"], dtype=torch.bfloat16) for n, t in wanted.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert {n: sha256(t) for n, t in state.items()} == {n: t["sha256"] for n, t in wanted.items()}
    chunks = described.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks
    # Layer by layer, gate and up of each of the four ranks.
    assert len(chunks) == 4 * 2 * 4
    assert all(list(chunk.sizes) == [1, 24, 64] for chunk in chunks)
    theirs = dcp.FileSystemReader(DIST / "iter_0000010").read_metadata()
    objects = {n for n, m in theirs.state_dict_metadata.items() if not hasattr(m, "chunks")}
    assert objects <= set(described.state_dict_metadata)
    for name in objects:
        at = next(info for index, info in described.storage_data.items() if index.fqn == name)
        content = (folder / at.relative_path).read_bytes()[at.offset : at.offset + at.length]
        path = tmp_path / "object.pt"
        path.write_bytes(content)
        assert load_pt(path) == [None]


@pytest.mark.parametrize("form", ["megatron:legacy", "megatron:torch_dist"])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_that_comes_back_computes_the_same(name: str, form: str, tmp_path: Path) -> None:
    before = model(name, tmp_path / "before")
    ran = cli("convert", tmp_path / "before", tmp_path / "megatron", "--to", form, "--tp", 2, "--pp", 2)
    assert ran.code == 0, ran.out
    ran = cli("convert", tmp_path / "megatron", tmp_path / "after", "--to", "hf", "--vocab-size", 200)
    assert ran.code == 0, ran.out
    same(tmp_path / "after", tmp_path / "before")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()
    assert after.config.model_type == before.config.model_type
    tokens = torch.arange(40).reshape(2, 20) * 7 % 200
    with torch.no_grad():
        assert torch.equal(after(tokens).logits, before(tokens).logits)


def test_tied_embeddings_have_a_copy_in_the_last_stage(tmp_path: Path) -> None:
    model("llama_tied", tmp_path / "hf")
    out = tmp_path / "out"
    assert cli("convert", tmp_path / "hf", out, "--to", "megatron:legacy", "--tp", 2, "--pp", 2).code == 0
    last = out / "release/mp_rank_01_001/model_optim_rng.pt"
    first = load_pt(out / "release/mp_rank_01_000/model_optim_rng.pt")["model"]
    copy = load_pt(last)["model"]["output_layer.weight"]
    assert torch.equal(copy, first["embedding.word_embeddings.weight"])
    (out / "fastshard.manifest.json").unlink()

    def change(state: dict[str, Any]) -> None:
        state["model"]["output_layer.weight"][3, 4] += 1

    edit_pt(last, change)
    assert_refused(out, tmp_path / "again", "FS311", command=("convert", "--to", "hf"), file="mp_rank_01_001")


@pytest.mark.parametrize("form", FORMS)
def test_tp_and_pp_change_from_megatron_to_megatron(form: str, tmp_path: Path) -> None:
    assert cli("convert", DIST, tmp_path / "out", "--to", form, "--tp", 1, "--pp", 4).code == 0
    assert cli("convert", tmp_path / "out", tmp_path / "hf", "--to", "hf", "--vocab-size", "1000").code == 0
    assert hashes(tmp_path / "hf") == expected(DIST, "expected_hf.json")


def test_between_megatron_and_gpt_neox(tmp_path: Path) -> None:
    assert (
        cli("convert", LEGACY, tmp_path / "neox", "--to", "gpt_neox", "--tp", 4, "--vocab-size", 1000).code
        == 0
    )
    assert cli("convert", tmp_path / "neox", tmp_path / "megatron", "--to", "megatron", "--tp", 2).code == 0
    assert (
        cli("convert", tmp_path / "megatron", tmp_path / "hf", "--to", "hf", "--vocab-size", 1000).code == 0
    )
    assert hashes(tmp_path / "hf") == expected(LEGACY, "expected_hf.json")


def test_degrees_that_do_not_divide_name_those_that_do(tmp_path: Path) -> None:
    command = ("convert", "--to", "megatron:legacy", "--pp", "3")
    assert_refused(
        HF, tmp_path / "out", "FS204", exit=2, command=command, expected="--pp 1, 2, 4", got="4 layers"
    )
    command = ("convert", "--to", "megatron:torch_dist", "--tp", "3")
    assert_refused(HF, tmp_path / "out", "FS204", exit=2, command=command, expected="1, 2, 4, 8")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "biases"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_scaling"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}, "window"),
    ],
)
def test_a_model_that_megatron_lacks_is_refused_by_name(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    model(
        "qwen2" if "model_type" in change else "llama_biases" if "mlp_bias" in change else "llama",
        tmp_path / "hf",
    )
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text()) | change
    if "mlp_bias" in change:
        config |= {"attention_bias": False}
    path.write_text(json.dumps(config))
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert ran.code == 2, ran.out
    assert any(f["code"] == "FS514" and what in f["message"] for f in ran.doc["findings"]), ran.out
    assert not (tmp_path / "out").exists()


def plain_gpt() -> dict[str, torch.Tensor]:
    """A GPT with LayerNorm, biases and a plain MLP, under the names of one rank without parallelism."""
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (128, 32)}
    for layer in range(4):
        inside = {
            "input_layernorm.weight": (32,),
            "input_layernorm.bias": (32,),
            "self_attention.linear_proj.weight": (32, 32),
            "self_attention.linear_proj.bias": (32,),
            "self_attention.linear_qkv.weight": (64, 32),
            "self_attention.linear_qkv.bias": (64,),
            "pre_mlp_layernorm.weight": (32,),
            "pre_mlp_layernorm.bias": (32,),
            "mlp.linear_fc1.weight": (128, 32),
            "mlp.linear_fc1.bias": (128,),
            "mlp.linear_fc2.weight": (32, 128),
            "mlp.linear_fc2.bias": (32,),
        }
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in inside.items()}
    shapes |= {"decoder.final_layernorm.weight": (32,), "decoder.final_layernorm.bias": (32,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_gpt_that_is_no_llama_changes_its_degrees(form: str, tmp_path: Path) -> None:
    weights = plain_gpt()
    args = argparse.Namespace(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        group_query_attention=True,
        kv_channels=8,
        ffn_hidden_size=128,
        swiglu=False,
        padded_vocab_size=128,
        normalization="LayerNorm",
        add_bias_linear=True,
        untie_embeddings_and_output_weights=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        transformer_impl="local",
        iteration=7,
    )
    source = tmp_path / "source/iter_0000007/mp_rank_00"
    source.mkdir(parents=True)
    torch.save({"args": args, "iteration": 7, "model": weights}, source / "model_optim_rng.pt")
    (tmp_path / "source/latest_checkpointed_iteration.txt").write_text("7")
    ran = cli("convert", tmp_path / "source", tmp_path / "there", "--to", form, "--tp", 2, "--pp", 4)
    assert ran.code == 0, ran.out
    back = ("--to", "megatron:legacy-local", "--vocab-size", 128)
    ran = cli("convert", tmp_path / "there", tmp_path / "back", *back)
    assert ran.code == 0, ran.out
    state = load_pt(tmp_path / "back/iter_0000007/mp_rank_00/model_optim_rng.pt")["model"]
    assert {name for name, value in state.items() if value is not None} == set(weights)
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    ran = cli("convert", tmp_path / "there", tmp_path / "hf", "--to", "hf")
    assert ran.code == 2
    assert ran.having("FS514", message="normalization")


def rank_file_of(name: str, folder: Path, **stated: Any) -> Any:
    """One of the tiny models as a Megatron checkpoint of one rank whose arguments say this besides."""
    made = model(name, folder.parent / "made")
    ran = cli("convert", folder.parent / "made", folder, "--to", "megatron:legacy")
    assert ran.code == 0, ran.out
    (folder / "fastshard.manifest.json").unlink()
    edit_pt(folder / "release/mp_rank_00/model_optim_rng.pt", lambda c: vars(c["args"]).update(stated))
    return made


TO_HF = ("convert", "--to", "hf", "--vocab-size", "200")


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("llama", {"rotary_seq_len_interpolation_factor": 4}),
        ("llama", {"no_rope_freq": [0, 1, 0, 1]}),
        ("llama", {"qk_l2_norm": True}),
        ("llama", {"softmax_type": "off-by-one"}),
        ("llama", {"softmax_scale": 0.5}),
        ("llama", {"apply_residual_connection_post_layernorm": True}),
        ("llama", {"activation_func_clamp_value": 7.0}),
        ("llama", {"glu_linear_offset": 1.0}),
        ("llama", {"attention_output_gate": True}),
        ("llama", {"multi_latent_attention": True}),
        ("llama", {"mtp_num_layers": 1}),
        ("llama", {"heterogeneous_layers_config_encoded_json": "{}"}),
        ("llama", {"window_size": (4, 1)}),
        ("llama", {"window_attn_skip_freq": 2, "window_size": (4, 0)}),
        ("llama_biases", {"window_size": (4, 0)}),
    ],
)
def test_arguments_that_change_the_computation_are_refused(
    name: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    rank_file_of(name, tmp_path / "megatron", **stated)
    ran = assert_refused(tmp_path / "megatron", tmp_path / "out", "FS514", exit=2, command=TO_HF)
    assert ran.having("FS514", message=list(stated)[-1])


def test_arguments_that_change_nothing_are_taken(tmp_path: Path) -> None:
    rank_file_of(
        "llama",
        tmp_path / "megatron",
        rotary_seq_len_interpolation_factor=1,
        no_rope_freq=None,
        softmax_type="vanilla",
        qk_l2_norm=False,
        glu_linear_offset=0.0,
        mtp_num_layers=None,
        window_size=(-1, -1),
        rotary_percent=1,
    )
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", *TO_HF[1:])
    assert ran.code == 0, ran.out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == "llama" and "sliding_window" not in config


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_window_in_all_layers_is_computed(name: str, tmp_path: Path) -> None:
    whole = rank_file_of(name, tmp_path / "megatron", window_size=(4, 0))
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", *TO_HF[1:])
    assert ran.code == 0, ran.out
    tokens = torch.arange(40).reshape(2, 20) * 7 % 200
    # The token itself and the four before it.
    at = torch.arange(20)
    seen = (at[:, None] >= at) & (at[:, None] - at <= 4)
    # Both kinds of layer get what is seen, whichever the config names.
    masks: Any = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    if name != "llama":
        masks = {"full_attention": masks, "sliding_attention": masks}
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        have = after(tokens).logits
        assert (have - whole(tokens).logits).abs().max() > 1e-3
        assert torch.allclose(have, whole(tokens, attention_mask=masks).logits, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("window", ["x", -3, True, 0, 5, None])
def test_mistral_alone_has_a_window(kind: str, window: Any, tmp_path: Path) -> None:
    model(kind, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": window}))
    ran = cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron:legacy")
    if kind == "mistral" and window not in (5, None):
        assert ran.code == 2 and ran.having("FS211", message="sliding_window"), ran.out
        assert not (tmp_path / "out").exists()
        return
    assert ran.code == 0, ran.out
    args = load_pt(tmp_path / "out/release/mp_rank_00/model_optim_rng.pt")["args"]
    seen = (4, 0) if (kind, window) == ("mistral", 5) else None
    assert getattr(args, "window_size", None) == seen


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("qwen3", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4}, "FS514"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0}}, "FS211"),
        ("llama", {"model_type": ["llama"]}, "FS514"),
    ],
)
def test_configs_that_do_not_say_enough_are_refused(
    name: str, change: dict[str, Any], code: str, tmp_path: Path
) -> None:
    model(name, tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert_refused(tmp_path / "hf", tmp_path / "out", code, exit=2, command=("convert", "--to", "megatron"))


@pytest.mark.parametrize("form", FORMS)
def test_the_layout_of_the_run_does_not_outlive_it(form: str, tmp_path: Path) -> None:
    rank_file_of(
        "llama",
        tmp_path / "megatron",
        num_layers_per_virtual_pipeline_stage=1,
        num_virtual_stages_per_pipeline_rank=2,
        decoder_first_pipeline_num_layers=1,
        decoder_last_pipeline_num_layers=1,
        context_parallel_size=2,
        pipeline_model_parallel_layout="Et|t|t|tL",
        account_for_loss_in_pipeline_split=True,
        expert_tensor_parallel_size=2,
        hidden_dropout=0.25,
    )
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", "--to", form, "--tp", 2)
    assert ran.code == 0, ran.out
    name = "common.pt" if form == "megatron:torch_dist" else "mp_rank_01/model_optim_rng.pt"
    args = vars(load_pt(tmp_path / "out/release" / name)["args"])
    assert args["hidden_dropout"] == 0.25 and args["tensor_model_parallel_size"] == 2
    for key in (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    ):
        assert args[key] is None
    assert args["account_for_loss_in_pipeline_split"] is False
    assert args["context_parallel_size"] == args["expert_tensor_parallel_size"] == 1
    assert "expert_model_parallel_size" not in args


@pytest.mark.parametrize(
    ("stated", "key"),
    [
        ({"rotary_percent": "abc"}, "rotary_percent"),
        ({"rotary_base": float("nan")}, "rotary_base"),
        ({"norm_epsilon": "x"}, "norm_epsilon"),
        ({"window_size": ("a", 0)}, "window_size"),
        ({"window_size": "9"}, "window_size"),
        ({"num_attention_heads": "8"}, "num_attention_heads"),
        ({"hidden_size": 10**30}, "hidden_size"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings"),
        ({"use_rope_scaling": "no"}, "use_rope_scaling"),
        ({"tensor_model_parallel_size": 10**9}, "parallel degrees"),
        ({"tensor_model_parallel_size": 1 << 16, "pipeline_model_parallel_size": 32}, "parallel degrees"),
    ],
)
def test_numbers_that_are_none_are_findings(stated: dict[str, Any], key: str, tmp_path: Path) -> None:
    rank_file_of("llama", tmp_path / "megatron", **stated)
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", *TO_HF[1:])
    assert ran.code == 2 and ran.having("FS211", message=key), ran.out
    assert not (tmp_path / "out").exists()


def test_experts_in_nested_layers_are_refused(tmp_path: Path) -> None:
    rank_file_of("llama", tmp_path / "megatron", moe_layer_freq=[[1]], num_experts=4)
    assert_refused(tmp_path / "megatron", tmp_path / "out", "FS514", exit=2, command=TO_HF)


def test_many_missing_ranks_are_named_and_counted(tmp_path: Path) -> None:
    rank_file_of("llama", tmp_path / "megatron", tensor_model_parallel_size=1 << 16)
    ran = cli("verify", tmp_path / "megatron")
    # The sizes that follow from so many ranks are not the tensors' either; where ranks are missing that tells
    # nothing new.
    assert ran.code == 3, ran.out[:500]
    (one,) = [f for f in ran.doc["findings"] if f["code"] == "FS101"]
    assert (one["rank"], one["count"]) == ("tp 1 to 65535, pp 0", 65535)
    assert one["message"] == "the files from this one to mp_rank_65535/model_optim_rng.pt are missing"


def test_missing_ranks_beyond_a_hundred_are_all_counted(tmp_path: Path) -> None:
    rank_file_of("llama", tmp_path / "megatron", tensor_model_parallel_size=200)
    (one,) = [f for f in cli("verify", tmp_path / "megatron").doc["findings"] if f["code"] == "FS101"]
    assert (one["rank"], one["count"]) == ("tp 1 to 199, pp 0", 199)


def test_missing_ranks_of_many_stages_are_one_finding(tmp_path: Path) -> None:
    degrees = {"tensor_model_parallel_size": 512, "pipeline_model_parallel_size": 4}
    rank_file_of("llama", tmp_path / "megatron", **degrees)
    (one,) = [f for f in cli("verify", tmp_path / "megatron").doc["findings"] if f["code"] == "FS101"]
    assert one["message"] == "2047 files are missing" and len(one["files"]) == 4


@pytest.mark.parametrize("step", ["²", "9" * 4000])
def test_a_step_that_is_no_number_is_not_there(step: str, tmp_path: Path) -> None:
    rank_file_of("llama", tmp_path / "megatron")
    ran = cli("inspect", tmp_path / "megatron", "--step", step)
    assert ran.code == 2 and ran.having("FS501"), ran.out
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text(step)
    ran = cli("inspect", tmp_path / "megatron")
    assert ran.having("FS105"), ran.out


@pytest.mark.parametrize("skipped", [1, 2, [0, 1, 0, 1]])
def test_a_config_with_a_window_in_all_layers_goes_before_the_list_of_arguments(
    skipped: Any, tmp_path: Path
) -> None:
    rank_file_of("qwen2", tmp_path / "megatron", window_size=(4, 0), window_attn_skip_freq=skipped)
    config = json.loads((tmp_path / "made/config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    config.pop("layer_types", None)
    (tmp_path / "given.json").write_text(json.dumps(config))
    command = (*TO_HF[1:], "--config", tmp_path / "given.json")
    ran = cli("convert", tmp_path / "megatron", tmp_path / "out", *command)
    assert ran.code == 0, ran.out
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["sliding_window"], written["max_window_layers"]) == (5, 0)
