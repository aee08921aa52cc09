"""GPT-NeoX checkpoints in pipeline form: one torch zip per layer and tensor-parallel rank."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from synthetic import Spec, values, whole


def model(hidden: int, layers: int, vocab: int) -> dict[str, list[Spec]]:
    """Tensors of each layer file."""

    def norm(name: str) -> list[Spec]:
        return [Spec(f"{name}.{part}", (hidden,), None, "F16") for part in ("weight", "bias")]

    block = [*norm("input_layernorm"), *norm("post_attention_layernorm")]
    for name, rows, columns, dim in (
        ("attention.query_key_value", 3 * hidden, hidden, 0),
        ("attention.dense", hidden, hidden, 1),
        ("mlp.dense_h_to_4h", 4 * hidden, hidden, 0),
        ("mlp.dense_4h_to_h", hidden, 4 * hidden, 1),
    ):
        block.append(Spec(f"{name}.weight", (rows, columns), dim, "F16"))
        block.append(Spec(f"{name}.bias", (rows,), 0 if dim == 0 else None, "F16"))
    files = {"00": [Spec("word_embeddings.weight", (vocab, hidden), 0, "F16")]}
    files |= {f"{n + 2:02d}": block for n in range(layers)}
    files[f"{layers + 3:02d}"] = norm("norm")
    files[f"{layers + 4:02d}"] = [Spec("final_linear.weight", (vocab, hidden), 0, "F16")]
    return files


def _named(spec: Spec, layer: str) -> Spec:
    """The same tensor under a name that no other layer has: its seed."""
    return Spec(f"{layer}.{spec.name}", spec.shape, spec.dim, spec.dtype)


def write(folder: Path, *, hidden: int = 512, layers: int = 4, vocab: int = 4096, tp: int = 2) -> None:
    """Writes `latest`, the step's layer and rank files, and the YAML of the run."""
    step = folder / "global_step10"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    for layer, specs in model(hidden, layers, vocab).items():
        for rank in range(tp):
            state = {}
            for spec in (_named(s, layer) for s in specs):
                shard = "all" if spec.dim is None else rank
                array = values(f"0/{spec.name}/{shard}", spec.local(tp), spec.dtype)
                state[spec.name.partition(".")[2]] = torch.from_numpy(array).view(torch.float16)
            torch.save(state, step / f"layer_{layer}-model_{rank:02d}-model_states.pt")
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // 64}
    args = {**sizes, "padded_vocab_size": vocab, "model_parallel_size": tp}
    for rank in range(tp):
        state = {"module": None, "iteration": 10, "args": args}
        torch.save(state, step / f"mp_rank_{rank:02d}_model_states.pt")
    config = {**sizes, "model_parallel_size": tp, "no_weight_tying": True, "gpt_j_residual": False}
    config |= {"pos_emb": "rotary", "norm": "layernorm", "activation": "gelu", "max_position_embeddings": 64}
    config |= {"layernorm_epsilon": 1e-5, "rotary_pct": 0.25}
    (step / "configs" / "run.yml").write_text(json.dumps(config))


def expected(*, hidden: int = 512, layers: int = 4, vocab: int = 4096, tp: int = 2) -> dict[str, bytes]:
    """What the Hugging Face result must hold, merged by numpy."""
    out = {}
    for layer, specs in model(hidden, layers, vocab).items():
        for spec in specs:
            if layer == "00":
                name = "gpt_neox.embed_in.weight"
            elif spec.name == "final_linear.weight":
                name = "embed_out.weight"
            elif spec.name.startswith("norm."):
                name = "gpt_neox.final_layer_norm." + spec.name.removeprefix("norm.")
            else:
                name = f"gpt_neox.layers.{int(layer) - 2}.{spec.name}"
            out[name] = whole(_named(spec, layer), tp).tobytes()
    return out
