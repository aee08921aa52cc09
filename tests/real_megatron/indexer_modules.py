"""What Megatron-LM's indexer takes from Transformer Engine and from a kernel, for CPUs.

The indexer, the attention to what it chooses, and the rest of the block are megatron-core's own. 0.16.1
rotates the last part of each head, in pairs; versions since then, and DeepSeek's own code, the first, in
halves: that is put in its place.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm


class DuplicatedLinear(MegatronModule):  # type: ignore[misc]
    """A linear layer that every rank has whole."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, parallel_mode: str, **_: Any
    ) -> None:
        super().__init__(config)
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden @ self.weight.T, None


def _rotate_first_part(self: Any, x: torch.Tensor, angles: torch.Tensor, mscale: float) -> torch.Tensor:
    """source: Megatron-LM dsa.py (_apply_rope) of 2026"""
    rotated = self.qk_pos_emb_head_dim
    config = copy.copy(self.config)
    # Halves, not the pairs of attention over a latent.
    config.multi_latent_attention = False
    first = apply_rotary_pos_emb(
        x[..., :rotated], angles, config=config, mscale=mscale, cp_group=self.pg_collection.cp
    )
    return torch.cat([first, x[..., rotated:]], dim=-1)


def block_spec(config: Any) -> Any:
    """The spec of the decoder's block, with an indexer in each layer."""
    # A rotation of both sides changes no product of them.
    dsa.rotate_activation = lambda x: x
    dsa.DSAIndexer._apply_rope = _rotate_first_part
    indexer = ModuleSpec(
        module=dsa.DSAIndexer,
        submodules=dsa.DSAIndexerSubmodules(
            linear_wq_b=DuplicatedLinear,
            linear_wk=DuplicatedLinear,
            k_norm=WrappedTorchNorm,
            linear_weights_proj=DuplicatedLinear,
        ),
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
            module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer)
        )
    return spec
