"""A small model of transformers that has learnt something: to repeat a sequence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 32
Tensors = dict[str, torch.Tensor]


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random sequences that are repeated once: the second half can be copied from the first, by attention."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(0, VOCABULARY, (rows, length // 2), generator=generator)
    return torch.cat([half, half], dim=1)


@cache
def trained() -> Path:
    """The folder of the model, trained once in a process."""
    folder = Path(mkdtemp(prefix="trained-"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    threads = torch.get_num_threads()
    # More than one wait for each other longer than they compute.
    torch.set_num_threads(1)
    for step in range(300):
        batch = make_tokens(32, 16, seed=step + 1)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model.eval().save_pretrained(folder)
    return folder


def damaged(folder: Path, change: Callable[[Tensors], object] | None = None, **settings: Any) -> Path:
    """A copy of the model with other tensors, or other settings of its config."""
    shutil.copytree(trained(), folder)
    if change is not None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    if settings:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def exchange(tensors: Tensors, one: str, other: str) -> None:
    """Exchanges two tensors."""
    tensors[one], tensors[other] = tensors[other], tensors[one]
