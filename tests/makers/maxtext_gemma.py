"""Tiny models of Gemma 2 and Gemma 3 as MaxText holds and computes them, by MaxText's own definitions.

MaxText does not install on the Python of these tests. What it holds follows its param_mapping.py, with numpy
alone; what it computes follows its layers, in plain torch float32.
source: MaxText checkpoint_conversion/utils/param_mapping.py (GEMMA2_*, GEMMA3_*), models/{gemma2,gemma3}.py,
    layers/{attentions,attention_op,embeddings,decoders,linears,normalizations}.py,
    configs/models/gemma{2,3}-*.yml
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import moe_maker
import numpy as np
import torch
import transformers
import yaml
from jax_maker import Tree, as_numpy, saved_orbax, scaled
from safetensors.torch import load_file
from torch.nn import functional as F

#: A head is larger than hidden_size / num_attention_heads. The roots of both and of hidden_size are powers of
#: two, so that values are scaled and scaled back exactly.
SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    # Fewer tokens than the tests' text has.
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
#: Scores are divided as MaxText's gemma2-27b and gemma3-27b do it.
_WIDTH = {"query_pre_attn_scalar": 16, "num_key_value_heads": 4}
#: As Gemma 3 has them, for shorter texts.
_ROPES: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 2000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_PLAIN: dict[str, Any] = {kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in _ROPES}
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
#: Settings of tiny models by kind.
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 4, **_CAPS},
    "gemma2 wide": {"num_hidden_layers": 2, **_CAPS, **_WIDTH, "attn_logit_softcapping": None},
    # Two full cycles; one and a part of the next; and a part of one.
    "gemma3": {"num_hidden_layers": 12, "rope_parameters": _ROPES},
    "gemma3 cut": {"num_hidden_layers": 8, "rope_parameters": _ROPES, **_WIDTH},
    "gemma3 short": {"num_hidden_layers": 5, "final_logit_softcapping": 2.0, "rope_parameters": _PLAIN},
}
PAIR, CYCLE = 2, 6


def model(kind: str, **changes: Any) -> Any:
    """A model whose parameters all differ from what they begin with. Norms plus 1 are exact in bfloat16."""
    torch.manual_seed(5)
    settings = SIZES | KINDS[kind] | changes
    if kind.startswith("gemma2"):
        network: Any = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**settings)).eval()
    else:
        network = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = torch.randn_like(parameter) * 0.3
            parameter.copy_(
                values.mul(64).round().div(64).clamp(-0.75, 0.75) + 0.0 if "norm" in name else values
            )
    return network


#: Name within a layer of MaxText -> that of transformers; `_` stands for the end of the names in Gemma 2.
_NAMES = {
    "pre_self_attention_norm_.scale": "input_layernorm",
    "post_self_attention_norm_.scale": "post_attention_layernorm",
    "pre_ffw_norm_.scale": "pre_feedforward_layernorm",
    "post_ffw_norm_.scale": "post_feedforward_layernorm",
    "self_attention_.query.kernel": "self_attn.q_proj",
    "self_attention_.key.kernel": "self_attn.k_proj",
    "self_attention_.value.kernel": "self_attn.v_proj",
    "self_attention_.out.kernel": "self_attn.o_proj",
    "mlp_.wi_0.kernel": "mlp.gate_proj",
    "mlp_.wi_1.kernel": "mlp.up_proj",
    "mlp_.wo.kernel": "mlp.down_proj",
}
_QK_NORMS = {
    "self_attention_.query_norm.scale": "self_attn.q_norm",
    "self_attention_.key_norm.scale": "self_attn.k_norm",
}


def _layer(hf: Tree, config: Any, layer: int) -> Tree:
    """The arrays of a layer, by their names in `_NAMES`."""
    d, hidden = config.head_dim, config.hidden_size
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    shapes = {
        "query": (hidden, heads, d),
        "key": (hidden, groups, d),
        "value": (hidden, groups, d),
        "out": (heads, d, hidden),
    }
    is_2 = config.model_type == "gemma2"
    out = {}
    for own, theirs in (_NAMES if is_2 else _NAMES | _QK_NORMS).items():
        array = hf[f"model.layers.{layer}.{theirs}.weight"]
        if own.endswith(".scale"):
            out[own] = array + array.dtype.type(1.0)
            continue
        module = own.split(".")[1]
        out[own] = array.T.reshape(shapes[module]) if module in shapes else array.T
        if module == "query" and is_2:
            # param_mapping.py takes head_dim, also for gemma2-27b, whose standalone script takes this number.
            out[own] = scaled(out[own], 1 / np.sqrt(config.query_pre_attn_scalar))
    return out


def _stack(layers: list[np.ndarray], scan: int) -> np.ndarray:
    stack = np.stack(layers)
    # flax takes an axis beyond a vector's own for its last. source: flax core/axes_scan.py
    return np.moveaxis(stack, 0, min(scan, stack.ndim - 1) if scan >= 0 else scan)


def arrange(hf: Tree, config: Any, scan: int | None) -> Tree:
    """What MaxText has of a model, besides the step.

    Args:
        hf: tensors as transformers writes them to disk.
        config: transformers' config of the model.
        scan: axis of the layers; None for layers apart.
    """
    out = {
        "token_embedder.embedding": scaled(hf["model.embed_tokens.weight"], np.sqrt(config.hidden_size)),
        "decoder.decoder_norm.scale": hf["model.norm.weight"] + hf["model.norm.weight"].dtype.type(1.0),
    }
    layers = [_layer(hf, config, n) for n in range(config.num_hidden_layers)]
    if config.model_type != "gemma2":
        layers = [{name.replace("_.", "."): array for name, array in layer.items()} for layer in layers]
        return _with_prefix(out | _arrange_cycles(layers, scan))
    for name in layers[0]:
        for place, end in enumerate(("_local", "_global")):
            own = name.replace("_.", f"{end}.")
            of_place = [layer[name] for layer in layers[place::PAIR]]
            if scan is None:
                out |= {f"decoder.layers_{n}.{own}": array for n, array in enumerate(of_place)}
            else:
                out[f"decoder.layers.{own}"] = _stack(of_place, scan)
    return _with_prefix(out)


def _arrange_cycles(layers: list[Tree], scan: int | None) -> Tree:
    """Layers of a cycle, each place a stack, and those after the last full cycle apart."""
    if scan is None:
        return {
            f"decoder.layers_{n}.{name}": a for n, layer in enumerate(layers) for name, a in layer.items()
        }
    end = len(layers) - len(layers) % CYCLE
    out: Tree = {}
    for name in layers[0]:
        for place in range(CYCLE if end else 0):
            stack = _stack([layer[name] for layer in layers[place:end:CYCLE]], scan)
            out[f"decoder.layers.layers_{place}.{name}"] = stack
        for n, layer in enumerate(layers[end:]):
            out[f"decoder.layers_remainder.layers_{n}.{name}"] = layer[name]
    return out


def _with_prefix(tree: Tree) -> Tree:
    return {f"params.params.{name}": np.ascontiguousarray(array) for name, array in tree.items()}


def _norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def _rotate(x: torch.Tensor, base: float, factor: float) -> torch.Tensor:
    """RotaryEmbedding; x is [B, S, N, D]."""
    d = x.shape[-1]
    timescale = base ** (torch.arange(0, d, 2, dtype=torch.float32) / d) * factor
    angle = (torch.arange(x.shape[1], dtype=torch.float32)[:, None] / timescale)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def _cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    return (x / cap).tanh() * cap if cap else x


class _Arrays:
    """The arrays of a tree by their names in one layer, and which of them were used."""

    def __init__(self, tree: Tree, yml: dict[str, Any]) -> None:
        names = {key.removeprefix("params.params."): a for key, a in tree.items() if key != "step"}
        self.arrays = {key: torch.from_numpy(np.ascontiguousarray(a)).float() for key, a in names.items()}
        self.used: set[str] = set()
        self.yml = yml

    def get(self, own: str, layer: int | None = None) -> torch.Tensor:
        count = self.yml["base_num_decoder_layers"]
        if layer is None:
            self.used.add(own)
            return self.arrays[own]
        if self.yml["decoder_block"] == "gemma2":
            number, end = layer // PAIR, ("_local", "_global")[layer % PAIR]
            own = own.replace("_.", f"{end}.")
            if self.yml["scan_layers"]:
                return self._select(f"decoder.layers.{own}", number, count)
            return self.get(f"decoder.layers_{number}.{own}")
        own = own.replace("_.", ".")
        if not self.yml["scan_layers"]:
            return self.get(f"decoder.layers_{layer}.{own}")
        cycle, place = divmod(layer, CYCLE)
        if cycle < count // CYCLE:
            return self._select(f"decoder.layers.layers_{place}.{own}", cycle, count // CYCLE)
        return self.get(f"decoder.layers_remainder.layers_{place}.{own}")

    def _select(self, name: str, number: int, count: int) -> torch.Tensor:
        stack = self.get(name)
        axis = min(self.yml["param_scan_axis"], stack.ndim - 1)
        assert stack.shape[axis] == count
        return stack.select(axis, number)


def compute(tree: Tree, yml: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of MaxText for a tree that it restores and the yml that it is run with."""
    stored = _Arrays(tree, yml)
    get = stored.get
    is_2 = yml["decoder_block"] == "gemma2"
    assert (is_2 or yml["decoder_block"] == "gemma3") and yml["mlp_activations"] == ["gelu", "linear"]
    assert yml["use_post_attn_norm"] and yml["use_post_ffw_norm"] and yml["rope_type"] == "default"
    count = yml["base_num_decoder_layers"] * (PAIR if is_2 else 1)
    # The norms of layers are made without an epsilon, and have the class's own.
    own_eps, eps = 1e-6, float(yml["normalization_layer_epsilon"])
    base, factor = float(yml["rope_max_timescale"]), yml.get("rope_linear_scaling_factor", 1.0)
    local_base = yml.get("local_rope_max_timescale", -1)
    local_base = float(local_base) if local_base > 0 else base
    scale, d = 1.0, yml["head_dim"]
    if not is_2:
        # get_query_pre_attn_scalar
        width = yml["base_emb_dim"] // yml["base_num_query_heads"]
        numbers = {"gemma3-4b": d, "gemma3-12b": d, "gemma3-27b": width}
        scale = numbers[yml["model_name"]] ** -0.5
    x = get("token_embedder.embedding")[tokens]
    length = tokens.shape[1]
    causal = torch.full((length, length), float("-inf")).triu(1)
    # A token sees those whose column is beyond its row less the window.
    local = causal + torch.full((length, length), float("-inf")).tril(-yml["sliding_window_size"])
    for i in range(count):
        is_global = i % PAIR == PAIR - 1 if is_2 else i % CYCLE == CYCLE - 1
        y = _norm(x, get("pre_self_attention_norm_.scale", i), own_eps)
        q, k, v = (
            torch.einsum("bsh,hnd->bsnd", y, get(f"self_attention_.{name}.kernel", i))
            for name in ("query", "key", "value")
        )
        if not is_2:
            # Unlike the layers' norms, these are made with the epsilon of the yml.
            q = _norm(q, get("self_attention_.query_norm.scale", i), eps)
            k = _norm(k, get("self_attention_.key_norm.scale", i), eps)
        # init_rotary_embedding: under the names of Gemma 3, local layers are not scaled.
        rope = (base, factor) if is_global else (local_base, factor if is_2 else 1.0)
        q, k = _rotate(q, *rope) * scale, _rotate(k, *rope)
        k, v = (a.repeat_interleave(q.shape[2] // a.shape[2], 2) for a in (k, v))
        scores = _cap(torch.einsum("bsnd,btnd->bnst", q, k), yml.get("attn_logits_soft_cap", 0.0))
        weights = (scores + (causal if is_global else local)).softmax(-1)
        mixed = torch.einsum("bnst,btnd->bsnd", weights, v)
        mixed = torch.einsum("bsnd,ndh->bsh", mixed, get("self_attention_.out.kernel", i))
        x = x + _norm(mixed, get("post_self_attention_norm_.scale", i), own_eps)
        y = _norm(x, get("pre_ffw_norm_.scale", i), own_eps)
        # flax's gelu is the approximation by tanh.
        inner = F.gelu(y @ get("mlp_.wi_0.kernel", i), approximate="tanh") * (y @ get("mlp_.wi_1.kernel", i))
        x = x + _norm(inner @ get("mlp_.wo.kernel", i), get("post_ffw_norm_.scale", i), own_eps)
    y = _norm(x, get("decoder.decoder_norm.scale"), eps)
    if not yml["logits_via_embedding"]:
        logits = y @ get("decoder.logits_dense.kernel")
    else:
        logits = y @ get("token_embedder.embedding").T
        if yml.get("normalize_embedding_logits", True):
            logits = logits / y.shape[-1] ** 0.5
        logits = _cap(logits, yml.get("final_logits_soft_cap", 0.0))
    assert stored.used == stored.arrays.keys()
    return logits


def files(kind: str, folder: Path | None = None, **changes: Any) -> tuple[Any, Tree, torch.Tensor]:
    """Config, tensors and logits of a model that transformers saves, in a folder if one is given."""
    network = model(kind, **changes)
    if folder is None:
        with TemporaryDirectory() as temporary:
            return files(kind, Path(temporary), **changes)
    network.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    return (
        network.config,
        {name: as_numpy(t).copy() for name, t in tensors.items()},
        moe_maker.logits(network),
    )


def yml_of(config: Any, **more: Any) -> dict[str, Any]:
    """What the yml of such a model in MaxText's configs/models states, and the rotary embedding's base."""
    out = {
        "base_emb_dim": config.hidden_size,
        "base_num_query_heads": config.num_attention_heads,
        "base_num_kv_heads": config.num_key_value_heads,
        "base_mlp_dim": config.intermediate_size,
        # Each layer of MaxText is one with a window and one without.
        "base_num_decoder_layers": config.num_hidden_layers // (PAIR if config.model_type == "gemma2" else 1),
        "head_dim": config.head_dim,
        "mlp_activations": ["gelu", "linear"],
        "vocab_size": config.vocab_size,
        "decoder_block": config.model_type.removesuffix("_text"),
        "normalization_layer_epsilon": config.rms_norm_eps,
        "logits_via_embedding": config.tie_word_embeddings,
        "final_logits_soft_cap": config.final_logit_softcapping or 0.0,
        "sliding_window_size": config.sliding_window,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "rope_max_timescale": 10_000,
    }
    if config.model_type == "gemma2":
        return out | {"attn_logits_soft_cap": config.attn_logit_softcapping or 0.0} | more
    others, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    is_wide = config.query_pre_attn_scalar != config.head_dim
    out |= {
        "model_name": "gemma3-27b" if is_wide else "gemma3-4b",
        "rope_max_timescale": int(others["rope_theta"]),
        "local_rope_max_timescale": int(local["rope_theta"]),
        "rope_linear_scaling_factor": others.get("factor", 1.0),
    }
    return out | more


def checkpoint(kind: str, folder: Path, scan: int | None = 1, tree: Tree | None = None, **yml: Any) -> Path:
    """A checkpoint of MaxText's own, with a yml beside it."""
    config, tensors, _ = files(kind)
    saved_orbax(arrange(tensors, config, scan) if tree is None else tree, folder)
    settings = {key: value for key, value in yml_of(config, **yml).items() if value is not None}
    (folder / "maxtext_model.yml").write_text(yaml.safe_dump(settings))
    return folder
