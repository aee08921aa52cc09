"""Completion in the real shells, and manual pages through the real formatters."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastshard.cli.parser import build, subparsers
from fastshard.cli.verbs import VERBS
from fastshard.cli.verbs.completion import SHELLS
from fastshard.targets.registry import TARGETS
from helpers import cli
from holding import HANG


def needs(program: str) -> str:
    """The path of a program; where it is absent the test is skipped, unless the run must have it."""
    found = shutil.which(program)
    if found is None:
        assert "FASTSHARD_NEED_SHELLS" not in os.environ, f"{program} is not installed"
        pytest.skip(f"needs {program}")
    return found


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    script = tmp_path_factory.mktemp(name) / ("_fastshard" if name == "zsh" else f"fastshard.{name}")
    script.write_text(cli("completion", name, json_output=False).out)
    return name, script


#: Types a line and presses Tab twice; what the shell lists stands between the marks.
ZSH = r"""
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z "PS1=; stty -echo; unsetopt beep; zstyle ':completion:*' verbose no; LISTMAX=0"
zpty -w z "fpath=({folder} \$fpath); autoload -U compinit; compinit -u -D"
zpty -w z "zstyle ':completion:*' list-prompt ''; print BEG''IN"
while zpty -r z line; do [[ $line == *BEGIN* ]] && break; done
zpty -n -w z "{line}"$'\t\t'
sleep 1
zpty -n -w z $'\x03'
zpty -w z "print; print E''ND"
while zpty -r z line; do [[ $line == *END* ]] && break; print -r -- $line; done
zpty -d z
"""


def completed(shell: tuple[str, Path], line: str, cwd: Path) -> set[str]:
    """The words that a shell offers for the last word of a line."""
    name, script = shell
    program = needs(name)
    if name == "fish":
        command = [program, "--no-config", "-c", f"source {script}; complete -C {line!r}"]
    elif name == "bash":
        words = line.split(" ")
        text = f"""
source {script}
COMP_LINE={line!r}; COMP_POINT={len(line)}
COMP_WORDS=({" ".join(repr(w) for w in words)}); COMP_CWORD={len(words) - 1}
$(complete -p fastshard | sed -n 's/.*-F \\([^ ]*\\).*/\\1/p') fastshard {words[-1]!r} {words[-2]!r}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        command = [program, "--norc", "-c", text]
    else:
        command = [program, "-f", "-c", ZSH.replace("{folder}", str(script.parent)).replace("{line}", line)]
    env = {**os.environ, "HOME": str(cwd), "TERM": "dumb", "COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd, env=env, timeout=HANG)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", done.stdout)
    if name == "fish":
        return {row.split("\t")[0].rstrip("/") for row in shown.splitlines()}
    return {word.rstrip("/") for word in shown.split()}


def test_commands_flags_values_and_paths(shell: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "global_step4").mkdir()
    if shell[0] == "zsh":
        # All that is offered: zsh lists it with what it means.
        offered = completed(shell, "fastshard ", tmp_path)
        assert {"inspect", "merge", "verify", "make-part"} <= offered
        assert "sarif" in completed(shell, "fastshard verify --output-format ", tmp_path)
        return
    assert {verb.name for verb in VERBS} <= completed(shell, "fastshard ", tmp_path)
    assert completed(shell, "fastshard ins", tmp_path) == {"inspect"}
    assert completed(shell, "fastshard convert --tok", tmp_path) == {"--tokenizer"}
    assert {"sarif"} <= completed(shell, "fastshard verify --output-format s", tmp_path)
    assert {t for t in TARGETS if ":" not in t} <= completed(shell, "fastshard convert --to ", tmp_path)
    assert "global_step4" in completed(shell, "fastshard inspect glob", tmp_path)


def test_an_unknown_shell_is_named() -> None:
    assert "did you mean bash?" in cli("completion", "bsh", json_output=False).err


PAGES = [None, *(verb.name for verb in VERBS)]


@pytest.mark.parametrize("command", PAGES)
def test_manual_pages_format_without_a_warning(command: str | None) -> None:
    text = cli("man", *([command] if command else []), json_output=False).out
    done = subprocess.run(
        [needs("groff"), "-man", "-Tutf8", "-ww", "-z"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", PAGES)
def test_manual_pages_say_what_help_says(command: str | None) -> None:
    text = cli("man", *([command] if command else []), json_output=False).out
    done = subprocess.run(
        [needs("groff"), "-man", "-Tascii", "-P-c", "-P-b", "-P-u", "-rLL=1000n"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    page = re.sub(r"\s+", " ", done.stdout)
    parser = build() if command is None else subparsers(build())[command]
    listed = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    assert all(flag in page for action in listed for flag in action.option_strings)
    for action in listed:
        if action.help and action.option_strings:
            told = re.sub(r"\s+", " ", action.help % {**vars(action), "prog": "fastshard"})
            assert told in page
    if command is None:
        assert all(f" {verb.name} " in page for verb in VERBS)


def test_a_page_that_there_is_not() -> None:
    ran = cli("man", "convret", json_output=False)
    assert ran.code == 2 and "did you mean convert?" in ran.err
