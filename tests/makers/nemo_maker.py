"""Makes checkpoints in the layout of NeMo 2 of the weights of a Megatron-LM torch_dist checkpoint.

The layout is that of NeMo's sources: nemo/lightning/io/pl.py (`MegatronCheckpointIO`: the save in `weights`),
nemo/lightning/io/mixin.py (`_io_dump_yaml`: all fields of the config with their defaults, classes and
functions as `_target_` with `_call_: false`), nemo/lightning/pytorch/strategies/megatron_strategy.py (the
common part is Lightning's). `tests/real_megatron/test_nemo_saves.py` has a save by megatron-core itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from helpers import FIXTURES

SOURCE = FIXTURES / "sharded/megatron_torch_dist_tp2_pp2"


def target(name: str, **more: Any) -> dict[str, Any]:
    """A class or function as NeMo writes it."""
    return {"_target_": name, "_call_": False, **more}


#: The config of the fixture's model, as NeMo's LlamaConfig states it.
CONFIG: dict[str, Any] = {
    "_target_": "nemo.collections.llm.gpt.model.llama.LlamaConfig",
    "activation_func": target("torch.nn.functional.silu"),
    "activation_func_clamp_value": None,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_backend": {
        "_target_": "megatron.core.transformer.enums.AttnBackend",
        "_call_": True,
        "_args_": [5],
    },
    "attention_dropout": 0.0,
    "bf16": True,
    "data_step_fn": target("nemo.collections.llm.gpt.model.base.gpt_data_step"),
    "expert_model_parallel_size": 1,
    "ffn_hidden_size": 96,
    "fp8": None,
    "fp8_param": False,
    "gated_linear_unit": True,
    "glu_linear_offset": 0.0,
    "heterogeneous_block_specs": False,
    "hidden_dropout": 0.0,
    "hidden_size": 64,
    "init_method": {
        "_target_": "torch.nn.init.normal_",
        "_partial_": True,
        "_args_": [],
        "mean": 0.0,
        "std": 0.02,
    },
    "is_hybrid_model": False,
    "kv_channels": None,
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": False,
    "make_vocab_size_divisible_by": 64,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "normalization": "RMSNorm",
    "num_attention_heads": 8,
    "num_layers": 4,
    "num_moe_experts": None,
    "num_query_groups": 4,
    "params_dtype": target("torch.bfloat16"),
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "rope",
    "qk_layernorm": False,
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "seq_len_interpolation_factor": None,
    "seq_length": 64,
    "share_embeddings_and_output_weights": False,
    "softmax_scale": None,
    "tensor_model_parallel_size": 1,
    "transformer_layer_spec": target("nemo.collections.llm.gpt.model.base.default_layer_spec"),
    "vocab_size": None,
    "window_attn_skip_freq": None,
    "window_size": None,
}


def read_weights() -> dict[str, torch.Tensor]:
    """The full weights of the fixture, by Megatron's names."""
    entries = json.loads((SOURCE / "expected.json").read_text())["tensors"]
    weights = {name: torch.empty(entry["shape"], dtype=torch.bfloat16) for name, entry in entries.items()}
    dcp.load(weights, checkpoint_id=SOURCE / "iter_0000010", no_dist=True)
    return weights


def write_context(root: Path, changes: dict[str, Any] | None = None) -> None:
    """Write `context/` with the config of the fixture's model, changed."""
    context = root / "context"
    context.mkdir(parents=True, exist_ok=True)
    model = {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel",
        "config": CONFIG | (changes or {}),
        "model_transform": None,
        "optim": {"_target_": "nemo.lightning.pytorch.optim.megatron.MegatronOptimizerModule"},
        "tokenizer": {
            "_target_": "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer",
            "pretrained_model_name": "nemo_tokenizer",
        },
    }
    (context / "model.yaml").write_text(yaml.safe_dump(model))
    (context / "io.json").write_text('{"root": {"type": {"module": "os", "name": "system"}}}')


def write_save(folder: Path, tensors: dict[str, torch.Tensor], step: int = 99) -> None:
    """Write a save of Lightning's state: tensors in several files, the rest in `common.pt`."""
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False), no_dist=True)
    (folder / "metadata.json").write_text(
        json.dumps(
            {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        )
    )
    common = {
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": {},
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "checkpoint_version": 3.0,
    }
    torch.save(common, folder / "common.pt")


def make(
    root: Path,
    changes: dict[str, Any] | None = None,
    *,
    weights: dict[str, torch.Tensor] | None = None,
    state: dict[str, torch.Tensor] | None = None,
    step: int = 99,
) -> dict[str, torch.Tensor]:
    """Make a checkpoint of NeMo at a path; return its weights by the names stored.

    Args:
        root: the checkpoint's folder.
        changes: fields of the config that differ from the fixture's.
        weights: weights by Megatron's names, in place of the fixture's.
        state: the optimizer's state, by the names stored.
        step: the count of steps.
    """
    named = {f"module.{name}": t for name, t in (read_weights() if weights is None else weights).items()}
    write_save(root / "weights", named | (state or {}), step)
    write_context(root, changes)
    return named
