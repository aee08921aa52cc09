"""Adapters, targets and tables of a package of one's own, installed beside fastshard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HF, read_result, sha256

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extend/framework.md"
ENTRIES = """\
[fastshard.adapters]
quarry = fastshard_quarry.adapter:Quarry

[fastshard.targets]
quarry = fastshard_quarry.target:QuarryTarget

[fastshard.layouts]
quarry = fastshard_quarry.layouts
"""
TARGET = '''\
"""The files of ranks, under a name of one's own."""

from fastshard.targets.tp_safetensors import TpTarget


class QuarryTarget(TpTarget):
    """Rank files of safetensors."""

    names = ("quarry",)
'''
TABLE = """\
layout = "quarry.llama"
family = "llama"
extends = "hf.llama"
[config]
model_type = ["quarry_llama"]
"""


def block(title: str) -> str:
    """A block of the page that shows how an adapter is written."""
    return re.findall(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)[0]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages, with one that has an adapter, a target and a table."""
    folder = tmp_path / "site"
    package, metadata = folder / "fastshard_quarry", folder / "fastshard_quarry-1.0.dist-info"
    (package / "layouts").mkdir(parents=True)
    metadata.mkdir()
    adapter = block("fastshard/sources/quarry.py")
    adapter = re.sub(r"^from \.\.", "from fastshard.", adapter, flags=re.M)
    adapter = re.sub(r"^from \. import", "from fastshard.sources import", adapter, flags=re.M)
    adapter = re.sub(r"^from \.", "from fastshard.sources.", adapter, flags=re.M)
    (package / "__init__.py").touch()
    (package / "layouts/__init__.py").touch()
    (package / "adapter.py").write_text(adapter)
    (package / "target.py").write_text(TARGET)
    (package / "layouts/quarry.llama.toml").write_text(TABLE)
    (metadata / "entry_points.txt").write_text(ENTRIES)
    return folder


def run(
    *words: object, site: Path | None, cwd: Path, plugins: str | None = None
) -> subprocess.CompletedProcess[str]:
    paths = [str(path) for path in (site, os.environ.get("PYTHONPATH")) if path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env |= {} if plugins is None else {"FASTSHARD_PLUGINS": plugins}
    return subprocess.run(
        [sys.executable, "-m", "fastshard", *map(str, words)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def quarry(tmp_path: Path) -> Path:
    """A checkpoint of the framework."""
    for words in (["ranks", "--to", "tp-safetensors", "--tp", "2"], ["original"]):
        command = [sys.executable, "-m", "fastshard.examples", "llama", *words]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    script = block("save.py")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    return tmp_path / "run"


def test_a_package_of_its_own_reads_its_framework(quarry: Path, site: Path, tmp_path: Path) -> None:
    seen = run("inspect", quarry, site=site, cwd=tmp_path)
    assert seen.returncode == 0 and re.search(r"^framework +Quarry$", seen.stdout, re.M), seen
    to = ("--to", "hf", "--vocab-size", 500)
    made = run("convert", quarry, tmp_path / "hf", *to, site=site, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    have, want = read_result(tmp_path / "hf"), read_result(tmp_path / "original")
    assert {name: sha256(value) for name, value in have.items()} == {
        name: sha256(value) for name, value in want.items()
    }
    (quarry / "step-7/rank1.quarry.safetensors").unlink()
    lost = run("verify", quarry, site=site, cwd=tmp_path)
    assert lost.returncode == 3 and "rank1.quarry.safetensors: the file is missing" in lost.stdout


def test_it_writes_a_target_and_knows_a_table(site: Path, tmp_path: Path) -> None:
    made = run("convert", HF, tmp_path / "out", "--to", "quarry", "--tp", 2, site=site, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in (tmp_path / "out").glob("tp_rank_*")) == [
        "tp_rank_00.safetensors",
        "tp_rank_01.safetensors",
    ]
    assert "quarry" in run("convert", "--help", site=site, cwd=tmp_path).stdout
    code = (
        "from fastshard.layouts import tables; print(tables.family('quarry.llama'), "
        'tables.of_config(\'{"model_type": "quarry_llama", "num_hidden_layers": 2, "hidden_size": 8, '
        '"num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 10}\'))'
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["llama", "quarry.llama"]


def test_its_author_checks_the_adapter(quarry: Path, site: Path, tmp_path: Path) -> None:
    code = (
        "from fastshard import testing\n"
        "testing.check_adapter('run', 'quarry', spare=['config.json'])\n"
        "try:\n"
        "    testing.check_adapter('run', 'other')\n"
        "except AssertionError as error:\n"
        "    print(error)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("the first adapter that finds it is quarry, expected other"), ran.stdout


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("fastshard_quarry/adapter.py", "import package_that_nobody_has\n"),
        ("fastshard_quarry/adapter.py", "class Other: pass\n"),
        ("fastshard_quarry/adapter.py", "1 / 0\n"),
        ("fastshard_quarry-1.0.dist-info/entry_points.txt", "no section = no\n"),
        (
            "fastshard_quarry-1.0.dist-info/entry_points.txt",
            "[fastshard.adapters]\nquarry = nowhere:Quarry\n",
        ),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named(file: str, text: str, site: Path, tmp_path: Path) -> None:
    (site / file).write_text(text)
    ran = run("inspect", HF, site=site, cwd=tmp_path)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    words = " ".join((ran.stdout + ran.stderr).split())
    assert "FS515" in words and "FASTSHARD_PLUGINS=off" in words
    assert "quarry" in words
    assert run("inspect", HF, site=site, cwd=tmp_path, plugins="off").returncode == 0


def test_nothing_of_the_current_directory_is_imported(site: Path, tmp_path: Path) -> None:
    """It may hold a checkpoint: `python -m` has it among the paths of imports."""
    (site / "fastshard_quarry/adapter.py").write_text("raise SystemExit('imported')\n")
    ran = run("inspect", HF, site=None, cwd=site)
    assert ran.returncode == 0 and "imported" not in ran.stderr, ran


@pytest.mark.parametrize(
    ("file", "text"),
    [
        # A package must not end a command as if all were well.
        ("fastshard_quarry/adapter.py", "raise SystemExit(0)\n"),
        ("fastshard_quarry/adapter.py", "class Quarry:\n    def __init__(self): raise ValueError('no')\n"),
        ("fastshard_quarry/adapter.py", "Quarry = None\n"),
        (
            "fastshard_quarry/adapter.py",
            "class Quarry:\n    name = 'quarry'\n    def detect(self, *_): raise KeyError('x')\n",
        ),
    ],
)
@pytest.mark.parametrize("verb", [("verify",), ("convert", "--to", "hf")])
def test_a_package_that_fails_is_named(
    verb: tuple[str, ...], file: str, text: str, site: Path, tmp_path: Path
) -> None:
    (site / file).write_text(text)
    paths = [tmp_path / "out"] if verb[0] == "convert" else []
    ran = run(verb[0], HF, *paths, *verb[1:], site=site, cwd=tmp_path)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    words = " ".join((ran.stdout + ran.stderr).split())
    assert "FS515" in words and "registers quarry as" in words and "FASTSHARD_PLUGINS=off" in words


def test_entry_points_that_cannot_be_read_are_a_finding_for_every_command(site: Path, tmp_path: Path) -> None:
    (site / "fastshard_quarry-1.0.dist-info/entry_points.txt").write_text("no section = no\n")
    for words in (("convert", HF, tmp_path / "out", "--to", "hf"), ("verify", HF), ("plan", HF)):
        ran = run(*words, site=site, cwd=tmp_path)
        assert ran.returncode == 2 and "FS515" in ran.stdout + ran.stderr, ran
        assert "Traceback" not in ran.stderr
    assert run("convert", "--help", site=site, cwd=tmp_path).returncode == 0


def test_entry_points_may_have_extras_and_dots(site: Path, tmp_path: Path) -> None:
    file = site / "fastshard_quarry-1.0.dist-info/entry_points.txt"
    file.write_text("[fastshard.adapters]\nquarry = fastshard_quarry.adapter:Outer.Quarry [extra]\n")
    with (site / "fastshard_quarry/adapter.py").open("a") as adapter:
        adapter.write("\n\nclass Outer:\n    Quarry = Quarry\n")
    assert run("verify", HF, site=site, cwd=tmp_path).returncode == 0


def test_a_table_that_is_not_valid_is_named(site: Path, tmp_path: Path) -> None:
    (site / "fastshard_quarry/layouts/quarry.llama.toml").write_text("layout = = 1\n")
    ran = run("convert", HF, tmp_path / "out", "--to", "hf", site=site, cwd=tmp_path)
    assert ran.returncode in (1, 2) and "quarry.llama.toml" in ran.stdout + ran.stderr, ran


def test_a_target_that_is_none_is_named(site: Path, tmp_path: Path) -> None:
    (site / "fastshard_quarry/target.py").write_text("QuarryTarget = None\n")
    ran = run("convert", HF, tmp_path / "out", "--to", "quarry", site=site, cwd=tmp_path)
    assert ran.returncode == 2 and "registers quarry as" in ran.stderr and "FS520" not in ran.stderr
