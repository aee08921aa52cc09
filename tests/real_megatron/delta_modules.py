"""What Megatron-LM takes from Transformer Engine and flash-linear-attention for gated delta nets, for CPUs.

The block, the delta net, the attention and the experts are megatron-core's own; only norms, the linear layer
that begins with one, and the norm of single vectors are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec


def _norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with zero-centred weights. source: Transformer Engine (zero_centered_gamma)"""
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)


class CentredNorm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        assert config.layernorm_zero_centered_gamma
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _norm(hidden, self.weight, self.eps)


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """With the norm before it, under the names of Transformer Engine's LayerNormLinear."""

    def __init__(self, input_size: int, *args: Any, config: Any, **words: Any) -> None:
        super().__init__(input_size, *args, config=config, **words)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size))
        self.eps = config.layernorm_epsilon

    def forward(self, hidden: torch.Tensor, *args: Any, **words: Any) -> Any:
        return super().forward(_norm(hidden, self.layer_norm_weight, self.eps), *args, **words)


class Backend(LocalSpecProvider):  # type: ignore[misc]
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormedColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        assert rms_norm
        return CentredNorm


def _attention(config: Any, backend: Backend | None = None) -> ModuleSpec:
    """What get_gpt_layer_with_transformer_engine_spec says of the attention."""
    backend = backend or Backend()
    norm = backend.layer_norm(rms_norm=True) if config.qk_layernorm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_layer_norm_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
        metainfo={"fuse_input_layernorm": True},
    )


def block_spec(config: Any) -> Any:
    """The spec of the decoder's block, with layers as the config says."""
    gated_delta_net.HAVE_FLA = True
    # source: fla.modules.l2norm
    gated_delta_net.l2norm = lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
    specs._get_backend_spec_provider = lambda config: Backend()
    specs._get_self_attention_module_spec = _attention
    return specs.get_transformer_block_with_experimental_attention_variant_spec(config)
