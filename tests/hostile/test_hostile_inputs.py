"""Odd and hostile inputs: each is taken as it is meant, or refused in a word, and costs no more than its
size."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import HF, TP4, assert_refused, cli, copy, read_result
from safetensors.torch import save_file

#: A name that terminals must not be shown, one that turns the line around, and one that is no text.
ODD = ["o\x1b[31mx", "o\u202ex", os.fsdecode(b"o\xffx"), "a'b%c\\d e", "plain"]


@pytest.mark.parametrize("where", ["source", "out"])
@pytest.mark.parametrize("name", ODD)
def test_a_run_in_parts_takes_any_path(name: str, where: str, tmp_path: Path) -> None:
    """What is printed to make the parts names the real one."""
    source = copy(TP4, tmp_path / (name if where == "source" else "in"))
    out = tmp_path / (name if where == "out" else "out")
    begun = cli("split", source, out, "--parts", 2, "--emit", "shell")
    assert begun.code == 0, begun.out
    collected = cli("clean", out)
    assert collected.code == 0 and len(collected.doc["leftovers"]) == 1, collected.out
    script = begun.doc["emitted"]
    assert script.isascii() and script.replace("\n", "").isprintable()
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = json.loads((TP4 / "expected.json").read_text())["tensors"]
    # safetensors opens no path that is no text.
    assert set(read_result(out.rename(tmp_path / "read"))) == set(expected)


def test_axes_that_are_derived_of_each_other_are_expanded_once(tmp_path: Path) -> None:
    """Each of forty doubles the factors of the one before: a trillion in all."""
    axes = ['x0 = "H"', *(f'x{i} = "x{i - 1}*x{i - 1}"' for i in range(1, 41))]
    table = ['layout = "x"', 'family = "x"', 'vocab = "V"', "[axes]", *axes]
    table += ["[[tensor]]", 'name = "a.{L}.w"', 'shape = "[x40]"', 'as = "w.{L}"']
    (tmp_path / "derived.toml").write_text("\n".join(table))
    ran = cli("plan", HF, "--to", "hf", "--layout", tmp_path / "derived.toml")
    assert ran.code == 2 and ran.having("FS210", message="factors once it is expanded"), ran.out


def test_a_kilobyte_is_no_tensor_of_gigabytes(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(16).as_strided((1 << 36,), (0,))}, tmp_path / "model.pt")
    for verb in ("verify", "inspect"):
        ran = cli(verb, tmp_path / "model.pt")
        assert ran.code == 1 and ran.having("FS602", message="repeated without end"), ran.out
    assert_refused(tmp_path / "model.pt", tmp_path / "out", "FS602", command=("merge",))
    # What torch itself saves as an expanded view is taken.
    torch.save({"ids": torch.arange(8).expand(3, 8)}, tmp_path / "ids.pt")
    assert cli("merge", tmp_path / "ids.pt", tmp_path / "ids").code == 0
    assert torch.equal(read_result(tmp_path / "ids")["ids"], torch.arange(8).expand(3, 8))


def test_what_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e-45])
    for name, tensor in (("a", odd), ("b", torch.arange(4.0))):
        (tmp_path / name).mkdir()
        save_file({"w": tensor}, tmp_path / name / "model.safetensors")
    for verb in (
        ("diff", tmp_path / "a", tmp_path / "b"),
        ("stats", tmp_path / "a"),
        ("verify", tmp_path / "a"),
    ):
        ran = cli(*verb)

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        json.loads(ran.out, parse_constant=refuse)
        assert ran.code == 1
    (difference,) = cli("diff", tmp_path / "a", tmp_path / "b").doc["differences"]
    assert difference["tensor"] == "w" and difference["largest"] is None
