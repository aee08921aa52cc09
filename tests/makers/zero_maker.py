"""Checkpoints as DeepSpeed writes them, made from whole tensors: shorter and slower than any reader.

Written from the format alone (DeepSpeed runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py,
unfused_optimizer.py, runtime/engine.py of 0.19.8), and sharing nothing with the package.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TAG = "global_step7"
STEP = 7.0
Tensors = dict[str, torch.Tensor]

Stage = enum.IntEnum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3})


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


class Address:
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


CLASSES: dict[tuple[str, str], Any] = {
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): LossScaler,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Address,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Stage,
}


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Gives the stand-ins the names of DeepSpeed's classes, as pickle looks them up."""
    parts = {module.rsplit(".", n)[0] for module, _ in CLASSES for n in range(module.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in parts}
    for name in parts:
        sys.modules[name] = types.ModuleType(name)
    for (module, name), made in CLASSES.items():
        made.__module__, made.__qualname__ = module, name
        setattr(sys.modules[module], name, made)
    try:
        yield
    finally:
        for name, module_ in before.items():
            sys.modules.pop(name)
            if module_ is not None:
                sys.modules[name] = module_


@dataclass
class Run:
    """What a run held, and how it was set up."""

    #: 0 to 3, or "bf16": BF16_Optimizer. Stage 0 is FP16_UnfusedOptimizer; "fused": FP16_Optimizer;
    #: "plain": an optimizer that was not wrapped.
    stage: int | str
    world: int
    dtype: torch.dtype
    #: Trained parameters, one dict per group, fp32.
    groups: list[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    #: {alias: owner}
    aliases: dict[str, str] = field(default_factory=dict)
    #: Multiple that each parameter begins at (parameter_alignment).
    alignment: int = 1
    #: ZeRO-3: elements of a rank's sub-group.
    sub_group: int = 1 << 60
    #: "fused": the module's tensors lie in the flat 16-bit vectors, as when it was trained.
    views: bool = True
    #: ZeRO-1 and 2: the flat vectors have another order than the module.
    round_robin: bool = False

    @property
    def trained(self) -> Tensors:
        return {name: tensor for group in self.groups for name, tensor in group.items()}

    def flat_order(self) -> list[list[str]]:
        """Names as they lie in the flat vectors."""
        names = [list(group) for group in self.groups]
        if not self.round_robin:
            return names
        return [[n for r in range(self.world) for n in group[r :: self.world]] for group in names]

    def with_aliases(self, tensors: Tensors) -> Tensors:
        return tensors | {alias: tensors[owner] for alias, owner in self.aliases.items()}

    def masters(self) -> Tensors:
        """What `--weights masters` must give."""
        return self.with_aliases(self.trained) | self.frozen | self.buffers

    def params(self) -> Tensors:
        """What `--weights params` must give; ZeRO-3 stores masters only."""
        if self.stage == 3:
            return self.masters()
        rounded = {name: tensor.to(self.dtype) for name, tensor in self.trained.items()}
        return self.with_aliases(rounded) | self.frozen | self.buffers

    def moments(self) -> Tensors:
        """Moments by `<parameter>.<slot>`, under the owners' names."""
        return {
            f"{name}.{slot}": moment(tensor, slot)
            for name, tensor in self.trained.items()
            for slot in ("exp_avg", "exp_avg_sq")
        }


def moment(tensor: torch.Tensor, slot: str) -> torch.Tensor:
    """Moments that tell parameters and slots apart, and fill no padding."""
    return tensor * 0.25 + (3.0 if slot == "exp_avg" else 5.0)


def optim_file(dp: int, run: Run | None = None) -> str:
    bf16 = run is None or run.dtype == torch.bfloat16
    return f"{TAG}/{'bf16_' if bf16 else ''}zero_pp_rank_{dp}_mp_rank_00_optim_states.pt"


def model_file(dp: int | None = None) -> str:
    start = "" if dp is None else f"zero_pp_rank_{dp}_"
    return f"{TAG}/{start}mp_rank_00_model_states.pt"


def write(folder: Path, run: Run) -> Path:
    """Writes the checkpoint."""
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    with deepspeed_classes():
        {0: _stage0, "fused": _stage0, "plain": _stage0, 3: _stage3}.get(run.stage, _stage12)(folder, run)
    return folder


def save(content: Any, path: Path) -> None:
    with deepspeed_classes():
        torch.save(content, path)


def load(path: Path) -> Any:
    with deepspeed_classes():
        return torch.load(path, weights_only=False)


def edit(path: Path, change: Any) -> None:
    """Loads, changes and saves a file."""
    content = load(path)
    change(content)
    save(content, path)


def _model_state(run: Run, module: Tensors, **more: Any) -> dict[str, Any]:
    config = {"stage": {"fused": 0, "plain": 0, "bf16": 1}.get(run.stage, run.stage)}
    if run.round_robin:
        config["round_robin_gradients"] = True
    return {
        "module": OrderedDict(module),
        "buffer_names": list(run.buffers),
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": int(STEP),
        "global_samples": 56,
        "dp_world_size": run.world,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": config},
        "ds_version": "0.19.8",
        **more,
    }


def _adam(flats: list[Any]) -> dict[str, Any]:
    """State of torch's AdamW over flat vectors (or parameters); moments are those of their values."""
    state = {
        i: {"step": torch.tensor(STEP), "exp_avg": flat[0], "exp_avg_sq": flat[1]}
        for i, flat in enumerate(flats)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(range(len(flats)))}]}


def _concat(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([p.reshape(-1) for p in pieces]) if pieces else torch.zeros(0)


def _stage12(folder: Path, run: Run) -> None:
    shapes: list[Any] = []
    module: Tensors = {}
    ranks: list[dict[str, list[Any]]] = [
        {"masters": [], "moments": [], "paddings": [], "mappings": []} for _ in range(run.world)
    ]
    alignments: list[list[int]] = []
    for group, order in zip(run.groups, run.flat_order(), strict=True):
        shapes.append(OrderedDict((name, group[name].shape) for name in order))
        spans: dict[str, tuple[int, int]] = {}
        pads = []
        at = 0
        for i, name in enumerate(order):
            spans[name] = (at, at + group[name].numel())
            at += group[name].numel()
            pads.append(0 if i == len(order) - 1 else -at % run.alignment)
            at += pads[-1]
        alignments.append(pads)
        unit = 2 * run.world
        size = -(-at // unit) * unit

        def lay_out(
            values: Tensors, dtype: torch.dtype, spans: dict[str, tuple[int, int]] = spans, size: int = size
        ) -> torch.Tensor:
            flat = torch.zeros(size, dtype=dtype)
            for name, (lo, hi) in spans.items():
                flat[lo:hi] = values[name].reshape(-1)
            return flat

        low, high = lay_out(group, run.dtype), lay_out(group, torch.float32)
        slots = [
            lay_out({n: moment(t, slot) for n, t in group.items()}, torch.float32)
            for slot in ("exp_avg", "exp_avg_sq")
        ]
        module |= {name: low[lo:hi].view(group[name].shape) for name, (lo, hi) in spans.items()}
        told = spans
        if run.round_robin:
            # DeepSpeed's own account is in the order before the reordering.
            starts = [sum(t.numel() for t in list(group.values())[:i]) for i in range(len(group))]
            told = {n: (s, s + t.numel()) for (n, t), s in zip(group.items(), starts, strict=True)}
        part = size // run.world
        for r, rank in enumerate(ranks):
            lo, hi = r * part, (r + 1) * part
            # A storage of its own, of which the saved view leaves out the padding.
            held = high[lo:hi].clone()
            padding = min(max(hi - at, 0), part)
            if run.stage == "bf16":
                padding = size - at if r == run.world - 1 else 0
            rank["masters"].append(held if run.stage == "bf16" else held[: part - padding])
            rank["moments"].append([slot[lo:hi].clone() for slot in slots])
            rank["paddings"].append(padding)
            mapping = OrderedDict()
            for name in group:
                a, b = max(told[name][0], lo), min(told[name][1], hi)
                if a < b:
                    mapping[name] = Address(b - a, a - lo)
            rank["mappings"].append(mapping)
    module = run.with_aliases(module) | run.frozen | run.buffers
    shared = {"param_shapes": shapes, "shared_params": dict(run.aliases)}
    torch.save(_model_state(run, module, **shared), folder / model_file())
    for r, rank in enumerate(ranks):
        state: dict[str, Any] = {
            "loss_scaler": LossScaler(),
            "base_optimizer_state": _adam(rank["moments"]),
            "single_partition_of_fp32_groups": rank["masters"],
            "group_paddings": rank["paddings"],
            "partition_count": [run.world] * len(run.groups),
            "ds_version": "0.19.8",
            "param_slice_mappings": rank["mappings"],
        }
        if run.stage != "bf16":
            state |= {"zero_stage": Stage(run.stage), "param_alignment_paddings": alignments}
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / optim_file(r, run))


def _parts(tensor: torch.Tensor, world: int) -> list[torch.Tensor]:
    """ZeRO-3's parts of a tensor: equal, the last ones padded."""
    flat = tensor.reshape(-1)
    part = -(-flat.numel() // world)
    padded = torch.cat([flat, torch.zeros(part * world - flat.numel(), dtype=flat.dtype)])
    return [padded[r * part : (r + 1) * part].clone() for r in range(world)]


def _stage3(folder: Path, run: Run) -> None:
    shapes: list[Any] = []
    subs: list[list[str]] = []
    for group in run.groups:
        sub: list[str] = []
        for name in group:
            sub.append(name)
            filled = sum(len(_parts(group[n], run.world)[0]) for n in sub)
            if filled >= run.sub_group or name == list(group)[-1]:
                subs.append(sub)
                sub = []
    trained = run.trained
    shapes = [OrderedDict((n, trained[n].shape) for n in sub) for sub in subs]
    empty = {name: torch.zeros(0, dtype=run.dtype) for name in [*trained, *run.frozen, *run.aliases]}
    for r in range(run.world):

        def of_rank(values: Tensors, sub: list[str], r: int = r) -> torch.Tensor:
            return _concat([_parts(values[n], run.world)[r] for n in sub])

        held = _model_state(
            run,
            empty | run.buffers,
            param_shapes=shapes,
            shared_params=dict(run.aliases) if r == 0 else {},
            frozen_param_shapes=OrderedDict((n, t.shape) for n, t in run.frozen.items()),
            frozen_param_fragments={n: _parts(t, run.world)[r] for n, t in run.frozen.items()},
        )
        torch.save(held, folder / model_file(r))
        slots = [{n: moment(t, slot) for n, t in trained.items()} for slot in ("exp_avg", "exp_avg_sq")]
        state = {
            "zero_stage": Stage(3),
            "loss_scaler": LossScaler(),
            "partition_count": run.world,
            "optimizer_state_dict": _adam([[of_rank(s, sub) for s in slots] for sub in subs]),
            "fp32_flat_groups": [of_rank(trained, sub) for sub in subs],
        }
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / optim_file(r, run))


def _stage0(folder: Path, run: Run) -> None:
    rounded = {name: tensor.to(run.dtype) for name, tensor in run.trained.items()}
    module = run.with_aliases(rounded | run.frozen) | run.buffers
    if run.stage == "fused":
        for group in run.groups:
            if run.views:
                flat, at = _concat([rounded[name] for name in group]), 0
                for name, tensor in group.items():
                    module[name] = flat[at : at + tensor.numel()].view(tensor.shape)
                    at += tensor.numel()
        module = run.with_aliases(module)
        flats = [_concat(list(group.values())) for group in run.groups]
        moments = [
            [_concat([moment(t, slot) for t in group.values()]) for slot in ("exp_avg", "exp_avg_sq")]
            for group in run.groups
        ]
        optimizer = {"optimizer_state_dict": _adam(moments), "fp32_groups_flat": flats, "clip_grad": 1.0}
        torch.save(_model_state(run, module, optimizer=optimizer), folder / model_file())
        return
    masters = [[tensor.clone() for tensor in group.values()] for group in run.groups]
    moments = [
        [moment(t, slot) for slot in ("exp_avg", "exp_avg_sq")]
        for group in run.groups
        for t in group.values()
    ]
    optimizer = {"fp32_groups": masters, "optimizer_state_dict": _adam(moments), "cur_scale": 1.0}
    if run.stage == "plain":
        optimizer = _adam(moments)
        numbers = iter(range(len(moments)))
        optimizer["param_groups"] = [{"lr": 0.1, "params": [next(numbers) for _ in g]} for g in run.groups]
    torch.save(_model_state(run, module, optimizer=optimizer), folder / model_file())


def universal(folder: Path, run: Run) -> Path:
    """Writes what ds_to_universal makes of the checkpoint. source: checkpoint/ds_to_universal.py of 0.19.8
    (main)"""
    write(folder, run)
    held = load(folder / optim_file(0, run))["optimizer_state_dict"]
    base = held["optimizer_state_dict" if run.stage == 3 else "base_optimizer_state"]
    for dp in range(run.world):
        (folder / optim_file(dp, run)).unlink()
    (folder / "latest").rename(folder / "latest_universal")

    def put(name: str, slot: str, tensor: torch.Tensor) -> None:
        path = folder / TAG / "zero" / name / f"{slot}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Stage 3 leaves the parts as they lie one after another.
        stored = tensor.reshape(-1).clone() if run.stage == 3 else {"param": tensor.clone(), "cat_dim": 0}
        torch.save(torch.tensor(STEP) if slot == "step" else stored, path)

    (folder / TAG / "zero").mkdir(exist_ok=True)
    of_all = {"zero_stage": run.stage, "param_groups": base["param_groups"]}
    torch.save(of_all, folder / TAG / "zero" / "optimizer_state.pt")
    for name, tensor in run.trained.items():
        put(name, "fp32", tensor)
        put(name, "step", tensor)
        for slot in ("exp_avg", "exp_avg_sq"):
            put(name, slot, moment(tensor, slot))
    if run.stage != 3:
        for name, tensor in load(folder / model_file())["module"].items():
            if name not in run.trained:
                put(name, "fp32", tensor.float())
    return folder
