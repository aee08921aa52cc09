"""Two ranks of real DeepSpeed on CPUs, started once for all configurations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from launching import launch


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint per configuration, and what the engine held."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install '.[deepspeed]' (CONTRIBUTING.md)")
    folder = tmp_path_factory.mktemp("real_deepspeed")
    launch("train", folder)
    return folder
