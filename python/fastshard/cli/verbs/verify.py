"""``fastshard verify``: completeness, integrity, and content against a manifest."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from ...checkpoint.missing_files import absent
from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.gate import ignored
from ...common.records import asdict
from ...findings.proof import list_unchecked
from ...verification.verify import verify
from ..shared_arguments import add_choosing, add_common, add_exit_zero, add_source, opening, progress
from ..verb import Outcome, Result, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser, like=True)
    parser.add_argument("--expect", metavar="FILE", help="compare with this manifest or config")
    parser.add_argument("--subset", metavar="n/t", help="read part n of t of the tensors")
    add_choosing(parser)
    group = parser.add_argument_group(
        "a signature of OpenSSF model-signing (needs the package model-signing)"
    )
    group.add_argument(
        "--signature",
        metavar="FILE",
        help="check that every file is as it was signed (model.sig); git's own files, such as "
        ".gitattributes and .github, are never signed",
    )
    group.add_argument(
        "--public-key", metavar="FILE", help="PEM file of the public key that matches the signing key"
    )
    group.add_argument(
        "--certificate-chain",
        action="append",
        default=[],
        metavar="FILE",
        help="or PEM files of the certificates above the signing certificate",
    )
    add_common(parser)
    add_exit_zero(parser)


def _run(a: argparse.Namespace) -> Outcome:
    subset = None
    if a.subset:
        given = re.fullmatch("([0-9]{1,18})/([0-9]{1,18})", a.subset)
        if given is None:
            raise FastshardError.of(codes.USAGE, "--subset", expected="n/t, e.g. 1/10", got=a.subset)
        subset = (int(given[1]), int(given[2]))
    options = opening(a)
    if options["config"] is None:
        del options["config"]
    verification = verify(
        a.ckpt,
        expect=a.expect,
        subset=subset,
        include=a.include,
        exclude=a.exclude,
        signature=a.signature,
        public_key=a.public_key,
        certificates=a.certificate_chain,
        memory=a.memory,
        progress=progress(a),
        **options,
    )
    findings = verification.findings
    errors = sum(f.severity == "error" for f in findings)
    warnings = sum(f.severity == "warning" and not ignored(f) for f in findings)
    document: dict[str, Any] = {"ok": not errors, "errors": errors, "warnings": warnings}
    if verification.checked is not None:
        document["checked"] = verification.checked.to_dict()
    below = ""
    if missing := absent(findings, a.ckpt):
        below = missing.describe() if missing.may_be_elsewhere else ""
        document["absent"] = asdict(missing)
    how = verification.checked
    return Result(
        document=document,
        below=below,
        unchecked=how.left() if how else None,
        unchecked_with_advice=_add_advice(how.left(), findings) if how else None,
        reason=how.told() if how else "",
    ), findings


def _add_advice(unchecked: Sequence[str], findings: list[Finding]) -> tuple[str, ...]:
    """Return what was not checked, with the advice of findings; empty if everything was checked."""
    if not unchecked:
        return ()
    of_findings = set(list_unchecked(findings))
    rest = [line for line in unchecked if line not in of_findings]
    return (*list_unchecked(findings, with_advice=True), *rest)


VERIFY = Verb(
    name="verify",
    help="check that all data is present and undamaged; reads every byte",
    description="""\
        Checks that a checkpoint is complete and undamaged. Reads every byte. With a manifest or a
        signature the contents are checked too. Files that were downloaded from the Hugging Face Hub are
        compared with the hashes in its cache or in --local-dir. A block of zeros in a tensor that is
        otherwise not zero is a warning (FS313): lost shards look like that. Lines that begin with `not
        checked` list what would go unnoticed.""",
    arguments=_arguments,
    run=_run,
    silent=True,
    finds=True,
    tells_unchecked=True,
    often=("--expect", "--like", "--subset", "--fail-on", "--ignore", "--output-format"),
    examples=("fastshard verify run", "fastshard verify model --fail-on warning --output-format github"),
)
