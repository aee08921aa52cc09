"""Makes the fixtures ``sharded/moe_*``: one tiny Mixtral by transformers, and what real megatron-core saves
of it.

``python tests/real_megatron/make_moe.py OUT`` needs ``pip install megatron-core==0.16.1``; four gloo ranks on
CPUs. Each rank's model takes its part of the weights with ``strict=True`` and computes the logits of the
whole before it is saved: a part in the wrong place would show.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "makers"))
import moe_maker

PORT = "29617"


def build(degrees: tuple[int, int, int]) -> Any:
    """This rank's megatron-core model, by the local spec: no Transformer Engine, SequentialMLP."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp, pp, ep = degrees
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=24,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm"),
        vocab_size=moe_maker.PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
    ).eval()


def place_of() -> tuple[int, int, int]:
    """(tp, pp, ep) of this rank."""
    from megatron.core import parallel_state as p

    return (
        p.get_tensor_model_parallel_rank(),
        p.get_pipeline_model_parallel_rank(),
        p.get_expert_model_parallel_rank(),
    )


def load(model: Any, whole: moe_maker.State, degrees: tuple[int, int, int]) -> None:
    """This rank's part of the weights; every name and shape must fit."""
    state = moe_maker.rank_state(whole, place_of(), degrees)
    extra = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    model.load_state_dict(state | extra, strict=True)


def forward(model: Any, degrees: tuple[int, int, int]) -> torch.Tensor:
    """Logits of the whole vocabulary; only without pipeline stages."""
    tokens = moe_maker.TOKENS
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    with torch.no_grad():
        return model(tokens, positions, mask)[..., : moe_maker.SIZES["vocab_size"]]


def _rank(rank: int, world: int, out: str, degrees: tuple[int, int, int]) -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    # Megatron puts buffers on the current device and forks its random state without asking whether there is a
    # GPU.
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    # 0.16.1 asks for this name even where Transformer Engine is not installed.
    moe_utils.te_general_gemm = None

    theirs = moe_maker.model()
    whole = theirs.state_dict()
    model = build(degrees)
    load(model, whole, degrees)
    if degrees[1] == 1:
        difference = (forward(model, degrees) - moe_maker.logits(theirs)).abs().max()
        assert difference < 1e-4, difference
        print(f"rank {rank} {place_of()}: logits differ by {difference:.1e}", flush=True)
    name = "_".join(f"{n}{d}" for n, d in zip(("tp", "pp", "ep"), degrees, strict=True) if d > 1)
    args = moe_maker.arguments(*degrees)
    folder = (
        Path(out) / f"moe_megatron_legacy_{name}/iter_0000010" / moe_maker.rank_folder(place_of(), degrees)
    )
    if parallel_state.get_expert_data_parallel_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": model.state_dict()}
        torch.save(content, folder / "model_optim_rng.pt")
    step = Path(out) / f"moe_megatron_torch_dist_{name}/iter_0000010"
    if rank == 0:
        step.mkdir(parents=True)
    torch.distributed.barrier()
    state = model.sharded_state_dict() | {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    dist_checkpointing.save(state, str(step))
    if rank == 0:
        for root in (step.parent, folder.parents[1]):
            (root / "latest_checkpointed_iteration.txt").write_text("10")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(out: Path) -> None:
    moe_maker.model().save_pretrained(out / "moe_hf_mixtral")
    for degrees in ((2, 1, 2), (1, 2, 2)):
        torch.multiprocessing.start_processes(
            _rank, args=(4, str(out), degrees), nprocs=4, start_method="fork"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
