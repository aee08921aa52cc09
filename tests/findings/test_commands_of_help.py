"""The commands that findings advise run as they are printed, and what they are advised for is gone
afterwards."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from damage import CASES, EXAMPLES, made, shown
from fastshard.cli.parser import build, flags, subparsers
from helpers import FIXTURES, Ran, cli

#: Nothing here stands for a host, a repository, or a step and a size of somebody's choice.
ELSEWHERE = {"HOST", "REPO", "NAME", "N", "DIR", "GOOD", "git", "pip", "hf"}
#: What each case advises and is run here: a help that loses its command is noticed.
ADVISED = {
    "neox_swapped_ranks": ["--accept renamed"],
    "neox_no_config": ["--config"],
    "neox_latest_points_nowhere": ["--accept older-step"],
    "neox_norms_drifted": ["--replicas mean"],
    "zero1_stale_masters": ["master-weights", "--weights params"],
    "tp_copied_rank": ["--accept copies"],
    "FS115": ["mv", "merge"],
    "FS306": ["--accept non-finite"],
}
#: Packages that no extra of the tests brings, by the case that needs one.
NEEDS = {"FS315": "model_signing"}


ROOT = Path(__file__).parents[2]
#: Programs besides fastshard that a help may name; none of them removes a file.
OTHERS = {"git", "hf", "pip", "mv", "cp", "rsync"}


def _literal(node: ast.expr) -> str | None:
    """A string of the source; what is put into it is a word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
    return None


def _advised() -> set[str]:
    """Every command that a finding of the sources advises."""
    found = set()
    for file in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.keyword) and node.arg == "run"):
                continue
            lists = [part for part in ast.walk(node.value) if isinstance(part, ast.List)]
            found |= {text for part in lists for one in part.elts if (text := _literal(one))}
    for file in (ROOT / "rust").rglob("*.rs"):
        for literal in re.findall(r'\.run\((?:format!\()?"((?:[^"\\]|\\.)*)"', file.read_text()):
            found.add(re.sub(r"\{[^}]*\}", "X", literal))
    return found


def test_every_command_that_a_help_advises_is_one() -> None:
    advised = _advised()
    assert len(advised) > 50 and {"--config FILE", "fastshard merge CKPT OUT", "--resume"} <= advised
    verbs = {name: set(flags(parser)) for name, parser in subparsers(build()).items()}
    for command in advised:
        words = shlex.split(command)
        if words[0].startswith("--"):
            named = [word for word in words if word.startswith("--")]
            assert any(set(named) <= of for of in verbs.values()), command
        elif words[0] == "fastshard":
            assert words[1] in verbs, command
            assert all(word in verbs[words[1]] for word in words[2:] if word.startswith("-")), command
        else:
            assert words[0] in OTHERS, command


def find_helps() -> set[str]:
    """Finds every help of the sources, in the words that do not depend on the checkpoint."""
    helps = set()
    for file in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "help":
                helps |= {text for part in ast.walk(node.value) if (text := _literal(part))}  # type: ignore[arg-type]
    for file in (ROOT / "rust").rglob("*.rs"):
        for literal in re.findall(r'\.help\((?:format!\()?"((?:[^"\\]|\\.)*)"', file.read_text()):
            helps.add(re.sub(r"\\\n *", "", literal))
    return helps


#: Options of other programs that a help names.
OPTIONS_OF_OTHERS = {
    "--dist-ckpt-optim-fully-reshardable",  # Megatron-LM
    "--no-load-optim",  # Megatron-LM
}
#: What a help may have removed: leavings of fastshard's own runs, and what a finding shows to be of another
#: save.
REMOVED = {
    "continue it, or remove what it left behind",
    "continue the run, or remove what it left behind",
    "copy the step if it is the one you want; else delete the tracker file",
    "check it and remove it, or choose a destination in your own directory; somebody else made or opened it",
    "check the destination and the directory, which may hold the previous files; then remove it and run "
    "again",
    "make the part again on its host, or remove the file",
    "run the command, or remove the complete result, which is kept in ",
    "run the command, or remove the complete result, which is kept in X",
    "also remove this run, although it could be continued",
    "remove what interrupted runs left behind",
    "list what would be removed, and remove nothing",
    "start afresh: remove the directory, and run again without --resume",
    "start afresh: remove the directory, which another version wrote",
    "start afresh: remove the directory; the sources or options have changed",
    "start afresh: remove the staging directory",
}


def test_a_help_names_options_and_verbs_that_exist_and_has_no_file_of_a_checkpoint_removed() -> None:
    helps = find_helps()
    assert len(helps) > 400
    parsers = {name: set(flags(parser)) for name, parser in subparsers(build()).items()}
    options = set().union(*parsers.values())
    for text in helps:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))
        assert named <= options | OPTIONS_OF_OTHERS, text
        assert set(re.findall(r"`fastshard ([a-z][a-z-]*)", text)) <= parsers.keys(), text
        assert text in REMOVED or not re.search(r"\b(remove|removed|delete|rm)\b", text), text
    assert helps >= REMOVED


def _config(name: str) -> str:
    """The config that the checkpoint of a case was trained with."""
    fixture = FIXTURES / (CASES[name][0] if name in CASES else EXAMPLES[name].fixture)
    if training := sorted(fixture.glob("*/configs/*.yml")):
        return str(training[0])
    return str(fixture / "config.json")


def _done(name: str, command: str) -> Ran | None:
    """A command as it was printed, carried out where nothing in it is missing here."""
    words = shlex.split(command)
    words = ["result" if word == "OUT" else _config(name) if word == "FILE" else word for word in words]
    if ELSEWHERE & set(words):
        return None
    if words[0] != "fastshard":
        subprocess.run(words, check=True)
        return None
    ran = cli(*words[1:])
    shutil.rmtree("result", ignore_errors=True)
    return ran


# The layout of FS213 asks for what no config of the model states.
@pytest.mark.parametrize("name", [*CASES, *(code for code in EXAMPLES if code != "FS213")])
def test_the_commands_of_a_help_mend_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="pip install '.[sign]'")
    monkeypatch.chdir(tmp_path)
    if name in CASES:
        made(name, tmp_path / "run")
        command = "verify run"
    else:
        command = shown(name, tmp_path)
    first = cli(*command.split())
    advised = {tuple(error.get("run", ())): error for error in first.errors}
    commands = [command for run in advised for command in run]
    for option in ADVISED.get(name, ()):
        assert any(option in command for command in commands), (option, commands)
    for run, error in advised.items():
        for command in run:
            after = _done(name, command)
            if after is not None:
                left = {(found["code"], found["message"]) for found in after.errors}
                assert (error["code"], error["message"]) not in left, (command, after.out)
                # With several errors another may be left; no command is one that cannot be run.
                assert after.code == 0 or (len(advised) > 1 and after.code in (1, 3)), (command, after.out)
