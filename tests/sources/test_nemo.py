"""NeMo 2 and Megatron-Bridge: settings come from YAML beside the torch_dist save, and nothing is executed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nemo_maker
import pytest
import torch
import yaml
from fastshard.sources.step_names import newer
from helpers import HF, assert_refused, cli, copy, read_result, sha256
from transformers import AutoModelForCausalLM

EXPECTED_HF = json.loads((nemo_maker.SOURCE / "expected_hf.json").read_text())["tensors"]
TO_HF = ("--to", "hf", "--vocab-size", "1000")
LAYER = "decoder.layers."


def hashes(out: Path) -> dict[str, str]:
    return {name: sha256(tensor) for name, tensor in read_result(out).items()}


EXPECTED_HASHES = {name: entry["sha256"] for name, entry in EXPECTED_HF.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nemo") / "llama"
    nemo_maker.make(root)
    return root


@pytest.mark.parametrize("inside", ["", "weights"])
def test_all_commands_take_the_folder_and_its_weights(inside: str, good: Path, tmp_path: Path) -> None:
    ckpt = good / inside
    ran = cli("inspect", ckpt, json_output=False)
    assert "NeMo (torch_dist)" in ran.out
    assert "llama: 4 layers, hidden_size 64" in ran.out
    assert cli("verify", ckpt).code == 0
    assert cli("merge", ckpt, tmp_path / "merged").code == 0
    weights = {f"module.{name}": tensor for name, tensor in nemo_maker.read_weights().items()}
    merged = read_result(tmp_path / "merged")
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    ran = cli("convert", ckpt, tmp_path / "hf", *TO_HF)
    assert ran.code == 0, ran.out
    # The settings state eps and base, so that nothing is assumed.
    assert not ran.having("FS216")
    assert hashes(tmp_path / "hf") == EXPECTED_HASHES


def test_the_result_computes_what_the_original_does(good: Path, tmp_path: Path) -> None:
    assert cli("convert", good, tmp_path / "out", *TO_HF).code == 0
    tokens = torch.arange(16).reshape(1, 16) * 31 % 1000
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(HF, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_megatron_loads_names_without_the_module(good: Path, tmp_path: Path) -> None:
    """Converted for Megatron and from there to Hugging Face, it is the same model."""
    assert cli("convert", good, tmp_path / "m", "--to", "megatron", "--tp", "2").code == 0
    ran = cli("convert", tmp_path / "m", tmp_path / "hf", *TO_HF)
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "hf") == EXPECTED_HASHES
    assert json.loads((tmp_path / "hf/config.json").read_text())["rms_norm_eps"] == 1e-6


BIAS = {f"{LAYER}self_attention.linear_qkv.bias": (4, 128)}
NORMS = {f"{LAYER}self_attention.{one}_layernorm.weight": (4, 8) for one in "qk"}


@pytest.mark.parametrize(
    ("changes", "more", "stated"),
    [
        pytest.param({"num_query_groups": 4, "kv_channels": 8}, {}, {"head_dim": 8}, id="all_sizes"),
        pytest.param({"rotary_base": 500000.0}, {}, {"rope_theta": 500000}, id="base"),
        pytest.param({"layernorm_epsilon": 1e-5}, {}, {"rms_norm_eps": 1e-5}, id="eps"),
        pytest.param({"seq_length": 8192}, {}, {"max_position_embeddings": 8192}, id="positions"),
        pytest.param(
            {"window_size": [31, 0]}, {}, {"model_type": "mistral", "sliding_window": 32}, id="mistral"
        ),
        pytest.param({"add_qkv_bias": True}, BIAS, {"model_type": "qwen2"}, id="qwen2"),
        pytest.param({"qk_layernorm": True}, NORMS, {"model_type": "qwen3"}, id="qwen3"),
        pytest.param({"vocab_size": 1024}, {}, {"model_type": "llama"}, id="rows"),
    ],
)
def test_settings_become_the_config(
    changes: dict[str, Any], more: dict[str, Any], stated: dict[str, Any], tmp_path: Path
) -> None:
    extra = {name: torch.randn(shape).bfloat16() for name, shape in more.items()}
    nemo_maker.make(tmp_path / "ckpt", changes, weights=nemo_maker.read_weights() | extra)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: config.get(key) for key in stated} == stated


@pytest.mark.parametrize("factor", [8, 32.0])
def test_the_scaling_of_llama_3_is_kept(factor: float, tmp_path: Path) -> None:
    scaling = {"scale_factor": factor, "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
    nemo_maker.make(tmp_path / "ckpt", scaling)
    assert cli("convert", tmp_path / "ckpt", tmp_path / "out", *TO_HF).code == 0
    rope = json.loads((tmp_path / "out/config.json").read_text())["rope_scaling"]
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == factor
    assert rope["original_max_position_embeddings"] == 8192


def test_a_mixture_of_experts_is_a_mixtral(tmp_path: Path) -> None:
    experts, width, hidden, layers = 4, 24, 64, 4
    weights = nemo_maker.read_weights()
    for name in ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"):
        del weights[f"{LAYER}mlp.{name}"]
    first = torch.randn(layers, experts, 2 * width, hidden).bfloat16()
    second = torch.randn(layers, experts, hidden, width).bfloat16()
    weights |= {
        f"{LAYER}pre_mlp_layernorm.weight": torch.randn(layers, hidden).bfloat16(),
        f"{LAYER}mlp.router.weight": torch.randn(layers, experts, hidden).bfloat16(),
        f"{LAYER}mlp.experts.experts.linear_fc1.weight": first,
        f"{LAYER}mlp.experts.experts.linear_fc2.weight": second,
    }
    nemo_maker.make(
        tmp_path / "ckpt", {"num_moe_experts": experts, "ffn_hidden_size": width}, weights=weights
    )
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["num_local_experts"]) == ("mixtral", experts)
    have = read_result(tmp_path / "out")
    for layer, expert in ((0, 0), (2, 3)):
        under = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        assert torch.equal(have[f"{under}.w1.weight"], first[layer, expert, :width])
        assert torch.equal(have[f"{under}.w3.weight"], first[layer, expert, width:])
        assert torch.equal(have[f"{under}.w2.weight"], second[layer, expert])
    before_softmax = tmp_path / "pre"
    shutil.copytree(tmp_path / "ckpt", before_softmax)
    nemo_maker.write_context(
        before_softmax,
        {"num_moe_experts": experts, "ffn_hidden_size": width, "moe_router_pre_softmax": True},
    )
    ran = cli("convert", before_softmax, tmp_path / "other", *TO_HF)
    assert (
        ran.code == 2 or json.loads((tmp_path / "other/config.json").read_text())["norm_topk_prob"] is False
    )


def test_a_tied_head_is_not_stored(tmp_path: Path) -> None:
    weights = nemo_maker.read_weights()
    del weights["output_layer.weight"]
    nemo_maker.make(tmp_path / "ckpt", {"share_embeddings_and_output_weights": True}, weights=weights)
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    nemo_maker.write_context(tmp_path / "ckpt", {"share_embeddings_and_output_weights": False})
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "bad", *TO_HF)
    assert ran.code != 0
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("changes", "code", "exit", "told"),
    [
        ({"num_layers": 5}, "FS215", 1, {"message": "number of layers"}),
        ({"hidden_size": 128, "kv_channels": 8}, "FS215", 1, {"message": "hidden size"}),
        ({"ffn_hidden_size": 48}, "FS215", 1, {"message": "width of the MLP"}),
        # Not stated, it is four times the hidden size.
        ({"ffn_hidden_size": None}, "FS215", 1, {"expected": "256"}),
        ({"num_attention_heads": 16, "kv_channels": 8}, "FS215", 1, {"message": "attention heads"}),
        ({"vocab_size": 1000}, "FS215", 1, {"message": "padded vocabulary"}),
        ({"num_query_groups": None}, "FS514", 2, {"message": "linear_qkv"}),
        ({"num_query_groups": 2}, "FS514", 2, {"message": "linear_qkv"}),
        ({"gated_linear_unit": False}, "FS514", 2, {}),
    ],
)
def test_settings_that_contradict_the_shards_are_refused(
    changes: dict[str, Any], code: str, exit: int, told: dict[str, str], good: Path, tmp_path: Path
) -> None:
    root = copy(good, tmp_path / "ckpt")
    nemo_maker.write_context(root, changes)
    assert_refused(root, tmp_path / "out", code, exit=exit, command=("convert", *TO_HF), **told)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_func": nemo_maker.target("torch._C._nn.gelu")}, "activation_func"),
        ({"activation_func": None}, "activation_func"),
        (
            {"gated_linear_unit": None, "activation_func": nemo_maker.target("torch._C._nn.gelu")},
            "activation_func",
        ),
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"layernorm_zero_centered_gamma": True}, "apply_layernorm_1p"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"position_embedding_type": "yarn"}, "rotary_scaling_factor"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"seq_len_interpolation_factor": 4.0}, "rotary_seq_len_interpolation_factor"),
        ({"no_rope_freq": [0, 0, 1, 0]}, "no_rope_freq"),
        ({"multi_latent_attention": True}, "multi_latent_attention"),
        ({"scale_factor": 8}, "low_freq_factor"),
        (
            {"scale_factor": 8, "low_freq_factor": 2, "high_freq_factor": 4, "old_context_len": 8192},
            "low_freq_factor",
        ),
    ],
)
def test_models_that_transformers_lacks_are_merged_and_not_converted(
    changes: dict[str, Any], named: str, good: Path, tmp_path: Path
) -> None:
    root = copy(good, tmp_path / "ckpt")
    nemo_maker.write_context(root, changes)
    ran = cli("convert", root, tmp_path / "out", *TO_HF)
    assert ran.code == 2, ran.out
    assert ran.having("FS514", message=named)
    assert cli("merge", root, tmp_path / "merged").code == 0


@pytest.mark.parametrize(
    "text",
    [
        "config: !!python/object/apply:os.system ['touch executed']",
        "config: [1, 2]",
        "model: {}",
        "just words",
        "config: {num_layers: 4",
        "config: {num_layers: true}",
        "config: {num_layers: 'four'}",
        "config: {num_layers: -4}",
        "config: {num_layers: 99999999999999999999999}",
        "config: {share_embeddings_and_output_weights: 1}",
        "config: {num_layers: 4, num_layers: 5}",
        "a: &a [1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e]",
        "",
    ],
)
def test_a_damaged_file_of_settings_is_refused_by_name(text: str, good: Path, tmp_path: Path) -> None:
    root = copy(good, tmp_path / "ckpt")
    (root / "context/model.yaml").write_text(text)
    assert_refused(
        root, tmp_path / "out", "FS211", exit=2, command=("convert", *TO_HF), file="context/model.yaml"
    )
    assert not Path("executed").exists()


def test_targets_are_texts(good: Path, tmp_path: Path) -> None:
    """No module that a `_target_` names is imported."""
    root = copy(good, tmp_path / "ckpt")
    marker = tmp_path / "imported"
    (tmp_path / "evil_module.py").write_text(f"open({str(marker)!r}, 'w')")
    nemo_maker.write_context(root, {"init_method": {"_target_": "evil_module.run", "_call_": True}})
    assert cli("convert", root, tmp_path / "out", *TO_HF).code == 0
    assert not marker.exists()


def test_every_file_that_is_lost_is_missed_or_carries_nothing(good: Path, tmp_path: Path) -> None:
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
    assert len(files) > 10
    told = {}
    for number, file in enumerate(files):
        root = copy(good, tmp_path / f"ckpt{number}")
        (root / file).unlink()
        ran = cli("convert", root, tmp_path / f"out{number}", *TO_HF)
        told[file.as_posix()] = ran.code
        if ran.code == 0:
            assert hashes(tmp_path / f"out{number}") == EXPECTED_HASHES, file
            config = json.loads((tmp_path / f"out{number}/config.json").read_text())
            assert config["rms_norm_eps"] == 1e-6, file
        else:
            assert not (tmp_path / f"out{number}").exists(), file
    # What fiddle has of the run is not read.
    assert [file for file, code in told.items() if code == 0] == ["context/io.json"]


def test_without_settings_one_sentence_names_their_file(good: Path, tmp_path: Path) -> None:
    root = copy(good, tmp_path / "ckpt")
    shutil.rmtree(root / "context")
    ran = assert_refused(
        root, tmp_path / "out", "FS101", exit=3, command=("convert", *TO_HF), file="context/model.yaml"
    )
    assert len([finding for finding in ran.findings if finding["severity"] == "error"]) == 1
    assert cli("merge", root, tmp_path / "merged").code == 0
    ran = cli("convert", root, tmp_path / "hf", *TO_HF, "--config", HF / "config.json")
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "hf") == EXPECTED_HASHES


def test_a_stray_context_elsewhere_is_not_taken(good: Path, tmp_path: Path) -> None:
    """Only the folder beside `weights` describes it."""
    above = tmp_path / "run"
    root = copy(good, above / "llama")
    shutil.move(root / "context", above / "context")
    assert cli("convert", above, tmp_path / "out", *TO_HF).code == 3
    assert cli("convert", root, tmp_path / "out", *TO_HF).code == 3


def test_the_mark_of_an_unfinished_save_is_believed(good: Path, tmp_path: Path) -> None:
    root = copy(good, tmp_path / "run/llama")
    mark = tmp_path / "run/llama-unfinished"
    mark.touch()
    for ckpt in (root, root / "weights", tmp_path / "run"):
        for command in ("merge", "verify"):
            argv = [tmp_path / "out"] if command == "merge" else []
            ran = cli(command, ckpt, *argv)
            assert ran.code == 3, (ckpt, command, ran.out)
            assert ran.having("FS104", message="marked as unfinished")
    mark.rename(tmp_path / "run/other-unfinished")
    assert cli("merge", root, tmp_path / "out").code == 0


def name_of(loss: str, step: int, end: str = "") -> str:
    return f"llama--val_loss={loss}-epoch=0-step={step}-consumed_samples={step * 8}.0{end}"


def test_steps_are_told_by_their_step(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for loss, step in (("2.35", 99), ("1.20", 199), ("10.50", 49)):
        copy(good, run / name_of(loss, step))
    taken = [run, "--step"]
    ran = cli("inspect", run, json_output=False)
    assert f"step        {name_of('1.20', 199)}\n" in ran.out
    assert name_of("2.35", 99) in cli("inspect", *taken, "99", json_output=False).out
    # NeMo goes on from the one that is called the last.
    copy(good, run / name_of("1.20", 199, "-last"))
    assert f"step        {name_of('1.20', 199, '-last')}\n" in cli("inspect", run, json_output=False).out
    (run / name_of("1.20", 199, "-last-unfinished")).touch()
    ran = cli("inspect", run, json_output=False)
    assert f"step        {name_of('1.20', 199)}\n" in ran.out
    assert "not finished" in ran.out
    ran = cli("merge", run, tmp_path / "out", "--step", name_of("1.20", 199, "-last"))
    assert ran.code == 3
    assert ran.having("FS104", message="marked as unfinished")


def test_the_last_is_newer_than_its_twin_alone() -> None:
    assert newer(name_of("1.20", 9, "-last"), name_of("1.20", 9))
    assert not newer(name_of("1.20", 9), name_of("1.20", 9, "-last"))
    assert newer(name_of("9.99", 10), name_of("1.20", 9, "-last"))
    assert newer("epoch=1-step=10", "epoch=0-step=10")


def test_the_optimizers_state_is_taken_by_parameter(tmp_path: Path) -> None:
    weights = nemo_maker.read_weights()
    under = "optimizer.state"
    state = {
        f"{under}.{slot}.module.{name}": torch.randn(tensor.shape)
        for slot in ("exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    masters = {f"{under}.fp32_param.module.{name}": tensor.float() for name, tensor in weights.items()}
    nemo_maker.make(tmp_path / "ckpt", state=state | masters)
    assert cli("convert", tmp_path / "ckpt", tmp_path / "hf", *TO_HF).code == 0
    assert hashes(tmp_path / "hf") == EXPECTED_HASHES
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "all", "--optimizer")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "all")
    for key, tensor in state.items():
        slot, _, name = key.removeprefix(f"{under}.").partition(".")
        found = [value for stored, value in have.items() if slot in stored.split(".") and name in stored]
        assert any(torch.equal(value, tensor) for value in found), (key, sorted(have)[:8])


def test_flat_buckets_are_refused_as_no_argument_states_the_ranks(tmp_path: Path) -> None:
    bucket = (
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    )
    flat = {f"{bucket}.{slot}": torch.randn(512) for slot in ("param", "exp_avg", "exp_avg_sq")}
    nemo_maker.make(tmp_path / "ckpt", state=flat)
    assert cli("merge", tmp_path / "ckpt", tmp_path / "weights").code == 0
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out", "--optimizer")
    assert ran.code != 0, ran.out
    assert not (tmp_path / "out").exists()


def test_settings_of_megatron_bridge_are_read_too(tmp_path: Path) -> None:
    """`iter_NNNNNNN/run_config.yaml`, and names without `module.`."""
    weights = nemo_maker.read_weights()
    folder = tmp_path / "ckpt/iter_0000010"
    nemo_maker.write_save(folder, weights)
    (tmp_path / "ckpt/latest_checkpointed_iteration.txt").write_text("10")
    torch.save({"step": torch.tensor(10)}, tmp_path / "ckpt/latest_train_state.pt")
    torch.save({"step": torch.tensor(10)}, folder / "train_state.pt")
    model = nemo_maker.CONFIG | {
        "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider",
        "vocab_size": 1000,
        "should_pad_vocab": True,
    }
    content = {"model": model, "optimizer": {"lr": 0.1}, "peft": None}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(content))
    assert "Megatron-Bridge" in cli("inspect", tmp_path / "ckpt", json_output=False).out
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "out") == EXPECTED_HASHES
    assert not ran.having("FS216")
