"""The features with which a GPT-NeoX model was trained, derived from its tensors' names and shapes.

The YAML states the requested features; the names show the ones that were used. Transformer Engine's modules
replace GPT-NeoX's individually, so each sub-module is examined separately.
source: gpt-neox megatron/model/{transformer,norms,transformer_engine}.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...common import codes
from ...common.config_text import shown
from ...common.errors import FastshardError, Finding, error_for
from ...common.records import asdict, dataclass, field
from ...common.regex import compile_when_used
from ...layouts.declaration import Description, Source, Unit
from ...models import gpt_neox
from ...models.gpt_neox import GATED, Features
from ..base import Contents, Found
from . import fp8_state, unread_blocks
from .config import Model

_NUMBERED = compile_when_used(r"^\d+\.(.+)$")
_IN = ("mlp.linear1.weight", "mlp.dense_h_to_4h.weight", "mlp.fc1_weight")
_OUT = ("mlp.linear2.weight", "mlp.dense_4h_to_h.weight", "mlp.fc2_weight")
_QKV = ("attention.query_key_value.weight", "attention.qkv.weight")
_EXTRA = "_extra_state"
_EXTRA_REASON = "Transformer Engine's FP8 state: scales of the run, not weights"


@dataclass
class Parts:
    """Tensor names without layer numbers, and their properties."""

    #: name -> local shapes, with the number of occurrences
    shapes: dict[str, Counter[tuple[int, ...]]] = field(default_factory=dict)
    #: Transformer Engine's states: unit, keys from the file's root, name, and whether the state is a tensor
    states: list[fp8_state.State] = field(default_factory=list)
    #: tensors stored in FP8: unit, name, and the dtype or class
    fp8: list[tuple[Unit, str, str]] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Return True if one of the names occurs in a layer."""
        return any(name in self.shapes for name in names)

    def ends(self, *ends: str) -> bool:
        """Return True if a name has one of these suffixes."""
        return any(name.endswith(ends) for name in self.shapes)

    def begins(self, start: str) -> bool:
        """Return True if a name has this prefix."""
        return any(name.startswith(start) for name in self.shapes)

    def shape(self, *names: str) -> tuple[int, ...] | None:
        """Return the most frequent shape of the first of these names that exists."""
        for name in names:
            if name in self.shapes:
                return self.shapes[name].most_common(1)[0][0]
        return None


def read(units: list[Unit], values: Contents) -> Parts:
    """Read names and shapes of all tensors in a source's units."""
    parts = Parts()
    for unit in units:
        depth = len(unit.under)
        for tensor in values.tensors(unit.file):
            path = tensor["path"]
            if path[:depth] != unit.under:
                continue
            name = unit.prefix + ".".join(path[depth:]).removeprefix(unit.strip)
            if match := _NUMBERED.match(name):
                shapes = parts.shapes.setdefault(match[1], Counter())
                shapes[tuple(tensor["shape"])] += 1
            if str(tensor["dtype"]).startswith("F8_"):
                parts.fp8.append((unit, name, tensor["dtype"]))
            if name.endswith(_EXTRA):
                parts.states.append((unit, path, name, True))
        content = values(unit.file)
        for key in unit.under:
            content = content.get(key) if isinstance(content, dict) else None
        if isinstance(content, dict):
            for key, value in content.items():
                if not isinstance(value, dict) or "__tensor__" in value:
                    continue
                name = unit.prefix + key.removeprefix(unit.strip)
                kind = str(value.get("__class__"))
                if key.endswith(_EXTRA):
                    parts.states.append((unit, [*unit.under, key], name, False))
                elif kind.startswith("transformer_engine"):
                    # A quantised tensor of TE's own class, as fp8_model_init makes.
                    parts.fp8.append((unit, name, kind))
    return parts


def norm_of(parts: Parts, config: dict[str, Any]) -> str:
    """Return the kind of norm in the terms of GPT-NeoX's ``norm``; tensor names take precedence."""
    declared_norm = str(config.get("norm") or "layernorm")
    inside = [n.removeprefix("input_layernorm.") for n in parts.shapes if n.startswith("input_layernorm.")]
    if "scale" in inside:
        return "rmsnorm"
    if "g" in inside:
        return "scalenorm"
    if "norm.weight" in inside:
        bias = "norm.bias" in inside
        # Without biases the name alone does not tell the two apart.
        return (
            declared_norm
            if not bias and declared_norm.startswith("te_")
            else ("te_layernorm" if bias else "te_rmsnorm")
        )
    if "weight" in inside:
        return "layernorm"
    return declared_norm


def _gated(parts: Parts, activation: str | None) -> bool:
    inner, outer = parts.shape(*_IN), parts.shape(*_OUT)
    if parts.has("mlp.w1.weight", "mlp.w3.weight"):
        return True
    if inner and outer and len(outer) == 2:
        return inner[0] == 2 * outer[1]
    return activation in GATED


def _kv_heads(parts: Parts, model: Model, tp: int) -> int | None:
    """Return the number of key/value heads from the rows of the fused projection, H + 2 K d.

    None if the number of rows does not determine it.
    """
    sizes = {shape for name in _QKV for shape in parts.shapes.get(name, ())}
    hidden, width = model.axes.get("H"), model.axes.get("d")
    if len(sizes) != 1 or not hidden or not width or not model.heads:
        return None
    rest = sizes.pop()[0] * tp - hidden
    # What fits no whole number of heads is left to the check of shapes.
    if rest > 0 and rest % (2 * width) == 0 and model.heads % (rest // (2 * width)) == 0:
        return rest // (2 * width)
    return None


def apply(
    found: Found[object], source: Source, model: Model, values: Contents, own_layout: bool = False
) -> None:
    """Choose the layout and its facts for a declared source, and record how the model was trained.

    Args:
        found: its files.
        source: the declaration.
        model: the model by arguments and config.
        values: contents of the files' headers.
        own_layout: True if the caller has a table for the model.

    Raises:
        FastshardError: ``FS211`` if the heads are not divisible by the stated key/value heads, or if a name
            is not text; ``FS514`` for blocks that no table describes.
    """
    parts = read(source.files.units, values)
    if not own_layout and (
        others := unread_blocks.others(found, source.files.units, set(parts.shapes), values)
    ):
        raise error_for(others)
    _refuse_config(model)
    activation: str | None = model.config.get("activation")
    kv_heads = _kv_heads(parts, model, source.binding.degrees.get("tp", 1)) or model.kv_heads or model.heads
    if model.heads and kv_heads:
        source.binding.axes |= {"g": kv_heads, "r": model.heads // kv_heads}
    norm = norm_of(parts, model.config)
    gqa = bool(model.heads and kv_heads and kv_heads != model.heads)
    source.binding.facts |= _facts(parts, norm, _gated(parts, activation), gqa)
    source.findings += _left_out(found, parts)
    features = _features(parts, norm, kv_heads, source.binding.facts)
    source.files.values["features"] = asdict(features)
    if parts.states:
        summary = fp8_state.summary(found, parts.states, values, source.findings)
        source.files.values["features"]["fp8"] = summary
    family = "llama" if features.is_llama else "gpt_neox"
    source.binding.layout = "gpt_neox.llama" if family == "llama" else "gpt_neox.neox"
    source.model = Description(family, model.config, dialect=gpt_neox.GptNeoX(features))
    source.findings += _contradictions(source, model, features, activation)


def _refuse_config(model: Model) -> None:
    """Raise an error for a name that is not text, and for heads that are not divisible by the key/value
    heads.
    """
    for key in ("norm", "activation", "pos_emb"):
        if not isinstance(model.config.get(key), (str, type(None))):
            raise FastshardError.of(
                codes.BAD_VALUE,
                f"config: {key}",
                file=model.path,
                expected="a name",
                got=shown(model.config[key]),
            )
    if model.heads and model.kv_heads and model.heads % model.kv_heads:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "config: num_attention_heads over num_kv_heads",
            file=model.path,
            expected=f"a multiple of {model.kv_heads}",
            got=str(model.heads),
        )


def _facts(parts: Parts, norm: str, gated: bool, gqa: bool) -> dict[str, bool]:
    """Return the facts on which the layout's rules depend."""
    te_mha = parts.has("attention.qkv.weight", "attention.proj.weight")
    te_mlp = parts.has("mlp.fc1_weight", "mlp.fc2_weight")
    states = [name for _, _, name, _ in parts.states]
    return {
        "gqa": gqa,
        "gated": gated,
        "te_mha": te_mha,
        "te_mlp": te_mlp,
        "te_dense": te_mha or any(name.endswith("attention.dense._extra_state") for name in states),
        "te_linear2": te_mlp or any(name.endswith("mlp.linear2._extra_state") for name in states),
        "split_gate": parts.has("mlp.w1.weight", "mlp.w3.weight"),
        "scalenorm": norm == "scalenorm",
        "norms": norm != "non_parametric_layernorm",
        "reward": parts.has("rm_linear.weight"),
    }


def _features(parts: Parts, norm: str, kv_heads: int | None, facts: dict[str, bool]) -> Features:
    """Describe the model's computation by its features."""
    residual = facts.get("gpt_j_residual")
    te_linear = (facts["te_dense"] and not facts["te_mha"]) or (facts["te_linear2"] and not facts["te_mlp"])
    return Features(
        norm=norm,
        norm_bias=parts.ends("norm.bias", "norm.offset", "layernorm.bias", "layernorm.offset")
        or parts.has("mlp.layer_norm_bias"),
        residual="unknown" if residual is None else ("parallel" if residual else "sequential"),
        attention_bias=parts.has("attention.query_key_value.bias", "attention.qkv.bias"),
        dense_bias=parts.has("attention.dense.bias", "attention.proj.bias"),
        mlp_bias=parts.ends("linear1.bias", "dense_h_to_4h.bias", "fc1_bias"),
        mlp_out_bias=parts.ends("linear2.bias", "dense_4h_to_h.bias", "fc2_bias"),
        gated=facts["gated"],
        kv_heads=kv_heads,
        gqa=facts["gqa"],
        te_mha=facts["te_mha"],
        te_layernorm_mlp=facts["te_mlp"],
        stale_norm=facts["te_mlp"] and parts.begins("post_attention_layernorm."),
        te_parallel_linear=te_linear,
        qk_layernorm=parts.begins("attention.qk_layernorm"),
        learned_positions=parts.has("position_embeddings.weight"),
        reward_head=facts["reward"],
        legacy_names=parts.ends("dense_h_to_4h.weight") or facts["split_gate"],
    )


def _left_out(found: Found[object], parts: Parts) -> list[Finding]:
    """Report FP8 state that is not a tensor, so that the layout has no rule for it, and weights in FP8.

    FP8 weights are not supported.
    """
    return [
        *(
            Finding.of(
                codes.IGNORED, _EXTRA_REASON, file=found.files[unit.file].path, rank=unit.rank, tensor=name
            )
            for unit, _, name, is_tensor in parts.states
            if not is_tensor
        ),
        *(
            Finding.of(
                codes.UNSUPPORTED,
                "a weight stored in FP8: fastshard does not apply its scale",
                file=found.files[unit.file].path,
                rank=unit.rank,
                tensor=name,
                expected="F32, BF16 or F16",
                got=kind,
                help="dequantise it with the framework that trained it, and save the checkpoint again",
            )
            for unit, name, kind in parts.fp8
        ),
    ]


def _contradictions(
    source: Source, model: Model, features: Features, activation: str | None
) -> list[Finding]:
    """Report contradictions between the config and the tensors' names."""
    gated = features.gated
    declared_norm = model.config.get("norm")
    # TE's modules and GPT-NeoX's own are of one kind by either name, or the names would not fit.
    kind = {"te_layernorm": "layernorm", "te_rmsnorm": "rmsnorm"}
    mismatches: list[tuple[str, str, object]] = []
    # mlp_type llama is gated by its w1 and w3, whatever the activation is called.
    if activation is not None and (activation in GATED) != gated and not source.binding.facts["split_gate"]:
        rows = "by the rows of the MLP's first projection"
        mismatches.append(("activation", f"{'a gated' if gated else 'no gated'} one, {rows}", activation))
    if model.kv_heads is not None and model.kv_heads != features.kv_heads:
        rows = "by the rows of the fused projection"
        mismatches.append(("num_kv_heads", f"{features.kv_heads}, {rows}", model.kv_heads))
    norm = features.norm
    if declared_norm is not None and kind.get(declared_norm, declared_norm) != kind.get(norm, norm):
        mismatches.append(("norm", f"{norm}, by the names of its tensors", declared_norm))
    findings = [
        Finding.of(
            codes.CONFIG_DISAGREES,
            f"config: {key}",
            file=model.path,
            expected=expected,
            got=str(got),
            help="pass the config of this checkpoint",
            run=["--config FILE"],
        )
        for key, expected, got in mismatches
    ]
    if features.stale_norm:
        findings.append(
            Finding.of(
                codes.IGNORED,
                "post_attention_layernorm.* next to Transformer Engine's mlp.layer_norm_* is stale, and is "
                "left out in all layers",
                severity="warning",
                help="ignore it; GPT-NeoX before #1355 created it and never used it (gpt-neox#1353)",
            )
        )
    tp = source.binding.degrees.get("tp", 1)
    if source.binding.facts.get("gpt_j_residual") and tp > 1 and source.binding.facts["te_linear2"]:
        findings.append(
            Finding.of(
                codes.CONFIG_DISAGREES,
                "gpt_j_residual with Transformer Engine's row-parallel layers",
                severity="warning",
                file=model.path,
                expected="one reduction of each layer's output",
                got=f"two reductions over tp {tp}, by GPT-NeoX's source",
                help="compare logits of the result with the run's own before use; row biases are read as "
                "copies",
            )
        )
    return findings
