"""A conversion script as users write it: tensors one by one into OUT. Run as ``writer_run.py OUT
[--overwrite]``."""

import sys

import fastshard
import numpy as np

SHAPE = (128, 64)
NAMES = [f"block.{i}.weight" for i in range(12)]


def main() -> int:
    """Exit code 0, or that of the error."""
    arrays = {name: np.random.default_rng(i).standard_normal(SHAPE, "f4") for i, name in enumerate(NAMES)}
    expected = dict.fromkeys(NAMES, ("F32", SHAPE))
    config = {"model_type": "test"}
    try:
        with fastshard.Writer(
            sys.argv[1],
            expected=expected,
            max_shard_size="100KB",
            overwrite="--overwrite" in sys.argv,
            config=config,
        ) as writer:
            for name, array in arrays.items():
                writer[name] = array
    except fastshard.FastshardError as error:
        for finding in error.findings:
            print(f"error {finding.code}: {finding} help: {finding.help}", file=sys.stderr)
        return int(error.exit_code)
    assert writer.manifest is not None
    for finding in writer.manifest.findings:
        print(f"{finding.severity} {finding.code}: {finding}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
