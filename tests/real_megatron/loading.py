"""One rank: loads what fastshard wrote with megatron-core itself, and says what it then holds and
computes."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fastshard.integrations import record
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

#: What the common part of a checkpoint holds besides the model.
COMMON = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")


def build(args: Any, tp: int, pp: int) -> GPTModel:
    """The model that the arguments in a checkpoint describe."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        # The fused form is a kernel for accelerators.
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=args.qk_layernorm),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
    ).eval()


def spoil(model: GPTModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


def load(folder: Path, tp: int, pp: int) -> tuple[GPTModel, dict[str, Any]]:
    """A model with the weights of torch_dist, and the state that the rank file of the legacy form gives
    it."""
    t, p = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    suffix = f"_{p:03d}" if pp > 1 else ""
    path = folder / f"legacy/release/mp_rank_{t:02d}{suffix}/model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    model = build(state["args"], tp, pp)
    spoil(model)
    model.load_state_dict(state["model"], strict=True)
    legacy = {n: v.clone() for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    spoil(model)
    loaded = dist_checkpointing.load(model.sharded_state_dict(), str(folder / "torch_dist/release"))
    model.load_state_dict({k: v for k, v in loaded.items() if k not in COMMON}, strict=True)
    return model, legacy


def main(root: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    # megatron-core asks for the device by this name on CPUs too.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    # Dropout draws from an accelerator's generators, even where it drops nothing.
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    report: dict[str, Any] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        for degrees in ((2, 1), (1, 2)):
            tp, pp = degrees
            parallel_state.initialize_model_parallel(tp, pp)
            model, legacy = load(folder / f"tp{tp}_pp{pp}", tp, pp)
            held = {n: v for n, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
            same = held.keys() == legacy.keys() and all(torch.equal(held[n], legacy[n]) for n in held)
            entry: dict[str, Any] = {"tensors": len(held), "torch_dist_is_legacy": same}
            if pp == 1:
                tokens = torch.load(folder / "tokens.pt")
                positions = torch.arange(tokens.shape[1]).expand_as(tokens)
                mask = torch.ones(1, 1, *2 * tokens.shape[1:], dtype=torch.bool).triu(1)
                with torch.no_grad():
                    logits = model(tokens, positions, mask)
                wanted = torch.load(folder / "logits.pt")
                entry["difference"] = (logits[..., : wanted.shape[-1]] - wanted).abs().max().item()
                own = folder / f"layers_{rank}.safetensors"
                record(model, tokens, own, position_ids=positions, attention_mask=mask)
            report[f"{folder.name} tp{tp} pp{pp}"] = entry
            parallel_state.destroy_model_parallel()
    (root / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
