"""Train states of MaxText and Paxml for tests, made by numpy alone, and how to read what becomes of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import fastshard
import ml_dtypes
import numpy as np
import tensorstore
import torch
import yaml
from safetensors.torch import load_file, save_file

Tree = dict[str, np.ndarray]
#: What a train state has of a model that never took a step.
STEP: Tree = {"step": np.array(0, np.int64)}
#: The rotary embedding whose order of queries and keys MaxText's converter writes.
LLAMA31 = {"rope_type": "llama3.1", "rope_use_scale": False}


#: Forms of MaxText's layers: the axis along which a scan stacks them, or None for layers apart.
SCANS = {"scan 1": 1, "scan 0": 0, "scan -1": -1, "apart": None}


def target(scan: int | None) -> dict[str, Any]:
    """Options of a conversion to MaxText with layers stacked along an axis, or apart."""
    return {"to": "maxtext:unscan"} if scan is None else {"to": "maxtext:scan", "param_scan_axis": scan}


def without_step(tree: Tree) -> Tree:
    """The arrays of a train state besides its step."""
    return {name: array for name, array in tree.items() if name != "step"}


def written_yml(out: Path) -> dict[str, Any]:
    """The yml beside a result in MaxText's form."""
    yml = yaml.safe_load((out / "maxtext_model.yml").read_text())
    assert isinstance(yml, dict)
    return yml


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def as_torch(array: np.ndarray) -> torch.Tensor:
    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def saved(tree: Tree, folder: Path) -> Path:
    """The arrays in a safetensors file, under their own names."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: as_torch(a) for name, a in tree.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def _zarr(tree: Tree, item: Path) -> None:
    """The arrays as zarr v2, a folder and one chunk each, as TensorStore's driver of files has them."""
    for name, array in tree.items():
        array = np.array(array, order="C")
        metadata = {
            "zarr_format": 2,
            "shape": array.shape,
            "chunks": array.shape,
            "order": "C",
            "filters": None,
            "dtype": "bfloat16" if array.dtype == ml_dtypes.bfloat16 else array.dtype.str,
            "compressor": None,
            "fill_value": None,
            "dimension_separator": ".",
        }
        (item / name).mkdir(parents=True)
        (item / name / ".zarray").write_text(json.dumps(metadata))
        (item / name / ("0" + ".0" * (array.ndim - 1))).write_bytes(array.tobytes())


def saved_orbax(tree: Tree, folder: Path, **custom: Any) -> Path:
    """A checkpoint of Orbax, whose steps lie in ``folder``; ``custom`` is what it says of itself besides."""
    item = folder / "7/items"
    _zarr(tree, item)
    entries = {}
    for name, array in tree.items():
        keys = name.split(".")
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": array.shape,
            },
        }
    described = {"tree_metadata": entries, "use_ocdbt": False, "use_zarr3": False, "custom_metadata": None}
    (item / "_METADATA").write_text(json.dumps(described))
    (folder / "7/_CHECKPOINT_METADATA").write_text(json.dumps({"custom_metadata": custom}))
    return folder


def saved_paxml(tree: Tree, folder: Path) -> Path:
    """A checkpoint of Paxml."""
    _zarr(tree, folder / "checkpoint_00004000/state")
    return folder


def converted(source: Any, out: Path, to: str, **options: Any) -> tuple[Tree, list[Any]]:
    """What a conversion writes, and its findings."""
    manifest = fastshard.convert(source, out, to=to, memory="2GiB", **options)
    return read(out), manifest.findings


def read(out: Path) -> Tree:
    """The arrays of a result: of safetensors, or of an Orbax checkpoint, which TensorStore alone decodes."""
    if (out / "model.safetensors").exists():
        return {k: as_numpy(v) for k, v in load_file(out / "model.safetensors").items()}
    (item,) = (path.parent.resolve() for path in out.glob("*/*/_METADATA"))
    files: dict[str, Any] = {"driver": "file", "path": f"{item}/"}
    if (item / "manifest.ocdbt").exists():
        files = {"driver": "ocdbt", "base": files}
    tree = {}
    for key in tensorstore.KvStore.open(files).result().list().result():
        name, _, metadata = key.decode().rpartition("/")
        if driver := {"zarr.json": "zarr3", ".zarray": "zarr"}.get(metadata):
            path = f"{name}/" if files["driver"] == "ocdbt" else f"{item}/{name}/"
            array = tensorstore.open({"driver": driver, "kvstore": {**files, "path": path}}).result()
            tree[name] = np.asarray(array.read().result())
    return tree


@dataclasses.dataclass(frozen=True)
class Size:
    """Extents of a tiny model."""

    layers: int = 3
    hidden: int = 20
    groups: int = 2
    heads: int = 4
    head_dim: int = 16
    ffn: int = 28
    vocab: int = 50
    positions: int = 12


class Values:
    """Arrays of values that occur once each, in the order in which they are asked for."""

    def __init__(self, dtype: Any, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.dtype = dtype

    def __call__(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32).astype(self.dtype)


def hf_llama(size: Size, dtype: Any = np.float32, tied: bool = False, seed: int = 0) -> Tree:
    """A Llama under the names of transformers."""
    new, s = Values(dtype, seed), size
    q, kv = s.heads * s.head_dim, s.groups * s.head_dim
    tree = {"model.embed_tokens.weight": new(s.vocab, s.hidden), "model.norm.weight": new(s.hidden)}
    if not tied:
        tree["lm_head.weight"] = new(s.vocab, s.hidden)
    for i in range(s.layers):
        tree |= {
            f"model.layers.{i}.{name}.weight": new(*shape)
            for name, shape in {
                "input_layernorm": (s.hidden,),
                "post_attention_layernorm": (s.hidden,),
                "self_attn.q_proj": (q, s.hidden),
                "self_attn.k_proj": (kv, s.hidden),
                "self_attn.v_proj": (kv, s.hidden),
                "self_attn.o_proj": (s.hidden, q),
                "mlp.gate_proj": (s.ffn, s.hidden),
                "mlp.up_proj": (s.ffn, s.hidden),
                "mlp.down_proj": (s.hidden, s.ffn),
            }.items()
        }
    return tree


def llama_config(size: Size, tied: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.groups,
        "head_dim": size.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        **more,
    }


def llama_yml(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "decoder_block": "llama2",
        "base_emb_dim": size.hidden,
        "base_num_query_heads": size.heads,
        "base_num_kv_heads": size.groups,
        "base_mlp_dim": size.ffn,
        "base_num_decoder_layers": size.layers,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "mlp_activations": ["silu", "linear"],
        "normalization_layer_epsilon": "1e-6",
        "rope_max_timescale": 500_000,
        "logits_via_embedding": False,
        "rope_type": "default",
        **more,
    }


def stacked(layers: list[np.ndarray], axis: int) -> np.ndarray:
    """Layers as flax's scan stacks them."""
    return np.stack(layers, axis=axis)


def interleaved(rows: np.ndarray) -> np.ndarray:
    """[E, N, H] with the halves of the rotary pairs side by side."""
    half = rows.shape[-1] // 2
    return np.stack([rows[..., :half], rows[..., half:]], axis=-1).reshape(rows.shape)


def scaled(array: np.ndarray, factor: float, dtype: Any = None) -> np.ndarray:
    """Multiplied in float32 and rounded once."""
    return (array.astype(np.float32) * np.float32(factor)).astype(dtype or array.dtype)


def maxtext_llama(hf: Tree, size: Size, scan: int | None, dtype: Any = None, rope: str = "llama3.1") -> Tree:
    """What MaxText has of :func:`hf_llama`, besides the step, for one of its rotary embeddings."""
    s = size
    ordered = interleaved if rope == "llama3.1" else np.asarray
    out = {
        "token_embedder.embedding": hf["model.embed_tokens.weight"],
        "decoder.decoder_norm.scale": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        out["decoder.logits_dense.kernel"] = hf["lm_head.weight"].T
    apart: list[Tree] = []
    for i in range(s.layers):

        def w(name: str, at: int = i) -> np.ndarray:
            return hf[f"model.layers.{at}.{name}.weight"]

        def split(name: str, heads: int, at: int = i) -> np.ndarray:
            return w(name, at).T.reshape(s.hidden, heads, s.head_dim)

        q = ordered(split("self_attn.q_proj", s.heads))
        apart.append(
            {
                "pre_self_attention_layer_norm.scale": w("input_layernorm"),
                "post_self_attention_layer_norm.scale": w("post_attention_layernorm"),
                "self_attention.query.kernel": scaled(q, 1 / np.sqrt(s.head_dim), dtype),
                "self_attention.key.kernel": ordered(split("self_attn.k_proj", s.groups)),
                "self_attention.value.kernel": split("self_attn.v_proj", s.groups),
                "self_attention.out.kernel": w("self_attn.o_proj").T.reshape(s.heads, s.head_dim, s.hidden),
                "mlp.wi_0.kernel": w("mlp.gate_proj").T,
                "mlp.wi_1.kernel": w("mlp.up_proj").T,
                "mlp.wo.kernel": w("mlp.down_proj").T,
            }
        )
    out |= with_layers(apart, scan)
    return {f"params.params.{name}": a.astype(dtype or a.dtype) for name, a in out.items()}


def with_layers(apart: list[Tree], scan: int | None) -> Tree:
    if scan is None:
        return {f"decoder.layers_{i}.{name}": a for i, layer in enumerate(apart) for name, a in layer.items()}
    return {f"decoder.layers.{name}": stacked([layer[name] for layer in apart], scan) for name in apart[0]}


def paxml_gpt3(size: Size, dtype: Any = np.float32, seed: int = 0) -> Tree:
    """The weights of MLPerf's GPT-3, names from ``lm.`` on."""
    new, s = Values(dtype, seed), size
    x = "transformer.repeat.sub.x_layers_0."
    heads = (s.heads, s.head_dim)
    return {
        "softmax.logits_ffn.linear.w": new(s.hidden, s.vocab),
        "position_emb.emb_var": new(s.positions, s.hidden),
        f"{x}layer_norm.scale": new(s.layers, s.hidden),
        f"{x}layer_norm.bias": new(s.layers, s.hidden),
        f"{x}self_attention.combined_qkv.w": new(s.layers, 3, s.hidden, *heads),
        f"{x}self_attention.combined_qkv.b": new(s.layers, 3, *heads),
        f"{x}self_attention.post.w": new(s.layers, s.hidden, *heads),
        f"{x}self_attention.post.b": new(s.layers, s.hidden),
        f"{x}ff_layer.layer_norm.scale": new(s.layers, s.hidden),
        f"{x}ff_layer.layer_norm.bias": new(s.layers, s.hidden),
        f"{x}ff_layer.ffn_layer1.linear.w": new(s.layers, s.hidden, s.ffn),
        f"{x}ff_layer.ffn_layer1.bias.b": new(s.layers, s.ffn),
        f"{x}ff_layer.ffn_layer2.linear.w": new(s.layers, s.ffn, s.hidden),
        f"{x}ff_layer.ffn_layer2.bias.b": new(s.layers, s.hidden),
        "final_ln.scale": new(s.hidden),
        "final_ln.bias": new(s.hidden),
    }


def maxtext_gpt3(paxml: Tree, scan: int | None, fused: bool = True) -> Tree:
    """The same model as MaxText has it, names from ``decoder`` and ``token_embedder`` on."""
    x = "transformer.repeat.sub.x_layers_0."
    out = {
        "token_embedder.embedding": paxml["softmax.logits_ffn.linear.w"].T,
        "decoder.position_embedder.embedding": paxml["position_emb.emb_var"],
        "decoder.decoder_norm.scale": paxml["final_ln.scale"],
        "decoder.decoder_norm.bias": paxml["final_ln.bias"],
    }
    apart = []
    for i in range(paxml[f"{x}layer_norm.scale"].shape[0]):
        qkv, bias = (paxml[f"{x}self_attention.combined_qkv.{k}"][i] for k in "wb")
        layer = {
            "pre_self_attention_norm.scale": paxml[f"{x}layer_norm.scale"][i],
            "pre_self_attention_norm.bias": paxml[f"{x}layer_norm.bias"][i],
            "self_attention.out.kernel": np.moveaxis(paxml[f"{x}self_attention.post.w"][i], 0, -1),
            "self_attention.out.bias": paxml[f"{x}self_attention.post.b"][i],
            "mlp.mlp_layer_norm.scale": paxml[f"{x}ff_layer.layer_norm.scale"][i],
            "mlp.mlp_layer_norm.bias": paxml[f"{x}ff_layer.layer_norm.bias"][i],
            "mlp.wi.kernel": paxml[f"{x}ff_layer.ffn_layer1.linear.w"][i],
            "mlp.wi.bias": paxml[f"{x}ff_layer.ffn_layer1.bias.b"][i],
            "mlp.wo.kernel": paxml[f"{x}ff_layer.ffn_layer2.linear.w"][i],
            "mlp.wo.bias": paxml[f"{x}ff_layer.ffn_layer2.bias.b"][i],
        }
        if fused:
            layer["self_attention.qkv_proj.kernel"] = np.moveaxis(qkv, 0, 1)
            layer["self_attention.qkv_proj.bias"] = bias
        else:
            for k, name in enumerate(("query", "key", "value")):
                layer[f"self_attention.{name}.kernel"] = qkv[k]
                layer[f"self_attention.{name}.bias"] = bias[k]
        apart.append(layer)
    return out | with_layers(apart, scan)


def paxml_state(size: Size, dtype: Any = np.float32, place: int = 2) -> Tree:
    """A train state of Paxml: weights, both moments, step and count."""
    stacked_group = f"p#{size.layers}#i-1_{place}"
    tree = {f"mdl_vars.params.lm.{name}": a for name, a in paxml_gpt3(size, dtype).items()}
    for seed, slot in ((1, "m"), (2, "v")):
        for name, a in paxml_gpt3(size, np.float32, seed).items():
            group = stacked_group if name.startswith("transformer.repeat") else f"no_prefix_{place}"
            tree[f"opt_states_0.{group}.{slot}.params.lm.{name}"] = a
    tree["step"] = np.array(4000, np.uint32)
    tree["opt_states_0.no_prefix_0.count"] = np.array(4000, np.int32)
    return tree


def maxtext_gpt3_state(size: Size, scan: int | None, fused: bool = True, optimizer: bool = True) -> Tree:
    """What :func:`paxml_state` is in MaxText."""
    tree = {f"params.params.{k}": a for k, a in maxtext_gpt3(paxml_gpt3(size), scan, fused).items()}
    tree["step"] = np.array(4000, np.int32)
    if optimizer:
        for seed, slot in ((1, "mu"), (2, "nu")):
            moments = maxtext_gpt3(paxml_gpt3(size, np.float32, seed), scan, fused)
            tree |= {f"opt_state.{slot}.params.{k}": a for k, a in moments.items()}
        tree["opt_state.count"] = np.array(4000, np.int32)
    return tree


def assert_same(have: Tree, want: Tree) -> None:
    """Names, dtypes, shapes and bits."""
    assert set(have) == set(want), set(have) ^ set(want)
    for name, array in want.items():
        assert have[name].dtype == array.dtype, (name, have[name].dtype, array.dtype)
        assert have[name].shape == array.shape, (name, have[name].shape, array.shape)
        assert sha(have[name]) == sha(array), name
