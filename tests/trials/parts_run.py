"""A run in two parts, from the division to the commit. Run as ``parts_run.py CKPT OUT [--overwrite]``."""

import sys

import fastshard


def main() -> int:
    """Exit code 0, or that of the error."""
    source, out = sys.argv[1:3]
    try:
        run = fastshard.split(
            source, out, parts=2, overwrite="--overwrite" in sys.argv, max_shard_size="600KB"
        )
        for part in range(2):
            fastshard.make_part(out, part, run.id, threads=1)
        manifest = fastshard.commit(out, run.id, threads=1)
    except fastshard.FastshardError as error:
        for finding in error.findings:
            print(f"error {finding.code}: {finding} help: {finding.help}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        # As Python's own calls raise it where a source cannot be looked at.
        print(f"error: {error} help: look at this path", file=sys.stderr)
        return 2
    for finding in manifest.findings:
        print(f"{finding.severity} {finding.code}: {finding}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
