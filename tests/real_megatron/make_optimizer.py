"""Makes checkpoints with optimizer state by real megatron-core, and writes what the live optimizer held
beside each.

``python tests/real_megatron/make_optimizer.py OUT [CASE ...]`` needs ``pip install megatron-core==0.16.1``
(0.15.3 works too; 0.13.1 for the cases ``old_*``, which it alone can make); two or four gloo ranks on CPUs.
The distributed optimizer asks for CUDA by the names of types and devices: these are answered for CPUs here,
and the gather of parameters after a step goes by way of gloo. Buffers, buckets, the optimizer, sharding and
saving are Megatron's own, untouched.

``expected.safetensors`` holds weights, ``NAME.master``, ``NAME.exp_avg`` and ``NAME.exp_avg_sq``, whole,
under the names of torch_dist: parts of ranks are put together by what the model itself says of its shards.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

PORT = "29653"
STEPS = 3
PADDED = 96


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, saved in several forms."""

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    #: Virtual stages of each pipeline stage.
    vp: int = 1
    etp: int | None = None
    #: Elements after which a bucket is closed; None for one bucket.
    bucket: int | None = None
    distributed: bool = True
    tied: bool = False
    fp32: bool = False
    forms: tuple[str, ...] = ("fully_reshardable", "dp_reshardable", "legacy")
    #: Further words of the transformer's config.
    config: tuple[tuple[str, Any], ...] = ()


OLD = ("fully_sharded_model_space",)
CASES = {
    "tp2_dp2": Case(4, tp=2),
    "tp2_dp2_buckets": Case(4, tp=2, bucket=3000),
    # The second bucket begins behind padding: fully_reshardable is written wrong here.
    "tp2_dp2_shifted": Case(
        4,
        tp=2,
        bucket=1560,
        forms=("fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter", "legacy"),
    ),
    "pp2_dp2_tied": Case(4, pp=2, tied=True),
    "pp2_vp2": Case(2, pp=2, vp=2),
    "dp2_bias": Case(2, config=(("add_qkv_bias", True), ("qk_layernorm", True), ("add_bias_linear", True))),
    "dp2_ungated": Case(2, config=(("gated_linear_unit", False),)),
    "dp2_fp32": Case(2, fp32=True),
    "moe_tp2_ep2": Case(4, tp=2, ep=2, config=(("num_moe_experts", 4),)),
    "moe_ep2_dp2": Case(4, ep=2, config=(("num_moe_experts", 4),)),
    "moe_tp2_etp1": Case(2, tp=2, ep=2, etp=1, config=(("num_moe_experts", 4),)),
    "moe_freq_ep2": Case(
        2,
        ep=2,
        config=(
            ("num_moe_experts", 4),
            ("moe_layer_freq", [1, 1]),
            ("moe_router_enable_expert_bias", True),
            ("moe_router_score_function", "sigmoid"),
        ),
    ),
    "tp2_plain": Case(2, tp=2, distributed=False, forms=("torch_dist", "legacy")),
    "moe_ep2_plain": Case(
        2, ep=2, distributed=False, forms=("torch_dist", "legacy"), config=(("num_moe_experts", 4),)
    ),
    "old_tp2_dp2": Case(4, tp=2, forms=OLD),
    "old_tp2_dp2_buckets": Case(4, tp=2, bucket=3000, forms=OLD),
    "old_moe_ep2_dp2": Case(4, ep=2, forms=OLD, config=(("num_moe_experts", 4),)),
}


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def pretend() -> None:
    """Answers what Megatron asks of CUDA, for CPUs."""
    kind = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        told = kind(self, *args, **kwargs)
        return (
            told.replace("torch.", "torch.cuda.", 1) if isinstance(told, str) and "cuda" not in told else told
        )

    torch.Tensor.type = type_
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = lambda *_, **__: None
    torch.cuda.device_count = lambda: 1
    # A device that is counted and is not there would be asked whether it captures a graph, by every step.
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    OnCpu().__enter__()
    if not hasattr(np, "product"):
        # As 0.13 calls it.
        np.product = np.prod

    from megatron.core.distributed import param_and_grad_buffer as buffers
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def gather(self: Any, force_sync: bool = False) -> None:
        group = getattr(self, "intra_distributed_optimizer_instance_group", None) or self.data_parallel_group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        for bucket in self.buckets:
            parts = list(bucket.param_data.chunk(size))
            held = [torch.empty_like(part) for part in parts]
            dist.all_gather(held, parts[rank].contiguous(), group=group)
            for part, value in zip(parts, held, strict=True):
                part.copy_(value)
        self.param_gather_handle, self.param_gather_dispatched = None, True

    buffers._ParamAndGradBucketGroup.start_param_sync = gather
    from megatron.core import __version__
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if __version__.startswith("0.15."):
        # Its buckets take what the fused optimizers keep alone, which count steps by group.
        states = DistributedOptimizer._get_main_param_and_optimizer_states
        DistributedOptimizer._get_main_param_and_optimizer_states = lambda self, parameter: {
            key: value for key, value in states(self, parameter).items() if key != "step"
        }


def build(case: Case, chunk: int) -> Any:
    """A stage of this rank's model, by the local spec: no Transformer Engine."""
    from megatron.core import parallel_state as p
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    words = dict(case.config)
    experts = words.get("num_moe_experts")
    if experts:
        words = {
            "moe_ffn_hidden_size": 24,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        } | words
    config = TransformerConfig(
        **{
            "num_layers": 4 if case.pp * case.vp > 1 else 2,
            "hidden_size": 32,
            "ffn_hidden_size": 24,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-5,
            "use_cpu_initialization": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
            "params_dtype": torch.float32 if case.fp32 else torch.bfloat16,
            "bf16": not case.fp32,
            "pipeline_dtype": torch.bfloat16,
            "tensor_model_parallel_size": case.tp,
            "pipeline_model_parallel_size": case.pp,
            "expert_model_parallel_size": case.ep,
            "virtual_pipeline_model_parallel_size": case.vp if case.vp > 1 else None,
            "expert_tensor_parallel_size": case.etp or case.tp,
        }
        | words
    )
    stages = {"vp_stage": chunk} if case.vp > 1 else {}
    if isinstance(words.get("moe_layer_freq"), list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **stages)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=experts,
            moe_grouped_gemm=False,
            normalization="RMSNorm",
            qk_layernorm=bool(words.get("qk_layernorm")),
        )
    ends = {"ignore_virtual": False, **stages} if case.vp > 1 else {}
    torch.manual_seed(11 + p.get_pipeline_model_parallel_rank() * 8 + chunk)
    model = GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=case.tied,
        pre_process=p.is_pipeline_first_stage(**ends),
        post_process=p.is_pipeline_last_stage(**ends),
        **stages,
    )
    return model if case.fp32 else model.to(torch.bfloat16)


def seed_of(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def place(case: Case, name: str, parameter: torch.Tensor) -> str:
    """What tells this parameter's values from those of other ranks: equal where ranks hold copies."""
    from megatron.core import parallel_state as p

    expert = not getattr(parameter, "allreduce", True)
    stage = p.get_pipeline_model_parallel_rank()
    if case.tied and ("word_embeddings" in name or name.startswith("output_layer")):
        name, stage = "embedding", 0
    cut = getattr(parameter, "tensor_model_parallel", False)
    tensor = p.get_expert_tensor_parallel_rank() if expert else p.get_tensor_model_parallel_rank()
    return (
        f"{name} pp{stage} tp{tensor if cut else 0} ep{p.get_expert_model_parallel_rank() if expert else 0}"
    )


def fill(case: Case, model: Any, chunk: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(
                parameter.shape, generator=seed_of(f"{chunk} {place(case, name, parameter)}")
            )
            parameter.copy_(values * 0.05 + ("norm" in name))


def train(case: Case, models: list[Any], optimizer: Any) -> None:
    """Steps by gradients that are drawn: those that a run would have reduced."""
    for step in range(STEPS):
        for chunk, model in enumerate(models):
            for name, parameter in model.module.named_parameters():
                told = f"{step} {chunk} {place(case, name, parameter)}"
                drawn = torch.randn(parameter.shape, generator=seed_of(told))
                parameter.main_grad.copy_(drawn)
        done, *_ = optimizer.step()
        assert done
        if case.distributed:
            for model in models:
                model.start_param_sync(force_sync=True)


def arguments(case: Case, model: Any) -> argparse.Namespace:
    """What Megatron-LM's own script says in its checkpoints. source: megatron/training/arguments.py"""
    c = model.config
    known = {
        key: getattr(c, key)
        for key in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
            "normalization",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "moe_layer_freq",
        )
    }
    known |= {
        "group_query_attention": True,
        "swiglu": c.gated_linear_unit,
        "padded_vocab_size": PADDED,
        "max_position_embeddings": 64,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "use_rope_scaling": False,
        "norm_epsilon": 1e-5,
        "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": not case.tied,
        "bf16": not case.fp32,
        "fp16": False,
        "transformer_impl": "local",
        "use_distributed_optimizer": case.distributed,
        "iteration": STEPS,
        "overlap_grad_reduce": case.bucket is not None,
        "ddp_bucket_size": case.bucket,
        "world_size": case.world,
        "ckpt_fully_parallel_save": True,
        "accumulate_allreduce_grads_in_fp32": True,
        "optimizer": "adam",
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp or case.tp,
        "num_experts": c.num_moe_experts,
        "moe_router_topk": c.moe_router_topk,
    }
    if c.num_moe_experts:
        known["moe_ffn_hidden_size"] = 24
    return argparse.Namespace(**known)


def held(case: Case, optimizer: Any) -> dict[torch.Tensor, dict[str, list[tuple[int, torch.Tensor]]]]:
    """By parameter, the ranges of its master and moments that this rank has."""
    found: dict[torch.Tensor, dict[str, list[tuple[int, torch.Tensor]]]] = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if case.distributed:
            for parameter in one.model_param_group_index_map:
                begin = one._get_model_param_range_map(parameter)["param"].start
                if hasattr(one, "_get_main_param_and_optimizer_states"):
                    states = dict(one._get_main_param_and_optimizer_states(parameter))
                else:
                    group, order = one.model_param_group_index_map[parameter]
                    main = one.optimizer.param_groups[group]["params"][order]
                    states = {"param": main, **one.optimizer.state[main]}
                found[parameter] = {
                    key: [(begin, states[key].detach().float().reshape(-1))]
                    for key in ("param", "exp_avg", "exp_avg_sq")
                }
        else:
            groups = zip(one.float16_groups, one.fp32_from_float16_groups, strict=True)
            for parameter, main in ((a, b) for pair in groups for a, b in zip(*pair, strict=True)):
                states = {"param": main, **one.optimizer.state[main]}
                found[parameter] = {
                    key: [(0, states[key].detach().reshape(-1))] for key in ("param", "exp_avg", "exp_avg_sq")
                }
    return found


def expected(case: Case, models: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    """Everything whole, on rank 0: ranges put together over all ranks, then shards by the model's own
    account."""
    from megatron.core import parallel_state as p
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    states = held(case, optimizer)
    rank_of = (
        p.get_pipeline_model_parallel_rank(),
        p.get_tensor_model_parallel_rank(),
        p.get_expert_model_parallel_rank(),
    )
    mine: list[Any] = []
    for chunk, model in enumerate(models):
        for name, parameter in model.module.named_parameters():
            if parameter in states:
                mine.append(((rank_of, chunk, name), states[parameter]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    shards: list[Any] = []
    for chunk, model in enumerate(models):
        sharded = model.module.sharded_state_dict()
        by_parameter = {id(s.data): s for s in nested_values(sharded) if hasattr(s, "data")}
        for name, parameter in model.module.named_parameters():
            entry = by_parameter.get(id(parameter))
            if entry is None:
                # Without keep_vars some versions detach: found by its place in memory.
                entry = next(
                    (
                        s
                        for s in nested_values(sharded)
                        if isinstance(getattr(s, "data", None), torch.Tensor)
                        and s.data.data_ptr() == parameter.data_ptr()
                    ),
                    None,
                )
            assert entry is not None, name
            wanted: dict[str, torch.Tensor] = {"": parameter.detach()}
            # Experts of one rank are replicas on others: the states of any rank of this place serve.
            for key in ("param", "exp_avg", "exp_avg_sq"):
                flat = torch.full((parameter.numel(),), float("nan"))
                for theirs in everyone:
                    for told, ranges in theirs:
                        if told == (rank_of, chunk, name):
                            for begin, values in ranges[key]:
                                flat[begin : begin + len(values)] = values
                wanted["master" if key == "param" else key] = flat.reshape(parameter.shape)
            for key, whole in wanted.items():
                built = (
                    dataclasses.replace(entry, data=whole).build()
                    if isinstance(entry, ShardedTensorFactory)
                    else [dataclasses.replace(entry, data=whole, dtype=whole.dtype)]
                )
                for shard in nested_values(built if isinstance(built, (dict, list)) else [built]):
                    if isinstance(shard, ShardedTensor):
                        data = shard.data.reshape((1,) * shard.prepend_axis_num + tuple(shard.data.shape))
                        shards.append(
                            (
                                f"{shard.key}.{key}".rstrip("."),
                                shard.global_shape,
                                shard.global_offset,
                                data.clone(),
                            )
                        )
        for name, buffer in model.module.named_buffers():
            if name.endswith("expert_bias"):
                entry = next(
                    s for s in nested_values(sharded) if isinstance(s, ShardedTensor) and s.data is buffer
                )
                lead = (1,) * entry.prepend_axis_num
                shards.append(
                    (
                        entry.key,
                        entry.global_shape,
                        entry.global_offset,
                        buffer.reshape(lead + tuple(buffer.shape)),
                    )
                )
    all_shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_shards, shards)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, offset, data in (s for theirs in all_shards for s in theirs):
        target = whole.setdefault(name, torch.full(tuple(shape), float("nan"), dtype=data.dtype))
        box = target[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
        # What no rank of that place holds (a range of another data-parallel group) stays unknown.
        known = ~data.isnan()
        assert bool((box.isnan() | ~known | (box == data)).all()), name
        box[known] = data[known]
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), name
    return whole


def save(case: Case, form: str, models: list[Any], optimizer: Any, root: Path) -> None:
    """As megatron/training/checkpointing.py saves."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as p
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    args = arguments(case, models[0])
    step = root / f"iter_{STEPS:07d}"
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        step.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    keys = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    if form == "legacy":
        name = f"mp_rank_{p.get_tensor_model_parallel_rank():02d}"
        name += f"_{p.get_pipeline_model_parallel_rank():03d}" if case.pp > 1 else ""
        name += f"_{p.get_expert_model_parallel_rank():03d}" if case.ep > 1 else ""
        folder = step / name
        folder.mkdir(exist_ok=True)
        if case.distributed:
            optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
        if p.get_expert_data_parallel_rank() == 0:
            for key, model in zip(keys, models, strict=True):
                state[key] = model.module.state_dict_for_save_checkpoint()
            state["optimizer"] = optimizer.state_dict()
            torch.save(state, folder / "model_optim_rng.pt")
        dist.barrier()
        return
    metadata = {
        "distrib_optim_sharding_type": form,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state["content_metadata"] = metadata
    if form == "torch_dist":
        del metadata["distrib_optim_sharding_type"]
    for key, model in zip(keys, models, strict=True):
        state[key] = model.module.sharded_state_dict()
    model_state = state if len(keys) > 1 else state["model"]
    model_state = {k: v for k, v in model_state.items() if not len(keys) > 1 or k in keys}
    if form in OLD:
        state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=False, sharding_type=form)
        del metadata["singleton_local_shards"], metadata["chained_optim_avoid_prefix"]
    else:
        state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=False, metadata=metadata)
    strategy = get_default_save_sharded_strategy("torch_dist")
    strategy = FullyParallelSaveStrategyWrapper(
        strategy, p.get_data_parallel_group(with_context_parallel=True), False
    )
    dist_checkpointing.save(state, str(step), strategy)
    dist.barrier()


def join(rank: int, world: int, port: str) -> None:
    """Makes this process a rank of a run on this host's CPUs."""
    warnings.filterwarnings("ignore")
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        RANK=str(rank),
        WORLD_SIZE=str(world),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def _rank(rank: int, world: int, out: str, names: list[str]) -> None:
    join(rank, world, PORT)
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from safetensors.torch import save_file

    pretend()
    for name in names:
        case = CASES[name]
        parallel_state.initialize_model_parallel(
            case.tp,
            case.pp,
            virtual_pipeline_model_parallel_size=case.vp if case.vp > 1 else None,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
        )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=case.distributed,
            overlap_grad_reduce=case.bucket is not None,
            bucket_size=case.bucket,
        )
        models = []
        for chunk in range(case.vp):
            if case.vp > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            stage = build(case, chunk)
            fill(case, stage, chunk)
            models.append(DistributedDataParallel(stage.config, ddp, stage, disable_bucketing=chunk > 0))
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                min_lr=0.01,
                weight_decay=0.01,
                clip_grad=0.0,
                bf16=not case.fp32,
                params_dtype=torch.float32 if case.fp32 else torch.bfloat16,
                use_distributed_optimizer=case.distributed,
            ),
            models,
        )
        train(case, models, optimizer)
        whole = expected(case, models, optimizer)
        for form in case.forms:
            root = Path(out) / f"{name}__{form}"
            save(case, form, models, optimizer, root)
            if rank == 0:
                save_file({k: v.contiguous() for k, v in whole.items()}, root / "expected.safetensors")
        if rank == 0:
            print(f"{name}: {len(whole)} tensors, {', '.join(case.forms)}", flush=True)
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for world in sorted({CASES[name].world for name in names}):
        of_world = [name for name in names if CASES[name].world == world]
        torch.multiprocessing.start_processes(
            _rank, args=(world, str(out), of_world), nprocs=world, start_method="fork"
        )


if __name__ == "__main__":
    chosen = sys.argv[2:] or [name for name, case in CASES.items() if case.forms != OLD]
    main(Path(sys.argv[1]), chosen)
