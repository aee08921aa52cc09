"""The arguments in a Megatron-LM checkpoint other than those that describe its model.

source: Megatron-LM megatron/training/arguments.py and checkpointing.py (`check_checkpoint_args`)
"""

from __future__ import annotations

from typing import Any

from .pickle_tree import Global


def plain(args: dict[str, Any]) -> dict[str, Any]:
    """Return a source's arguments that are plain values.

    Objects of the source's classes are not pickled again.
    """

    def is_plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(is_plain(v) for v in value)
        return value is None or isinstance(value, (bool, int, float, str))

    return {key: value for key, value in args.items() if is_plain(value)}


def of_dtype(dtype: str | None) -> dict[str, Any]:
    """Return the arguments that state the precision of the weights; ``dtype`` is torch's name."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return {}
    return {"params_dtype": Global("torch", dtype), "bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
