"""Rank files as FSDP's users write them, made by real torch: processes that meet by a file and talk by gloo.

``python fsdp_maker.py OUT WORLD CASE,...`` makes each case in ``OUT/CASE``: what each rank saves, and what
the model holds as wholes (``expected.safetensors``), its moments too; of a family of ``families_maker``, what
is saved in each spelling. A run of several cases pays for starting torch once.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: Rows that four ranks do not divide: 101 of the vocabulary, 37 of the MLP.
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config(**changes: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES, architectures=["Qwen3ForCausalLM"], **changes)


def model(**changes: Any) -> Any:
    """The same one on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    made = AutoModelForCausalLM.from_config(config(**changes))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def sharded(made: Any, mesh: Any) -> Any:
    """FSDP2, layer by layer."""
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def parallel(made: Any, mesh: Any) -> None:
    """Tensor parallelism by columns and rows."""
    plan: dict[str, Any] = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        plan[f"self_attn.{name}"] = ColwiseParallel()
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    for layer in made.model.layers:
        parallelize_module(layer, mesh, plan)


def train(made: Any, steps: int = 2, **options: Any) -> torch.optim.Optimizer:
    """Steps by gradients that are parts of the same wholes; nothing is computed forward."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, **options)
    for step in range(steps):
        for n, parameter in enumerate(made.parameters()):
            if not parameter.requires_grad:
                continue
            torch.manual_seed(100 * step + n)
            if isinstance(parameter, DTensor):
                gradient = torch.randn(parameter.shape).to(parameter.dtype)
                parameter.grad = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            else:
                # A range of a flat parameter: another on each rank.
                torch.manual_seed(1000 * dist.get_rank() + 100 * step + n)
                parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()
    return optimizer


def whole(value: Any) -> torch.Tensor:
    """The whole tensor; all ranks must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class Case:
    """One case as one rank sees it."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}_world_size_{self.world}_rank_{self.rank}.pt"

    def save(self, made: Any, optimizer: torch.optim.Optimizer | None = None, step: int = 2) -> None:
        """As verl does."""
        torch.save(made.state_dict(), self.path("model"))
        if optimizer is not None:
            torch.save(optimizer.state_dict(), self.path("optim"))
            scheduler = {"last_epoch": step, "_step_count": step + 1}
            torch.save(
                {"lr_scheduler": scheduler, "rng": {"cpu": torch.get_rng_state()}}, self.path("extra_state")
            )
        self.beside(made)

    def beside(self, made: Any) -> None:
        if self.rank == 0:
            (self.folder / "huggingface").mkdir(exist_ok=True)
            made.config.save_pretrained(self.folder / "huggingface")
            (self.folder / "fsdp_config.json").write_text(
                json.dumps({"FSDP_version": 2, "world_size": self.world})
            )

    def expect(
        self, tensors: dict[str, torch.Tensor], state: torch.optim.Optimizer | None = None, made: Any = None
    ) -> None:
        """What the whole is, gathered by torch."""
        found = {name: whole(tensor).detach().clone().contiguous() for name, tensor in tensors.items()}
        if state is not None:
            for name, parameter in made.named_parameters():
                for slot, tensor in state.state.get(parameter, {}).items():
                    if slot != "step":
                        found[f"optimizer.{slot}.{name}"] = whole(tensor).clone().contiguous()
        if self.rank == 0:
            save_file(found, self.folder / "expected.safetensors")


def fsdp2(case: Case, mesh: Any = None, **changes: Any) -> None:
    dtype = changes.pop("dtype", torch.float32)
    made = sharded(
        model(**changes).to(dtype), mesh or init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    )
    optimizer = train(made)
    case.save(made, optimizer)
    case.expect(made.state_dict(), optimizer, made)


def hsdp(case: Case) -> None:
    fsdp2(case, init_device_mesh("cpu", (2, case.world // 2), mesh_dim_names=("ddp", "fsdp")))


def with_tp(case: Case) -> None:
    mesh = init_device_mesh("cpu", (case.world // 2, 2), mesh_dim_names=("dp", "tp"))
    made = model()
    parallel(made, mesh["tp"])
    sharded(made, mesh["dp"])
    torch.save(made.state_dict(), case.path("model"))
    case.beside(made)
    # The model as it was made: torch itself does not gather uneven strided shards rightly.
    case.expect(model().state_dict())


@contextlib.contextmanager
def kind(made: Any, of: StateDictType, *configs: Any) -> Iterator[None]:
    with FullyShardedDataParallel.state_dict_type(made, of, *configs):
        yield


def _fsdp1(case: Case, orig: bool = True, **options: Any) -> Any:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    policy = ModuleWrapPolicy({Qwen3DecoderLayer})
    return FullyShardedDataParallel(
        model(), device_id=torch.device("cpu"), use_orig_params=orig, auto_wrap_policy=policy, **options
    )


def fsdp1_mesh(case: Case) -> None:
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    made = _fsdp1(case, device_mesh=mesh)
    with kind(made, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        torch.save(made.state_dict(), case.path("model"))
    _fsdp1_beside(case, made)


def _fsdp1_beside(case: Case, made: Any) -> None:
    case.beside(made)
    with kind(made, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        case.expect(made.state_dict())


def fsdp1_sharded(case: Case) -> None:
    """With its optimizer, whose moments are flat."""
    made = _fsdp1(case)
    optimizer = train(made)
    with kind(made, StateDictType.SHARDED_STATE_DICT):
        torch.save(made.state_dict(), case.path("model"))
        torch.save(optimizer.state_dict(), case.path("optim"))
    case.beside(made)
    with kind(made, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        weights = made.state_dict()
    case.expect(weights | _moments(made, optimizer, weights))


def _moments(
    made: Any, optimizer: torch.optim.Optimizer, weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What all ranks hold, one after another: torch's own optim_state_dict gives both moments the same values
    on CPUs."""
    found = {}
    for name, parameter in made.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")
        for slot in ("exp_avg", "exp_avg_sq"):
            mine = optimizer.state.get(parameter, {}).get(slot, torch.empty(0))
            all_of_them: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_of_them, mine.flatten())
            found[f"optimizer.{slot}.{name}"] = torch.cat(all_of_them).view(weights[name].shape)
    return found


def fsdp1_local(case: Case, orig: bool = True) -> None:
    made = _fsdp1(case, orig)
    with kind(made, StateDictType.LOCAL_STATE_DICT):
        torch.save(made.state_dict(), case.path("model"))
    _fsdp1_beside(case, made)


def fsdp1_flat(case: Case) -> None:
    fsdp1_local(case, orig=False)


def compiled(case: Case) -> None:
    """Layers compiled one by one, and the whole: both leave their names."""
    made = model()
    for n, layer in enumerate(made.model.layers):
        made.model.layers[n] = torch.compile(layer)
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    made = sharded(made, mesh)
    torch.save(torch.compile(made).state_dict(), case.path("model"))
    case.beside(made)
    case.expect({name.replace("_orig_mod.", ""): t for name, t in made.state_dict().items()})


def partial(case: Case) -> None:
    """A DTensor that was never reduced."""
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    term = DTensor.from_local(torch.ones(4, 3), mesh, [Partial()], run_check=False)
    torch.save({"a": term}, case.path("model"))


def lora(case: Case) -> None:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model(), LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(11)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    for layer in made.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    optimizer = train(made)
    case.save(made, optimizer)
    if case.rank == 0:
        # As SkyRL and verl keep it beside: without its tensors, which are in the ranks' files.
        made.peft_config["default"].save_pretrained(case.folder / "lora_adapter")
    case.expect(made.state_dict(), optimizer, made)


CASES: dict[str, Any] = {
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": with_tp,
    "fsdp1_mesh": fsdp1_mesh,
    "fsdp1_sharded": fsdp1_sharded,
    "fsdp1_local": fsdp1_local,
    "fsdp1_flat": fsdp1_flat,
    "compiled": compiled,
    "partial": partial,
    "lora": lora,
    "tied": lambda case: fsdp2(case, tie_word_embeddings=True),
    "bf16": lambda case: fsdp2(case, dtype=torch.bfloat16),
}


#: What trainers save: the state dict itself, or dicts of theirs around it.
SPELLINGS: dict[str, Any] = {
    "flat": lambda s: s,
    "model": lambda s: {"model": s},
    "state_dict": lambda s: {"state_dict": s},
    "app.model": lambda s: {"app": {"model": s}},
}


def family(case: Case, name: str) -> None:
    """A family of transformers in all spellings: collectively by DCP, and a file of each rank's."""
    import torch.distributed.checkpoint as dcp
    from families_maker import made as of_family
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    made = of_family(name)
    made.config.architectures = [type(made).__name__]
    # FSDP2 divides no scalars: trainers leave them as they are.
    scalars = {parameter for parameter in made.parameters() if parameter.dim() == 0}
    mesh = init_device_mesh("cpu", (case.world,), mesh_dim_names=("fsdp",))
    # What is inside comes first.
    for module in reversed([*made.modules()]):
        for block in module if isinstance(module, torch.nn.ModuleList) else ():
            fully_shard(block, mesh=mesh, ignored_params=scalars)
    fully_shard(made, mesh=mesh, ignored_params=scalars)
    for spelling, of in SPELLINGS.items():
        by_dcp, by_ranks = case.folder / f"dcp {spelling}", case.folder / f"ranks {spelling}"
        by_ranks.mkdir(exist_ok=True)
        dcp.save(of(get_model_state_dict(made)), checkpoint_id=by_dcp)
        torch.save(of(made.state_dict()), by_ranks / case.path("model").name)
        if case.rank == 0:
            made.config.save_pretrained(by_dcp)
            made.config.save_pretrained(by_ranks / "huggingface")


def run(out: Path, world: int, cases: list[str], rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=world)
    for case in cases:
        (out / case).mkdir(exist_ok=True)
        at = Case(out / case, rank, world)
        CASES[case](at) if case in CASES else family(at, case)
        dist.barrier()
    dist.destroy_process_group()


def make(out: Path, world: int, cases: list[str]) -> None:
    """Makes cases in a process of its own, which imports torch once and forks the ranks."""
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, str(out), str(world), ",".join(cases)], check=True)


def main(out: Path, world: int, cases: list[str]) -> int:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    ranks = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run(out, world, cases, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ranks.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "makers"))
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")))
