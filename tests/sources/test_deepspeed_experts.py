"""deepspeed.moe: files of experts, and ZeRO partitions among the ranks that have the same ones.

The files are laid out as DeepSpeed 0.19.8 writes them (compared with real ones in tests/real_deepspeed).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_refused, cli, read_result
from zero_maker import STEP, TAG, Address, LossScaler, Stage, Tensors, edit, moment, optim_file, save

WORLD, EP, COUNTS = 4, 2, [4, 2]
INSIDE = "deepspeed_moe.experts.deepspeed_experts"
LAYERS = [f"layers.{i}.moe" for i in range(len(COUNTS))]


def dense() -> Tensors:
    torch.manual_seed(5)
    shapes = {"embed.weight": [9, 6]} | {
        f"{layer}.deepspeed_moe.gate.wg.weight": [count, 6]
        for layer, count in zip(LAYERS, COUNTS, strict=True)
    }
    return {name: torch.randn(shape) for name, shape in (shapes | {"head.weight": [9, 6]}).items()}


def experts() -> Tensors:
    """Of all ranks, in order."""
    torch.manual_seed(6)
    return {
        f"{layer}.{INSIDE}.{e}.{part}": torch.randn(shape)
        for layer, count in zip(LAYERS, COUNTS, strict=True)
        for e in range(count)
        for part, shape in (("up.weight", [7, 6]), ("up.bias", [7]), ("down.weight", [6, 7]))
    }


def local(rank: int, ep: int) -> dict[str, str]:
    """Names that an expert-parallel rank has for its experts -> those among all."""
    found = {}
    for name in experts():
        layer, number, rest = re.fullmatch(rf"(.*\.{INSIDE}\.)(\d+)(\..*)", name).groups()
        own = COUNTS[LAYERS.index(name.split(f".{INSIDE}")[0])] // ep
        if int(number) // own == rank:
            found[f"{layer}{int(number) % own}{rest}"] = name
    return found


def every() -> Tensors:
    return dense() | experts()


def rounded() -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in every().items()}


def moments() -> Tensors:
    return {f"{n}.{slot}": moment(t, slot) for n, t in every().items() for slot in ("exp_avg", "exp_avg_sq")}


def ranks_of(ep: int, data_first: bool) -> list[list[int]]:
    """Data-parallel ranks with the same experts. source: utils/groups.py
    (_create_expert_and_data_parallel)"""
    count = WORLD // ep
    if data_first:
        return [list(range(e * count, (e + 1) * count)) for e in range(ep)]
    return [list(range(e, WORLD, ep)) for e in range(ep)]


def partition(
    names: dict[str, str], count: int
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, Address]], list[int]]:
    """Masters and moments of each of `count` ranks, what it says of them, and its padding."""
    values, total, unit = every(), 0, 2 * count
    spans = {}
    for own, name in names.items():
        spans[own] = (total, total + values[name].numel())
        total += values[name].numel()
    size = -(-total // unit) * unit
    part = size // count
    flats = {}
    for slot in ("", "exp_avg", "exp_avg_sq"):
        flats[slot] = torch.zeros(size)
        for own, (lo, hi) in spans.items():
            value = values[names[own]]
            flats[slot][lo:hi] = (moment(value, slot) if slot else value).reshape(-1)
    held, told, pads = [], [], []
    for r in range(count):
        lo, hi = r * part, (r + 1) * part
        held.append({slot: flat[lo:hi].clone() for slot, flat in flats.items()})
        pads.append(max(0, hi - total))
        inside = {n: (max(a, lo), min(b, hi)) for n, (a, b) in spans.items()}
        told.append(OrderedDict((n, Address(b - a, a - lo)) for n, (a, b) in inside.items() if a < b))
    return held, told, pads


def write(root: Path, stage: int, ep: int = EP, data_first: bool = False) -> Path:
    folder = root / TAG
    folder.mkdir(parents=True)
    (root / "latest").write_text(TAG)
    low = rounded()
    for layer, count in enumerate(COUNTS):
        for e in range(count):
            start = f"{LAYERS[layer]}.{INSIDE}.{e}."
            own = {name: tensor.clone() for name, tensor in low.items() if name.startswith(start)}
            torch.save(own, folder / f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt")
    config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    if data_first:
        config["use_data_before_expert_parallelism"] = True
    shapes = [
        {n: list(t.shape) for n, t in dense().items()},
        {n: list(experts()[g].shape) for n, g in local(0, ep).items()},
    ]
    state = {
        "module": OrderedDict((n, low[n]) for n in dense()),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in shapes]
        if stage
        else None,
        "frozen_param_shapes": None,
        "shared_params": {} if stage else None,
        "frozen_param_fragments": None,
        "global_steps": int(STEP),
        "dp_world_size": WORLD,
        "mp_world_size": 1,
        "ds_config": config,
        "ds_version": "0.19.8",
        "num_experts": list(COUNTS),
        "ds_autoep_layers": None,
    }
    groups = [{"name": "dense", "lr": 0.1}, {"name": f"ep_size_{ep}", "moe": True, "lr": 0.1}]
    if not stage:
        for rank in range(ep):
            optimizer = unfused(local(rank, ep), groups)
            save({"optimizer": optimizer}, folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
        state["optimizer"] = unfused(local(0, ep), groups)
        save(state, folder / "mp_rank_00_model_states.pt")
        return root
    save(state, folder / "mp_rank_00_model_states.pt")
    everywhere = partition({n: n for n in dense()}, WORLD)
    for rank, among in enumerate(ranks_of(ep, data_first)):
        of_experts = partition(local(rank, ep), len(among))
        for place, dp in enumerate(among):
            both = [
                (parts[i][0][at], parts[i][1][at], parts[i][2][at])
                for i, (parts, at) in enumerate([([everywhere], dp), ([everywhere, of_experts], place)])
            ]
            adam = {
                g: {"step": torch.tensor(STEP), "exp_avg": h["exp_avg"], "exp_avg_sq": h["exp_avg_sq"]}
                for g, (h, _, _) in enumerate(both)
            }
            content = {
                "loss_scaler": LossScaler(),
                "zero_stage": Stage(stage),
                "base_optimizer_state": {
                    "state": adam,
                    "param_groups": [{**g, "params": [i]} for i, g in enumerate(groups)],
                },
                "single_partition_of_fp32_groups": [h[""][: len(h[""]) - pad] for h, _, pad in both],
                "group_paddings": [pad for *_, pad in both],
                "partition_count": [WORLD, len(among)],
                "param_slice_mappings": [told for _, told, _ in both],
                "ds_version": "0.19.8",
            }
            save({"optimizer_state_dict": content, "ds_version": "0.19.8"}, root / optim_file(dp))
    return root


def unfused(own: dict[str, str], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """FP16_UnfusedOptimizer's state of a rank: all that is dense, and its experts."""
    values = [[dense()[n] for n in dense()], [experts()[g] for g in own.values()]]
    flat = [t for group in values for t in group]
    state = {
        i: {"step": torch.tensor(STEP), **{s: moment(t, s) for s in ("exp_avg", "exp_avg_sq")}}
        for i, t in enumerate(flat)
    }
    numbers = iter(range(len(flat)))
    told = [{**g, "params": [next(numbers) for _ in group]} for g, group in zip(groups, values, strict=True)]
    return {
        "fp32_groups": [[t.clone() for t in group] for group in values],
        "cur_scale": 1.0,
        "optimizer_state_dict": {"state": state, "param_groups": told},
    }


def same(out: Path, want: Tensors) -> None:
    have = read_result(out)
    assert set(have) == set(want)
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name


CASES = [(0, 1, False), (0, 2, False), (1, 1, False), (1, 2, False), (2, 2, True), (2, 4, False)]


@pytest.mark.parametrize(("stage", "ep", "data_first"), [c for c in CASES if c[1] < 4])
def test_parameters_masters_and_moments(stage: int, ep: int, data_first: bool, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", stage, ep, data_first)
    for options, want in (
        ((), rounded()),
        (("--weights", "masters"), every()),
        (("--weights", "masters", "--optimizer"), every() | moments()),
    ):
        out = tmp_path / f"out{len(options)}"
        ran = cli("merge", root, out, *options)
        assert (ran.code, ran.errors) == (0, []), ran.out
        same(out, want)
    ran = cli("master-weights", root)
    assert (ran.code, ran.doc["differing"]) == (0, []), ran.out


@pytest.mark.parametrize(("layer", "expert"), [(0, 3), (1, 0)])
def test_an_experts_file_is_missing(layer: int, expert: int, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 1)
    name = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
    (root / TAG / name).unlink()
    assert_refused(
        root, tmp_path / "out", "FS101", exit=3, file=name, rank=f"expert {expert} of MoE layer {layer}"
    )


def test_an_expert_that_the_model_does_not_have(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 1)
    first = root / TAG / "layer_1_expert_0_mp_rank_00_model_states.pt"
    left = {k.replace(f"{INSIDE}.0.", f"{INSIDE}.2."): v for k, v in torch.load(first).items()}
    torch.save(left, first.with_name("layer_1_expert_2_mp_rank_00_model_states.pt"))
    assert_refused(root, tmp_path / "out", "FS110", file="layer_1_expert_2", expected="num_experts [4, 2]")


def test_an_experts_file_copied_over_another(tmp_path: Path) -> None:
    folder = write(tmp_path / "ckpt", 1) / TAG
    other = folder / "layer_0_expert_1_mp_rank_00_model_states.pt"
    other.write_bytes((folder / "layer_0_expert_2_mp_rank_00_model_states.pt").read_bytes())
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out")
    assert ran.code and ran.errors and not (tmp_path / "out").exists(), ran.out


@pytest.mark.parametrize("dp", range(WORLD))
def test_a_partition_copied_over_another(dp: int, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 2)
    (root / optim_file(dp)).write_bytes((root / optim_file((dp + 1) % WORLD)).read_bytes())
    assert_refused(root, tmp_path / "out", "FS303", options=("--weights", "masters"), file=optim_file(dp))


def test_ranks_of_another_order_are_refused(tmp_path: Path) -> None:
    """What a rank says of its partition must be what its place gives it."""
    root = write(tmp_path / "ckpt", 1, EP, True)

    def forget(state: Any) -> None:
        del state["ds_config"]["use_data_before_expert_parallelism"]

    edit(root / TAG / "mp_rank_00_model_states.pt", forget)
    ran = cli("merge", root, tmp_path / "out", "--weights", "masters")
    assert ran.code == 1 and not (tmp_path / "out").exists(), ran.out


def test_partitions_of_experts_that_no_ranks_divide(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 1)
    for dp in range(WORLD):
        edit(root / optim_file(dp), lambda s: s["optimizer_state_dict"].update(partition_count=[WORLD, 3]))
    assert_refused(root, tmp_path / "out", "FS404", options=("--weights", "masters"), message="group 1")


def test_an_optimizer_of_a_rank_is_missing(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 0)
    for rank in range(EP):
        file = root / TAG / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        content = file.read_bytes()
        file.unlink()
        assert_refused(
            root, tmp_path / "out", "FS101", exit=3, options=("--weights", "masters"), file=file.name
        )
        ran = cli("merge", root, tmp_path / f"out{rank}", "--weights", "params")
        assert ran.code == 0, ran.out
        same(tmp_path / f"out{rank}", rounded())
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(ds_autoep_layers=[{"moe_layer_id": 0}]), "AutoEP"),
        (lambda s: s.update(moe=True), "MoE checkpoint of DeepSpeed"),
    ],
)
def test_other_mixtures_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 1)
    edit(root / TAG / "mp_rank_00_model_states.pt", change)
    ran = assert_refused(root, tmp_path / "out", "FS514", exit=2)
    assert message in ran.having("FS514")[0]["message"]


def test_experts_of_model_parallel_ranks_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 0)
    first = root / TAG / "mp_rank_00_model_states.pt"
    (root / TAG / "mp_rank_01_model_states.pt").write_bytes(first.read_bytes())
    assert_refused(root, tmp_path / "out", "FS514", exit=2, message="2 model-parallel ranks")


def test_files_of_before_layers_were_told(tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", 0)
    torch.save({}, root / TAG / "expert_0_mp_rank_00_model_states.pt")
    assert_refused(root, tmp_path / "out", "FS514", exit=2, message="before 0.6")


@pytest.mark.parametrize(("stage", "ep"), [(0, 2), (1, 1), (2, 2)])
def test_stale_masters_are_repaired(stage: int, ep: int, tmp_path: Path) -> None:
    root = write(tmp_path / "ckpt", stage, ep)
    for layer, count in enumerate(COUNTS):
        for e in range(count):
            file = root / TAG / f"layer_{layer}_expert_{e}_mp_rank_00_model_states.pt"
            torch.save({name: t + 1 for name, t in torch.load(file).items()}, file)
    ran = cli("master-weights", root)
    assert (ran.code, set(ran.doc["differing"])) == (1, set(experts())), ran.out
    ran = cli("master-weights", root, "--repair", tmp_path / "repaired")
    assert ran.code == 0, ran.out
    assert cli("master-weights", tmp_path / "repaired").doc["differing"] == []
    assert cli("merge", tmp_path / "repaired", tmp_path / "out", "--weights", "masters").code == 0
    low = {n: t + 1 if INSIDE in n else t for n, t in rounded().items()}
    have = read_result(tmp_path / "out")
    assert all(torch.equal(have[n].bfloat16(), t) for n, t in low.items())
