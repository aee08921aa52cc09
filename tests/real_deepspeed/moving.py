"""One rank of training runs that go on elsewhere: `python moving.py JOBS FOLDER`, with RANK and WORLD_SIZE
set.

FOLDER/JOBS.json says, job by job, who trains (DeepSpeed's ZeRO stage, or FSDP2 with
torch.distributed.checkpoint), what is loaded, how many steps are taken before a checkpoint is saved, and how
many follow, with moments or, as a control, without. FOLDER/NAME.losses.json gets the losses of those that
follow.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 61
#: Each group has values of its own, none of them a default.
GROUPS = (
    {"lr": 4e-3, "weight_decay": 0.13, "betas": (0.9, 0.98), "eps": 1e-7},
    {"lr": 2e-3, "weight_decay": 0.0, "betas": (0.85, 0.97), "eps": 1e-7},
)


def model_of(tied: bool, seed: int) -> LlamaForCausalLM:
    """A Llama with grouped heads."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, **heads, tie_word_embeddings=tied, use_cache=False, attn_implementation="eager"
    )
    return LlamaForCausalLM(config).to(torch.float32)


def groups_of(model: torch.nn.Module, values: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    every = list(model.parameters())
    return [
        {"params": [p for p in every if (p.dim() > 1) is decays], **given}
        for decays, given in zip((True, False), values, strict=True)
    ]


def batch(step: int) -> torch.Tensor:
    """Tokens of this rank's share of a step: sequences with a rule."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    first = torch.randint(0, VOCAB, (4, 1), generator=generator)
    factor = torch.randint(2, 6, (4, 1), generator=generator)
    return (first + factor * torch.arange(12)) % VOCAB


def mean(loss: torch.Tensor) -> float:
    """The loss over all ranks."""
    value = loss.detach().clone().double()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


class Fused(torch.optim.AdamW):
    """Counts steps in numbers, as DeepSpeed's own optimizers do: ZeRO-3 gives one count to all of its
    parts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                (one, two), n = group["betas"], state["step"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - one)
                state["exp_avg_sq"].mul_(two).addcmul_(p.grad, p.grad, value=1 - two)
                scale = (state["exp_avg_sq"] / (1 - two**n)).sqrt() + group["eps"]
                p.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - one**n))


class DeepSpeed:
    """ZeRO of a stage, in float32."""

    def __init__(self, job: dict[str, Any]) -> None:
        import deepspeed

        # DeepSpeed would compile a reduction of its own for ranks of one machine; gloo's does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        model = model_of(job["tied"], job["seed"])
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": job["stage"], "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            # The others do not clip; 0.19 does unless it is told otherwise.
            "gradient_clipping": 0.0,
            "checkpoint": {"load_universal": bool(job["load"])},
        }
        groups = groups_of(model, GROUPS if not job["load"] else ({}, {}))
        if job["fused"]:
            groups = [{"params": list(model.parameters()), **(GROUPS[0] if not job["load"] else {})}]
        optimizer = (Fused if job["fused"] else torch.optim.AdamW)(groups)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        if job["load"]:
            path, _ = self.engine.load_checkpoint(job["load"])
            assert path is not None, "nothing was loaded"

    def states(self) -> list[dict[str, Any]]:
        return list(self.engine.optimizer.optimizer.state.values())

    def step(self, tokens: torch.Tensor) -> float:
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return mean(loss)

    def save(self, folder: Path, model: Path) -> None:
        self.engine.save_checkpoint(str(folder))
        if dist.get_rank() == 0:
            self.engine.module.config.save_pretrained(model)


class Fsdp:
    """FSDP2, and torch.distributed.checkpoint as torch's recipes use it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.model = model_of(job["tied"], job["seed"])
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(groups_of(self.model, GROUPS if not job["load"] else ({}, {})))
        if job["load"]:
            state = self.state()
            dcp.load(state, checkpoint_id=job["load"])
            set_model_state_dict(self.model, state["model"])
            set_optimizer_state_dict(self.model, self.optimizer, state["optim"])

    def states(self) -> list[dict[str, Any]]:
        return list(self.optimizer.state.values())

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def step(self, tokens: torch.Tensor) -> float:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return mean(loss)

    def save(self, folder: Path, model: Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder)
        if dist.get_rank() == 0:
            self.model.config.save_pretrained(model)


def main() -> None:
    jobs, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet_{jobs}", rank=rank, world_size=world)
    for name, job in json.loads((folder / f"{jobs}.json").read_text()).items():
        losses = run_job(job)
        if rank == 0:
            (folder / f"{name}.losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def run_job(job: dict[str, Any]) -> list[float]:
    """The losses of the steps that follow."""
    run = Fsdp(job) if job["stage"] is None else DeepSpeed(job)
    if job["forget"]:
        for state in run.states():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].zero_()
    begin = job["begin"]
    for step in range(begin, begin + job["steps"]):
        run.step(batch(step))
    begin += job["steps"]
    if job["save"]:
        run.save(Path(job["save"]), Path(job["save"]))
    return [run.step(batch(step)) for step in range(begin, begin + job["then"])]


if __name__ == "__main__":
    main()
