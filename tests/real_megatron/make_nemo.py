"""One rank: builds models with megatron-core, saves them as NeMo 2 does, and keeps what live ones compute.

``python tests/real_megatron/make_nemo.py OUT``, as one of two gloo ranks. The save is that of NeMo's
`MegatronCheckpointIO`; the settings are all fields of the live config, as NeMo's `_io_dump_yaml` writes them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from make_optimizer import pretend
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

#: Fields that NeMo's GPTConfig has besides those of the transformer. source: gpt/model/base.py
GPT: dict[str, Any] = {
    "share_embeddings_and_output_weights": False,
    "make_vocab_size_divisible_by": 64,
    "position_embedding_type": "rope",
    "rotary_base": 50000.0,
    "rotary_percent": 1.0,
    "seq_len_interpolation_factor": None,
    "seq_length": 64,
    "vocab_size": None,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "mixtral": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    },
    "tied_unstacked": {"hetereogenous_dist_checkpoint": True, "share_embeddings_and_output_weights": True},
}
WORDS = 256


def build(changes: dict[str, Any]) -> tuple[GPTModel, dict[str, Any]]:
    """This rank's model, and all its settings."""
    gpt = GPT | {key: value for key, value in changes.items() if key in GPT}
    config = TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "tensor_model_parallel_size": 2,
            "params_dtype": torch.float32,
            "use_cpu_initialization": True,
            # The fused form is a kernel for accelerators.
            "bias_activation_fusion": False,
            "apply_rope_fusion": False,
        }
        | {key: value for key, value in changes.items() if key not in GPT}
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=False,
            normalization=config.normalization,
            qk_layernorm=config.qk_layernorm,
        ),
        vocab_size=WORDS,
        max_sequence_length=gpt["seq_length"],
        parallel_output=False,
        share_embeddings_and_output_weights=gpt["share_embeddings_and_output_weights"],
        position_embedding_type=gpt["position_embedding_type"],
        rotary_base=gpt["rotary_base"],
        rotary_percent=gpt["rotary_percent"],
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                # Their usual values, zeros and ones, would hide a mistake.
                parameter.add_(0.1 * torch.arange(parameter.numel()).reshape(parameter.shape) % 0.7)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return model, {"_target_": "nemo.collections.llm.gpt.model.base.GPTConfig"} | fields | gpt


def plain(value: Any) -> Any:
    """A value as NeMo's representers write it: what YAML lacks by its name."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, torch.dtype):
        return {"_target_": str(value), "_call_": False}
    if name is None:
        return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}", "_call_": True}
    return {"_target_": f"{module}.{name}", "_call_": False}


def main(root: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    pretend()
    parallel_state.initialize_model_parallel(2, 1)
    tokens = torch.arange(40).reshape(2, 20) * 7 % WORDS
    positions = torch.arange(20).expand_as(tokens)
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool).triu(1)
    for number, (case, changes) in enumerate(CASES.items()):
        torch.manual_seed(number)
        model, settings = build(changes)
        folder = root / case
        if rank == 0:
            (folder / "weights").mkdir(parents=True)
            (folder / "context").mkdir()
            content = {"_target_": "nemo.collections.llm.gpt.model.base.GPTModel", "config": plain(settings)}
            (folder / "context/model.yaml").write_text(yaml.safe_dump(content))
            torch.save(tokens, folder.with_suffix(".tokens"))
        with torch.no_grad():
            logits = model(tokens, positions, mask)
        if rank == 0:
            torch.save(logits, folder.with_suffix(".logits"))
        dist.barrier()
        state = {
            "epoch": 0,
            "global_step": 7,
            "state_dict": {},
            "sharded_state_dict": model.sharded_state_dict(prefix="module."),
        }
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
        dist_checkpointing.save(state, str(folder / "weights"), strategy)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
