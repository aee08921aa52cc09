"""Blocks that cannot run here, and data: held against the program's own parsers, the repository and
schemas."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import blocks
import jsonschema
import pytest
import tomlkit
import yaml
from blocks import ROOT, Block
from fastshard import layouts
from fastshard.cli.main import parse
from fastshard.cli.parser import UsageError
from fastshard.cli.verbs import VERBS

HERE = Path(__file__).parent
PROJECT = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

#: Options of launchers that pages show: how many values each takes. source: `srun --help`, `mpirun --help`,
#: torch.distributed.run, the options of `ray job submit`
LAUNCHERS: dict[str, dict[str, int]] = {
    "srun": {"-N": 1, "-n": 1, "--ntasks-per-node": 1},
    "mpirun": {"-np": 1},
    "torchrun": {"--nnodes": 1, "--nproc-per-node": 1, "--no-python": 0},
}
#: Options of sbatch that pages show. source: `sbatch --help`
SBATCH = (
    "--job-name",
    "--nodes",
    "--ntasks-per-node",
    "--cpus-per-task",
    "--mem",
    "--time",
    "--output",
    "--array",
    "--dependency",
    "--parsable",
    "--wrap",
    "--partition",
)


class Wrong(Exception):
    """A block that is not what the program, the repository or a schema takes."""


def check(block: Block, folder: Path) -> None:
    """A block that cannot run here.

    Raises:
        Wrong: with its place and what it should be.
    """
    try:
        text = block.text
        if block.language == "console":
            text = "\n".join(command.text for command in blocks.commands(block)) + "\n"
        script(text, folder)
    except Wrong as wrong:
        raise Wrong(f"{block.where}: {wrong}") from None


def script(text: str, folder: Path) -> None:
    """Lines for a shell: its grammar, what each program is given, and Slurm's lines."""
    grammar = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    if grammar.returncode:
        raise Wrong(grammar.stderr)
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            sbatch(shlex.split(line)[1:], folder)
    for words in simple_commands(text):
        program = words[0].rpartition("/")[2]
        if program not in PROGRAMS:
            raise Wrong(f"nothing is known of {program!r}: run it, or add it to tests/docs/checking.py")
        PROGRAMS[program](words[1:], folder)


def simple_commands(text: str) -> list[list[str]]:
    """The words of each simple command, without assignments before it, redirections, and words of the
    shell."""
    lexer = shlex.shlex(
        text.replace("\\\n", " ").replace("\n", " ;\n"), posix=True, punctuation_chars=";&|()<>"
    )
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if set(word) <= set(";&|()"):
            found.append([])
        elif set(word) <= set("<>&"):
            redirected = True
        elif redirected:
            redirected = False
        elif not found[-1] and word == "for":
            # What it runs follows the next `do`.
            found[-1].append("set")
        elif not found[-1] and (
            re.match(r"^\w+=", word)
            or word in ("if", "then", "fi", "exec", "else", "while", "do", "done", "!")
        ):
            continue
        else:
            found[-1].append(word)
    return [words for words in found if words]


def fastshard(words: list[str], _folder: Path) -> None:
    """Flags and verbs of the documentation exist, and values have their types."""
    try:
        # What a scheduler fills in is a number.
        parse([re.sub(r"^\$\w+$", "0", word) for word in words], VERBS)
    except UsageError as error:
        raise Wrong(f"fastshard {' '.join(words)}: {error}") from None


def launcher(name: str) -> Callable[[list[str], Path], None]:
    def checked(words: list[str], folder: Path) -> None:
        rest = list(words)
        while rest and rest[0].startswith("-"):
            if rest[0] not in LAUNCHERS[name]:
                raise Wrong(f"{name} {rest[0]}: not among the options that are known here")
            del rest[: 1 + LAUNCHERS[name][rest[0]]]
        program(rest, folder)

    return checked


def program(words: list[str], folder: Path) -> None:
    """What a launcher starts."""
    if not words or words[0] not in PROGRAMS:
        raise Wrong(f"no program that is known: {' '.join(words)}")
    PROGRAMS[words[0]](words[1:], folder)


def sbatch(words: list[str], folder: Path) -> None:
    """Options of sbatch, and the script that it is given."""
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("-"):
            if name not in SBATCH or (not value and name not in ("--parsable", "--wrap")):
                raise Wrong(f"sbatch {word}: not an option that is known here")
        elif (folder / name).is_file():
            script((folder / name).read_text(encoding="utf-8"), folder)
        elif words[words.index(word) - 1] == "--wrap":
            script(name, folder)
        elif not name.startswith("$"):
            raise Wrong(f"sbatch {name}: no such file on the page")


def sh(words: list[str], folder: Path) -> None:
    """A script of the repository, or one that a command before it has written."""
    for root in (ROOT, folder):
        if (root / words[0]).is_file():
            script((root / words[0]).read_text(encoding="utf-8"), folder) if root == folder else None
            return
    raise Wrong(f"{words[0]}: no such file")


def kubectl(words: list[str], folder: Path) -> None:
    """`kubectl apply -f FILE`: the manifests against a schema of Jobs, their commands by the program's
    parser."""
    if words[:2] != ["apply", "-f"] or len(words) != 3:
        raise Wrong(f"kubectl {' '.join(words)}: only `apply -f FILE` is known here")
    for document in yaml.safe_load_all((folder / words[2]).read_text(encoding="utf-8")):
        kubernetes(document, folder)


def kubernetes(document: Any, folder: Path) -> None:
    """A Job."""
    valid(document, "k8s_job.schema.json")
    for container in document["spec"]["template"]["spec"]["containers"]:
        for text in container.get("args", []):
            script(text, folder)


def pip(words: list[str], _folder: Path) -> None:
    """Extras and groups exist."""
    extras = PROJECT["project"]["optional-dependencies"]
    for before, word in pairwise(words):
        if before == "--group" and word not in PROJECT["dependency-groups"]:
            raise Wrong(f"pip --group {word}: pyproject.toml has no such group")
    for word in words:
        match = re.fullmatch(r"(?:fastshard|\.)\[([\w,-]+)\]", word)
        if lacking := set(match[1].split(",") if match else ()) - set(extras):
            raise Wrong(f"pip {word}: pyproject.toml has no extra {lacking}")


def python(words: list[str], folder: Path) -> None:
    """Modules and scripts exist."""
    if words[:2] == ["-m", "fastshard"]:
        fastshard(words[2:], folder)
    elif words[0] == "-m":
        if words[1] not in ("venv", "pytest", "fastshard.examples"):
            raise Wrong(f"python -m {words[1]}: not known here")
    elif not (ROOT / words[0]).is_file():
        raise Wrong(f"python {words[0]}: no such file")
    else:
        source = (ROOT / words[0]).read_text(encoding="utf-8") + "".join(
            path.read_text(encoding="utf-8") for path in (ROOT / words[0]).parent.glob("*.py")
        )
        options(words[1:], source, words[0])


def options(words: list[str], source: str, what: str) -> None:
    """Options that a program of the repository has, by its source."""
    for word in words:
        if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source:
            raise Wrong(f"{what} has no {word}")


def tests(words: list[str], _folder: Path) -> None:
    """Paths exist, and options are pytest's or the repository's."""
    for word in words:
        if "/" in word and not (ROOT / word).exists():
            raise Wrong(f"pytest {word}: no such path")
    options(
        [word for word in words if word.startswith("--")],
        (ROOT / "tests/conftest.py").read_text(encoding="utf-8"),
        "pytest",
    )


def just(words: list[str], _folder: Path) -> None:
    """Recipes exist."""
    recipes = (ROOT / "justfile").read_text(encoding="utf-8")
    if not re.search(rf"^{words[0]}:", recipes, re.MULTILINE):
        raise Wrong(f"just {words[0]}: no such recipe")


def cargo(words: list[str], _folder: Path) -> None:
    """Tests that are named exist."""
    if "--test" in words:
        name = words[words.index("--test") + 1]
        if not list(ROOT.glob(f"rust/*/tests/{name}*")):
            raise Wrong(f"cargo --test {name}: no such test")


def mkdocs(words: list[str], _folder: Path) -> None:
    """Its two commands."""
    if words[0] not in ("build", "serve"):
        raise Wrong(f"mkdocs {words[0]}")


def ray(words: list[str], folder: Path) -> None:
    """A job whose command is one of ours."""
    if words[:3] != ["job", "submit", "--"]:
        raise Wrong(f"ray {' '.join(words)}: only `job submit -- COMMAND` is known here")
    program(words[3:], folder)


def aws(words: list[str], _folder: Path) -> None:
    """An upload of a folder."""
    if words[:2] != ["s3", "sync"] or len(words) != 4 or not words[3].startswith("s3://"):
        raise Wrong(f"aws {' '.join(words)}: only `s3 sync FOLDER s3://BUCKET/PREFIX` is known here")


def anything(_words: list[str], _folder: Path) -> None:
    """A program whose words say nothing about this repository."""


PROGRAMS: dict[str, Callable[[list[str], Path], None]] = {
    "fastshard": fastshard,
    **{name: launcher(name) for name in LAUNCHERS},
    "sbatch": sbatch,
    "kubectl": kubectl,
    "sh": sh,
    "bash": sh,
    "pip": pip,
    "python": python,
    "python3": python,
    "pytest": tests,
    "just": just,
    "cargo": cargo,
    "ray": ray,
    "mkdocs": mkdocs,
    "aws": aws,
    **dict.fromkeys(
        (
            ".",
            "maturin",
            "rsync",
            "git",
            "apt-get",
            "echo",
            "exit",
            "set",
            "[",
            "true",
            "cd",
            "cp",
            "rm",
            "sleep",
            "env",
            "eval",
            "export",
        ),
        anything,
    ),
}


# --- data


def valid(document: Any, schema: str) -> None:
    """A document against a schema of this folder or of the package."""
    found = next(
        p for p in (HERE / "schemas" / schema, ROOT / "python/fastshard/schemas" / schema) if p.is_file()
    )
    try:
        jsonschema.validate(document, json.loads(found.read_text(encoding="utf-8")))
    except jsonschema.ValidationError as error:
        raise Wrong(f"{error.json_path}: {error.message}") from None


def validate(block: Block) -> None:
    """Data, by what will read it; code by its compiler."""
    try:
        if block.language == "toml":
            toml(block)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                yaml_document(document, block)
        elif block.language == "python":
            compile(block.text, block.where, "exec")
        elif block.language == "sh":
            script(block.text, Path())
        elif block.language != "text":
            raise Wrong(f"a file of {block.language!r}: nothing validates it")
    except Wrong as wrong:
        raise Wrong(f"{block.where}: {wrong}") from None
    except (ValueError, SyntaxError) as error:
        raise Wrong(f"{block.where}: {error}") from None


def toml(block: Block) -> None:
    """Layout tables by the loader that reads them; others as TOML."""
    if "layout" in tomlkit.parse(block.text):
        layouts.parse(block.text)


def yaml_document(document: Any, block: Block) -> None:
    """A workflow, a Job, or plain YAML."""
    if not isinstance(document, dict):
        raise Wrong("no mapping")
    if document.get("kind") == "Job":
        kubernetes(document, Path())
    elif "jobs" in document:
        workflow(block.text)
        for job in document["jobs"].values():
            for step in job["steps"]:
                script(step.get("run", ""), Path())
                if step.get("uses", "").startswith("fastshard/fastshard@"):
                    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
                    if lacking := set(step.get("with", {})) - set(inputs):
                        raise Wrong(f"action.yml has no input {', '.join(sorted(lacking))}")
    elif block.title is None:
        raise Wrong("neither a workflow nor a Job: nothing validates it")


def workflow(text: str) -> None:
    """A workflow of GitHub Actions, against the schema that check-jsonschema brings along."""
    pytest.importorskip("check_jsonschema", reason="pip install --group docs")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.github-workflows",
            "--default-filetype",
            "yaml",
            "-",
        ],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise Wrong(done.stdout)


# --- blocks that other tests run


def other_test(block: Block) -> None:
    """The test that runs it does."""
    where, call = {
        "ci": (".ci/run", rf"^  readme {block.reason}$"),
        "run": ("tests/real_ray/test_cluster.py", rf'block\("{block.reason}"'),
    }[block.mark or ""]
    if not re.search(call, (ROOT / where).read_text(encoding="utf-8"), re.MULTILINE):
        raise Wrong(f"{block.where}: {where} does not run {block.reason!r}")
