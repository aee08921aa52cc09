"""Mixtures of experts: Mixtral in Hugging Face's two forms, in all of Megatron's, in DCP and per rank."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import moe_maker
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import FIXTURES, assert_refused, cli, copy, edit_pt, edit_safetensors, load_pt, read_result
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

SHARDED = FIXTURES / "sharded"
HF = SHARDED / "moe_hf_mixtral"
LEGACY = SHARDED / "moe_megatron_legacy_tp2_ep2"
DIST = SHARDED / "moe_megatron_torch_dist_tp2_ep2"
TO_HF = ("--to", "hf", "--vocab-size", "250")
FORMS = ("sequential", "grouped", "flat")


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    """Tensors of the fixture's model as transformers has them in memory: experts stacked."""
    return AutoModelForCausalLM.from_pretrained(HF, dtype=torch.float32).state_dict()


def same(out: Path, want: dict[str, torch.Tensor]) -> None:
    have = read_result(out)
    assert set(have) == set(want)
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype and torch.equal(have[name], tensor), name


def load(folder: Path) -> Any:
    """What transformers makes of a result; all that it holds and nothing else is used."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    return model.eval()


def rank_file(root: Path, folder: str) -> Path:
    return root / "iter_0000010" / folder / "model_optim_rng.pt"


# Hugging Face


def test_experts_are_read_in_either_form(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    save_file(
        {n: t.contiguous() for n, t in whole.items()},
        stacked / "model.safetensors",
        metadata={"format": "pt"},
    )
    shutil.copy(HF / "config.json", stacked)
    for folder in (HF, stacked):
        assert cli("verify", folder).code == 0
        assert cli("convert", folder, tmp_path / f"out_{folder.name}", "--to", "hf").code == 0
        # Both versions of transformers read one tensor per expert, so that is what is written.
        same(tmp_path / f"out_{folder.name}", load_file(HF / "model.safetensors"))
    assert cli("merge", stacked, tmp_path / "merged").code == 0
    same(tmp_path / "merged", whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_has_a_part_of_every_expert(tp: int, tmp_path: Path) -> None:
    ran = cli("convert", HF, tmp_path / "ranks", "--to", "tp-safetensors", "--tp", tp)
    assert ran.code == 0, ran.out
    want = load_file(HF / "model.safetensors")
    for rank in range(tp):
        have = load_file(tmp_path / "ranks" / f"tp_rank_{rank:02d}.safetensors")
        for e in range(4):
            stem = f"model.layers.1.block_sparse_moe.experts.{e}"
            for name, dim in ((f"{stem}.w1.weight", 0), (f"{stem}.w3.weight", 0), (f"{stem}.w2.weight", 1)):
                assert torch.equal(have[name], want[name].chunk(tp, dim)[rank]), name
        gate = "model.layers.1.block_sparse_moe.gate.weight"
        assert torch.equal(have[gate], want[gate])
    assert cli("verify", tmp_path / "ranks").code == 0
    assert cli("convert", tmp_path / "ranks", tmp_path / "back", "--to", "hf").code == 0
    same(tmp_path / "back", want)


@pytest.mark.parametrize("version", [2, 3])
def test_qwen_has_other_names_for_the_same(version: int, tmp_path: Path) -> None:
    model = moe_maker.qwen(version)
    model.save_pretrained(tmp_path / "hf")
    want = load_file(tmp_path / "hf/model.safetensors")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in want
    ran = cli("convert", tmp_path / "hf", tmp_path / "ranks", "--to", "tp-safetensors", "--tp", 2)
    assert ran.code == 0, ran.out
    assert cli("convert", tmp_path / "ranks", tmp_path / "back", "--to", "hf").code == 0
    same(tmp_path / "back", want)
    assert torch.equal(moe_maker.logits(load(tmp_path / "back")), moe_maker.logits(model))


def test_dense_layers_among_experts_are_divided_as_well(tmp_path: Path) -> None:
    model = moe_maker.qwen(3, mlp_only_layers=[1])
    model.save_pretrained(tmp_path / "hf")
    want = read_result(tmp_path / "hf")
    assert cli("convert", tmp_path / "hf", tmp_path / "ranks", "--to", "tp-safetensors", "--tp", 2).code == 0
    dense = load_file(tmp_path / "ranks/tp_rank_01.safetensors")["model.layers.1.mlp.gate_proj.weight"]
    assert torch.equal(dense, want["model.layers.1.mlp.gate_proj.weight"].chunk(2)[1])
    assert cli("convert", tmp_path / "ranks", tmp_path / "back", "--to", "hf").code == 0
    same(tmp_path / "back", want)
    assert cli("convert", tmp_path / "hf", tmp_path / "dcp", "--to", "dcp", "--tp", 2).code == 0
    assert cli("merge", tmp_path / "hf", tmp_path / "merged").code == 0
    same(tmp_path / "merged", want)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit_safetensors(root / "model.safetensors", lambda tensors: tensors.pop(name))
    assert_refused(root, tmp_path / "out", "FS102", exit=3, tensor=name)


def test_an_expert_that_all_layers_lack_is_one_finding(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts.3." in n]:
            del tensors[name]

    edit_safetensors(root / "model.safetensors", drop)
    ran = assert_refused(
        root, tmp_path / "out", "FS103", exit=3, message="expert 3 is missing", got="0,1,2,_"
    )
    assert len(ran.errors) == 1


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].t().contiguous()

    edit_safetensors(root / "model.safetensors", turn)
    assert_refused(root, tmp_path / "out", "FS201", tensor=name, expected="[24, 32]", got="[32, 24]")


def test_a_config_of_fewer_experts_is_contradicted(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
    assert_refused(root, tmp_path / "out", "FS215", message="a tensor of expert")


# Megatron-LM


def test_shards_made_here_are_those_of_megatron(whole: dict[str, torch.Tensor]) -> None:
    for tp in range(2):
        for ep in range(2):
            degrees, place = (2, 1, 2), (tp, 0, ep)
            theirs = load_pt(rank_file(LEGACY, moe_maker.rank_folder(place, degrees)))["model"]
            theirs = {name: tensor for name, tensor in theirs.items() if not name.endswith("_extra_state")}
            ours = moe_maker.rank_state(whole, place, degrees)
            assert set(ours) == set(theirs)
            assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("folder", [LEGACY, DIST], ids=["legacy", "torch_dist"])
def test_real_checkpoints_become_the_model_that_they_came_from(folder: Path, tmp_path: Path) -> None:
    assert cli("verify", folder).code == 0
    ran = cli("convert", folder, tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    same(tmp_path / "out", load_file(HF / "model.safetensors"))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], config["num_local_experts"]) == (["MixtralForCausalLM"], 4)
    difference = moe_maker.logits(load(tmp_path / "out")) - moe_maker.logits(load(HF))
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2)], ids=str)
def test_every_form_and_degree(
    form: str, degrees: tuple[int, int, int], whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, degrees, form)
    ran = cli("convert", root, tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    same(tmp_path / "out", load_file(HF / "model.safetensors"))


@pytest.mark.parametrize("form", FORMS)
def test_own_names_are_merged_with_the_numbers_of_the_whole(
    form: str, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (2, 2, 2), form)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    want = moe_maker.rank_state(whole, (0, 0, 0), (1, 1, 1), form)
    have = read_result(tmp_path / "out")
    assert set(have) == set(want)
    for name, tensor in want.items():
        # GroupedMLP's come out in the shape that its bytes have.
        assert torch.equal(have[name].reshape(tensor.shape), tensor), name


def test_virtual_stages_number_experts_too(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (1, 1, 2))
    for ep in range(2):

        def split(content: dict[str, Any]) -> None:
            model = content.pop("model")
            for chunk in range(2):
                content[f"model{chunk}"] = {
                    name.replace(f"layers.{chunk}.", "layers.0."): tensor
                    for name, tensor in model.items()
                    if f"layers.{chunk}." in name
                    or (".layers." not in name and ("embedding" in name) == (chunk == 0))
                }

        edit_pt(rank_file(root, f"mp_rank_00_{ep:03d}"), split)
    assert cli("convert", root, tmp_path / "out", *TO_HF).code == 0
    same(tmp_path / "out", load_file(HF / "model.safetensors"))


def test_norms_of_q_and_k_make_it_qwen3(tmp_path: Path) -> None:
    model = moe_maker.qwen(3, norm_topk_prob=True, rms_norm_eps=1e-5)
    root = moe_maker.save_legacy(tmp_path / "ckpt", model.state_dict(), (2, 1, 2), "grouped")
    ran = cli("convert", root, tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    made = load(tmp_path / "out")
    assert made.config.model_type == "qwen3_moe"
    assert (moe_maker.logits(made) - moe_maker.logits(model)).abs().max() < 1e-4


def test_megatron_is_divided_per_rank(tmp_path: Path) -> None:
    ran = cli("convert", LEGACY, tmp_path / "ranks", "--to", "tp-safetensors", "--tp", 2, "--vocab-size", 250)
    assert ran.code == 0, ran.out
    assert cli("convert", tmp_path / "ranks", tmp_path / "back", "--to", "hf").code == 0
    same(tmp_path / "back", load_file(HF / "model.safetensors"))


def test_a_missing_expert_rank_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    shutil.rmtree(rank_file(root, "mp_rank_01_001").parent)
    assert_refused(root, tmp_path / "out", "FS101", exit=3, file="mp_rank_01_001", rank="tp 1, pp 0, ep 1")


def test_a_missing_expert_of_a_rank_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    name = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2.weight"
    edit_pt(rank_file(root, "mp_rank_01_001"), lambda content: content["model"].pop(name))
    # By its number in the whole.
    assert_refused(
        root,
        tmp_path / "out",
        "FS102",
        exit=3,
        tensor=name.replace("local_experts.1", "local_experts.3"),
        rank="tp 1",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("degrees", [(1, 1, 2), (2, 1, 2), (1, 2, 2)], ids=str)
def test_a_copied_expert_rank_is_named(
    form: str, degrees: tuple[int, int, int], whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, degrees, form)
    place = (degrees[0] - 1, degrees[1] - 1)
    first, second = (moe_maker.rank_folder((*place, ep), degrees) for ep in range(2))
    shutil.copy(rank_file(root, first), rank_file(root, second))
    assert_refused(root, tmp_path / "out", "FS303", file=second)


def test_experts_made_of_one_dense_layer_are_no_copied_files(
    whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    alike = {
        name: tensor[:1].expand_as(tensor).contiguous() if ".experts." in name else tensor
        for name, tensor in whole.items()
    }
    root = moe_maker.save_legacy(tmp_path / "ckpt", alike, (2, 1, 2))
    ran = cli("convert", root, tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    assert ran.having("FS304")


def test_a_router_that_differs_between_expert_ranks_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    name = "decoder.layers.0.mlp.router.weight"
    edit_pt(rank_file(root, "mp_rank_00_001"), lambda content: content["model"][name].add_(1))
    assert_refused(root, tmp_path / "out", "FS302", tensor=name)


def test_an_expert_shard_of_another_shape_is_named(tmp_path: Path) -> None:
    root = copy(LEGACY, tmp_path / "ckpt")
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"

    def turn(content: dict[str, Any]) -> None:
        content["model"][name] = content["model"][name].t().contiguous()

    edit_pt(rank_file(root, "mp_rank_00_001"), turn)
    assert_refused(
        root,
        tmp_path / "out",
        "FS201",
        tensor=name,
        rank="tp 0, pp 0, ep 1",
        expected="[32, 12]",
        got="[12, 32]",
    )


def test_grouped_weights_of_another_shape_are_named(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (1, 1, 2), "flat")
    name = "decoder.layers.0.mlp.experts.weight1"

    def turn(content: dict[str, Any]) -> None:
        content["model"][name] = content["model"][name].t().contiguous()

    edit_pt(rank_file(root, "mp_rank_00_001"), turn)
    assert_refused(root, tmp_path / "out", "FS201", tensor=name, rank="tp 0, pp 0, ep 1", got="[96, 32]")


def test_one_number_without_arguments_may_be_either(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (1, 1, 2))
    for ep in range(2):
        edit_pt(rank_file(root, f"mp_rank_00_{ep:03d}"), lambda content: content.pop("args"))
    assert_refused(
        root, tmp_path / "out", "FS106", exit=2, message="pipeline stage or an expert-parallel rank"
    )


def test_files_that_no_run_with_its_arguments_saves_are_refused(
    whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (2, 1, 2), expert_tensor_parallel_size=1)
    assert_refused(root, tmp_path / "out", "FS514", exit=2, message="separate tensor-parallel degree")


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"moe_shared_expert_intermediate_size": 24}, "mlp.shared_experts.linear_fc2.weight"),
        ({"moe_layer_freq": [0, 1]}, "mlp.linear_fc2.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_arguments_promise_and_the_files_lack_is_missing(
    changes: dict[str, Any], lost: str, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (2, 1, 2), **changes)
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code in (1, 3) and not (tmp_path / "out").exists()
    assert ran.having("FS102", tensor=f"decoder.layers.0.{lost}"), ran.out
    assert cli("convert", root, tmp_path / "out", *TO_HF).code in (1, 2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_pre_softmax": True},
        {"moe_router_topk_scaling_factor": 2.5},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_expert_capacity_factor": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_routing_that_transformers_lacks_is_refused_and_merged(
    changes: dict[str, Any], whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    root = moe_maker.save_legacy(tmp_path / "ckpt", whole, (1, 1, 2), **changes)
    name = next(iter(changes))
    assert_refused(root, tmp_path / "out", "FS514", exit=2, command=("convert", *TO_HF), message=name)
    assert cli("merge", root, tmp_path / "out").code == 0


@pytest.mark.parametrize("source", [HF, LEGACY, DIST], ids=lambda path: path.name)
def test_gpt_neox_has_none(source: Path, tmp_path: Path) -> None:
    assert_refused(
        source, tmp_path / "out", "FS514", exit=2, command=("convert", "--to", "gpt_neox"), message="mixtral"
    )


# torch DCP


def test_a_saved_state_dict_is_converted(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    dcp.save(whole, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert cli("merge", tmp_path / "ckpt", tmp_path / "merged").code == 0
    same(tmp_path / "merged", whole)
    shutil.copy(HF / "config.json", tmp_path / "ckpt")
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    same(tmp_path / "out", load_file(HF / "model.safetensors"))
    assert torch.equal(moe_maker.logits(load(tmp_path / "out")), moe_maker.logits(load(HF)))


def test_layers_that_torch_dist_does_not_stack(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """As megatron-core saves with a list in moe_layer_freq: whole tensors by layer, experts stacked."""
    state: dict[str, Any] = {}
    for name, tensor in moe_maker.rank_state(whole, (0, 0, 0), (1, 1, 1)).items():
        name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        if ".local_experts." in name:
            before, after = name.split("local_experts.")
            state.setdefault(f"{before}experts.{after.partition('.')[2]}", []).append(tensor)
        else:
            state[name] = tensor
    tensors = {name: torch.stack(t) if isinstance(t, list) else t for name, t in state.items()}
    step = tmp_path / "ckpt/iter_0000010"
    dcp.save(tensors, checkpoint_id=step, no_dist=True)
    shutil.copy(DIST / "iter_0000010/metadata.json", step)
    args = moe_maker.arguments(1, 1, 1, moe_layer_freq=[1, 1])
    torch.save({"args": args, "iteration": 10}, step / "common.pt")
    ran = cli("convert", tmp_path / "ckpt", tmp_path / "out", *TO_HF)
    assert ran.code == 0, ran.out
    same(tmp_path / "out", load_file(HF / "model.safetensors"))


def test_a_chunk_of_experts_that_was_not_saved_is_named(tmp_path: Path) -> None:
    root = copy(DIST, tmp_path / "ckpt")
    path = root / "iter_0000010/.metadata"
    metadata = pickle.loads(path.read_bytes())
    name = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    metadata.state_dict_metadata[name].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    assert_refused(root, tmp_path / "out", "FS205", tensor=name)
