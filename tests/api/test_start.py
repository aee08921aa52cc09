"""Nothing is imported before it is needed, and all that is promised is there when it is."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
from fastshard.cli.verbs import VERBS
from fastshard.targets.registry import _PLACES
from helpers import FIXTURES


def loaded(script: str) -> set[str]:
    """Modules that a script loads beyond those that Python itself does."""
    told = (
        "import sys, json; before = set(sys.modules)\n{}\nprint(json.dumps(sorted(set(sys.modules) - "
        "before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", told.format(script)], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_loads_nothing_else() -> None:
    assert loaded("import fastshard") - {"__future__"} == {"fastshard"}
    assert "fastshard._core" in loaded("import fastshard; fastshard.__version__")


@pytest.mark.parametrize("argv", [["--version"], ["explain", "--help"]])
def test_the_command_line_loads_what_it_was_asked_for(argv: list[str]) -> None:
    script = f"from fastshard.cli import main\ntry: main({argv})\nexcept SystemExit: pass"
    more = loaded(script)
    verbs = {name for name in more if name.startswith("fastshard.cli.verbs.")}
    assert verbs == ({"fastshard.cli.verbs.explain"} if argv[0] == "explain" else set())
    assert not more & {"numpy", "yaml", "rich"}
    if argv == ["--version"]:
        assert not more & {
            "dataclasses",
            "typing",
            "fastshard.common.errors",
            "fastshard.checkpoint.checkpoint",
        }


#: Checkpoints, and the one package of ``sources`` besides Hugging Face's whose adapter reads them.
OWN_FRAMEWORK = {
    "sharded/hf_sharded": set(),
    "sharded/megatron_legacy_tp2_pp2": {"megatron", "dcp"},
    "deepspeed/zero1_bf16_dp2": {"deepspeed", "zero", "gpt_neox"},
    "sharded/dcp_fsdp2": {"dcp", "megatron", "zero"},
}
#: What looking at a small checkpoint has no use for.
USELESS = {
    "concurrent.futures",
    "dataclasses",
    "hashlib",
    "inspect",
    "numpy",
    "shutil",
    "subprocess",
    "tempfile",
    "tomllib",
    "yaml",
}


@pytest.mark.parametrize("path", OWN_FRAMEWORK)
def test_a_look_at_a_checkpoint_loads_what_reads_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here are no settings.
    monkeypatch.chdir(tmp_path)
    more = loaded(f"from fastshard.cli import main; main(['inspect', {str(FIXTURES / path)!r}])")
    folders = {file.name for file in (Path(fastshard.__file__).parent / "sources").iterdir() if file.is_dir()}
    frameworks = {name.split(".")[2] for name in more if name.startswith("fastshard.sources.")} & folders
    assert frameworks <= {"huggingface", *OWN_FRAMEWORK[path]}
    if not OWN_FRAMEWORK[path]:
        # Newer versions of Python load more of their own for a parser.
        of_parser = loaded(
            "import argparse; argparse.ArgumentParser(prog='x').add_subparsers(prog='x').add_parser('y')"
        )
        assert not more & (USELESS - of_parser)
        targets = {name for name in more if name.startswith("fastshard.targets.")}
        assert not targets & {f"fastshard.targets.{module}" for module, _ in _PLACES}


def test_every_public_name_is_there_and_in_its_home() -> None:
    assert sorted(fastshard._HOME_OF) == sorted(fastshard.__all__)
    for name in fastshard.__all__:
        assert getattr(fastshard, name).__name__ if name != "HISTOGRAM_EDGES" else fastshard.HISTOGRAM_EDGES
        assert name in dir(fastshard)
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        fastshard.opne  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(fastshard.__file__).read_text())
    typed = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {
        alias.name: node.module or alias.name
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == fastshard._HOME_OF


def test_no_module_has_the_name_of_a_function() -> None:
    """Importing it would put the module in the function's place."""
    script = (
        "import fastshard, pkgutil\nleft_out = ('.ray.', '__main__', 'integrations.')\n"
        "for found in pkgutil.walk_packages(fastshard.__path__, 'fastshard.'):\n"
        "    if not any(word in found.name for word in left_out): __import__(found.name)\n"
    )
    script += (
        "assert all(callable(getattr(fastshard, n)) for n in fastshard.__all__ if n[0].islower() and n not "
        "in ('integrations', 'layouts', 'ray'))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_verbs_are_called_what_their_places_say() -> None:
    assert [VERBS[verb.name] for verb in VERBS] == list(VERBS)


#: Modules that take signals over, or come before that.
FIRST_MODULES = ["fastshard.cli", "fastshard.cli.main", "fastshard.cli.parser", "fastshard._core"]


def start(module: str, when_imported: str) -> subprocess.CompletedProcess[str]:
    """Starts the command line; a statement is carried out when a module is imported."""
    script = (
        "import os, runpy, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: {when_imported}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['fastshard', 'explain']\n"
        "runpy.run_module('fastshard', run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", FIRST_MODULES)
def test_a_signal_before_anything_has_begun_says_nothing(module: str, number: int) -> None:
    done = start(module, f"os.kill(os.getpid(), {number})")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


@pytest.mark.parametrize(
    "error", ["MemoryError", "ImportError('_core.so: failed to map segment from shared object')"]
)
@pytest.mark.parametrize("module", FIRST_MODULES)
def test_a_program_that_memory_does_not_hold_says_so(module: str, error: str) -> None:
    done = start(module, f"raise {error}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error FS512: ") and "Traceback" not in done.stderr
