"""Configurations that a small model is trained in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    stage: int
    dtype: str
    #: More of `zero_optimization`.
    zero: dict[str, Any] = field(default_factory=dict)
    #: More of the config.
    more: dict[str, Any] = field(default_factory=dict)
    #: Several parameter groups.
    groups: bool = False
    #: Pipeline stages; 0 for a plain model.
    pipeline: int = 0
    accumulate: int = 1
    steps: int = 3
    #: DeepSpeed's FusedAdam: its steps are numbers, and stage 0 wraps it in FP16_Optimizer.
    fused: bool = False
    #: Also saved with masters that were not refreshed.
    finetune: bool = False
    #: Expert-parallel ranks of a mixture of experts (deepspeed.moe); 0 for a dense model.
    experts: int = 0
    #: Ranks that AutoTP divides a Llama over; 0 without it.
    tensor: int = 0


PARALLEL_WRITE = {"parallel_write": {"pipeline_stage": True}}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}

CASES = [
    Case("zero0_bf16", 0, "bf16", finetune=True, steps=30),
    Case("zero0_bf16_groups", 0, "bf16", groups=True),
    Case("zero0_fp16", 0, "fp16"),
    Case("zero0_bf16_fused", 0, "bf16", fused=True, finetune=True, steps=30),
    Case("zero0_fp16_fused_groups", 0, "fp16", fused=True, groups=True),
    Case("zero0_fp32", 0, "fp32"),
    Case("zero0_fp32_groups", 0, "fp32", groups=True),
    Case("zero1_bf16", 1, "bf16", finetune=True, steps=30),
    Case("zero1_bf16_fused", 1, "bf16", fused=True, finetune=True, steps=30),
    Case("zero1_fp16", 1, "fp16"),
    Case("zero1_fp32", 1, "fp32"),
    Case("zero1_bf16_groups", 1, "bf16", groups=True, accumulate=2),
    Case("zero1_bf16_round_robin", 1, "bf16", {"round_robin_gradients": True}),
    Case("zero1_bf16_aligned", 1, "bf16", {"parameter_alignment": True}, groups=True),
    Case("bf16_optimizer", 1, "bf16", more=FP32_GRADIENTS, finetune=True, steps=30),
    Case("bf16_optimizer_groups", 1, "bf16", more=FP32_GRADIENTS, groups=True, accumulate=2),
    Case("zero2_bf16", 2, "bf16"),
    Case("zero2_fp16", 2, "fp16"),
    Case("zero2_fp32", 2, "fp32"),
    Case("zero2_bf16_round_robin", 2, "bf16", {"round_robin_gradients": True}, groups=True),
    Case("zero3_bf16", 3, "bf16"),
    Case("zero3_fp16", 3, "fp16"),
    Case("zero3_fp32", 3, "fp32"),
    Case("zero3_bf16_groups", 3, "bf16", groups=True),
    Case("zero3_bf16_small_groups", 3, "bf16", {"sub_group_size": 100}),
    Case("pipeline_zero1_bf16", 1, "bf16", pipeline=2, accumulate=2),
    Case("pipeline_zero1_fp16", 1, "fp16", pipeline=2, accumulate=2),
    Case("pipeline_bf16_optimizer", 1, "bf16", more=FP32_GRADIENTS, pipeline=2, accumulate=2),
    Case("pipeline_zero0_fp16_fused", 0, "fp16", pipeline=1, accumulate=2, fused=True),
    Case("pipeline_zero0_bf16", 0, "bf16", pipeline=1, accumulate=2),
    Case("pipeline_zero0_bf16_pp2", 0, "bf16", pipeline=2, accumulate=2),
    Case("pipeline_zero1_bf16_dp2", 1, "bf16", pipeline=1, accumulate=2),
    Case("moe_zero0_fp32", 0, "fp32", experts=1),
    Case("moe_zero0_fp32_ep2", 0, "fp32", experts=2),
    Case("moe_zero0_bf16_ep2", 0, "bf16", experts=2),
    Case("moe_zero0_fp16_fused_ep2", 0, "fp16", experts=2, fused=True),
    Case("moe_zero1_bf16", 1, "bf16", experts=1),
    Case("moe_zero1_bf16_ep2", 1, "bf16", experts=2),
    Case("moe_zero2_fp16_ep2", 2, "fp16", experts=2),
    Case(
        "moe_zero2_bf16_data_first", 2, "bf16", experts=2, more={"use_data_before_expert_parallelism": True}
    ),
    Case("moe_bf16_optimizer_ep2", 1, "bf16", more=FP32_GRADIENTS, experts=2),
    Case("autotp_zero0_bf16", 0, "bf16", tensor=2),
    Case("autotp_zero1_bf16", 1, "bf16", tensor=2),
    Case("autotp_zero2_bf16_groups", 2, "bf16", tensor=2, groups=True),
    Case("autotp_zero3_bf16", 3, "bf16", tensor=2),
    Case("pipeline_parallel_write", 1, "bf16", pipeline=1, accumulate=2, more={"checkpoint": PARALLEL_WRITE}),
    Case("zero2_node_local", 2, "bf16", more={"checkpoint": {"use_node_local_storage": True}}),
    Case("zero1_elastic", 1, "bf16", {"elastic_checkpoint": True}),
    Case("zero2_elastic_groups", 2, "bf16", {"elastic_checkpoint": True}, groups=True),
]


def ds_config(case: Case) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.accumulate,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.dtype == "bf16"},
        "fp16": {"enabled": case.dtype == "fp16", "initial_scale_power": 6},
        "zero_optimization": {"stage": case.stage, **case.zero},
        **({"tensor_parallel": {"autotp_size": case.tensor}} if case.tensor else {}),
        **case.more,
    }
