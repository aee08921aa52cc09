"""transformers' words for models: ``config.json``.

source: transformers models/{gpt_neox,llama,mistral,qwen2,qwen3,mixtral,qwen3_moe}, configuration_*.py and modeling_*.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..common.config_text import shown
from ..common.errors import Finding
from ..layouts.declaration import Evidence
from . import unsupported
from .config_fields import positive_number, refused, whole_number
from .model import Experts, Lack, Model, Rope
from .unsupported import Says

#: transformers has several names for some functions. source: transformers activations.py, ACT2FN
_SAME = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
_ACTIVATIONS = frozenset({"gelu", "gelu_pytorch_tanh", "relu", "silu", "mish", "sigmoid", "linear", "tanh"})
_ALL = (True, True, True, True)
_NONE = (False, False, False, False)
_QKV = (True, False, False, False)
_ATTENTION = (True, True, False, False)
_MLP = (False, False, True, True)
#: What messages call the fields.
_WORDS = {
    "activation": "hidden_act", "parallel": "use_parallel_residual", "window": "sliding_window", "rope.scaling": "rope_scaling",
    "eps": "rms_norm_eps",
}  # fmt: skip


@dataclass(frozen=True)
class Class(Says):
    """A class of transformers."""

    model_type: str = ""
    architecture: str = ""
    #: The layout table of its tensors.
    layout: str = "hf.llama"


def _class(kind: str, model_type: str, architecture: str, **more: Any) -> Class:
    return Class(
        kind=kind, model_type=model_type, architecture=f"{architecture}ForCausalLM", activations=_ACTIVATIONS, **more
    )  # fmt: skip


#: The plainest first: of those that compute the same it is taken.
CLASSES = (
    _class("Llama", "llama", "Llama", biases=(_NONE, _ATTENTION, _MLP, _ALL)),
    _class("Mistral", "mistral", "Mistral", window=True),
    _class("Qwen2", "qwen2", "Qwen2", biases=(_QKV,), window=True),
    _class("Qwen3", "qwen3", "Qwen3", biases=(_NONE, _ATTENTION), qk_norm=(True,), window=True),
    _class("Mixtral", "mixtral", "Mixtral", layout="hf.mixtral", experts=True, window=True),
    # Whether its window is that of the others is not known.
    _class(
        "Qwen3-MoE", "qwen3_moe", "Qwen3Moe", layout="hf.qwen_moe", biases=(_NONE, _ATTENTION), qk_norm=(True,),
        experts=True, unnormalised=True,
    ),
    _class(
        "GPT-NeoX", "gpt_neox", "GPTNeoX", layout="hf.gpt_neox", norm="LayerNorm", norm_bias=True, gated=False,
        parallel=(False, True), shares=None, biases=(_ALL, _MLP), grouped=(False,),
    ),
)  # fmt: skip


#: Model types of which it is known what they compute. Qwen2-MoE is only read: nothing else has its shared expert.
_KNOWN = sorted({"qwen2_moe", *(c.model_type for c in CLASSES)})

#: Its GPT-2 is another model.
_GPT3 = Says(kind="GPT-3")


def class_of(model: Model, help: str | None = None) -> Class:
    """The class of transformers that computes a model.

    Raises:
        FastshardError: ``FS514``, one finding for each thing that no such class computes.
    """
    if model.family == "gpt3":
        raise unsupported.refused("transformers", _GPT3, list(model.others), help)
    neox = model.family == "gpt_neox"
    known = [
        c for c in CLASSES if (c.layout == "hf.gpt_neox") == neox and c.experts == (model.experts is not None)
    ]
    # The class that its source names, if that will do, else the plainest.
    known.sort(key=lambda c: c.model_type != model.kin)
    found, lacking = unsupported.fitting(model, known)
    assert isinstance(found, Class)
    if lacking:
        raise unsupported.refused("transformers", found, lacking, help)
    return found


def facts_of(model: Model, of: Class) -> dict[str, bool]:
    """Facts of the class's layout table."""
    qkv, out, mlp, _ = model.biases
    facts = {"tied": model.tied, "head": not model.tied, "attention_bias": qkv}
    if of.layout != "hf.gpt_neox":
        facts |= {"out_bias": out, "mlp_bias": mlp, "qk_norm": model.qk_norm}
    if of.experts:
        facts |= {"stacked_experts": False, "shared_expert": False}
    return facts


def sizes(axes: Mapping[str, int]) -> dict[str, int]:
    """Sizes by the axes of a table, as ``config.json`` names them."""
    return {
        "vocab_size": axes["V"],
        "hidden_size": axes["H"],
        "intermediate_size": axes["F"],
        "num_hidden_layers": axes["L"],
        "num_attention_heads": axes["g"] * axes.get("r", 1),
        "num_key_value_heads": axes["g"],
        "head_dim": axes["d"],
    }


def write(
    model: Model, of: Class, axes: Mapping[str, int], file: str
) -> tuple[dict[str, Any], list[Finding]]:
    """The config of a model without its dtype, and what had to be assumed. What nothing states is left out.

    Args:
        model: what is computed.
        of: the class that computes it.
        axes: extents that the plan bound.
        file: what messages call the config.

    Raises:
        FastshardError: ``FS209`` for what decides values and is stated nowhere.
    """
    model.settled("parallel", "activation")
    if model.config is not None:
        return {**model.config, **sizes(axes)}, model.told(file=file)
    neox = of.model_type == "gpt_neox"
    out: dict[str, Any] = {"architectures": [of.architecture], "model_type": of.model_type, **sizes(axes)}
    if neox:
        del out["num_key_value_heads"], out["head_dim"]
    out |= {"hidden_act": model.activation, "tie_word_embeddings": model.tied, "use_cache": True}
    written = ["activation", "eps", "max_positions", "rope.base", "rope.share"]
    known = {
        "max_position_embeddings": model.max_positions,
        "layer_norm_eps" if neox else "rms_norm_eps": model.eps,
        "rotary_emb_base" if neox else "rope_theta": _whole(model.rope.base),
    }
    out |= {key: value for key, value in known.items() if value is not None} | dict(model.tokens)
    if neox:
        written.append("parallel")
        out |= {"rotary_pct": model.rope.share, "use_parallel_residual": model.parallel}
    if neox or of.model_type in ("llama", "qwen3", "qwen3_moe"):
        out["attention_bias"] = model.biases[0]
    if of.model_type == "llama":
        out["mlp_bias"] = model.biases[2]
    if model.rope.kind != "default":
        written.append("rope.scaling")
        out["rope_scaling"] = {**model.rope.scaling, "rope_type": model.rope.kind}
    if model.experts is not None:
        written.append("experts.best")
        out |= _mixture(model.experts, of, axes)
    out |= _window(model, of, axes["L"])
    return out, [*model.told(*written, file=file), *_outside(model, file)]


def _whole(value: float | None) -> float | None:
    return int(value) if value is not None and float(value).is_integer() else value


def _mixture(experts: Experts, of: Class, axes: Mapping[str, int]) -> dict[str, Any]:
    if of.model_type == "mixtral":
        return {"num_local_experts": axes["E"], "num_experts_per_tok": experts.best}
    return {
        "num_experts": axes["E"],
        "num_experts_per_tok": experts.best,
        "moe_intermediate_size": axes["F"],
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _window(model: Model, of: Class, layers: int) -> dict[str, Any]:
    if model.window is None:
        # Mistral's own default is a window.
        return {"sliding_window": None} if of.model_type == "mistral" else {}
    out: dict[str, Any] = {"sliding_window": model.window}
    if of.model_type in ("qwen2", "qwen3"):
        # Both have it in the layers from some number on, and only where they say so.
        every = ["sliding_attention"] * layers
        out |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": every}
    return out


def _outside(model: Model, file: str) -> list[Finding]:
    """What the place of eps changes."""
    if not model.eps_outside or model.norm != "RMSNorm" or model.eps is None or model.eps <= 1e-7:
        return []
    return [
        Finding.of(
            "FS109",
            f"config: {model.framework}'s RMSNorm divides by rms + eps, Llama's by sqrt(rms^2 + eps); "
            f"{model.word('eps')} is written",
            severity="note",
            file=file,
        )
    ]


class HuggingFace:
    """The dialect of transformers."""

    name = "transformers"

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """The model of a ``config.json`` whose tensors its table describes.

        Raises:
            FastshardError: ``FS211`` for a value of another kind.
        """
        kind = str(values.get("model_type"))
        neox = evidence.family == "gpt_neox"
        facts = evidence.facts
        # source: configuration_gpt_neox.py: a quarter of a head, gelu, a parallel residual
        activation = str(values.get("hidden_act", "gelu" if neox else "silu"))
        mlp = neox or facts.get("mlp_bias", False)
        qkv = facts.get("attention_bias", False)
        window, some = _windows(values, kind)
        rope, several = rope_of(values, 0.25 if neox else 1.0)
        return Model(
            framework=self.name,
            family=evidence.family,
            norm="LayerNorm" if neox else "RMSNorm",
            norm_bias=neox,
            eps=positive_number(values, "layer_norm_eps", 1e-5) if neox else positive_number(values, "rms_norm_eps", 1e-6),
            gated=not neox,
            activation=_SAME.get(activation, activation),
            parallel=neox and bool(values.get("use_parallel_residual", True)),
            rope=rope,
            window=window,
            biases=(qkv, qkv if neox else facts.get("out_bias", False), mlp, mlp),
            qk_norm=facts.get("qk_norm", False),
            grouped=evidence.axes.get("r", 1) > 1,
            tied=facts.get("tied", False),
            experts=_experts(values, kind),
            max_positions=whole_number(values, "max_position_embeddings", 2048),
            kin=kind,
            others=(*some, *several, *_strange(kind)),
            words=_WORDS | {"eps": "layer_norm_eps" if neox else "rms_norm_eps"},
            config=values,
        )  # fmt: skip


def _strange(kind: str) -> list[Lack]:
    """A model type of which only the tensors are known: no other framework is told what it computes."""
    return [] if kind in _KNOWN else [Lack("model_type", f"one of {', '.join(_KNOWN)}", shown(kind))]


def _experts(config: Mapping[str, Any], kind: str) -> Experts | None:
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return None
    # source: configuration_{mixtral,qwen2_moe,qwen3_moe}.py
    best = whole_number(config, "num_experts_per_tok", {"mixtral": 2, "qwen2_moe": 4}.get(kind, 8))
    return Experts(best, kind == "mixtral" or bool(config.get("norm_topk_prob", False)))


def _windows(config: Mapping[str, Any], kind: str) -> tuple[int | None, list[Lack]]:
    """The positions that every layer sees, and what a window in some of them is called.

    Llama takes no notice of one, Mistral has it in all layers, Qwen in those that it names, and only where it says so.
    """
    if kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        types, used = config.get("layer_types"), config.get("use_sliding_window")
        seen = [one == "sliding_attention" for one in types] if isinstance(types, list) else []
        # Without types it is in the layers from one on, by default the 28th.
        if not used and not any(seen):
            return None, []
        dense = kind in ("qwen2", "qwen3")
        if not (dense and used and (all(seen) if seen else config.get("max_window_layers", 28) == 0)):
            return None, [Lack("sliding window in some layers", "none", shown(config.get("sliding_window")))]
    elif kind not in ("mistral", "mixtral"):
        return None, []
    # source: configuration_mixtral.py alone has no window by default
    window = config.get("sliding_window", None if kind == "mixtral" else 4096)
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or not 0 < window < 1 << 48
    ):
        raise refused("config: sliding_window", "a positive whole number", window)
    return window, []


def rope_of(config: Mapping[str, Any], share: float) -> tuple[Rope, list[Lack]]:
    """The rotary embedding, and what one of several kinds for several layers is called.

    transformers 4 has ``rope_theta`` and ``rope_scaling``, 5 has both in ``rope_parameters``.

    Args:
        config: ``config.json`` of the model.
        share: the part of a head that is rotated where the config does not say.

    Raises:
        FastshardError: ``FS211`` for values of another kind.
    """
    tables: dict[str, dict[str, Any]] = {}
    several: list[Lack] = []
    for key in ("rope_parameters", "rope_scaling"):
        stated = config.get(key)
        if not isinstance(stated, (dict, type(None))):
            raise refused(f"config: {key}", "a table", stated)
        tables[key] = stated or {}
        if nested := [name for name, value in tables[key].items() if isinstance(value, dict)]:
            several.append(Lack(f"{key} by kinds of layers", f"one set of {key}", ", ".join(nested)))
    if several:
        return Rope(), several
    kinds = [
        str(table.get("rope_type", table.get("type", "default")))
        for table in (tables["rope_scaling"], tables["rope_parameters"])
    ]
    flat = {**config, **tables["rope_parameters"]}
    base = next((key for key in ("rope_theta", "rotary_emb_base") if key in flat), "rope_theta")
    part = next((key for key in ("partial_rotary_factor", "rotary_pct") if key in flat), "rotary_pct")
    kind = next((kind for kind in kinds if kind != "default"), "default")
    scaling = tables["rope_scaling"] or tables["rope_parameters"]
    return Rope(positive_number(flat, base, 10000), positive_number(flat, part, share), kind, scaling), []


DIALECT = HuggingFace()
