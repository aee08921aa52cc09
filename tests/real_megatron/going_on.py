"""A run of Megatron-LM's distributed optimizer, and FSDP2 that goes on with it: `python going_on.py FOLDER
megatron|fsdp NAME`.

`megatron` trains on four gloo ranks (tp 2, dp 2), saves FOLDER/saved after BEFORE steps, and goes on; `fsdp`
goes on with FOLDER/moved on two. Both see the same batches. The losses of the steps that follow become
FOLDER/NAME.json; `fsdp` with the name `lost` begins with moments of zero.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make_optimizer as maker
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

PORT = "29661"
BEFORE, AFTER = 12, 20
DATA_PARALLEL = 2
VALUES = {"lr": 4e-3, "weight_decay": 0.13, "eps": 1e-7}
BETAS = (0.9, 0.98)


def batch(step: int, rank: int) -> torch.Tensor:
    """Tokens of a data-parallel rank: sequences with a rule."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, maker.PADDED, (4, 1), generator=generator)
    factor = torch.randint(2, 6, (4, 1), generator=generator)
    return (first + factor * torch.arange(12)) % maker.PADDED


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def mean(loss: torch.Tensor, group: Any) -> float:
    value = loss.detach().clone().double()
    dist.all_reduce(value, group=group)
    return float(value) / dist.get_world_size(group)


def run(step_of: Callable[[int], float], saves: Callable[[], None] | None) -> list[float]:
    """The losses of the steps that follow."""
    if saves is not None:
        for step in range(BEFORE):
            step_of(step)
        saves()
    return [step_of(step) for step in range(BEFORE, BEFORE + AFTER)]


def megatron(folder: Path) -> list[float]:
    """Real megatron-core, its optimizer and its scheduler; gradients are averaged over gloo."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    maker.pretend()
    maker.STEPS = BEFORE
    case = maker.Case(4, tp=2, fp32=True)
    parallel_state.initialize_model_parallel(case.tp, 1)
    stage = maker.build(case, 0)
    maker.fill(case, stage, 0)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(stage.config, settings, stage)
    config = OptimizerConfig(
        optimizer="adam",
        lr=VALUES["lr"],
        min_lr=VALUES["lr"],
        weight_decay=VALUES["weight_decay"],
        clip_grad=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=VALUES["eps"],
        params_dtype=torch.float32,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [model])
    rate, decay = VALUES["lr"], VALUES["weight_decay"]
    # It is what gives a group its weight decay.
    scheduler = OptimizerParamScheduler(
        optimizer, rate, rate, rate, 0, 1000, "constant", decay, decay, 0, "constant"
    )
    group, rank = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()

    def step_of(step: int) -> float:
        tokens = batch(step, rank)
        length = tokens.shape[1]
        model.zero_grad_buffer()
        with model.no_sync():
            logits = model(
                tokens,
                torch.arange(length).expand_as(tokens),
                torch.ones(length, length).triu(1).bool()[None, None],
            )
            loss = loss_of(gather_from_tensor_model_parallel_region(logits), tokens)
            loss.backward()
        for parameter in stage.parameters():
            dist.all_reduce(parameter.main_grad, group=group)
            parameter.main_grad.div_(DATA_PARALLEL)
        done, *_ = optimizer.step()
        assert done
        scheduler.step(1)
        model.start_param_sync(force_sync=True)
        return mean(loss, group)

    return run(step_of, lambda: maker.save(case, "fully_reshardable", [model], optimizer, folder / "saved"))


def fsdp(folder: Path, forgets: bool) -> list[float]:
    """What torch's recipe of distributed checkpoints loads; nothing but the layout of groups is known
    here."""
    from torch.distributed.checkpoint import state_dict as parts
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(77)
    config = AutoConfig.from_pretrained(folder / "moved")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).float()
    mesh = init_device_mesh("cpu", (DATA_PARALLEL,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    every = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in every if (p.dim() > 1) is m]} for m in (True, False)]
    )
    state = {
        "model": parts.get_model_state_dict(model),
        "optim": parts.get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder / "moved")
    parts.set_model_state_dict(model, state["model"])
    parts.set_optimizer_state_dict(model, optimizer, state["optim"])
    if forgets:
        for moments in optimizer.state.values():
            moments["exp_avg"].zero_(), moments["exp_avg_sq"].zero_()

    def step_of(step: int) -> float:
        tokens = batch(step, dist.get_rank())
        loss = loss_of(model(input_ids=tokens, use_cache=False).logits, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return mean(loss, None)

    return run(step_of, None)


def _rank(rank: int, world: int, folder: str, what: str, name: str) -> None:
    maker.join(rank, world, PORT)
    root = Path(folder)
    losses = megatron(root) if what == "megatron" else fsdp(root, name == "lost")
    if rank == 0:
        (root / f"{name}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = 4 if sys.argv[2] == "megatron" else DATA_PARALLEL
    torch.multiprocessing.start_processes(
        _rank, args=(ranks, *sys.argv[1:4]), nprocs=ranks, start_method="fork"
    )
