"""Small checkpoints to try commands on: ``python -m fastshard.examples gpt_neox run --to gpt_neox --tp 2``.

The weights are random but the same in every run. OUT then contains the files of a training run or of a
published model, without a manifest.
"""

# The public path; the code is in fastshard.conversion.examples.
from .conversion.examples import CONFIGS, main, make, tensors

__all__ = ["CONFIGS", "main", "make", "tensors"]

if __name__ == "__main__":
    raise SystemExit(main())
