"""GPT-NeoX with ZeRO-1 partitions: tp x pp x dp masters straight to an fp32 Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, cli, edit_pt, read_result
from neox_maker import Shard, Spec, hf_name, make_shards, merge, rank_state, write

STEP = "global_step7"


def stage_of(layer: int, spec: Spec, pp: int) -> int:
    """Pipeline stage of a layer: the last one owns norm and head."""
    return min(pp * layer // (spec.layers + 2), pp - 1)


def flat_names(shard: Shard, stage: int, spec: Spec, pp: int) -> list[str]:
    """Parameters of one stage, in an order that is not that of the files."""
    mine = [name for name in shard if stage_of(int(name.split(".")[0]), spec, pp) == stage]
    if spec.tied and stage == pp - 1 and pp > 1:
        mine.append("0.word_embeddings.weight")
    return sorted(mine, key=lambda name: (not name.endswith("bias"), name))


def in_zero(name: str, spec: Spec) -> str:
    """A tied embedding's name in `param_shapes`."""
    return "tied_modules.embed.word_embeddings.weight" if spec.tied and name.startswith("0.") else name


def write_zero(
    root: Path, spec: Spec, masters: list[Shard], *, pp: int, dp: int, pipeline: bool = True
) -> Path:
    """Layer files in bf16, and BF16_Optimizer partitions (which keep their padding) in fp32."""
    half = [{name: tensor.to(torch.bfloat16) for name, tensor in shard.items()} for shard in masters]
    write(root, replace(spec, dtype=torch.bfloat16), half, pipeline=pipeline)
    for file in (root / STEP).glob("mp_rank_*"):
        file.unlink()
    for stage in range(pp):
        for tp, shard in enumerate(masters):
            mp = stage * spec.tp + tp
            names = flat_names(shard, stage, spec, pp)
            prefix = "" if pipeline else "sequential."
            shapes = {prefix + in_zero(name, spec): shard[name].shape for name in names}
            module = None if pipeline else {f"sequential.{n}": t for n, t in half[tp].items()}
            state = rank_state(spec, module) | {
                "param_shapes": [shapes],
                "dp_world_size": dp,
                "mp_world_size": pp * spec.tp,
                "shared_params": {},
                "buffer_names": [],
                "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": spec.tp},
            }
            torch.save(state, root / STEP / f"mp_rank_{mp:02d}_model_states.pt")
            flat = torch.cat([shard[name].float().reshape(-1) for name in names])
            part = -(-flat.numel() // (2 * dp)) * 2
            flat = torch.cat([flat, torch.zeros(part * dp - flat.numel())])
            for rank in range(dp):
                mine = flat[rank * part : (rank + 1) * part].clone()
                optimizer: dict[str, Any] = {
                    "single_partition_of_fp32_groups": [mine],
                    "base_optimizer_state": {
                        "state": {0: {"step": torch.tensor(7.0), "exp_avg": mine / 2, "exp_avg_sq": mine**2}},
                        "param_groups": [{"lr": 0.1, "params": [0]}],
                    },
                    "group_paddings": [
                        part * dp - sum(s.numel() for s in shapes.values()) if rank == dp - 1 else 0
                    ],
                    "partition_count": [dp],
                    "ds_version": "0.16.0",
                    "clip_grad": 1.0,
                }
                name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
                torch.save({"optimizer_state_dict": optimizer}, root / STEP / name)
    return root


CASES = [
    pytest.param(2, 2, 2, True, False, id="tp2_pp2_dp2"),
    pytest.param(2, 1, 11, True, False, id="tp2_pp1_dp11"),
    pytest.param(1, 2, 3, True, True, id="tp1_pp2_dp3_tied"),
    pytest.param(2, 2, 2, True, True, id="tp2_pp2_dp2_tied"),
    pytest.param(4, 1, 2, False, False, id="tp4_sequential_dp2"),
]


@pytest.mark.parametrize(("tp", "pp", "dp", "pipeline", "tied"), CASES)
def test_masters_become_an_fp32_hugging_face_checkpoint(
    tp: int, pp: int, dp: int, pipeline: bool, tied: bool, tmp_path: Path
) -> None:
    spec = Spec(tp=tp, layers=4, residual=False, tied=tied, seed=3)
    masters = make_shards(spec)
    root = write_zero(tmp_path / "ckpt", spec, masters, pp=pp, dp=dp, pipeline=pipeline)
    ran = cli("convert", root, tmp_path / "hf", "--to", "hf", "--weights", "masters")
    assert ran.code == 0, ran.out
    want = {hf_name(name, spec.layers): t for name, t in merge(masters, residual=False).items()}
    have = read_result(tmp_path / "hf")
    assert set(have) == set(want)
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
    # The parameters, which are the default, are the same rounded.
    assert cli("convert", root, tmp_path / "half", "--to", "hf").code == 0
    half = read_result(tmp_path / "half")
    assert all(torch.equal(half[name], tensor.to(torch.bfloat16)) for name, tensor in want.items())


def test_moments_are_merged_by_the_rules_of_their_parameters(tmp_path: Path) -> None:
    spec = Spec(tp=2, layers=3, residual=False, seed=5)
    masters = make_shards(spec)
    root = write_zero(tmp_path / "ckpt", spec, masters, pp=1, dp=2)
    ran = cli("merge", root, tmp_path / "out", "--weights", "masters", "--optimizer")
    assert ran.code == 0, ran.out
    have = read_result(tmp_path / "out")
    for slot, value in (("exp_avg", lambda t: t / 2), ("exp_avg_sq", lambda t: t**2)):
        want = merge([{n: value(t) for n, t in shard.items()} for shard in masters], residual=False)
        assert {n for n in have if n.endswith(f".{slot}")} == {f"{n}.{slot}" for n in want}
        assert all(torch.equal(have[f"{n}.{slot}"], t) for n, t in want.items())


def test_a_sum_of_biases_comes_from_the_masters_too(tmp_path: Path) -> None:
    spec = Spec(tp=2, layers=2, residual=True, seed=6)
    masters = make_shards(spec)
    root = write_zero(tmp_path / "ckpt", spec, masters, pp=1, dp=2)
    assert cli("merge", root, tmp_path / "out", "--weights", "masters").code == 0
    want = merge(masters, residual=True)
    have = read_result(tmp_path / "out")
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())


def test_masters_of_one_rank_that_are_stale_are_named(tmp_path: Path) -> None:
    spec = Spec(tp=2, layers=2, residual=False, seed=7)
    root = write_zero(tmp_path / "ckpt", spec, make_shards(spec), pp=2, dp=2)

    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].add_(1)

    name = "bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt"
    edit_pt(root / STEP / name, change)
    for options in ((), ("--weights", "masters")):
        assert_refused(
            root,
            tmp_path / "out",
            "FS401",
            command=("convert", "--to", "hf"),
            options=options,
            rank="mp 3",
            file=name,
        )
    ran = cli("master-weights", root)
    assert ran.code == 1
    assert {f["rank"] for f in ran.having("FS401")} == {"mp 3"}
    assert cli("master-weights", root, "--repair", tmp_path / "repaired").code == 0
    assert (
        cli("convert", tmp_path / "repaired", tmp_path / "hf", "--to", "hf", "--weights", "masters").code == 0
    )


def test_tied_masters_of_two_stages_must_agree(tmp_path: Path) -> None:
    spec = Spec(tp=1, layers=2, residual=False, tied=True, seed=8)
    root = write_zero(tmp_path / "ckpt", spec, make_shards(spec), pp=2, dp=1)

    def change(content: dict[str, Any]) -> None:
        names = list(reversed(content["param_shapes"][0].items()))
        content["param_shapes"] = [dict(names)]

    # Another order of the flat vector: every master is another parameter's.
    edit_pt(root / STEP / "mp_rank_01_model_states.pt", change)
    assert_refused(root, tmp_path / "out", "FS401", rank="mp 1")


def test_a_rank_from_another_step_is_named(tmp_path: Path) -> None:
    spec = Spec(tp=1, layers=2, residual=False, seed=9)
    root = write_zero(tmp_path / "ckpt", spec, make_shards(spec), pp=1, dp=3)

    def change(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"].add_(1)

    edit_pt(root / STEP / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", change)
    assert_refused(root, tmp_path / "out", "FS107", rank="dp 1", expected="7", got="8")


def write_fused(root: Path, spec: Spec, masters: list[Shard], *, pipeline: bool) -> Path:
    """ZeRO stage 0 with FusedAdam: two flat masters in each rank's file, with weight decay and without.

    source: DeepSpeed runtime/fp16/fused_optimizer.py; gpt-neox model/utils.py
        (get_params_for_weight_decay_optimization)
    """
    half = [{name: tensor.to(torch.bfloat16) for name, tensor in shard.items()} for shard in masters]
    write(root, replace(spec, dtype=torch.bfloat16), half, pipeline=pipeline)
    for tp, shard in enumerate(masters):
        groups = [[t for t in shard.values() if t.dim() == dim] for dim in (2, 1)]
        flats = [torch.cat([t.float().reshape(-1) for t in group]) for group in groups]
        state = {i: {"step": 7, "exp_avg": flat / 2, "exp_avg_sq": flat**2} for i, flat in enumerate(flats)}
        base = {"state": state, "param_groups": [{"params": [i], "step": 0} for i in range(2)]}
        optimizer = {"optimizer_state_dict": base, "fp32_groups_flat": flats, "clip_grad": 1.0}

        def change(content: dict[str, Any], optimizer: dict[str, Any] = optimizer) -> None:
            content.update(optimizer=optimizer, buffer_names=[])

        edit_pt(root / STEP / f"mp_rank_{tp:02d}_model_states.pt", change)
    return root


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_flat_masters_of_stage_0(tmp_path: Path, pipeline: bool, tp: int) -> None:
    spec = Spec(tp=tp, layers=2, residual=False, seed=10)
    masters = make_shards(spec)
    root = write_fused(tmp_path / "ckpt", spec, masters, pipeline=pipeline)
    ran = cli("master-weights", root)
    assert (ran.code, ran.doc["differing"], ran.doc["compared"]) == (0, [], tp * len(masters[0])), ran.out
    assert cli("merge", root, tmp_path / "out", "--weights", "masters", "--optimizer").code == 0
    have = read_result(tmp_path / "out")
    want = merge(masters, residual=False)
    want |= {
        f"{n}.exp_avg": t
        for n, t in merge([{n: t / 2 for n, t in s.items()} for s in masters], residual=False).items()
    }
    assert set(want) <= set(have)
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
    ran = cli("master-weights", root, "--repair", tmp_path / "repaired")
    assert (ran.code, cli("master-weights", tmp_path / "repaired").doc["steps"]) == (0, [0.0]), ran.out


def test_stale_flat_masters_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    spec = Spec(tp=2, layers=2, residual=False, seed=11)
    root = write_fused(tmp_path / "ckpt", spec, make_shards(spec), pipeline=True)
    edit_pt(root / STEP / "layer_03-model_01-model_states.pt", lambda c: c["mlp.linear1.bias"].add_(1))
    assert_refused(root, tmp_path / "out", "FS401", rank="mp 1", tensor="3.mlp.linear1.bias")
