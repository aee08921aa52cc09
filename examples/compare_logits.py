"""Shows how far the logits of two models lie apart: `python examples/compare_logits.py A B`. Needs
transformers."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


def main(a: str, b: str) -> float:
    """Loads both with `from_pretrained` and runs the same tokens through them."""
    torch.manual_seed(0)
    one, two = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (a, b))
    tokens = torch.randint(0, one.config.vocab_size, (1, 16))
    with torch.no_grad():
        first, second = one(tokens).logits, two(tokens).logits
    apart = (first - second).abs().max().item()
    print(f"logits: max |difference| {apart:.4f} (largest logit {first.abs().max().item():.4f})")
    return apart


if __name__ == "__main__":
    main(*sys.argv[1:])
