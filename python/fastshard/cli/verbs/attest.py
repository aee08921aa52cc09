"""``fastshard attest``: a statement about a published result."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...verification.attest import STATEMENT_NAME
from ...verification.attest import attest as make_statement
from ..shared_arguments import add_common, progress
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ckpt", metavar="CKPT", help="a result of fastshard, or a directory with a manifest")
    parser.add_argument("-o", "--output", metavar="FILE", help=f"default: {STATEMENT_NAME} in CKPT")
    parser.add_argument(
        "--no-verify",
        action="store_true",
        help="copy the hashes from the manifest without checking the files against them",
    )
    add_common(parser)


def _run(a: argparse.Namespace) -> Outcome:
    statement = make_statement(
        a.ckpt, a.output, verify=not a.no_verify, memory=a.memory, threads=a.threads, progress=progress(a)
    )
    path = a.output or Path(a.ckpt) / STATEMENT_NAME
    files = [s for s in statement["subject"] if "sha256" in s["digest"]]
    tensors = len(statement["subject"]) - len(files)
    text = f"{path}: SHA-256 of {len(files)} files, BLAKE3 of {tensors} tensors"
    return Result(text, {"statement": str(path), "files": len(files), "tensors": tensors}), []


ATTEST = Verb(
    name="attest",
    help="write an in-toto statement about a result, ready to sign",
    description="""\
        Compares a result with its manifest and writes an in-toto statement about it: the SHA-256 of each
        file (the id that Git LFS and the Hugging Face Hub use), the BLAKE3 of each tensor, and the sources
        of the result. The statement is not signed. To sign the directory with your own key: model_signing
        sign key CKPT. --overwrite does not replace a result that holds a statement or a signature, because
        both describe the files of that result.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    often=("--output",),
    examples=("fastshard attest model",),
)
