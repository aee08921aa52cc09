"""Small checkpoints to try commands on: ``python -m fastshard.examples gpt_neox run --to gpt_neox --tp 2``.

The weights are random, the same in every run, and of no use but this. What lies at OUT afterwards is what a
training run leaves, or a publisher: no manifest.
"""

# The public path: what it is lies in fastshard.conversion.examples.
from .conversion.examples import CONFIGS, main, make, tensors

__all__ = ["CONFIGS", "main", "make", "tensors"]

if __name__ == "__main__":
    raise SystemExit(main())
