"""MaxText's terms for models: its yml.

source: MaxText configs/base.yml and configs/models, configs/types.py,
    layers/{attentions,embeddings,decoders}.py,
models/{llama2,mistral,gpt3}.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, replace
from ..layouts.declaration import Evidence
from . import huggingface, unsupported
from .config_fields import flag, positive_number
from .model import Lack, Model, Rope
from .unsupported import Says

#: Keys that tell MaxText's yml from other configs.
_TELLING = (
    "decoder_block",
    "base_config",
    "logits_via_embedding",
    "scan_layers",
    "param_scan_axis",
    "normalization_layer_epsilon",
    "rope_max_timescale",
    "fused_qkv",
    "rope_type",
    "model_name",
)
#: source: MaxText configs/base.yml
_DEFAULTS = {"rope_max_timescale": 10_000, "normalization_layer_epsilon": 1e-5}
#: Hard-coded in MaxText. source: MaxText layers/embeddings.py, LLaMARotaryEmbedding
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Blocks that compute what Llama does. source: MaxText layers/decoders.py
_BLOCKS = ("llama2", "mistral")
_MERGE = "run `fastshard merge`, which writes the tensors under MaxText's own names"
_WORDS = {
    "eps": "normalization_layer_epsilon",
    "rope.base": "rope_max_timescale",
    "activation": "mlp_activations",
    "rope.scaling": "rope_type",
}
#: Its Llama block, which sees all positions before. source: MaxText models/{llama2,mistral}.py
#: (attention_type is global)
LLAMA = Says(
    kind="Llama",
    activations=("silu",),
    scalings=("default", "llama3"),
    fixed=tuple(LLAMA3_SCALING.items()),
    whole_base=True,
)


def is_maxtext(config: Mapping[str, Any]) -> bool:
    """Return True for a config that MaxText reads, False for other configs."""
    if "model_type" in config or "architectures" in config:
        return False
    return any(key in config for key in _TELLING) or any(str(key).startswith("base_") for key in config)


@dataclass(frozen=True)
class Pairs:
    """The rotary embedding of a MaxText model."""

    #: The two of a pair lie side by side.
    interleaved: bool
    #: Frequencies are scaled as Llama 3.1's are.
    scaled: bool


def pairs_of(config: Mapping[str, Any]) -> Pairs | None:
    """Return the rotary embedding by a yml or ``config.json``, since no checkpoint of MaxText states it.

    None if the order of queries and keys stays open: with only some ``model_name`` in a yml, or with a
    ``config.json`` without scaling, which MaxText can run with either order.
    source: MaxText layers/attentions.py (init_rotary_embedding)

    Raises:
        FastshardError: ``FS211`` for invalid values, ``FS514`` for an embedding that is neither.
    """
    if not config:
        return None
    if not is_maxtext(config):
        rope, several = huggingface.rope_of(config)
        if several:
            raise unsupported.refused("MaxText", LLAMA, several)
        return Pairs(True, True) if rope.kind == "llama3" else None
    kind, model = config.get("rope_type"), str(config.get("model_name") or "")
    if str(kind).lower().startswith("llama3.1") or model.startswith("llama3.1"):
        return Pairs(True, flag(config, "rope_use_scale") is not False)
    if kind is None:
        # llama3.2 and later are not told apart by MaxText's own code and its converters alike.
        return Pairs(False, False) if model.startswith(("llama2", "llama3-", "mistral")) else None
    if str(kind).lower() != "default":
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "transformers has no Llama with this rope_type",
            expected="default | llama3.1",
            got=shown(kind),
            help=_MERGE,
        )
    return Pairs(False, False)


@dataclass(frozen=True)
class MaxText:
    """The dialect of MaxText, and of Paxml's models, which it runs."""

    name: ClassVar[str] = "MaxText"
    #: What a ``config.json`` of transformers' Llama says in place of a yml; None where there is none.
    config_facts: Mapping[str, bool] | None = None

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model of a yml, or of a ``config.json`` that was given for it.

        Raises:
            FastshardError: ``FS211`` for an invalid value, ``FS209`` if the yml leaves open which
                order queries and keys have, ``FS215`` for a config of another model.
        """
        if evidence.family == "gpt3":
            zero = Lack(
                "norm",
                "--to maxtext, which has it, or LayerNorm",
                "one around zero: GPT-2 of transformers stores other values",
            )
            return Model(
                self.name, "gpt3", norm="LayerNorm", norm_bias=True, gated=False, others=(zero,), tied=True
            )
        tied, pairs = evidence.facts.get("tied", False), pairs_of(values)
        if values and not is_maxtext(values):
            return self._of_config(values, evidence)
        if values and pairs is None:
            raise FastshardError.of(
                codes.FACT_UNKNOWN,
                "the order of queries and keys depends on `rope_type`, which is not stated",
                help="pass MaxText's yml, which must say rope_type: default or llama3.1, or the model_name",
                run=["--config FILE"],
            )
        remarks, assumed = [_order_open()] if pairs is None else [], {}
        found: dict[str, float | None] = {}
        for name, key, theirs in (
            ("rope.base", "rope_max_timescale", "rope_theta"),
            ("eps", "normalization_layer_epsilon", "rms_norm_eps"),
        ):
            found[name] = None
            if not values:
                # A guess would be a model that loads and is wrong.
                subject = (
                    f"{theirs} (MaxText's {key}): config.json lacks it, and transformers takes its own "
                    "default"
                )
                remarks.append(_report_assumed(subject, "warning"))
                continue
            if values.get(key) is None:
                assumed[name], found[name] = key, _DEFAULTS[key]
            else:
                found[name] = positive_number(values, key, _DEFAULTS[key])
        if values.get("decoder_block") is None:
            remarks.append(_report_assumed("decoder_block: config.json says Llama", "note"))
        remarks.append(
            _report_assumed(
                "max_position_embeddings, bos_token_id, eos_token_id: config.json lacks them, "
                "and transformers takes its own defaults",
                "warning",
            )
        )
        scaled = pairs is not None and pairs.scaled
        return Model(
            framework=self.name,
            family=evidence.family,
            eps=found["eps"],
            rope=Rope(
                found["rope.base"], 1.0, "llama3" if scaled else "default", LLAMA3_SCALING if scaled else {}
            ),
            grouped=evidence.axes.get("r", 1) > 1 or bool(evidence.facts.get("gqa")),
            tied=tied,
            # MaxText's block attends to all positions before. source: MaxText models/mistral.py
            kin="mistral" if values.get("decoder_block") == "mistral" else "llama",
            others=tuple(_besides(values, tied)),
            words=_WORDS,
            assumed=assumed,
            remarks=tuple(remarks),
        )

    def _of_config(self, config: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model of a ``config.json``, if the tensors are those of such a model."""
        facts = {"tied": evidence.facts.get("tied", False)}
        facts |= dict.fromkeys(("attention_bias", "out_bias", "mlp_bias", "qk_norm"), False)
        declared = self.config_facts
        differing = sorted(key for key in facts if declared is not None and declared[key] != facts[key])
        if declared is None or differing:
            with_ = f" with {', '.join(f'{key}: {facts[key]}' for key in differing)}" if differing else ""
            raise FastshardError.of(
                codes.CONFIG_DISAGREES,
                "the config describes another model than the tensors",
                expected=f"a Llama or Mistral{with_}",
                got=shown(config.get("model_type")),
                help="pass the config of this model",
                run=["--config FILE"],
            )
        seen = Evidence(evidence.family, facts, evidence.axes)
        model = huggingface.DIALECT.read(config, seen)
        if pairs_of(config) is not None:
            return model
        return replace(model, remarks=(*model.remarks, _order_open()))

    def write(
        self, model: Model, interleaved: bool, tied: bool, file: str
    ) -> tuple[dict[str, Any], list[Finding]]:
        """Return the keys of a yml that describe a model, and the assumptions.

        Args:
            model: the model.
            interleaved: the order of queries and keys that is written.
            tied: the output layer is the embedding.
            file: the yml's name in messages.

        Raises:
            FastshardError: ``FS514`` for a model that MaxText's block does not compute.
        """
        refuse(model)
        model.settled("parallel", "activation")
        findings = model.list_assumptions("eps", "rope.base", "rope.share", "rope.scaling", file=file)
        if model.window is not None:
            findings.append(
                Finding.of(
                    codes.NOT_PROVABLE,
                    f"sliding_window {model.window} is left out: max_position_embeddings is "
                    f"{model.max_positions}, "
                    "and MaxText's block, which sees all positions before, computes the same up to there",
                    severity="note",
                    file=file,
                )
            )
        out = {
            "mlp_activations": ["silu", "linear"],
            "rope_max_timescale": int(model.rope.base or 10_000),
            # source: transformers models/{llama,mistral}/configuration_*.py
            "normalization_layer_epsilon": 1e-6 if model.eps is None else model.eps,
            "decoder_block": "mistral" if model.kin == "mistral" else "llama2",
            **order(interleaved, model.rope.kind == "llama3"),
        }
        if tied:
            # MaxText would divide the logits by sqrt(emb_dim). source: MaxText configs/base.yml
            out["normalize_embedding_logits"] = False
            findings.append(
                Finding.of(
                    codes.NOT_PROVABLE,
                    "the output layer is the embedding: MaxText computes the same only with "
                    "logits_via_embedding: true and normalize_embedding_logits: false",
                    severity="warning",
                    file=file,
                )
            )
        return out, findings


def refuse(model: Model) -> None:
    """Refuse a model that MaxText's Llama block does not compute.

    Raises:
        FastshardError: ``FS514``, one finding for each reason.
    """
    if model.window is not None and model.max_positions and model.window >= model.max_positions:
        # All that the model may read is within the window.
        model = replace(model, window=None)
    unsupported.refuse("MaxText", [LLAMA], model)


def order(interleaved: bool, scaled: bool) -> dict[str, Any]:
    """Return the keys of the order of pairs, which is always stated since it decides the values' meaning."""
    return {"rope_type": "llama3.1", "rope_use_scale": scaled} if interleaved else {"rope_type": "default"}


def _besides(config: Mapping[str, Any], tied: bool) -> list[Lack]:
    """List features of a MaxText model that no other framework computes. source: MaxText configs/base.yml"""
    activations = config.get("mlp_activations", ["silu", "linear"])
    linear = config.get("rope_linear_scaling_factor", 1.0)
    least, experts = config.get("rope_min_timescale", 1), config.get("num_experts", 1)
    caps = [(key, config.get(key)) for key in ("attn_logits_soft_cap", "final_logits_soft_cap")]
    block = config.get("decoder_block")
    checks = [
        (
            "decoder_block",
            " | ".join(_BLOCKS),
            block,
            block is None or (isinstance(block, str) and block in _BLOCKS),
        ),
        ("mlp_activations", "['silu', 'linear']", activations, activations == ["silu", "linear"]),
        ("rope_min_timescale", "1", least, least == 1),
        ("rope_linear_scaling_factor", "1.0", linear, linear == 1),
        ("use_qk_norm", "false", config.get("use_qk_norm"), not config.get("use_qk_norm")),
        ("num_experts", "1", experts, experts == 1),
        *((key, "none", value, not value) for key, value in caps),
    ]
    if tied:
        normalised = config.get("normalize_embedding_logits", True)
        checks.append(("normalize_embedding_logits", "false", normalised, normalised is False))
    return [Lack(what, expected, shown(got)) for what, expected, got, fits in checks if not fits]


def _order_open() -> Finding:
    return _report_assumed(
        "rope_type: taken for llama3.1, whose order of queries and keys MaxText's converter writes; "
        "a run with rope_type default needs its yml with --config",
        "warning",
    )


def _report_assumed(what: str, severity: str) -> Finding:
    return Finding.of(
        codes.DEFAULT_ASSUMED,
        f"not stated: {what}",
        severity=severity,
        help="pass the model's config.json, or correct the one that is written",
        run=["--config FILE"],
    )


DIALECT = MaxText()
