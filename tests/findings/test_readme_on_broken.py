"""Every command that judges or writes, and what the README shows, on a broken checkpoint: each refuses, and
nothing is published."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fastshard
import pytest
from fastshard.cli.verbs import VERBS
from helpers import FIXTURES, cli, copy

README = (Path(__file__).parents[2] / "README.md").read_text()
#: A file that a rank of the checkpoint wrote, and a tensor that is not whole without it.
LOST = "global_step4/layer_03-model_01-model_states.pt"
TENSOR = "3.attention.dense.weight"
COMMANDS = [
    "inspect CKPT",
    "plan CKPT --to hf",
    "merge CKPT OUT",
    "convert CKPT OUT --to hf",
    "convert CKPT OUT --to gpt_neox --tp 4",
    "convert CKPT OUT --to megatron --tp 4 --pp 2",
    "convert CKPT OUT --to maxtext",
    "convert CKPT OUT --to universal",
    "verify CKPT",
    "diff CKPT CKPT",
    "zero-to-fp32 CKPT OUT",
    "consolidate CKPT OUT",
    "ls CKPT *",
    "trace CKPT TENSOR --to hf",
    "stats CKPT",
    "master-weights CKPT --repair OUT",
    "manifest CKPT",
    "attest CKPT",
    "split CKPT OUT --parts 4",
    "loss CKPT",
    "layers CKPT CKPT",
    "find CKPT --in CKPT",
    "steps CKPT",
]
#: Commands that make no statement about whether a checkpoint is whole.
OTHERS = {
    "make-part",
    "commit",
    "clean",
    "check-storage",
    "copy-local",
    "expected",
    "explain",
    "completion",
    "man",
    "report",
}
#: Commands that this checkpoint is not for, whole or not.
NOT_FOR_IT = ("megatron", "maxtext", "universal", "zero-to-fp32", "master-weights", "attest")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = copy(FIXTURES / "gpt_neox/neox_pp_tp2", tmp_path / "run")
    (root / LOST).unlink()
    return root


def test_no_command_is_left_out() -> None:
    assert {command.split()[0] for command in COMMANDS} | OTHERS == {verb.name for verb in VERBS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, broken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = shlex.split(command)
    ran = cli(*({"CKPT": broken, "OUT": out, "TENSOR": TENSOR}.get(word, word) for word in words))
    if any(word in words for word in NOT_FOR_IT):
        assert ran.code in (1, 2, 3), (words, ran.out)
    else:
        assert ran.code in (1, 3) and ran.having("FS101", file=LOST, severity="error"), (words, ran.out)
    assert not out.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_the_python_of_the_readme(broken: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = block.replace('"run"', f'"{broken}"').replace('"edited"', f'"{tmp_path}/edited"')
    code = code.replace("2.attention.dense.weight", TENSOR)
    assert str(broken) in code and f"{tmp_path}/edited" in code and TENSOR in code
    names: dict[str, object] = {}
    refused = []
    for statement in re.split(r"\n(?=\S)", code.strip()):
        try:
            exec(statement, names)
        except fastshard.FastshardError as error:
            assert any(f.code == "FS101" for f in error.findings), statement
            refused.append(statement.partition("(")[0])
        except NameError:
            # What a statement before it would have made.
            assert statement.startswith(("view[", "with fastshard.Writer")), statement
    assert refused == [f'ckpt["{TENSOR}"].numpy', "view = fastshard.open", "model = fastshard.load_model"]
    assert "INCOMPLETE" in repr(names["ckpt"])
    with pytest.raises(fastshard.FastshardError), fastshard.Writer(tmp_path / "edited", expected=broken):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
