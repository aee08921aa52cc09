"""``fastshard make-part`` and ``fastshard commit``: a run in parts that can be written at any time."""

from __future__ import annotations

import argparse
import os
import re
import shlex

from ...checkpoint.manifests import MANIFEST_NAME
from ...common import codes
from ...common.errors import FastshardError
from ...common.formatting import counted
from ...common.records import dataclass
from ...conversion.distributed.split_runs import SplitRun, commit, make_part
from ...conversion.distributed.split_runs import split as split_run
from ..render import human
from ..shared_arguments import (
    add_common,
    add_exit_zero,
    add_shaping,
    add_source,
    add_target,
    add_writing,
    looks,
    opening,
    placing,
    progress,
    shape,
    writing,
)
from ..verb import Outcome, Result, Verb

#: Systems that can start the parts of a run.
EMITTERS = ("shell", "slurm", "k8s")


def _split_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    parser.add_argument(
        "out", metavar="OUT", help="destination directory, on storage that all hosts of the run see"
    )
    parser.add_argument("--parts", type=int, metavar="N", required=True, help="number of parts")
    parser.add_argument(
        "--emit", choices=EMITTERS, default="shell", help="kind of job script (default: shell)"
    )
    group = parser.add_argument_group("job scripts (--emit slurm, k8s)")
    group.add_argument(
        "--time", default="01:00:00", metavar="HH:MM:SS", help="time limit of each part (default: 01:00:00)"
    )
    group.add_argument("--cpus", type=int, default=4, metavar="N", help="CPU cores of each part (default: 4)")
    add_target(parser, required=False)
    add_shaping(parser)
    add_writing(parser)
    add_common(parser)
    add_exit_zero(parser)


def _split(a: argparse.Namespace) -> Outcome:
    looks(a, "a run in parts")
    if a.fsync != "full":
        raise FastshardError.of(
            codes.USAGE, "--fsync", expected="full, because several processes write the result", got=a.fsync
        )
    run = split_run(
        a.ckpt,
        a.out,
        a.to,
        parts=a.parts,
        **writing(a),
        **shape(a),
        **placing(a),
        **opening(a),
    )
    if not re.fullmatch(r"(?:[0-9]{1,3}-)?[0-9]{1,3}:[0-9]{2}:[0-9]{2}", a.time):
        raise FastshardError.of(codes.USAGE, "--time", expected="HH:MM:SS", got=a.time)
    if a.cpus < 1:
        raise FastshardError.of(codes.USAGE, "--cpus", expected="1 or more", got=str(a.cpus))
    text = emitted(run, a.emit, Job(a.time, a.cpus, run.memory))
    document = {"out": run.out, "run": run.id, "folder": run.folder, "parts": run.bytes, "emitted": text}
    return Result(text, document), run.findings


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="destination of the run")
    parser.add_argument(
        "--run", required=True, metavar="ID", help="the run's id, as `fastshard split` printed it"
    )
    add_common(parser)


def _part_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", type=int, metavar="I", help="number of the part, from 0")
    _run_arguments(parser)


def _part(a: argparse.Namespace) -> Outcome:
    is_new = make_part(a.out, a.part, a.run, memory=a.memory, threads=a.threads, progress=progress(a))
    text = (
        f"part {a.part} of {a.out}: {'made' if is_new else 'was made before'}; `fastshard commit` puts the "
        "result in place"
    )
    return Result(text, {"out": str(a.out), "part": a.part, "made": is_new}), []


def _commit(a: argparse.Namespace) -> Outcome:
    manifest = commit(a.out, a.run, memory=a.memory, threads=a.threads, progress=progress(a))
    files = manifest.tensor_files
    size = sum(f["size"] for f in files) if files else manifest.tensor_bytes
    text = f"{a.out}: {counted(len(manifest), 'tensor')}, {human(size)}, every byte hashed in {MANIFEST_NAME}"
    return Result(text, {"out": str(a.out), "tensors": len(manifest), "bytes": size}), manifest.findings


def quoted(path: str) -> str:
    """Quote a path as a word of a POSIX shell, in printable characters that expand to the real path.

    Raises:
        FastshardError: ``FS515`` for a path that ends in a line feed, which no command substitution keeps.
    """
    if path.isprintable():
        return shlex.quote(path)
    if path.endswith("\n"):
        raise FastshardError.of(codes.USAGE, "--out ends with a newline", help="choose another name")
    plain = frozenset(range(0x20, 0x7F)) - frozenset(b"'\\%")
    octal = "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in os.fsencode(path))
    return f"\"$(printf '{octal}')\""


@dataclass(frozen=True)
class Job:
    """Resources that a scheduler gives each part."""

    #: Time limit in Slurm's format.
    time: str
    cpus: int
    #: Memory limit of the process in bytes.
    memory: int

    @property
    def options(self) -> str:
        """Options that pass these resources to a part."""
        return f"--threads {self.cpus} --memory {self.memory >> 20}MiB"

    @property
    def mebibytes(self) -> int:
        """Memory to request: the process's limit, and the same amount again for the system's buffers."""
        return max(2 * self.memory >> 20, 1024)


def emitted(run: SplitRun, how: str, job: Job) -> str:
    """Write the commands that run all parts and commit the run, for a shell, Slurm or Kubernetes."""
    parts, out = len(run.bytes), quoted(run.out)
    options = "" if how == "shell" else f" {job.options}"
    part = f"fastshard make-part {{}} {out} --run {run.id}{options}"
    commit = f"fastshard commit {out} --run {run.id}"
    if how == "slurm":
        return "\n".join(
            [
                "#!/bin/sh",
                f"#SBATCH --job-name=fastshard-{run.id[:8]}",
                f"#SBATCH --time={job.time}",
                f"#SBATCH --cpus-per-task={job.cpus}",
                f"#SBATCH --mem={job.mebibytes}M",
                f"#SBATCH --output=fastshard-{run.id[:8]}-%A_%a.out",
                "# Run this where you submit jobs: an array makes the parts, and a job that depends on it "
                "commits them.",
                'if [ -n "$SLURM_ARRAY_TASK_ID" ]; then',
                "  exec " + part.format('"$SLURM_ARRAY_TASK_ID"'),
                "fi",
                f'job=$(sbatch --parsable --array=0-{parts - 1} "$0") || exit',
                f"sbatch --dependency=afterok:$job --job-name=fastshard-{run.id[:8]} --time={job.time} "
                f"--output=fastshard-{run.id[:8]}-commit.out --wrap {shlex.quote(commit)}",
            ]
        )
    if how == "k8s":
        return _kubernetes(parts, part.format('"$JOB_COMPLETION_INDEX"'), commit, run.id[:8], job)
    return "\n".join(
        [
            "#!/bin/sh",
            "# Run each line on any host that sees the destination and the sources, in any order; the last "
            "one when all are done.",
            "set -e",
            *(part.format(i) for i in range(parts)),
            commit,
        ]
    )


def _kubernetes(parts: int, part: str, commit: str, name: str, needs: Job) -> str:
    def job(what: str, spec: str, command: str) -> str:
        return f"""apiVersion: batch/v1
kind: Job
metadata:
  name: fastshard-{name}-{what}
spec:{spec}
  template:
    spec:
      restartPolicy: OnFailure
      containers:
        - name: fastshard
          image: IMAGE            # one that has fastshard
          command: ["sh", "-c"]
          args:
            - |
              {command}
          resources:
            requests: {{cpu: {needs.cpus}, memory: {needs.mebibytes}Mi}}
            limits: {{memory: {needs.mebibytes}Mi}}
          volumeMounts: []        # the storage of sources and destination, at these paths
      volumes: []"""

    indexed = f"""
  completions: {parts}
  parallelism: {parts}
  completionMode: Indexed"""
    # A pod that begins before the parts are made says which are missing, and is started again.
    retried = "\n  backoffLimit: 1000"
    return job("parts", indexed, part) + "\n---\n" + job("commit", retried, commit)


SPLIT = Verb(
    name="split",
    help="divide a merge or convert into N parts, for job arrays",
    arguments=_split_arguments,
    run=_split,
    often=("--to", "--vocab-size", "--dtype", "--emit", "--time", "--cpus", "--memory", "--resume"),
    examples=(
        "fastshard split run parted --to hf --vocab-size 500 --parts 2",
        "fastshard split run parted_slurm --parts 4 --emit slurm",
    ),
)
MAKE_PART = Verb(
    name="make-part",
    help="make one part of a run that was split",
    arguments=_part_arguments,
    run=_part,
    silent=True,
    often=("--memory", "--threads"),
    examples=("fastshard make-part 0 parted --run ID",),
)
COMMIT = Verb(
    name="commit",
    help="check all parts, then put the result in place",
    arguments=_run_arguments,
    run=_commit,
    silent=True,
    tells_unchecked=True,
    publishes=lambda a: getattr(a, "out", ""),
    often=("--memory", "--threads"),
    examples=("fastshard commit parted --run ID",),
)
