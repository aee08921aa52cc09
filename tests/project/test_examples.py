"""``python -m fastshard.examples``: what it writes is what transformers loads, and the same in every run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
import torch
import transformers
from fastshard import examples
from fastshard.manifests import MANIFEST_NAME
from helpers import cli, state_of


@pytest.mark.parametrize("model", examples.CONFIGS)
def test_transformers_loads_it(model: str, tmp_path: Path) -> None:
    examples.make(model, tmp_path / "out")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = loaded(torch.arange(32)[None]).logits
    assert torch.isfinite(logits).all() and logits.std() > 0


@pytest.mark.parametrize("model", examples.CONFIGS)
def test_it_is_the_same_in_every_run_and_small(model: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        examples.make(model, tmp_path / name)
    made = {file: hashed for file, (_, hashed) in state_of(tmp_path / "a").items()}
    assert made == {file: hashed for file, (_, hashed) in state_of(tmp_path / "b").items()}
    assert MANIFEST_NAME not in made
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) < 400_000


def test_the_line_of_the_tutorial(tmp_path: Path) -> None:
    line = ["-m", "fastshard.examples", "gpt_neox", "run", "--to", "gpt_neox", "--tp", "2"]
    done = subprocess.run([sys.executable, *line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("run: 16 files, ") and not done.stderr
    found = fastshard.open(tmp_path / "run")
    assert not [finding for finding in found.findings if finding.severity == "error"]
    examples.make("gpt_neox", tmp_path / "whole")
    assert cli("convert", tmp_path / "run", tmp_path / "back", "--to", "hf", "--vocab-size", 500).code == 0
    assert cli("diff", tmp_path / "back", tmp_path / "whole").code == 0


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    line = [sys.executable, "-m", "fastshard.examples", "llama", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "FS5" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
