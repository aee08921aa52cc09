"""Checkpoints to run on: a Llama grown from a fixture, in the forms that the program itself makes, and
fixtures."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
from runner import Zygote

FIXTURES = Path(__file__).parent.parent / "fixtures"
#: The Llama of this fixture is grown: its config gives the form.
_LLAMA = "sharded/hf_sharded"
_SHARDS = 4


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes arrays of 16-bit patterns as BF16."""
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array.tobytes())


def llama(
    folder: Path,
    fixtures: Path,
    seed: int,
    *,
    hidden: int,
    ffn: int,
    layers: int,
    vocab: int,
    shards: int = _SHARDS,
) -> Path:
    """Writes a Llama in the Hugging Face form with normal numbers in bf16, and companion files."""
    config = json.loads((fixtures / _LLAMA / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = hidden // heads
    config |= {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "head_dim": head,
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (heads * head, hidden),
                "self_attn.k_proj": (kv * head, hidden),
                "self_attn.v_proj": (kv * head, hidden),
                "self_attn.o_proj": (hidden, heads * head),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
            }.items()
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    names, weights = list(shapes), dict[str, str]()
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        held = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        arrays = {n: generator.standard_normal(shapes[n], "f4").view("u4") >> 16 for n in held}
        write_safetensors(folder / file, {n: a.astype("<u2") for n, a in arrays.items()})
        weights |= dict.fromkeys(held, file)
    if shards > 1:
        total = sum(2 * int(np.prod(shape)) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "seed": seed}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64, "seed": seed}))
    return folder


def small(folder: Path, fixtures: Path, seed: int) -> Path:
    """About 2 MiB in four shards."""
    return llama(folder, fixtures, seed, hidden=128, ffn=256, layers=4, vocab=2000)


def derived(zygote: Zygote, source: Path, folder: Path, *options: str) -> Path:
    """A checkpoint in another form, as the program makes it; without its manifest, like one of a
    framework."""
    ended = zygote.run("convert", source, folder, *options, "-q")
    if ended.code:
        raise SystemExit(f"cannot make {folder.name}: {ended.said}")
    (folder / "fastshard.manifest.json").unlink()
    return folder


def fixture(fixtures: Path, name: str, folder: Path) -> Path:
    """A copy of a fixture, since a run looks for manifests beside it."""
    shutil.copytree(fixtures / name, folder)
    return folder


def further(fixtures: Path) -> list[str]:
    """The good checkpoints of a larger collection, by folder."""
    found = [
        p.parent
        for kind in ("gpt_neox", "deepspeed", "universal", "sharded")
        for p in (fixtures / kind).glob("*/expected.json")
    ]
    return sorted(str(p.relative_to(fixtures)) for p in found)
