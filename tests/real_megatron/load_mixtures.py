"""One rank of four: loads mixtures of experts that fastshard wrote with megatron-core itself, and says what
it then holds and computes.

Stages, tensors and experts are divided at once: tp 2 x pp 2, and ep 2 x etp 1 over the same four ranks.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import delta_modules
import indexer_modules
import torch
import torch.distributed as dist
import torch.nn.functional as F
from make_models import allow_local_latent
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

#: What the common part of a checkpoint holds besides the model.
COMMON = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")


#: Arguments that the transformer's config has by the same names.
SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_dtype",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_grouped_gemm",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "mtp_num_layers",
    "moe_shared_expert_gate",
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "glu_linear_offset",
    "activation_func_clamp_value",
)


def build(args: Any) -> GPTModel:
    """The model that the arguments in a checkpoint describe."""
    latent = getattr(args, "multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    variant = getattr(args, "experimental_attention_variant", None)
    has_delta_nets = variant == "gated_delta_net"
    rotary = {"rotary_base": args.rotary_base} if latent else {}
    config = kind(
        # Heads have no field for YaRN.
        **{key: getattr(args, key) for key in SAME if hasattr(args, key) and hasattr(kind, key)},
        **rotary,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        # The delta rule of torch, not that of a kernel.
        deterministic_mode=has_delta_nets,
        num_moe_experts=getattr(args, "num_experts", None),
        gated_linear_unit=True,
        activation_func=F.silu if args.swiglu else quick_gelu,
        layernorm_epsilon=args.norm_epsilon,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sequence_parallel=args.tensor_model_parallel_size > 1,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        # The fused form is a kernel for accelerators.
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    if args.position_embedding_type == "yarn":
        state_yarn(config, args)
    if has_delta_nets:
        spec = delta_modules.block_spec(config)
    elif variant == "dsa":
        spec = indexer_modules.block_spec(config)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    further = getattr(args, "mtp_num_layers", None)
    return GPTModel(
        config,
        spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
        if further
        else None,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
    ).eval()


def state_yarn(config: TransformerConfig, args: Any) -> None:
    """Gives the config what YaRN hangs on for heads.

    source: Megatron-LM megatron/training/argument_utils.py (_apply_yarn_config_from_args) of August 2026
    """
    config.yarn_rotary_scaling_factor = args.rotary_scaling_factor
    config.yarn_original_max_position_embeddings = args.yarn_original_max_position_embeddings
    config.yarn_beta_fast, config.yarn_beta_slow = args.yarn_beta_fast, args.yarn_beta_slow
    config.yarn_mscale, config.yarn_mscale_all_dim = args.mscale, args.mscale_all_dim
    config.yarn_correction_range_round_to_int = args.yarn_correction_range_round_to_int


def pretend() -> None:
    """Answers for CPUs what Megatron asks of an accelerator."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    # The mask of a window is made on an accelerator.
    ones = torch.ones
    torch.ones = lambda *size, device=None, **words: ones(  # type: ignore[assignment, misc]
        *size, device=None if device == "cuda" else device, **words
    )
    # 0.16.1 asks for this name even where Transformer Engine is not installed.
    moe_utils.te_general_gemm = None
    allow_local_latent()


def allow_norms_of_parallel_sequences() -> None:
    """Lets torch's norms be made where ranks divide the sequence.

    Megatron asserts against it for the sake of gradients; a norm of single tokens computes the same.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **words: Any) -> Any:
        config.sequence_parallel, given = False, config.sequence_parallel
        try:
            return make(cls, config, *args, **words)
        finally:
            config.sequence_parallel = given

    WrappedTorchNorm.__new__ = new  # type: ignore[method-assign]


def choose_output_gates() -> None:
    """Gives a rank the output gates of its own heads where several ranks share a group.

    0.16.1 does that for queries alone; later versions for gates too.
    source: Megatron-LM d98e8a64 megatron/core/transformer/attention.py (get_query_key_value_tensors)
    """
    from megatron.core.transformer.attention import SelfAttention

    method = SelfAttention.get_query_key_value_tensors

    def chosen(self: Any, *args: Any, **words: Any) -> Any:
        found = method(self, *args, **words)
        heads = found[0].shape[2]
        if len(found) == 4 and found[3].shape[2] != heads:
            at = parallel_state.get_tensor_model_parallel_rank() % (found[3].shape[2] // heads) * heads
            return *found[:3], found[3][:, :, at : at + heads]
        return found

    SelfAttention.get_query_key_value_tensors = chosen


def spoil(model: GPTModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


def rank_file(folder: Path) -> Path:
    tensor, stage, expert = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    files = folder / "legacy/release"
    of_experts = files / f"mp_rank_{tensor:02d}_{stage:03d}_{expert:03d}/model_optim_rng.pt"
    # A model without experts has no such ranks.
    return (
        of_experts if of_experts.exists() else files / f"mp_rank_{tensor:02d}_{stage:03d}/model_optim_rng.pt"
    )


def load(folder: Path) -> tuple[GPTModel, dict[str, Any] | None]:
    """A model with the weights of torch_dist, and the state that the rank file gives it if there is one."""
    dist_folder, legacy = folder / "torch_dist/release", None
    if is_legacy := (folder / "legacy").exists():
        state = torch.load(rank_file(folder), weights_only=False)
    args = (
        state["args"]
        if is_legacy
        else with_degrees(torch.load(dist_folder / "common.pt", weights_only=False)["args"])
    )
    model = build(args)
    if is_legacy:
        spoil(model)
        model.load_state_dict(state["model"], strict=True)
        legacy = {n: v.clone() for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    spoil(model)
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    loaded = dist_checkpointing.load(model.sharded_state_dict(metadata=groups), str(dist_folder))
    model.load_state_dict({k: v for k, v in loaded.items() if k not in COMMON}, strict=True)
    return model, legacy


def with_degrees(args: Any) -> Any:
    """The arguments, as a run with these ranks would state them."""
    args.tensor_model_parallel_size = args.pipeline_model_parallel_size = args.expert_model_parallel_size = 2
    args.expert_tensor_parallel_size = 1
    return args


def forward(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits on the last stage; the first sends it what it computed."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, *2 * tokens.shape[1:], dtype=torch.bool).triu(1)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        if parallel_state.is_pipeline_first_stage():
            hidden = model(tokens, positions, mask)
            dist.send(hidden.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            return None
        hidden = torch.empty(tokens.shape[1] // tp, tokens.shape[0], model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
        # Layers that predict further tokens count for a loss only.
        model.mtp_process, model.config.mtp_num_layers = False, None
        logits: torch.Tensor = model(tokens, positions, mask)
        return logits


def main(root: Path) -> None:
    pretend()
    allow_norms_of_parallel_sequences()
    choose_output_gates()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    report: dict[str, Any] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        model, legacy = load(folder)
        loaded = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        entry: dict[str, Any] = {"tensors": len(loaded)}
        if legacy is not None:
            same = loaded.keys() == legacy.keys() and all(torch.equal(loaded[n], legacy[n]) for n in loaded)
            entry["torch_dist_is_legacy"] = same
        logits = forward(model, torch.load(folder / "tokens.pt"))
        if logits is not None:
            wanted = torch.load(folder / "logits.pt")
            entry["difference"] = (logits[..., : wanted.shape[-1]] - wanted).abs().max().item()
        report[folder.name] = entry
    (root / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
