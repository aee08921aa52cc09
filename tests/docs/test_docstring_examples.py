"""The examples of public names: each runs in a folder with the checkpoints of docs/example_checkpoints.py,
and every public name has one."""

from __future__ import annotations

import ast
import doctest
import inspect
import runpy
import shutil
from pathlib import Path
from typing import Any

import fastshard
import pytest
from blocks import ROOT
from fastshard.integrations import save_guard
from fastshard.layouts import tables
from helpers import FIXTURES

#: Public names without an example, and why.
WITHOUT = {"HISTOGRAM_EDGES": "a constant has no docstring"}
#: Examples that need an extra which the group `test` does not install.
NEEDS = {"ray.convert": "ray", "ray.merge": "ray"}


def public() -> dict[str, Any]:
    """The public names; of a module those of its names that it calls public."""
    found: dict[str, Any] = {}
    for name in sorted(fastshard.__all__):
        value = getattr(fastshard, name)
        if inspect.ismodule(value):
            found |= {f"{name}.{member}": getattr(value, member) for member in value.__all__}
        else:
            found[name] = value
    return found


def docstring(value: Any) -> str:
    """The docstring that the site shows: of a class of the core that of its stub."""
    if getattr(fastshard._core, getattr(value, "__name__", ""), None) is not value:
        return inspect.getdoc(value) or ""
    stub = ast.parse((ROOT / "python/fastshard/_core.pyi").read_text(encoding="utf-8"))
    (node,) = (n for n in stub.body if isinstance(n, ast.ClassDef) and n.name == value.__name__)
    return ast.get_docstring(node) or ""


def examples(name: str, value: Any) -> doctest.DocTest:
    section = docstring(value).partition("\nExamples:\n")[2]
    return doctest.DocTestParser().get_doctest(section, {"fastshard": fastshard}, name, None, None)


EXAMPLES = {name: test for name, value in public().items() if (test := examples(name, value)).examples}


def test_every_public_name_has_an_example() -> None:
    assert set(public()) - set(EXAMPLES) == set(WITHOUT)
    # Others would not be run here.
    outside = {name: docstring(value).partition("\nExamples:\n")[0] for name, value in public().items()}
    assert not [name for name, text in outside.items() if ">>> " in text]


def test_no_example_is_skipped() -> None:
    assert not [
        name for name, test in EXAMPLES.items() if any(doctest.SKIP in e.options for e in test.examples)
    ]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that the examples name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(ROOT / "docs/example_checkpoints.py"))
    shutil.copytree(FIXTURES / "stale_masters_zero1_bf16_dp2", folder / "stale")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_example_is_true(
    name: str, checkpoints: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(shutil.copytree(checkpoints, tmp_path / "folder"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS", raising=False)
    # What examples change in this process.
    monkeypatch.setattr(tables, "_registered", {})
    monkeypatch.setattr(save_guard, "_current", None)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(EXAMPLES[name], out=printed.append)
    if save_guard._current is not None:
        save_guard._current.results(timeout=60)
    assert not failed, "".join(printed)
