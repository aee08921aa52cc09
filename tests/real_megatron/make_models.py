"""Makes checkpoints of models other than Llama by real megatron-core, and writes what the live model held
beside each.

``python tests/real_megatron/make_models.py OUT [CASE ...]`` needs ``pip install megatron-core==0.16.1``
(0.19.0 works too); two gloo ranks on CPUs, local specs. Each case is saved as torch_dist and as rank files.

``expected_FORM.safetensors`` holds the weights whole: for torch_dist parts of ranks are put together by what
the model itself says of its shards, for rank files by what the parameters themselves say of how ranks divide
them.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from make_optimizer import join, pretend, seed_of

PORT = "29657"
PADDED = 96
STEP = 10


@dataclass(frozen=True)
class Case:
    """One model, at the degrees of two ranks."""

    kind: str = "gpt"
    tp: int = 2
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    tied: bool = False
    positions: str = "rope"
    #: Further words of the transformer's config.
    config: tuple[tuple[str, Any], ...] = ()


_GPT3: tuple[tuple[str, Any], ...] = (
    ("normalization", "LayerNorm"),
    ("add_bias_linear", True),
    ("gated_linear_unit", False),
    ("activation_func", torch.nn.functional.gelu),
    ("num_query_groups", 4),
)
_MOE: tuple[tuple[str, Any], ...] = (
    ("num_moe_experts", 4),
    ("moe_ffn_hidden_size", 24),
    ("moe_router_topk", 2),
    ("moe_router_load_balancing_type", "none"),
    ("moe_token_dispatcher_type", "allgather"),
)
_SHARED: tuple[tuple[str, Any], ...] = (("moe_shared_expert_intermediate_size", 16),)
_MLA: tuple[tuple[str, Any], ...] = (
    ("multi_latent_attention", True),
    ("q_lora_rank", 16),
    ("kv_lora_rank", 16),
    ("qk_head_dim", 8),
    ("qk_pos_emb_head_dim", 4),
    ("v_head_dim", 8),
    ("num_query_groups", 4),
)
CASES = {
    "gpt3_tp2": Case(tied=True, positions="learned_absolute", config=_GPT3),
    "gpt3_pp2": Case(tp=1, pp=2, tied=True, positions="learned_absolute", config=_GPT3),
    "mtp_tp2": Case(config=(("mtp_num_layers", 1),)),
    "shared_tp2": Case(config=(*_MOE, *_SHARED)),
    "dense_first_ep2": Case(tp=1, ep=2, config=(*_MOE, *_SHARED, ("moe_layer_freq", [0, 1]))),
    "deepseek_ep2": Case(
        tp=1,
        ep=2,
        config=(
            *_MOE,
            *_SHARED,
            *_MLA,
            ("moe_layer_freq", [0, 1]),
            ("mtp_num_layers", 1),
            ("moe_router_enable_expert_bias", True),
            ("moe_router_score_function", "sigmoid"),
        ),
    ),
    "mla_tp2": Case(config=_MLA),
    "moe_etp1": Case(ep=2, etp=1, config=_MOE),
    "moe_bias_ep2": Case(tp=1, ep=2, config=(*_MOE, ("add_bias_linear", True))),
    "groups_1_tp2": Case(config=(("num_query_groups", 1),)),
    "gate_tp2": Case(config=(("attention_output_gate", True),)),
    "bert_tp2": Case("bert", positions="learned_absolute", tied=True, config=_GPT3),
    # One rank: of several the parts of its head do not fit together by its own account.
    "t5_tp1": Case("t5", tp=1, positions="learned_absolute", config=_GPT3),
    "vit_tp2": Case("vit", config=_GPT3),
}


def build(case: Case) -> Any:
    """This rank's model, by local specs: no Transformer Engine."""
    from megatron.core import parallel_state as p
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    words = dict(case.config)
    latent = bool(words.get("multi_latent_attention"))
    kind = MLATransformerConfig if latent else TransformerConfig
    config = kind(
        **{
            "num_layers": 2,
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
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "pipeline_dtype": torch.bfloat16,
            "tensor_model_parallel_size": case.tp,
            "pipeline_model_parallel_size": case.pp,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp or case.tp,
        }
        | words
    )
    torch.manual_seed(5)
    return _model(case, config, p.is_pipeline_first_stage(), p.is_pipeline_last_stage()).to(torch.bfloat16)


def allow_local_latent() -> None:
    """Lets the local attention be made for latent attention, which gives it words that only Transformer
    Engine's knows.

    It has no parameters, so that what is saved does not depend on it.
    """
    from megatron.core.transformer import attention, multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for module in (attention, multi_latent_attention):
        if not isinstance(getattr(module, "TELinear", None), type):
            module.TELinear = type("Absent", (), {})

    made = DotProductAttention.__init__

    def init(self: Any, *args: Any, **words: Any) -> None:
        made(self, *args, **{k: v for k, v in words.items() if k not in ("k_channels", "v_channels")})

    DotProductAttention.__init__ = init


def _model(case: Case, config: Any, first: bool, last: bool) -> Any:
    ends = {"pre_process": first, "post_process": last}
    words = {
        "vocab_size": PADDED,
        "max_sequence_length": 64,
        "position_embedding_type": case.positions,
        "share_embeddings_and_output_weights": case.tied,
    } | ends
    if case.kind == "bert":
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel

        return BertModel(config, num_tokentypes=2, transformer_layer_spec=bert_layer_local_spec, **words)
    if case.kind == "t5":
        from megatron.core.models.T5 import t5_spec
        from megatron.core.models.T5.t5_model import T5Model

        encoder = t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers)
        decoder = t5_spec.get_t5_decoder_with_local_block_spec(config.num_layers)
        return T5Model(config, config, encoder, decoder, **words)
    if case.kind == "vit":
        from megatron.core.models.vision.clip_vit_model import CLIPViTModel
        from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        return CLIPViTModel(
            config,
            get_vit_layer_with_local_spec(),
            WrappedTorchNorm,
            WrappedTorchNorm,
            patch_dim=8,
            img_h=16,
            img_w=16,
        )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if isinstance(config.moe_layer_freq, list):
        spec = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            normalization=config.normalization,
            multi_latent_attention=bool(config.multi_latent_attention),
        )
    if config.mtp_num_layers:
        layer = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
        words["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(config, spec, **words)


def groups(parameter: torch.Tensor) -> tuple[int, int, int]:
    """(rank, degree, expert rank) by which a parameter's values differ."""
    from megatron.core import parallel_state as p

    expert = not getattr(parameter, "allreduce", True)
    cut = getattr(parameter, "tensor_model_parallel", False)
    rank = p.get_expert_tensor_parallel_rank() if expert else p.get_tensor_model_parallel_rank()
    size = p.get_expert_tensor_parallel_world_size() if expert else p.get_tensor_model_parallel_world_size()
    return rank if cut else 0, size if cut else 1, p.get_expert_model_parallel_rank() if expert else -1


def fill(model: Any) -> None:
    """Values that tell ranks, stages and experts apart, and are equal where ranks hold copies."""
    from megatron.core import parallel_state as p

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rank, _, expert = groups(parameter)
            stage = p.get_pipeline_model_parallel_rank()
            if "word_embeddings" in name or name.startswith("output_layer"):
                name, stage = "embedding", 0
            told = f"{name} pp{stage} tp{rank} ep{expert}"
            parameter.copy_(torch.randn(parameter.shape, generator=seed_of(told)))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape, generator=seed_of(name)))


def by_shards(model: Any) -> dict[str, torch.Tensor]:
    """Whole tensors, by what the model says of its shards. Collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    mine = []
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedTensor):
            data = entry.data.detach().reshape((1,) * entry.prepend_axis_num + tuple(entry.data.shape))
            mine.append((entry.key, entry.global_shape, entry.global_offset, data.clone()))
    return _joined(mine)


def _joined(mine: list[Any]) -> dict[str, torch.Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, offset, data in (s for theirs in everyone for s in theirs):
        target = whole.setdefault(name, torch.full(tuple(shape), float("nan"), dtype=data.dtype))
        box = target[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
        assert bool((box.isnan() | (box == data)).all()), name
        box.copy_(data)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), name
    return whole


def by_attributes(case: Case, model: Any) -> dict[str, torch.Tensor]:
    """Whole tensors under the names of rank files, by what parameters say of how ranks divide them.
    Collective."""
    from megatron.core import parallel_state as p

    layers = 2 // case.pp
    parameters = dict(model.named_parameters())
    mine = []
    for name, value in model.state_dict_for_save_checkpoint().items():
        if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):
            continue
        owner = parameters.get(name, value)
        if name == "output_layer.weight" and case.tied:
            owner = parameters.get("embedding.word_embeddings.weight", owner)
        rank, degree, expert = groups(owner)
        base = p.get_pipeline_model_parallel_rank() * layers
        name = re.sub(
            r"^((?:de|en)coder\.layers\.)(\d+)", lambda m, base=base: f"{m[1]}{int(m[2]) + base}", name
        )
        if ".local_experts." in name:
            first = max(expert, 0) * (4 // case.ep)
            name = re.sub(
                r"(local_experts\.)(\d+)", lambda m, first=first: f"{m[1]}{int(m[2]) + first}", name
            )
        dim = max(getattr(owner, "partition_dim", 0), 0)
        shape = list(value.shape)
        starts = [[0] * len(shape)]
        parts = [value]
        if degree > 1:
            gated = ".linear_fc1." in name and model.config.gated_linear_unit
            parts = list(value.chunk(2, 0)) if gated else [value]
            each = parts[0].shape[dim]
            starts = [[0] * len(shape) for _ in parts]
            for n, start in enumerate(starts):
                start[dim] = (n * degree + rank) * each
            shape[dim] *= degree
        mine += [
            (name, shape, start, part.detach().clone()) for start, part in zip(starts, parts, strict=True)
        ]
    return _joined(mine)


def arguments(case: Case, model: Any) -> argparse.Namespace:
    """What Megatron-LM's own script says in its checkpoints. source: megatron/training/arguments.py"""
    c = model.config
    known = {
        key: getattr(c, key, None)
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
            "mtp_num_layers",
            "moe_shared_expert_intermediate_size",
            "multi_latent_attention",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
            "attention_output_gate",
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_router_enable_expert_bias",
            "moe_router_score_function",
        )
    }
    return argparse.Namespace(
        **known
        | {
            "group_query_attention": c.num_query_groups != c.num_attention_heads,
            "swiglu": c.gated_linear_unit,
            "padded_vocab_size": PADDED,
            "max_position_embeddings": 64,
            "position_embedding_type": case.positions,
            "rotary_base": 10000,
            "norm_epsilon": 1e-5,
            "apply_layernorm_1p": False,
            "bf16": True,
            "fp16": False,
            "untie_embeddings_and_output_weights": not case.tied,
            "transformer_impl": "local",
            "iteration": STEP,
            "use_distributed_optimizer": False,
            "world_size": 2,
            "expert_model_parallel_size": case.ep,
            "expert_tensor_parallel_size": case.etp or case.tp,
            "num_experts": c.num_moe_experts,
        }
    )


def save(case: Case, model: Any, root: Path) -> None:
    """As megatron/training/checkpointing.py saves."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as p

    args = arguments(case, model)
    for form in ("torch_dist", "legacy"):
        if dist.get_rank() == 0:
            (root / form / f"iter_{STEP:07d}").mkdir(parents=True)
            (root / form / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    dist.barrier()
    name = f"mp_rank_{p.get_tensor_model_parallel_rank():02d}"
    name += f"_{p.get_pipeline_model_parallel_rank():03d}" if case.pp > 1 else ""
    name += f"_{p.get_expert_model_parallel_rank():03d}" if case.ep > 1 else ""
    folder = root / f"legacy/iter_{STEP:07d}" / name
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": STEP}
    if p.get_expert_data_parallel_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(state | {"model": model.state_dict_for_save_checkpoint()}, folder / "model_optim_rng.pt")
    dist_checkpointing.save(
        model.sharded_state_dict() | state,
        str(root / f"torch_dist/iter_{STEP:07d}"),
        async_sharded_save=False,
    )
    dist.barrier()


def _rank(rank: int, out: str, names: list[str]) -> None:
    join(rank, 2, PORT)
    from megatron.core import parallel_state
    from safetensors.torch import save_file

    pretend()
    allow_local_latent()
    for name in names:
        case = CASES[name]
        parallel_state.initialize_model_parallel(
            case.tp, case.pp, expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp
        )
        model = build(case)
        fill(model)
        root = Path(out) / name
        save(case, model, root)
        for form, whole in (("torch_dist", by_shards(model)), ("legacy", by_attributes(case, model))):
            if rank == 0:
                tensors = {k: v.contiguous() for k, v in whole.items()}
                save_file(tensors, root / f"expected_{form}.safetensors")
                print(f"{name}: {form}, {len(whole)} tensors", flush=True)
        parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.start_processes(_rank, args=(str(out), names), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
