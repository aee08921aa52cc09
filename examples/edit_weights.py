"""Averages two checkpoints of one model, tensor by tensor, in bounded memory: `python
examples/edit_weights.py A B OUT`.

The result appears only if every tensor was written.
"""

from __future__ import annotations

import sys

import fastshard


def main(a: str, b: str, out: str) -> None:
    """Reads both, whatever format they have, under the names of Hugging Face."""
    one, two = fastshard.open(a, to="hf"), fastshard.open(b, to="hf")
    with fastshard.Writer(out, expected=one) as writer:
        for name, tensor in one.items():
            mean = (tensor.torch().float() + two[name].torch().float()) / 2
            writer[name] = mean.to(tensor.torch().dtype)


if __name__ == "__main__":
    main(*sys.argv[1:])
