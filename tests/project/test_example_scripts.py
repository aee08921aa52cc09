"""The example scripts and the notebook run as they are shown."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
import torch
from fastshard.conversion import examples
from helpers import read_result
from holding import HANG

FOLDER = Path(__file__).parents[2] / "examples"


def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG)


def assert_equal(a: Path, b: Path) -> None:
    one, two = read_result(a), read_result(b)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    examples.make("llama", tmp_path / "llama")
    return tmp_path / "llama"


def test_the_gate_refuses_and_converts(llama: Path, tmp_path: Path) -> None:
    done = run("gate.py", llama, tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out'}: 21 tensors, every one hashed\n"), done
    assert_equal(tmp_path / "out", llama)
    (llama / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:-8])
    done = run("gate.py", llama, tmp_path / "again")
    assert done.returncode == 1 and "FS312" in done.stderr and "  help: " in done.stderr
    assert not (tmp_path / "again").exists()


def test_weights_are_averaged(llama: Path, tmp_path: Path) -> None:
    done = run("edit_weights.py", llama, llama, tmp_path / "mean")
    assert done.returncode == 0, done
    assert_equal(tmp_path / "mean", llama)


def test_logits_are_compared(llama: Path) -> None:
    done = run("compare_logits.py", llama, llama)
    assert done.returncode == 0 and done.stdout.startswith(
        "logits: max |difference| 0.0000 (largest logit "
    ), done


def test_the_usual_script_merges_what_is_whole_and_what_is_not(tmp_path: Path) -> None:
    """The README shows the second: with the right files it is the model that was divided."""
    examples.make("gpt_neox", tmp_path / "original")
    fastshard.convert(tmp_path / "original", tmp_path / "run", to="gpt_neox", tp=2)
    step, config = tmp_path / "run/global_step0", tmp_path / "original/config.json"
    assert run("merge_by_hand.py", step, config, tmp_path / "good").stdout.startswith("saved 40 tensors to ")
    assert_equal(tmp_path / "good", tmp_path / "original")
    shutil.copy(step / "layer_03-model_00-model_states.pt", step / "layer_03-model_01-model_states.pt")
    assert run("merge_by_hand.py", step, config, tmp_path / "bad").returncode == 0
    done = run("compare_logits.py", tmp_path / "original", tmp_path / "bad")
    assert done.returncode == 0 and not done.stdout.startswith("logits: max |difference| 0.0000 "), done


def test_the_notebook_runs_and_shows_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell after cell as Jupyter does it: the value of the last line is what is shown."""
    cells = json.loads((FOLDER / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    shown = []
    for cell in cells:
        assert not cell.get("outputs"), "outputs are not committed"
        if cell["cell_type"] != "code":
            continue
        *steps, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(steps, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if hasattr(value, "_repr_html_"):
                shown.append(value._repr_html_())
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    assert len(shown) == 4 and all(page.lstrip().startswith("<") for page in shown)
