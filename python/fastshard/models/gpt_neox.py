"""GPT-NeoX's terms for models: the training config.

source: gpt-neox megatron/model, megatron/neox_arguments/neox_args.py, tools/ckpts/convert_neox_to_hf.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass
from ..layouts.declaration import Evidence
from . import unsupported
from .config_fields import positive_number, refused, whole_number
from .model import Attention, Block, Lack, Model, Rope, unstated
from .overridden_settings import read_settings
from .unsupported import Says

#: Gated activations, which halve the output of the first projection. source: gpt-neox
#: megatron/model/activations.py
GATED = ("swiglu", "geglu", "reglu", "bilinear", "glu")
#: source: gpt-neox megatron/neox_arguments/neox_args.py, activation
DEFAULT_ACTIVATION = "gelu"
#: Key and default of eps, by kind of norm. source: gpt-neox megatron/neox_arguments/neox_args.py LayerNormMLP
#: uses these defaults whatever the config says. source: megatron/model/transformer_engine.py
EPS = {
    "layernorm": ("layernorm_epsilon", 1e-5),
    "te_layernorm": ("layernorm_epsilon", 1e-5),
    "rmsnorm": ("rms_norm_epsilon", 1e-8),
    "te_rmsnorm": ("rms_norm_epsilon", 1e-8),
}
_NORMS = {
    "layernorm": "LayerNorm",
    "te_layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "te_rmsnorm": "RMSNorm",
}
#: GPT-NeoX activation -> transformers activation. For a gated one, the function applied to the gate.
_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "linear",
}
#: The reverse mapping. bias_gelu_fusion computes the tanh form. source: megatron/model/fused_bias_gelu.py
_PLAIN: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "gelu_pytorch_tanh": {"activation": "gelu", "bias_gelu_fusion": True},
    "relu": {"activation": "relu"},
    "silu": {"activation": "silu"},
    "mish": {"activation": "mish"},
}
_TOKENS = ("bos_token_id", "eos_token_id")
GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
_WORDS = {
    "gated": "MLP",
    "parallel": "gpt_j_residual",
    "positions": "pos_emb",
    "rope.share": "rotary_pct",
    "rope.base": "rotary_emb_base",
    "window": "sliding_window_width",
    "qk_norm": "use_qk_layernorm",
    "grouped": "num_kv_heads",
    "biases": "set of biases",
}
#: Keys of a training config for the settings that :func:`.read_settings` returns.
_OF_CONFIG = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_position_embeddings",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
    "parallel": "gpt_j_residual",
}
#: Keys of a training config that are settings of the model, not of the run.
SETTINGS = frozenset(
    {
        *_OF_CONFIG.values(),
        *(key for key, _ in EPS.values()),
        "activation",
        "bias_gelu_fusion",
        "norm",
        "pos_emb",
        "no_weight_tying",
        "sliding_window_width",
        "gpt_j_tied",
        "use_mup",
        "use_qk_layernorm",
        "intermediate_size",
        "mlp_multiple_of",
    }
)
_NONE = (False, False, False, False)
_ALL = (True, True, True, True)
_EVEN = (_NONE, _ALL, (True, True, False, False), (False, False, True, True))
NEOX = Says(
    kind="GPT-NeoX",
    families=("gpt_neox",),
    norm="LayerNorm",
    norm_bias=True,
    gated=False,
    activations=tuple(_PLAIN),
    parallel=(False, True),
    shares=None,
    scalings=("default",),
    whole_base=True,
    biases=_EVEN,
)
LLAMA = Says(
    kind="Llama",
    activations=tuple(GATES),
    shares=None,
    scalings=("default",),
    whole_base=True,
    window=True,
    biases=_EVEN,
)


@dataclass(frozen=True)
class Features:
    """Features of a trained model, derived from its tensors' names and shapes."""

    #: The kind of norm, as in GPT-NeoX's ``norm``.
    norm: str
    norm_bias: bool
    #: ``parallel``, ``sequential`` or ``unknown``.
    residual: str
    attention_bias: bool
    dense_bias: bool
    mlp_bias: bool
    mlp_out_bias: bool
    gated: bool
    kv_heads: int | None
    #: True if there are fewer key/value heads than heads.
    gqa: bool
    te_mha: bool
    te_layernorm_mlp: bool
    #: True if unused norms are stored besides those of Transformer Engine's MLP.
    stale_norm: bool
    te_parallel_linear: bool
    qk_layernorm: bool
    learned_positions: bool
    reward_head: bool
    legacy_names: bool

    @property
    def is_llama(self) -> bool:
        """True if transformers' Llama class computes the model: RMSNorm, gated MLP, sequential residual."""
        if self.residual == "unknown" and (self.dense_bias or self.mlp_out_bias):
            return False
        plain = self.norm in ("rmsnorm", "te_rmsnorm") and not self.norm_bias and self.gated
        others = self.qk_layernorm or self.learned_positions or self.reward_head
        return plain and self.residual != "parallel" and not others


@dataclass(frozen=True)
class GptNeoX:
    """The dialect of GPT-NeoX."""

    name: ClassVar[str] = "GPT-NeoX"
    #: Features with which the model was trained; None when writing a config.
    features: Features | None = None

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model that a training config and the tensor names describe.

        Args:
            values: the training config; may be empty.
            evidence: other evidence from the tensors.

        Raises:
            FastshardError: ``FS211`` for an invalid value.
        """
        features, facts = self.features, evidence.facts
        assert features is not None
        assumed: dict[str, str] = {}
        unknown: dict[str, Finding] = {}

        def known(field: str, key: str, default: Any) -> Any:
            if values.get(key) is None:
                assumed[field] = key
                return default
            if isinstance(default, int):
                return whole_number(values, key, default)
            return positive_number(values, key, default) if isinstance(default, float) else values[key]

        norm, gated = features.norm, features.gated
        key, default = EPS.get(norm, ("", 0.0))
        activation = values.get("activation")
        if activation is None and gated:
            unknown["activation"] = unstated(
                "activation",
                ", e.g. swiglu",
                "which is not stated: the MLP is gated, and the MLP of GPT-NeoX's default activation is not",
            )
        elif activation is None:
            assumed["activation"] = "activation"
        activation = str(activation or DEFAULT_ACTIVATION)
        is_fused = activation == "gelu" and not gated and bool(values.get("bias_gelu_fusion"))
        applied = "gelu_pytorch_tanh" if is_fused else _ACTIVATIONS.get(activation, activation)
        remarks = [] if not default else te_differences(values, features, "")
        tokens = {key: n for key in _TOKENS if isinstance(n := values.get(key), int)}
        remarks += _remarks(values, is_fused, [key for key in _TOKENS if key not in tokens])
        parallel = facts.get("gpt_j_residual")
        if parallel is None:
            unknown["parallel"] = unstated("gpt_j_residual", ": true or false")
        window = _window(values)
        # Llama rotates all of a head, as GPT-NeoX's own default does.
        rope = Rope(known("rope.base", "rotary_emb_base", 10000), known("rope.share", "rotary_pct", 1.0))
        biases = features.attention_bias, features.dense_bias, features.mlp_bias, features.mlp_out_bias
        # The token itself is not among those that it states.
        attention = Attention(window=None if window is None else window + 1, grouped=features.gqa)
        block = Block(attention, biases=biases)
        return Model(
            framework=self.name,
            family=evidence.family,
            norm=_NORMS.get(norm, norm),
            norm_bias=features.norm_bias,
            eps=known("eps", key, default) if key else None,
            eps_outside=norm == "rmsnorm",
            gated=gated,
            activation=applied,
            parallel=parallel,
            positions="learned" if features.learned_positions else str(values.get("pos_emb", "rotary")),
            rope=rope,
            blocks=(block,),
            tied=facts.get("tied", False),
            max_positions=known("max_positions", "max_position_embeddings", 2048),
            tokens=tokens,
            others=tuple(_besides(values, features, parallel, window is not None)),
            words=_WORDS | {"eps": key or "eps"},
            unknown=unknown,
            assumed=assumed,
            remarks=tuple(remarks),
        )

    def write(self, model: Model, axes: Mapping[str, int], file: str) -> tuple[dict[str, Any], list[Finding]]:
        """Return the keys of a training config that describe a model, and the assumptions made.

        Args:
            model: the model.
            axes: extents that the plan bound.
            file: the config's name in messages.

        Raises:
            FastshardError: ``FS514`` for a model that GPT-NeoX cannot compute, ``FS209`` for a setting that
                affects values and is not stated.
        """
        refuse(model)
        model.settled("parallel", "activation")
        llama = model.family != "gpt_neox"
        heads = axes["g"] * axes.get("r", 1)
        if axes["d"] * heads != axes["H"]:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "GPT-NeoX needs hidden_size equal to the number of heads times head_dim",
                expected=f"head_dim {axes['H'] // heads}",
                got=str(axes["d"]),
            )
        positions = model.max_positions or 2048
        activation = str(model.activation)
        qkv, _, mlp, _ = model.biases
        out: dict[str, Any] = {
            "num_layers": axes["L"],
            "hidden_size": axes["H"],
            "num_attention_heads": heads,
            "seq_length": positions,
            "max_position_embeddings": positions,
            "pos_emb": "rotary",
            "rotary_pct": model.rope.share,
            "rotary_emb_base": int(model.rope.base or 10000),
            "output_layer_parallelism": "column",
            "tokenizer_type": "HFTokenizer",
            "norm": "rmsnorm" if llama else "layernorm",
            # A gated MLP takes two thirds of this for gate and up together.
            "intermediate_size": 3 * axes["F"] if llama else axes["F"],
            "use_bias_in_norms": model.norm_bias,
            "use_bias_in_attn_linear": qkv,
            "use_bias_in_mlp": mlp,
            **({"activation": GATES[activation]} if llama else _PLAIN[activation]),
        }
        eps = 1e-6 if llama else 1e-5
        out["rms_norm_epsilon" if llama else "layernorm_epsilon"] = eps if model.eps is None else model.eps
        if llama:
            out["mlp_multiple_of"] = 1
        if axes.get("r", 1) > 1:
            out["num_kv_heads"] = axes["g"]
        if (window := model.attention.window) is not None:
            # GPT-NeoX has windows in flash attention alone.
            out["sliding_window_width"] = window - 1
            out["attention_config"] = [[["flash"], axes["L"]]]
        findings = model.list_assumptions(
            "eps", "max_positions", "rope.base", "rope.share", "rope.scaling", file=file
        )
        if llama and not model.eps_outside:
            findings.append(
                Finding.of(
                    codes.NOT_PROVABLE,
                    "config: GPT-NeoX adds rms_norm_epsilon to the root mean square, "
                    f"{model.framework} to the mean square",
                    severity="note",
                    file=file,
                    help="expect equal logits, except where activations are not much larger than the square "
                    "root of epsilon",
                )
            )
        return out, findings


def read_config_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the settings that a config.json states, as keys of a training config.

    Raises:
        FastshardError: ``FS211`` for an invalid value, ``FS514`` for one that no key states.
    """
    settings = read_settings(config)
    is_neox = config.get("model_type") == "gpt_neox"
    act, window = settings.get("hidden_act"), settings.get("sliding_window")
    known = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
    act = known.get(str(act), act)
    lacking = []
    if "rope_by_layers" in settings:
        lacking.append(
            Lack("rope_parameters by kinds of layers", "one set", shown(settings["rope_by_layers"]))
        )
    if (kind := settings.get("rope_type", "default")) != "default":
        lacking.append(Lack("rope_scaling", "default", kind))
    if isinstance(window, list):
        lacking.append(Lack("sliding window in some layers", "none", ", ".join(window)))
    if act is not None and act not in (_PLAIN if is_neox else GATES):
        lacking.append(Lack("hidden_act", " | ".join(_PLAIN if is_neox else GATES), shown(act)))
    if lacking:
        raise unsupported.refused("GPT-NeoX", NEOX if is_neox else LLAMA, lacking)
    found = {key: settings[name] for name, key in _OF_CONFIG.items() if name in settings}
    if "eps" in settings:
        found["layernorm_epsilon" if is_neox else "rms_norm_epsilon"] = settings["eps"]
    if act is not None:
        found |= {"bias_gelu_fusion": False, **_PLAIN[act]} if is_neox else {"activation": GATES[act]}
    if isinstance(tied := config.get("tie_word_embeddings"), bool):
        found["no_weight_tying"] = not tied
    if window is not None:
        # GPT-NeoX has windows in flash attention alone.
        found |= {"sliding_window_width": window - 1, "attention_config": [[["flash"], "all"]]}
    elif "sliding_window" in settings:
        found["sliding_window_width"] = None
    return found


def _remarks(values: Mapping[str, Any], is_fused: bool, lacking: list[str]) -> list[Finding]:
    """Report the chosen GELU variant, an assumed position embedding, and omitted config entries."""
    remarks = []
    if is_fused:
        what = "gelu_pytorch_tanh is written, which is the form of gelu that bias_gelu_fusion computes"
        remarks.append(_note(f"config: hidden_act {what}"))
    if "pos_emb" not in values:
        remarks.append(
            Finding.of(
                codes.DEFAULT_ASSUMED,
                "pos_emb is not stated, and there is no position embedding; rotary is written",
                help="pass the training config",
                run=["--config FILE"],
            )
        )
    if lacking:
        remarks.append(
            _note(f"config: left out, because only the tokenizer states them: {', '.join(lacking)}")
        )
    return remarks


def refuse(model: Model) -> None:
    """Refuse a model that GPT-NeoX cannot compute.

    Raises:
        FastshardError: ``FS514``, one finding for each reason.
    """
    unsupported.refuse("GPT-NeoX", [NEOX, LLAMA], model)


def activation_of(config: Mapping[str, Any]) -> str:
    """Return GPT-NeoX's ``activation``, or its default unless the tensors contradict it."""
    activation = config.get("activation")
    return DEFAULT_ACTIVATION if activation is None else str(activation)


def te_differences(config: Mapping[str, Any], features: Features, written: str) -> list[Finding]:
    """Report differences between Transformer Engine's LayerNormMLP and the plain modules of the result.

    Args:
        config: the training config.
        features: features by the tensors' names.
        written: the file that describes the plain modules.
    """
    if not features.te_layernorm_mlp:
        return []
    findings = []
    key, default = EPS.get(features.norm, ("", 0.0))
    eps = positive_number(config, key, default) if config.get(key) is not None else default
    if eps != default:
        findings.append(
            Finding.of(
                codes.CONFIG_DISAGREES,
                f"config: all norms share one eps; {key} is written",
                severity="warning",
                file=written,
                expected=f"{default:g}, as Transformer Engine's LayerNormMLP used before each MLP",
                got=f"{eps:g}",
                help="compare logits with the run's own; the norms before attention and the last norm used "
                "it",
            )
        )
    activation = str(config.get("activation", DEFAULT_ACTIVATION))
    if activation == "geglu" or (activation == "gelu" and not config.get("bias_gelu_fusion")):
        fused = "; `bias_gelu_fusion: true` in --config asks for that form" if activation == "gelu" else ""
        findings.append(
            Finding.of(
                codes.CONFIG_DISAGREES,
                f"config: {activation} is written with the error function, as in GPT-NeoX's own converter",
                severity="warning",
                file=written,
                expected="the tanh form of gelu, as in Transformer Engine's LayerNormMLP",
                got="gelu",
                help=f"compare logits with the run's own{fused}",
            )
        )
    return findings


def _note(message: str) -> Finding:
    return Finding.of(codes.NOT_PROVABLE, message, severity="note")


def _besides(
    config: Mapping[str, Any], features: Features, parallel: bool | None, windowed: bool
) -> list[Lack]:
    """List features that no other framework supports."""
    found = []
    if features.qk_layernorm:
        found.append(Lack("use_qk_layernorm", "no norm of queries and keys", "attention.qk_layernorm"))
    if features.reward_head:
        found.append(Lack("head", "final_linear", "rm_linear"))
    if config.get("use_mup"):
        found.append(Lack("use_mup", "no scaling of layer outputs", "true"))
    if config.get("gpt_j_tied") and parallel:
        found.append(Lack("gpt_j_tied", "a separate norm before the MLP", "true"))
    kinds = attention_kinds(config)
    # Flash and ring attention compute what global attention does.
    if kinds - {"global", "flash", "ring"}:
        found.append(Lack("attention_config", "global or flash", ", ".join(sorted(kinds))))
    elif windowed and (kinds != {"flash"} or features.te_mha):
        # Documented for flash attention alone. The mask of global attention has the window too, but fused
        # kernels do not look at it; Transformer Engine takes another kind of value.
        # source: gpt-neox neox_arguments/neox_args.py, megatron/utils.py get_attn_mask,
        # model/fused_softmax.py
        got = "Transformer Engine's attention" if features.te_mha else ", ".join(sorted(kinds))
        found.append(Lack("sliding_window_width", "attention_config: flash in all layers", got))
    return found


def _window(config: Mapping[str, Any]) -> int | None:
    """Return how many positions to its left a token sees, excluding itself; None for all.

    source: gpt-neox megatron/model/transformer.py: flash-attn gets ``window_size=(width, -1)``

    Raises:
        FastshardError: ``FS211`` if it is not an integer.
    """
    width = config.get("sliding_window_width")
    if width is not None and (
        not isinstance(width, int) or isinstance(width, bool) or not 0 <= width < 1 << 31
    ):
        raise refused("config: sliding_window_width", "an integer", width)
    return width


def attention_kinds(config: Mapping[str, Any]) -> set[str]:
    """Return the attention kinds in ``attention_config``: ``[[["global", "flash"], 12]]``, or one word per
    layer.

    Raises:
        FastshardError: ``FS211`` if it has another form.
    """
    attention_config = config.get("attention_config")
    if attention_config is None:
        return {"global"}
    kinds: list[Any] = []
    for block in attention_config if isinstance(attention_config, list) else [None]:
        if isinstance(block, list) and len(block) == 2:
            kinds += block[0] if isinstance(block[0], list) else [block[0]]
        else:
            kinds.append(block)
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise refused(
            "config: attention_config", 'kinds and numbers of layers, as [[["flash"], 12]]', attention_config
        )
    return set(kinds)


DIALECT = GptNeoX()
