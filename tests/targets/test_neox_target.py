"""Writing GPT-NeoX checkpoints: against torch's own reader, the files of real runs, and logits."""

from __future__ import annotations

import json
import re
import shutil
import signal
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
import yaml
from fastshard.targets.pickle_tree import TensorOf, tree
from helpers import (
    FIXTURES,
    HF,
    NEOX,
    NEOX_SEQ,
    STEP,
    Ran,
    assert_refused,
    at_once,
    cli,
    copy,
    flip_payload,
    layer_file,
    load_pt,
    rank_file,
    read_result,
    spawn,
)
from holding import HANG, Steps, needs_steps
from neox_maker import ROW_BIAS, Spec, make_shards, write
from test_neox_logits import TOLERANCE, largest_difference
from test_neox_parallel import edit_yaml, same_bits
from test_neox_variants import VARIANTS, variant
from test_neox_zero import write_zero

#: Variants of each kind of projection, norm and gate, tied and not; all are merged and read with every run.
QUICK = ("llama_tied", "llama_biases", "mistral", "neox_tanh", "te_both", "te_mha_parallel", "te_gqa_glu")
STANDARD = FIXTURES / "gpt_neox/neox_pp_tp2_stdres"
FORMS = [("gpt_neox", 1), ("gpt_neox:pipeline", 2), ("gpt_neox:sequential", 1)]


def torch_files(out: Path) -> list[Path]:
    return sorted(out.glob("global_step*/*.pt"))


def check_files(out: Path) -> dict[str, Any]:
    """Every file as torch and zip readers of other hands see it."""
    contents = {}
    for path in torch_files(out):
        contents[path.name] = torch.load(path, weights_only=True)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert {i.compress_type for i in archive.infolist()} == {zipfile.ZIP_STORED}
            raw = path.read_bytes()
            for info in archive.infolist():
                name_len, extra_len = (
                    int.from_bytes(raw[info.header_offset + at :][:2], "little") for at in (26, 28)
                )
                assert (info.header_offset + 30 + name_len + extra_len) % 64 == 0, info.filename
            names = [i.filename.removeprefix(f"{path.stem}/") for i in archive.infolist()]
        # The order and number of members are those of torch's own writer.
        again = out.parent / path.name
        torch.save(contents[path.name], again)
        with zipfile.ZipFile(again) as archive:
            assert [n.removeprefix(f"{path.stem}/") for n in archive.namelist()] == names
        again.unlink()
    return contents


def tensors_of(out: Path, rank: int) -> dict[str, torch.Tensor]:
    """Tensors of a rank by `LL.name`, of either form."""
    found: dict[str, torch.Tensor] = {}
    for path in torch_files(out):
        content = load_pt(path)
        if path.name == rank_file(rank) and content["module"] is not None:
            found |= {k.removeprefix("sequential."): v for k, v in content["module"].items()}
        elif f"-model_{rank:02d}-" in path.name:
            layer = int(path.name.split("_")[1].split("-")[0])
            found |= {f"{layer}.{k}": v for k, v in content.items()}
    return found


def to_hf(source: Path, out: Path, *options: object) -> dict[str, torch.Tensor]:
    ran = cli("convert", source, out, "--to", "hf", *options)
    assert (ran.code, ran.errors) == (0, []), ran.out
    return read_result(out)


def to_neox(source: Path, out: Path, to: str = "gpt_neox", *options: object) -> None:
    ran = cli("convert", source, out, "--to", to, *options)
    assert (ran.code, ran.errors) == (0, []), ran.out


@pytest.mark.parametrize("to, pp", FORMS, ids=["pipeline", "pp2", "sequential"])
@pytest.mark.parametrize("tp", at_once([1, 2, 4], [2]))
def test_there_and_back_keeps_every_bit(
    neox_fixture: Path, tp: int, to: str, pp: int, tmp_path: Path
) -> None:
    mean = ("--replicas", "mean") if "diverged" in neox_fixture.name else ()
    want = to_hf(neox_fixture, tmp_path / "hf", "--vocab-size", 509, *mean)
    options = (to, "--tp", tp, "--pp", pp)
    if tp == 4 and "gqa" in neox_fixture.name:
        command = ("convert", "--to", *options)
        ran = assert_refused(tmp_path / "hf", tmp_path / "neox", "FS204", exit=2, command=command)
        assert "1, 2" in ran.having("FS204")[0]["expected"]
        return
    to_neox(tmp_path / "hf", tmp_path / "neox", *options)
    check_files(tmp_path / "neox")
    verified = cli("verify", tmp_path / "neox")
    assert (verified.code, [f for f in verified.findings if f["severity"] != "note"]) == (0, [])
    same_bits(to_hf(tmp_path / "neox", tmp_path / "back", "--vocab-size", 509), want)
    config, back = (json.loads((tmp_path / p / "config.json").read_text()) for p in ("hf", "back"))
    assert back == config


@pytest.mark.parametrize("tp", at_once([1, 2, 4], [4]))
@pytest.mark.parametrize("name", at_once(VARIANTS, QUICK))
def test_variant_gives_the_logits_of_its_source(name: str, tp: int, tmp_path: Path) -> None:
    """From the run's own files, and by way of Hugging Face: a tensor-parallel forward of what was written."""
    root = write(tmp_path / "ckpt", variant(name, tp=2))
    want = to_hf(root, tmp_path / "hf", "--vocab-size", 600)
    for source, out, to in (
        (root, "resharded", "gpt_neox:sequential"),
        (tmp_path / "hf", "from_hf", "gpt_neox"),
    ):
        to_neox(source, tmp_path / out, to, "--tp", tp)
        assert largest_difference(tmp_path / out, tmp_path / "hf", 600) < TOLERANCE
        same_bits(to_hf(tmp_path / out, tmp_path / f"{out}_back", "--vocab-size", 600), want)
        shutil.rmtree(tmp_path / f"{out}_back")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_llama_of_transformers_there_and_back(tp: int, tmp_path: Path) -> None:
    want, vocab = read_result(HF), json.loads((HF / "config.json").read_text())["vocab_size"]
    to_neox(HF, tmp_path / "neox", "gpt_neox", "--tp", tp)
    # GPT-NeoX adds eps to the root mean square, transformers to the mean square: 2e-4 here, by the forward.
    assert largest_difference(tmp_path / "neox", HF, vocab) < 10 * TOLERANCE
    same_bits(to_hf(tmp_path / "neox", tmp_path / "back", "--vocab-size", vocab), want)


@pytest.mark.parametrize("fixture", [NEOX, STANDARD, NEOX_SEQ], ids=lambda p: p.name)
def test_tp2_is_what_the_run_had_written(fixture: Path, tmp_path: Path) -> None:
    """Tensor for tensor; row biases of the GPT-J residual are terms of which only the sum is known."""
    to_hf(fixture, tmp_path / "hf")
    form = "sequential" if fixture == NEOX_SEQ else "pipeline"
    partial = "stdres" not in fixture.name
    for source, out in ((tmp_path / "hf", "from_hf"), (fixture, "from_neox")):
        to_neox(source, tmp_path / out, f"gpt_neox:{form}", "--tp", 2)
        for rank in range(2):
            have, want = tensors_of(tmp_path / out, rank), tensors_of(fixture, rank)
            if partial:
                for name in [n for n in want if n.endswith(ROW_BIAS)]:
                    del want[name]
                    term = have.pop(name)
                    if rank:
                        assert torch.equal(term, torch.zeros_like(term)) and torch.signbit(term).all()
            same_bits(have, want)
        original = {p.relative_to(fixture) for p in fixture.rglob("*.pt")}
        step = STEP if out == "from_neox" else "global_step0"
        written = {p.relative_to(tmp_path / out) for p in (tmp_path / out).rglob("*.pt")}
        assert written == {Path(step) / p.name for p in original}


def test_resharding_keeps_what_the_run_said(tmp_path: Path) -> None:
    to_neox(NEOX, tmp_path / "tp4", "gpt_neox", "--tp", 4, "--pp", 2)
    assert (tmp_path / "tp4/latest").read_bytes() == STEP.encode()
    before = yaml.safe_load((NEOX / STEP / "configs/config.yml").read_text())
    after = yaml.safe_load((tmp_path / "tp4" / STEP / "configs/fastshard.yml").read_text())
    changed = {"model_parallel_size": 4, "pipe_parallel_size": 2, "finetune": True}
    assert after == before | changed
    was, states = load_pt(NEOX / STEP / rank_file(0)), check_files(tmp_path / "tp4")
    for rank in range(8):
        state = states[rank_file(rank)]
        assert state["args"] == was["args"] | {"model_parallel_size": 4}
        assert (state["iteration"], state["global_steps"], state["global_samples"]) == (4, 4, 64)
        assert state["mp_world_size"] == 8 and state["module"] is None
        assert state["checkpoint_parallel_dimensions"] == {"pp_degree": 2, "tp_degree": 4}
    assert rank_file(8) not in states
    to_neox(tmp_path / "tp4", tmp_path / "tp2", "gpt_neox", "--tp", 2)
    same_bits(to_hf(tmp_path / "tp2", tmp_path / "a"), to_hf(NEOX, tmp_path / "b"))


def test_masters_become_the_weights_of_another_degree(tmp_path: Path) -> None:
    spec = Spec(tp=2, dtype=torch.float32)
    root = write_zero(tmp_path / "zero", spec, make_shards(spec), pp=2, dp=2)
    masters = ("--weights", "masters")
    want = to_hf(root, tmp_path / "hf", *masters)
    assert {t.dtype for t in want.values()} == {torch.float32}
    to_neox(root, tmp_path / "tp4", "gpt_neox", "--tp", 4, *masters)
    config = yaml.safe_load((tmp_path / "tp4/global_step7/configs/fastshard.yml").read_text())
    assert config["precision"] == "fp32" and "bf16" not in config
    check_files(tmp_path / "tp4")
    same_bits(to_hf(tmp_path / "tp4", tmp_path / "back", "--vocab-size", spec.padded), want)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(norm="rmsnorm", kv_heads=4, residual=False),
        Spec(norm="rmsnorm", biases=False),
        Spec(activation="geglu", kv_heads=2),
        Spec(norm="te_rmsnorm", activation="swiglu", inner=96),
    ],
    ids=["rms_gqa", "rms", "geglu_gqa", "te_rms_gated_parallel"],
)
def test_models_that_transformers_does_not_have_are_resharded(spec: Spec, tmp_path: Path) -> None:
    """Such a model stays what it is: a merge of what was written is the merge of the run's own files."""
    root = write(tmp_path / "ckpt", spec)
    assert cli("merge", root, tmp_path / "want").code == 0
    want = read_result(tmp_path / "want")
    for to, tp in (("gpt_neox", 1), ("gpt_neox:sequential", 2), ("gpt_neox", 2 if spec.kv_heads == 2 else 4)):
        out = tmp_path / f"{to.replace(':', '_')}{tp}"
        to_neox(root, out, to, "--tp", tp)
        assert cli("verify", out).code == 0
        assert cli("merge", out, tmp_path / f"{out.name}_merged", "--vocab-size", spec.padded).code == 0
        same_bits(read_result(tmp_path / f"{out.name}_merged"), want)


def test_rank_files_hold_what_deepspeed_and_gpt_neox_look_for(tmp_path: Path) -> None:
    to_hf(NEOX, tmp_path / "hf")
    to_neox(tmp_path / "hf", tmp_path / "neox", "gpt_neox:sequential", "--tp", 2)
    state = check_files(tmp_path / "neox")[rank_file(1)]
    real = load_pt(NEOX_SEQ / STEP / rank_file(1))
    assert isinstance(state["module"], OrderedDict)
    assert state["module"].keys() == real["module"].keys()
    # What a run of its own would have made anew: random states, and the versions of what ran.
    missing = {k for k in real if not k.endswith(("rng_state", "rng_tracker_states"))} - state.keys()
    assert missing == {"ds_version", "sparse_tensor_module_names"}
    assert state["args"] == real["args"]
    # GPT-NeoX reads `iteration or total_iters`.
    assert (state["iteration"], state["total_iters"]) == (0, 0)
    assert "checkpoint_parallel_dimensions" not in state
    config = yaml.safe_load((tmp_path / "neox/global_step0/configs/fastshard.yml").read_text())
    stated = yaml.safe_load((NEOX_SEQ / STEP / "configs/config.yml").read_text())
    assert {k: config[k] for k in stated if k in config and k != "mlp_multiple_of"} == {
        k: v for k, v in stated.items() if k in config and k != "mlp_multiple_of"
    }
    assert stated.keys() - config.keys() == {"mlp_multiple_of", "vocab_file"}
    assert config["finetune"] is True


@pytest.mark.parametrize(
    "tp, multiple, padded", [(1, None, 512), (4, None, 512), (4, 256, 1024), (2, 1, 510)]
)
def test_vocabulary_is_padded_with_zeros(tp: int, multiple: int | None, padded: int, tmp_path: Path) -> None:
    want = to_hf(NEOX, tmp_path / "hf", "--vocab-size", 509)["gpt_neox.embed_in.weight"]
    options = () if multiple is None else ("--make-vocab-size-divisible-by", multiple)
    to_neox(tmp_path / "hf", tmp_path / "neox", "gpt_neox", "--tp", tp, *options)
    parts = [tensors_of(tmp_path / "neox", rank)["0.word_embeddings.weight"] for rank in range(tp)]
    whole = torch.cat(parts)
    assert whole.shape == (padded, 32) and torch.equal(whole[:509], want)
    assert not whole[509:].any() and not torch.signbit(whole[509:]).any()
    state = load_pt(tmp_path / "neox/global_step0" / rank_file(0))
    assert state["args"]["padded_vocab_size"] == padded
    assert state["args"]["make_vocab_size_divisible_by"] == multiple or 128


@pytest.mark.parametrize("damage", ["tensor", "pickle", "missing", "truncated"])
def test_damage_of_what_was_written_is_found(damage: str, tmp_path: Path) -> None:
    to_neox(NEOX, tmp_path / "out", "gpt_neox", "--tp", 2)
    file = tmp_path / "out" / STEP / layer_file(3, 1)
    name = "attention.dense.weight"
    if damage == "tensor":
        flip_payload(file, load_pt(file)[name])
    elif damage == "pickle":
        raw = file.read_bytes()
        at = raw.index(b"attention.dense.weight")
        file.write_bytes(raw[:at] + b"X" + raw[at + 1 :])
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-30])
    ran = cli("verify", tmp_path / "out")
    assert ran.code == (3 if damage == "missing" else 1), ran.out
    code = {"tensor": "FS301", "pickle": "FS301", "missing": "FS101", "truncated": "FS312"}[damage]
    assert ran.having(code, file=file.name)
    if damage == "tensor":
        assert ran.having("FS308", file=file.name, tensor=name)


def test_plan_prints_the_files_and_writes_nothing(tmp_path: Path) -> None:
    ran = cli("plan", NEOX, "--to", "gpt_neox:sequential", "--tp", 4, json_output=False)
    assert ran.code == 0 and f"{STEP}/mp_rank_03_model_states.pt" in ran.out
    document = cli("plan", NEOX, "--to", "gpt_neox", "--tp", 1).doc
    assert {f["name"] for f in document["summary"]["files"]} > {f"{STEP}/{layer_file(0, 0)}"}
    assert all("form" not in f for f in document["summary"]["files"])
    keys = {o["key"] for o in document["plan"]["outputs"]}
    assert "word_embeddings.weight" in keys


def test_python_manifest_tells_shards_apart(tmp_path: Path) -> None:
    made = fastshard.convert(NEOX, tmp_path / "out", to="gpt_neox", tp=2, memory="2GiB")
    assert len(made) == len(made.document["tensors"]) == 80
    file = f"{STEP}/{layer_file(2, 1)}"
    assert made[f"{file}:mlp.linear1.weight"]["shape"] == [64, 32]


def test_result_is_compared_with_the_manifest_expected_of_it(tmp_path: Path) -> None:
    to_hf(NEOX, tmp_path / "hf")
    options = ("--to", "gpt_neox:sequential", "--tp", 2)
    assert cli("convert", tmp_path / "hf", tmp_path / "a", *options).code == 0
    manifest = tmp_path / "a/fastshard.manifest.json"
    assert cli("convert", tmp_path / "hf", tmp_path / "b", *options, "--expect", manifest).code == 0
    document = json.loads(manifest.read_text())
    changed = next(t for t in document["tensors"] if t["file"].endswith(rank_file(1)))
    changed["blake3"] = "0" * 64
    manifest.write_text(json.dumps(document))
    ran = cli("convert", tmp_path / "hf", tmp_path / "c", *options, "--expect", manifest)
    assert (ran.code, len(ran.errors)) == (1, 1) and not (tmp_path / "c").exists()
    assert ran.having("FS308", tensor=f"{rank_file(1)}:{changed['name']}")


@pytest.mark.parametrize(
    "options, code, exit",
    [
        (("--to", "gpt_neox", "--tp", 3), "FS204", 2),
        (("--to", "gpt_neox", "--tp", 0), "FS515", 2),
        (("--to", "gpt_neox:sequential", "--pp", 2), "FS515", 2),
        (("--to", "gpt_neox", "--make-vocab-size-divisible-by", 0), "FS515", 2),
        (("--to", "gpt_neox", "--include", "*norm*"), "FS515", 2),
        (("--to", "hf", "--tp", 2), "FS514", 2),
        (("--to", "gpt_neox:zero"), "FS515", 2),
    ],
)
def test_what_cannot_be_written_is_refused(
    options: tuple[object, ...], code: str, exit: int, tmp_path: Path
) -> None:
    assert_refused(NEOX, tmp_path / "out", code, exit=exit, command=("convert",), options=options)


@pytest.mark.parametrize(
    "change, code",
    [
        ({"hidden_act": "quick_gelu"}, "FS514"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "FS514"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "FS514"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "FS514"),
        ({"rope_theta": 10000.7, "rope_parameters": None}, "FS514"),
        ({"rope_parameters": {"rope_theta": 10000.7}}, "FS514"),
        ({"model_type": "bloom"}, "FS514"),
        ({"rms_norm_eps": "small"}, "FS211"),
        ({"max_position_embeddings": "x"}, "FS211"),
        ({"max_position_embeddings": None}, "FS211"),
        ({"max_position_embeddings": 1 << 80}, "FS211"),
        ({"rope_parameters": None, "rope_theta": "abc"}, "FS211"),
        ({"rope_parameters": {"rope_theta": None}}, "FS211"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "FS211"),
        ({"rope_parameters": [1]}, "FS211"),
        ({"rope_scaling": "x"}, "FS211"),
    ],
    ids=str,
)
def test_models_that_gpt_neox_does_not_have_are_refused(
    change: dict[str, Any], code: str, tmp_path: Path
) -> None:
    hf = copy(HF, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | change))
    targets = ["gpt_neox"]
    if code == "FS211" or "rope_theta" in str(change.get("rope_parameters", change)):
        # The same keys, with the same bounds.
        targets += ["megatron:legacy"] if "llama3" not in str(change) else []
    for to in targets:
        assert_refused(hf, tmp_path / "out", code, exit=2, command=("convert",), options=("--to", to))


def written_config(out: Path) -> dict[str, Any]:
    (file,) = out.glob("global_step*/configs/fastshard.yml")
    config: dict[str, Any] = yaml.safe_load(file.read_text())
    return config


def resharded(spec: Spec, tmp_path: Path, **states: Any) -> tuple[dict[str, Any], Ran]:
    """The config that is written for a checkpoint of this model, whose own says `states`; None takes a key
    out."""
    root = write(tmp_path / "ckpt", spec)
    if states:
        edit_yaml(root, **states)
    ran = cli("convert", root, tmp_path / "out", "--to", "gpt_neox", "--tp", 2)
    assert (ran.code, ran.errors) == (0, []), ran.out
    return written_config(tmp_path / "out"), ran


@pytest.mark.parametrize("norm, suffix", [("te_layernorm", "norm.weight"), ("rmsnorm", "scale")])
def test_norms_of_queries_and_keys_keep_their_names(norm: str, suffix: str, tmp_path: Path) -> None:
    spec = Spec(norm=norm, more={"use_qk_layernorm": True})
    shards = make_shards(spec)
    for shard in shards:
        shard[f"2.attention.qk_layernorm.{suffix}"] = torch.randn(4, 8)
        shard[f"3.attention.qk_layernorm.{suffix}"] = torch.randn(4, 8)
    root = write(tmp_path / "ckpt", spec, shards)
    to_neox(root, tmp_path / "out", "gpt_neox", "--tp", 2)
    for rank, shard in enumerate(shards):
        have = tensors_of(tmp_path / "out", rank)
        assert have.keys() == shard.keys()
        assert torch.equal(
            have[f"3.attention.qk_layernorm.{suffix}"], shard[f"3.attention.qk_layernorm.{suffix}"]
        )


@pytest.mark.parametrize(
    "spec, told",
    [
        (Spec(te_mlp=True, residual=False, more={"layernorm_epsilon": 1e-3}), {"layernorm_epsilon", "gelu"}),
        (Spec(te_mlp=True, residual=False), {"gelu"}),
        (Spec(te_mlp=True, residual=False, more={"bias_gelu_fusion": True}), set()),
        (Spec(te_mlp=True, residual=False, activation="swiglu"), set()),
        (Spec(te_mha=True, residual=False, more={"layernorm_epsilon": 1e-3}), set()),
    ],
    ids=["eps", "gelu", "tanh", "swiglu", "attention_alone"],
)
def test_what_transformer_engine_computed_otherwise_is_said(
    spec: Spec, told: set[str], tmp_path: Path
) -> None:
    _, ran = resharded(spec, tmp_path)
    said = ran.having("FS215")
    assert {f["severity"] for f in said} <= {"warning"}
    assert len(said) == len(told) and all(any(key in f["message"] for f in said) for key in told)


def test_config_says_which_biases_the_tensors_have(tmp_path: Path) -> None:
    """GPT-NeoX's defaults are true; what a config states beside TE's modules need not be what they did."""
    stated = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    config, _ = resharded(Spec(te_mha=True, residual=False, more=stated), tmp_path)
    assert config["use_bias_in_attn_linear"] is config["use_bias_in_mlp"] is True
    assert "use_bias_in_norms" not in config
    config, _ = resharded(Spec(norm="rmsnorm", biases=False), tmp_path / "without")
    assert not any(config[f"use_bias_in_{part}"] for part in ("attn_linear", "mlp", "norms"))


def test_biases_on_one_of_two_projections_are_refused(tmp_path: Path) -> None:
    spec = Spec(residual=False)
    shards = make_shards(spec)
    for shard in shards:
        for name in [n for n in shard if n.endswith("dense.bias")]:
            del shard[name]
    root = write(tmp_path / "ckpt", spec, shards)
    options = ("--to", "gpt_neox")
    assert_refused(root, tmp_path / "out", "FS514", exit=2, command=("convert",), options=options)


def test_position_embeddings_that_were_assumed_are_written(tmp_path: Path) -> None:
    config, ran = resharded(Spec(), tmp_path, **{"pos-emb": None})
    assert config["pos_emb"] == "rotary" and ran.having("FS109", message="pos_emb")


@pytest.mark.parametrize(
    "spec, stated, want",
    [
        (Spec(inner=512), {"expansion_factor": 8}, {"expansion_factor": 8}),
        (Spec(inner=256), {"expansion_factor": 8}, {"intermediate_size": 256}),
        (
            Spec(inner=256),
            {"expansion_factor": 4, "intermediate_size": 256},
            {"intermediate_size": 256},
        ),
        (Spec(inner=96, activation="swiglu"), {"expansion_factor": 8}, {"intermediate_size": 288}),
    ],
    ids=["fits", "other", "both", "gated"],
)
def test_inner_size_is_said_once(
    spec: Spec, stated: dict[str, Any], want: dict[str, Any], tmp_path: Path
) -> None:
    config, _ = resharded(spec, tmp_path, **stated)
    assert {k: v for k, v in config.items() if k in ("expansion_factor", "intermediate_size")} == want


@pytest.mark.parametrize("to", ["gpt_neox", "gpt_neox:sequential"])
def test_norm_without_parameters_has_its_file(to: str, tmp_path: Path) -> None:
    """DeepSpeed loads a file for each module, empty or not."""
    spec = Spec(more={"norm": "non_parametric_layernorm"})
    shards = [
        {n: t for n, t in shard.items() if "norm" not in n} | {"5.none": torch.ones(1)}
        for shard in make_shards(spec)
    ]
    root = write(tmp_path / "ckpt", spec, shards)
    for rank in range(2):
        torch.save({}, root / "global_step7" / layer_file(5, rank))
    to_neox(root, tmp_path / "out", to, "--tp", 2)
    file = tmp_path / "out/global_step7" / layer_file(5, 1)
    assert to.endswith("sequential") or (load_pt(file) == {} and isinstance(load_pt(file), OrderedDict))
    assert written_config(tmp_path / "out")["norm"] == "non_parametric_layernorm"
    assert cli("verify", tmp_path / "out").code == 0


def test_window_of_mistral_counts_the_token_itself(tmp_path: Path) -> None:
    hf = copy(HF, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    config |= {"model_type": "mistral", "sliding_window": 8}
    (hf / "config.json").write_text(json.dumps(config))
    to_neox(hf, tmp_path / "out")
    said = written_config(tmp_path / "out")
    assert (said["sliding_window_width"], said["attention_config"]) == (7, [[["flash"], said["num_layers"]]])


def test_tanh_form_of_gelu_there_and_back(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(more={"bias_gelu_fusion": True}))
    to_hf(root, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["hidden_act"] == "gelu_pytorch_tanh"
    assert "bos_token_id" not in config and "eos_token_id" not in config
    to_neox(tmp_path / "hf", tmp_path / "neox")
    assert written_config(tmp_path / "neox")["bias_gelu_fusion"] is True
    to_hf(tmp_path / "neox", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


@pytest.mark.parametrize("to", ["gpt_neox", "hf"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"te_mlp": True}, {"split_gate": True}],
    ids=["linear1", "te_mlp", "w1_w3"],
)
def test_activation_of_a_gate_that_nothing_states_is_refused(
    changes: dict[str, Any], to: str, tmp_path: Path
) -> None:
    """GPT-NeoX's default is not gated: a config without the key is not the one of the run."""
    root = write(tmp_path / "ckpt", variant("llama_gqa", **changes))
    edit_yaml(root, activation=None, mlp_type="llama" if "split_gate" in changes else None)
    options = ("--to", to)
    ran = assert_refused(root, tmp_path / "out", "FS209", exit=2, command=("convert",), options=options)
    assert "activation" in ran.errors[0]["message"] and len(ran.errors) == 1
    assert cli("merge", root, tmp_path / "merged").code == 0


def test_gate_without_a_form_in_gpt_neox_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", variant("llama_w1_w3", activation="mish"))
    options = ("--to", "gpt_neox")
    assert_refused(root, tmp_path / "out", "FS514", exit=2, command=("convert",), options=options)


def test_unknown_residual_is_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", Spec(tp=2))
    file = root / "global_step7/configs/config.yml"
    config = yaml.safe_load(file.read_text())
    del config["gpt_j_residual"]
    file.write_text(yaml.safe_dump(config))
    options = ("--to", "gpt_neox", "--tp", 2)
    assert_refused(root, tmp_path / "out", "FS209", exit=2, command=("convert",), options=options)


def test_values_of_torch_files() -> None:
    value = {"a": [1, (2.5, None)], 3: OrderedDict(x=TensorOf("w")), "b": True, "c": b"\x00\xff"}
    assert tree(value) == {
        "dict": [
            [{"str": "a"}, {"list": [{"int": 1}, {"tuple": [{"float": "2.5"}, "none"]}]}],
            [{"int": 3}, {"ordered": [[{"str": "x"}, {"tensor": "w"}]]}],
            [{"str": "b"}, {"bool": True}],
            [{"str": "c"}, {"bytes": [0, 255]}],
        ]
    }
    with pytest.raises(TypeError):
        tree({1, 2})


@needs_steps
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl_c", "kill"])
def test_stopped_run_is_resumed_to_the_same_files(how: signal.Signals, tmp_path: Path) -> None:
    """Stopped in the middle of the tiles: some files are whole, some begun."""
    neox = write(tmp_path / "neox", Spec(tp=1, hidden=128, layers=4, inner=512, vocab=1000))
    source, place = tmp_path / "hf", tmp_path / "place"
    fastshard.convert(neox, source, to="hf", memory="2GiB", fsync=False)
    place.mkdir()
    options = ("--to", "gpt_neox", "--tp", "4", "--threads", "1", "--fsync", "none", "--json")
    fresh, out = place / "fresh", place / "out"
    with Steps() as steps:
        process = spawn("convert", source, fresh, *options, env=steps.environment)
        process.communicate(timeout=HANG)
        assert process.returncode == 0
        tiles = sum(name.startswith("tile-") for name in steps.reached())
    half = f"tile-{tiles // 2}"
    with Steps(half) as steps:
        process = spawn("convert", source, out, *options, env=steps.environment)
        held = steps.wait(half, process)
        process.send_signal(how)
        if how == signal.SIGINT:
            steps.wait("cancelled", process)
        held.release()
        process.communicate(timeout=HANG)
    assert process.returncode == (130 if how == signal.SIGINT else -how) and not out.exists()
    process = spawn("convert", source, out, *options, "--resume")
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stdout + stderr
    manifest = fresh / "fastshard.manifest.json"
    for path in sorted(p for p in fresh.rglob("*") if p.is_file() and p != manifest):
        assert (out / path.relative_to(fresh)).read_bytes() == path.read_bytes(), path.name
    written_at = re.compile(r'"mtime_ns": \d+')
    one, two = (written_at.sub("", (folder / manifest.name).read_text()) for folder in (fresh, out))
    assert one == two
    assert cli("verify", out).code == 0
    assert sorted(p.name for p in place.iterdir()) == ["fresh", "out"]
