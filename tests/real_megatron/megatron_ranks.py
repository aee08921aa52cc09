"""Starts the scripts of this folder, whose ranks are forked from a process that has imported
megatron-core."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from forks import Forks

HERE = Path(__file__).parent


@cache
def _megatron() -> Forks:
    return Forks(
        "torch",
        "transformers",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.dist_checkpointing",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        # DeepSpeed sets it on import, and the devices that scripts pretend would be taken for real ones.
        PYTORCH_NVML_BASED_CUDA_CHECK="0",
    )


def launch(
    script: str, argv: Sequence[object], logs: Sequence[Path], ranks: Sequence[Mapping[str, str]] = ({},)
) -> None:
    """Runs a script, or one for each rank; skips the test where megatron-core is not installed."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install '.[megatron]' (CONTRIBUTING.md)")
    _megatron().launch(HERE / script, argv, logs, ranks)
