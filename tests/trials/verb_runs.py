"""Every verb that reads a checkpoint, as a command over one: for series that run all verbs over many
inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fastshard.cli.verbs import VERBS

#: Verbs that read no checkpoint, and why.
READS_NONE = {
    "expected": "reads a config",
    "check-storage": "reads what ranks wrote to see each other",
    "clean": "reads what interrupted runs left",
    "explain": "has only its own text",
    "completion": "has only its own text",
    "man": "has only its own text",
}
#: Arguments of the others; a verb stands below the verbs whose results it takes.
ARGUMENTS = {
    "inspect": ["CKPT"],
    "ls": ["CKPT"],
    "stats": ["CKPT"],
    "trace": ["CKPT", "TENSOR"],
    "report": ["CKPT", "-o", "OUT/report.html"],
    "plan": ["CKPT"],
    "verify": ["CKPT"],
    "diff": ["CKPT", "CKPT"],
    "manifest": ["CKPT", "-o", "OUT/manifest.json"],
    "master-weights": ["CKPT"],
    "zero-to-fp32": ["CKPT", "OUT/fp32"],
    "consolidate": ["CKPT", "OUT/consolidated"],
    "convert": ["CKPT", "OUT/converted", "--to", "TARGET"],
    "copy-local": ["CKPT", "OUT/part"],
    "merge": ["CKPT", "OUT/merged"],
    "attest": ["OUT/merged"],
    "split": ["CKPT", "OUT/parted", "--parts", "2"],
    "make-part": ["0", "OUT/parted", "--run", "RUN"],
    "commit": ["OUT/parted", "--run", "RUN"],
}
#: Verbs that are not asked how a checkpoint is opened.
TAKES_NO_OPENING = {"attest", "make-part", "commit", "zero-to-fp32"}
#: Verbs whose result another one takes.
KEPT = {"merge": "attest", "split": "commit", "make-part": "commit"}


@dataclass(frozen=True)
class Input:
    """A checkpoint and how it is opened."""

    path: Path
    #: Name of a tensor of its result.
    tensor: str = ""
    options: tuple[str, ...] = ()
    target: str = "dcp"


def list_verbs() -> list[str]:
    """Names of the verbs that read a checkpoint, in an order in which they can run.

    Raises:
        SystemExit: if a verb is in neither table.
    """
    unknown = {verb.name for verb in VERBS} ^ {*ARGUMENTS, *READS_NONE}
    if unknown:
        raise SystemExit(f"verb_runs.py has no row, or one too many, for {', '.join(sorted(unknown))}")
    return list(ARGUMENTS)


def make_arguments(verb: str, given: Input, out: Path, run_id: str) -> list[str]:
    """Arguments of a verb over an input, with its results in the folder ``out``."""
    words = {"CKPT": str(given.path), "TENSOR": given.tensor, "TARGET": given.target, "RUN": run_id}
    argv = [words.get(word, word.replace("OUT/", f"{out}/")) for word in ARGUMENTS[verb]]
    return [verb, *argv, *(() if verb in TAKES_NO_OPENING else given.options)]


def find_run_id(output: str) -> str:
    """The run that ``split`` began; empty if it began none."""
    match = re.search(r"--run (\w{32})", output)
    return match.group(1) if match else ""
