"""What damage that no shape shows does to a trained model: its loss, and the units that `fastshard layers`
names.

    python benches/hidden_damage.py [--steps 1500]

A Qwen3 of 6 layers learns the bytes of this repository's documentation for a few minutes; a tenth of the text
is held out. Then one thing is changed at a time. The table is Markdown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastshard
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]
LAYERS, LENGTH = 6, 128
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def read_bytes() -> tuple[torch.Tensor, torch.Tensor]:
    """Read the documentation as bytes: what is learnt, and what is held out."""
    files = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
    text = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def train(folder: Path, text: torch.Tensor, steps: int) -> None:
    """Train a model and save it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(0, len(text) - LENGTH, (16,))
        batch = torch.stack([text[at : at + LENGTH] for at in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.eval().save_pretrained(folder)


def name_of(layer: int, part: str) -> str:
    """Return the name of a layer's weight."""
    return f"model.layers.{layer}.{part}.weight"


def swap(one: str, other: str, layers: range) -> Change:
    """Make the change that exchanges two weights of some layers."""

    def change(tensors: Tensors) -> None:
        for layer in layers:
            a, b = name_of(layer, one), name_of(layer, other)
            tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def alter(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Make the change that computes a tensor anew."""
    return lambda tensors: tensors.update({name: function(tensors[name])})


def copy_layer(source: int, to: int) -> Change:
    """Make the change that copies a layer over another."""

    def change(tensors: Tensors) -> None:
        before = f"model.layers.{source}."
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(before)}
        tensors.update({name.replace(before, f"model.layers.{to}."): t.clone() for name, t in own.items()})

    return change


def swap_layers(one: int, other: int) -> Change:
    """Make the change that exchanges two layers."""

    def change(tensors: Tensors) -> None:
        before = f"model.layers.{one}."
        for name in [name for name in tensors if name.startswith(before)]:
            twin = name.replace(before, f"model.layers.{other}.")
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    return change


def pair_heads(weight: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of heads from halves to pairs: the other rotary convention."""
    return weight.view(-1, 2, 16, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def list_cases() -> Iterator[tuple[str, Change | None, dict[str, Any]]]:
    """List what is changed: in words, in the tensors, in the config."""
    every, one = range(LAYERS), range(3, 4)
    q, k = "self_attn.q_norm", "self_attn.k_norm"
    norm = name_of(2, "input_layernorm")
    kv = name_of(4, "self_attn.k_proj")
    yield "nothing", None, {}
    yield "gate and up exchanged, layer 3", swap("mlp.gate_proj", "mlp.up_proj", one), {}
    yield "gate and up exchanged, all layers", swap("mlp.gate_proj", "mlp.up_proj", every), {}
    yield "q and k norms exchanged, layer 3", swap(q, k, one), {}
    yield "q and k norms exchanged, all layers", swap(q, k, every), {}
    yield "norm applied twice, layer 2", alter(norm, torch.square), {}
    yield "rotary pairs for halves, layer 4's keys", alter(kv, pair_heads), {}
    yield "key heads exchanged, layer 4", alter(kv, lambda w: w.roll(32, 0)), {}
    yield (
        "half of the output projection lost, layer 2",
        alter(name_of(2, "self_attn.o_proj"), lambda w: torch.cat([w[:64], torch.zeros_like(w[64:])])),
        {},
    )
    yield "layer 3 copied over layer 4", copy_layer(3, 4), {}
    yield "layers 2 and 3 exchanged", swap_layers(2, 3), {}
    yield "one row of the embedding lost", alter("model.embed_tokens.weight", _drop_row), {}
    yield (
        "the head is the embedding (a tie that is none)",
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})),
        {},
    )
    yield "rotary base 1e4 -> 5e5", None, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    yield "norm epsilon 1e-6 -> 1e-5", None, {"rms_norm_eps": 1e-5}


def _drop_row(weight: torch.Tensor) -> torch.Tensor:
    """Return an embedding whose row for the letter e is zero."""
    weight = weight.clone()
    weight[ord("e")] = 0
    return weight


def main() -> None:
    """Train, change one thing at a time, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as root:
        good, bad = Path(root) / "good", Path(root) / "bad"
        text, held_out = read_bytes()
        train(good, text, steps)
        tokens = held_out[: 32 * LENGTH].reshape(32, LENGTH)
        right = fastshard.loss(good, tokens=tokens, max_tokens=tokens.numel())
        print(f"\nloss {right.loss:.3f} +- {right.standard_error:.3f} on {right.tokens} held-out bytes\n")
        print("| damage | loss | units that `layers` names | REL DIFF |\n|---|---|---|---|")
        for words, change, settings in list_cases():
            shutil.copytree(good, bad)
            tensors = load_file(good / "model.safetensors")
            if change is not None:
                change(tensors)
            save_file(
                {n: t.contiguous() for n, t in tensors.items()}, bad / "model.safetensors", {"format": "pt"}
            )
            config = json.loads((bad / "config.json").read_text())
            (bad / "config.json").write_text(json.dumps(config | settings))
            changed = fastshard.loss(bad, tokens=tokens, max_tokens=tokens.numel())
            compared = fastshard.layers(good, bad, tokens=tokens[:2])
            most = max(unit.relative for unit in compared.units)
            units = ", ".join(compared.differing) or "none"
            keys = f" ({', '.join(compared.config)})" if compared.config else ""
            print(f"| {words} | {changed.loss - right.loss:+.4f} | {units}{keys} | {most:.1e} |", flush=True)
            shutil.rmtree(bad)


if __name__ == "__main__":
    main()
