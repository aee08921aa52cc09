"""Refuses a checkpoint that is broken, says why, and converts one that is not: `python examples/gate.py CKPT
OUT`."""

from __future__ import annotations

import sys

import fastshard


def main(checkpoint: str, out: str) -> int:
    """Checks, then converts; the exit code is that of the command line."""
    verdict = fastshard.verify(checkpoint)
    for finding in verdict:
        if finding.severity != "note":
            print(f"{finding.severity} {finding.code}: {finding}", file=sys.stderr)
            if finding.help:
                print(f"  help: {finding.help}", file=sys.stderr)
    try:
        verdict.raise_for_errors()
        manifest = fastshard.convert(checkpoint, out, to="hf")
    except fastshard.FastshardError as error:
        return error.exit_code
    print(f"{out}: {len(manifest)} tensors, every one hashed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
