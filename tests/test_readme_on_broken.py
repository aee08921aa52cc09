"""What the README shows, on a broken checkpoint: each command and each example refuses, and nothing is published."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fastshard
import pytest
from helpers import FIXTURES, cli, copy

README = (Path(__file__).parents[1] / "README.md").read_text()
#: A file that a rank of the README's checkpoint wrote, and a tensor that is not whole without it.
LOST = "global_step4/layer_03-model_01-model_states.pt"
TENSOR = "3.attention.dense.weight"
#: Options of the README's rows that are no part of a command.
COMMANDS = re.findall(r"^\| `(fastshard [^`]*)`(?:, `(fastshard [^`]*)`)? \|", README, re.M)
#: Verbs that make no statement about whether a checkpoint is whole.
OTHERS = {"make-part", "clean", "check-storage", "copy-local", "explain", "completion", "man", "report"}
#: Commands that this checkpoint is not for, whole or not.
NOT_FOR_IT = ("megatron", "maxtext", "universal", "zero-to-fp32", "master-weights", "attest")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = copy(FIXTURES / "gpt_neox/neox_pp_tp2", tmp_path / "run")
    (root / LOST).unlink()
    return root


def commands() -> list[str]:
    found = [command for row in COMMANDS for command in row if command]
    assert len(found) > 20, "the README's table of commands has another form"
    return [command for command in found if command.split()[1] not in OTHERS]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme(command: str, broken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = shlex.split(re.sub(r"[\[\]]|\.\.\.", "", command))[1:]
    values = {
        "CKPT": broken,
        "PATH": broken,
        "A": broken,
        "B": broken,
        "OUT": out,
        "TENSOR": TENSOR,
        "GLOB": "*",
        "OTHER": broken,
    }
    ran = cli(*(values.get(word, word) for word in words))
    if any(word in words for word in NOT_FOR_IT):
        assert ran.code in (1, 2, 3), (words, ran.out)
    else:
        assert ran.code in (1, 3) and ran.having("FS101", file=LOST, severity="error"), (words, ran.out)
    assert not out.exists() and sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_the_python_of_the_readme(broken: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    code = block.replace("tests/fixtures/gpt_neox/neox_pp_tp2", str(broken)).replace(
        '"out', f'"{tmp_path}/out'
    )
    assert str(broken) in code and f"{tmp_path}/out" in code
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
            assert statement.startswith("view["), statement
    assert refused == [
        "manifest = fastshard.convert", "view = fastshard.open", "model = fastshard.load_model", "with fastshard.Writer",
    ]  # fmt: skip
    assert "INCOMPLETE" in repr(names["ckpt"])
    assert any(f.severity == "error" for f in names["plan"].findings)  # type: ignore[attr-defined]
    with pytest.raises(fastshard.IncompleteError):
        names["ckpt"][TENSOR].numpy()  # type: ignore[index]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
