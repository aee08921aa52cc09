"""One rank of a DeepSpeed run on CPUs: `python training.py train|resume FOLDER`, with RANK and WORLD_SIZE
set.

`train` trains a small model in every configuration of :mod:`cases` and saves, beside each checkpoint,
what the live engine held (`truth.safetensors`), asked for with DeepSpeed's own functions. `resume` loads
checkpoints that a file lists and takes one step from each.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from cases import CASES, Case, ds_config
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import groups as parallel
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, INNER = 29, 12, 31
MOMENTS = ("exp_avg", "exp_avg_sq")


class Fused(FusedAdam):
    """FusedAdam with its kernel's arithmetic in torch: DeepSpeed wraps, saves and loads it as its own."""

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0, "bias_correction": True}
        torch.optim.Optimizer.__init__(self, params, defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        torch.optim.Optimizer.zero_grad(self, set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None, **_: Any) -> None:
        # source: deepspeed/ops/adam/fused_adam.py (step): numbers, in the groups as well as in the state
        for group in self.param_groups:
            group.setdefault("step", 0)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = group["step"]
                    state.update({key: torch.zeros_like(p) for key in MOMENTS})
                state["step"] += 1
                first, second = state["exp_avg"], state["exp_avg_sq"]
                first.lerp_(p.grad, 0.1)
                second.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                one, two = 1 - 0.9 ** state["step"], 1 - 0.999 ** state["step"]
                p.addcdiv_(first, (second / two).sqrt() + group["eps"], value=-group["lr"] / one)


class Model(nn.Module):
    """Tied head, frozen weights, a buffer, a parameter of one element, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.gain = nn.Parameter(torch.ones(1))
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.fixed = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.fixed.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embed(tokens)
        x = self.norm(x + self.down(torch.relu(self.up(x))) * self.gain + self.fixed(x))
        return loss_of(self.head(x), labels)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Embedding(nn.Module):
    """Both ends of the pipeline's tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.lin = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.lin(self.norm(x)))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Two layers of experts, the second one beside a dense expert, with a dense layer between them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        common = {"ep_size": ranks, "k": 1, "capacity_factor": 2.0}
        self.first = MoE(HIDDEN, Expert(), num_experts=4, **common)
        self.norm = nn.LayerNorm(HIDDEN)
        self.second = MoE(HIDDEN, Expert(), num_experts=2, use_residual=True, **common)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm(x + self.first(x)[0])
        return loss_of(self.head(x + self.second(x)[0]), labels)


def llama() -> nn.Module:
    """A model that AutoTP knows: grouped heads, a head of its own."""
    torch.set_default_dtype(torch.float32)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False, attn_implementation="eager"))


def pipeline(stages: int) -> PipelineModule:
    def logits(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, embedding.table.weight)

    layers = [
        TiedLayerSpec("embed", Embedding, tied_weight_attr="table.weight"),
        LayerSpec(Block),
        LayerSpec(Block),
        TiedLayerSpec("embed", Embedding, forward_fn=logits, tied_weight_attr="table.weight"),
    ]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of a rank's step: a rule that can be learnt."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (4, 7), generator=generator)
    return tokens, (3 * tokens + 1) % VOCAB


def groups_of(model: nn.Module, several: bool) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not several:
        return [{"params": [p for _, p in named]}]
    plain = [p for n, p in named if p.dim() < 2]
    # The later parameters come first, so that the groups' order is not the model's.
    return [
        {"params": plain, "weight_decay": 0.0},
        {"params": [p for n, p in named if p.dim() == 2 and n.startswith("down")]},
        {"params": [p for n, p in named if p.dim() == 2 and not n.startswith("down")]},
    ]


def engine_of(case: Case, lr: float, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    made = Mixture(case.experts) if case.experts else llama() if case.tensor else Model()
    model = pipeline(case.pipeline) if case.pipeline else made
    make = Fused if case.fused else torch.optim.AdamW
    groups = groups_of(model, case.groups)
    if case.experts:
        groups = split_params_into_different_moe_groups_for_optimizer(
            [{"name": "dense", **g} for g in groups]
        )
    optimizer = make(groups, lr=lr, eps=1e-6)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(case))
    return engine


def train(engine: Any, case: Case, steps: range) -> float:
    """Takes steps; the last loss."""
    loss = torch.zeros(())
    for step in steps:
        if case.pipeline:
            loss = engine.train_batch(iter([batch(step)] * case.accumulate))
            continue
        for _ in range(case.accumulate):
            loss = loss_on(engine, case, step)
            engine.backward(loss)
            engine.step()
    return float(loss.detach())


def loss_on(engine: Any, case: Case, step: int) -> torch.Tensor:
    if not case.tensor:
        return engine(*batch(step))
    # Ranks of one model see the same.
    tokens = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(step))
    return engine(input_ids=tokens, labels=tokens).loss


def together(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameters of all tensor-parallel ranks as a Llama of one rank has them."""
    found = {}
    for name in parts[0]:
        rows = re.search(r"(q|k|v|gate|up)_proj|lm_head", name)
        columns = re.search(r"(o|down)_proj", name)
        found[name] = (
            torch.cat([p[name] for p in parts], 0 if rows else 1) if rows or columns else parts[0][name]
        )
    return found


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters as the engine computes with them, on every rank."""
    found = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone().cpu()
    return found


def masters(engine: Any, case: Case) -> dict[str, torch.Tensor]:
    """fp32 master weights and moments, as the live optimizer holds them, under each name of a parameter."""
    found = {}
    whole = {}
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links moments after the first group's first step, when the other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    if case.stage == 0 and case.fused:
        whole = cut_flats(engine.optimizer)
    elif case.stage == 0 and case.dtype != "fp32" and not case.pipeline:
        optimizer = engine.optimizer
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            whole |= {id(p): (m, optimizer.optimizer.state[m]) for p, m in zip(low, high, strict=True)}
    if case.zero.get("round_robin_gradients"):
        whole = reordered(engine.optimizer)
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        if case.stage == 0 and case.dtype == "fp32":
            found |= {f"{name}.{key}": engine.optimizer.state[parameter][key] for key in MOMENTS}
        elif whole:
            found[name], state = whole[id(parameter)]
            found |= {f"{name}.{key}": state[key] for key in MOMENTS}
        else:
            found[name] = safe_get_full_fp32_param(parameter)
            found |= {f"{name}.{key}": safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}
    return {name: tensor.detach().clone().cpu() for name, tensor in found.items()}


def cut_flats(optimizer: Any) -> dict[int, Any]:
    """Masters and moments of FP16_Optimizer, by its own lists of parameters."""
    found = {}
    for parameters, master in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        state, at = optimizer.optimizer.state[master], 0
        for p in parameters:
            flats = (master, *(state[m] for m in MOMENTS))
            whole, *moments = (flat[at : at + p.numel()].view(p.shape) for flat in flats)
            found[id(p)] = whole, dict(zip(MOMENTS, moments, strict=True))
            at += p.numel()
    return found


def reordered(optimizer: Any) -> dict[int, Any]:
    """Masters and moments of ZeRO-1 and 2 by the flat vectors themselves.

    DeepSpeed's own functions look in the order before the reordering, and find other elements.
    """

    def gathered(part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.detach().contiguous())
        return torch.cat(parts)

    found = {}
    groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups, strict=True)
    for master, parameters in groups:
        flats = {"": gathered(master)} | {m: gathered(optimizer.optimizer.state[master][m]) for m in MOMENTS}
        at = 0
        for p in parameters:
            cut = {key: flat[at : at + p.numel()].view(p.shape) for key, flat in flats.items()}
            found[id(p)] = cut.pop(""), cut
            at += p.numel()
    return found


def truth(engine: Any, case: Case, folder: Path) -> None:
    """Saves parameters, masters with their moments, and buffers; of all stages of a pipeline."""
    params, high = parameters(engine), masters(engine, case)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    if case.experts:
        params, high = ({among_all(engine, n): t for n, t in part.items()} for part in (params, high))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (params, high, buffers))
    if case.tensor:
        params, high = (together([part[i] for part in every]) for i in range(2))
        buffers = {}
    if case.pipeline or case.experts:
        params, high, buffers = ({k: v for part in every for k, v in part[i].items()} for i in range(3))
    if dist.get_rank() == 0:
        for name, tensors in {"params": params, "masters": high, "buffers": buffers}.items():
            save_file({k: v.clone() for k, v in tensors.items()}, folder / f"truth_{name}.safetensors")


def among_all(engine: Any, name: str) -> str:
    """The name that an expert of this rank has where one rank has all."""
    for prefix, module in engine.module.named_modules():
        start = f"{prefix}.deepspeed_moe.experts.deepspeed_experts."
        if isinstance(module, MoE) and name.startswith(start):
            number, rest = name.removeprefix(start).split(".", 1)
            first = parallel._get_expert_parallel_rank(module.expert_group_name) * module.num_local_experts
            return f"{start}{first + int(number)}.{rest}"
    return name


def main_train(root: Path) -> None:
    for case in CASES:
        if not set(case.zero) <= set(DeepSpeedZeroConfig.model_fields):
            continue
        folder = root / case.name
        engine = engine_of(case, lr=1e-2)
        train(engine, case, range(case.steps))
        engine.save_checkpoint(folder, tag=f"global_step{case.steps}")
        truth(engine, case, folder)
        if case.finetune:
            forgotten(engine, case, root / f"{case.name}_forgotten")
        dist.barrier()
        engine.destroy()
        del engine
        gc.collect()


def forgotten(trained: Any, case: Case, folder: Path) -> None:
    """A finetune that put the parameters into the module and left the masters as they were initialised."""
    state = {name: tensor.clone() for name, tensor in trained.module.state_dict().items()}
    engine = engine_of(case, lr=1e-2, seed=2)
    # A step, so that there are moments; the parameters come after it, and nothing refreshes the masters.
    train(engine, case, range(1))
    engine.module.load_state_dict(state)
    engine.save_checkpoint(folder, tag="global_step1")
    engine.destroy()


def main_resume(root: Path) -> None:
    wanted = json.loads((root / "resume.json").read_text())
    cases = {case.name: case for case in CASES}
    report = []
    for entry in wanted:
        case = cases[entry["case"]]
        engine = engine_of(case, lr=entry["lr"], seed=3)
        path, _ = engine.load_checkpoint(entry["path"], **entry["options"])
        assert path is not None, entry
        for group in engine.optimizer.param_groups:
            group["lr"] = entry["lr"]
        before = parameters(engine)
        first = train(engine, case, range(50, 51))
        after = parameters(engine)
        move = max(float((after[n].float() - before[n].float()).abs().max()) for n in before)
        engine.eval()
        with torch.no_grad():
            then = float(engine(*batch(50)))
        report.append({**entry, "move": move, "loss": [first, then]})
        engine.destroy()
        del engine
        gc.collect()
    if dist.get_rank() == 0:
        (root / "resumed.json").write_text(json.dumps(report))


def main() -> None:
    what, root = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file to meet at needs no free port.
    dist.init_process_group("gloo", init_method=f"file://{root}/meet_{what}", rank=rank, world_size=world)
    # DeepSpeed would compile a reduction of its own for ranks of one machine; gloo's does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes in fp16 on every CPU, only slowly.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    {"train": main_train, "resume": main_resume}[what](root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
