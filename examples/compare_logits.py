"""Shows how far the logits of two checkpoints lie apart: `python examples/compare_logits.py A B`. Needs transformers."""

from __future__ import annotations

import sys

import fastshard
import torch


def main(a: str, b: str) -> float:
    """Loads both into transformers and runs the same tokens through them."""
    torch.manual_seed(0)
    one, two = (fastshard.load_model(path).eval() for path in (a, b))
    tokens = torch.randint(0, one.config.vocab_size, (1, 16))
    with torch.no_grad():
        first, second = one(tokens).logits, two(tokens).logits
    apart = (first - second).abs().max().item()
    print(f"logits: max |difference| {apart:.3g} (largest logit {first.abs().max().item():.3g})")
    return apart


if __name__ == "__main__":
    main(*sys.argv[1:])
