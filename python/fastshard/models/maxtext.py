"""MaxText's terms for models: its yml.

source: MaxText configs/base.yml and configs/models, configs/types.py,
    layers/{attentions,embeddings,decoders,moe}.py,
models/{llama2,mistral,mixtral,qwen3,qwen3_5,deepseek,gpt_oss,gemma2,gemma3,gpt3}.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding, error_for
from ..common.records import dataclass, field, replace
from ..layouts.declaration import Evidence
from ..layouts.jax_train_states import Cycle
from . import huggingface, maxtext_delta, maxtext_gemma, maxtext_latent, maxtext_windows, unsupported
from .config_fields import flag, positive_number, whole_number
from .model import Attention, Block, Experts, Lack, Model, Rope, change_layers, drop_experts, unstated
from .unsupported import Says

#: Keys that distinguish MaxText's yml from other configs.
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
_MERGE = "run `fastshard merge`, which writes the tensors under MaxText's own names"
_WORDS = {
    "eps": "normalization_layer_epsilon",
    "rope.base": "rope_max_timescale",
    "activation": "mlp_activations",
    "rope.scaling": "rope_type",
    "experts": "num_experts",
    "qk_norm": "use_qk_norm",
    "scores_cap": "attn_logits_soft_cap",
    "logits_cap": "final_logits_soft_cap",
    "local_rope": "local_rope_max_timescale",
}
#: MoE settings that change the computation but neither names nor shapes, with the values that do not change
#: it.
#: source: MaxText layers/moe.py (GateLogit, RoutedMoE.get_topk)
_NEUTRAL_ROUTING: dict[str, Any] = {"routed_score_func": "", "use_random_routing": False}
#: Settings that change the computation of every block and that no tensor shows.
#: source: MaxText layers/attention_op.py (moba), layers/decoders.py, layers/attentions.py
_ABSENT = (
    "attn_logits_soft_cap",
    "final_logits_soft_cap",
    "moba",
    "use_mrope",
    "use_untrainable_positional_embedding",
)
#: Settings that change the computation of every block, and that a yml made from another yml keeps.
KEPT = (
    "decoder_block",
    "mlp_activations",
    "normalization_layer_epsilon",
    "rope_max_timescale",
    "rope_min_timescale",
    "rope_linear_scaling_factor",
    "normalize_embedding_logits",
    "norm_topk_prob",
    "routed_score_func",
    "use_random_routing",
    "routed_scaling_factor",
    "capacity_factor",
    "sparse_matmul",
    "use_qk_norm",
    *_ABSENT,
)
#: MaxText's Llama block, which sees all previous positions. source: MaxText models/{llama2,mistral}.py
#: (attention_type is global)
LLAMA = Says(
    kind="Llama",
    activations=("silu",),
    scalings=("default", "llama3"),
    fixed=tuple(LLAMA3_SCALING.items()),
    whole_base=True,
)


@dataclass(frozen=True)
class DecoderBlock:
    """A kind of MaxText decoder block."""

    #: Family of its table, which is ``maxtext.FAMILY``.
    family: str
    says: Says
    #: decoder_block by transformers' model type; the first one if nothing states which is used.
    names: Mapping[str, str]
    #: Other yml settings that the block requires.
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: True if MaxText's converter always interleaves pairs; otherwise the order depends on ``rope_type``.
    interleaved: bool = False
    #: The cycle of its layers, if they differ in the same way in all models.
    cycle: Cycle | None = None

    @property
    def is_mixture(self) -> bool:
        """True for an MoE block."""
        return self.says.experts

    @property
    def is_latent(self) -> bool:
        """True for multi-latent attention, whose rotary embedding supports only one order of pairs."""
        return "latent" in self.says.attentions

    @property
    def is_windowed(self) -> bool:
        """True for a block with a window in every second layer, whose attention has sinks."""
        return True in self.says.sinks

    @property
    def is_gemma(self) -> bool:
        """True for a block with norms after attention and MLP, whose embedding is scaled."""
        return True in self.says.scaled_embedding

    @property
    def joined_layers(self) -> int:
        """Number of layers that MaxText counts as one."""
        return self.cycle.length if self.cycle is not None and self.cycle.stack is None else 1

    @property
    def is_delta(self) -> bool:
        """True for a block with gated delta nets in all layers of a cycle except the last."""
        return "delta" in self.says.attentions

    @property
    def fixed(self) -> Mapping[str, tuple[Any, Any]]:
        """The settings that this block supports with one value only, and MaxText's default for each."""
        if self.is_latent:
            return maxtext_latent.FIXED
        if self.is_windowed:
            return maxtext_windows.FIXED
        if self.is_gemma:
            return maxtext_gemma.FIXED
        return maxtext_delta.FIXED if self.is_delta else {}

    @property
    def has_one_order(self) -> bool:
        """True for a block whose rotary pairs have a fixed order, whatever ``rope_type`` states."""
        return self.is_latent or self.is_windowed or self.is_delta or self.is_gemma

    @property
    def scales_queries(self) -> bool:
        """True for a block whose query weights include the division by sqrt(head_dim)."""
        return not (self.qk_norm or self.is_latent or self.is_windowed)

    @property
    def activation(self) -> str:
        """The activation by transformers' name."""
        return next(iter(self.says.activations or ("silu",)))

    @property
    def qk_norm(self) -> bool:
        """True for a block with query and key norms."""
        return True in self.says.qk_norm

    @property
    def states_qk_norm(self) -> bool:
        """True for a block whose query and key norms are a setting in the yml."""
        return self.qk_norm and not (self.is_delta or self.is_gemma)

    def make_cycle(self, length: int | None) -> Cycle | None:
        """Return the cycle of different layers that a scan runs together; None if all layers are alike.

        Args:
            length: the number of layers in the cycle; None if it is unknown.
        """
        if not self.is_delta or length is None:
            return self.cycle
        places = range(length)
        return Cycle(
            length,
            "layer_{}",
            {"main": places, "delta": places[:-1], "main_full": places[-1:], "full": places[-1:]},
        )

    def model_type(self, decoder_block: Any) -> str:
        """Return transformers' model type for a decoder_block."""
        named = [kind for kind, name in self.names.items() if name == decoder_block]
        return (named or list(self.names))[0]


_MIXTURE = replace(LLAMA, families=("mixtral", "qwen_moe", "qwen2_moe"), experts=True)
_DEEPSEEK = replace(
    _MIXTURE,
    kind="DeepSeek-V3",
    families=("deepseek_v3",),
    scalings=("default", "yarn"),
    fixed=(),
    attentions=("latent",),
    scores=("sigmoid",),
    corrected=True,
    grouped_experts=True,
    scaled_experts=True,
    shared_experts=True,
    dense_layers="first",
)
_GPT_OSS = replace(
    _MIXTURE,
    kind="gpt-oss",
    families=("gpt_oss",),
    activations=("clamped_swiglu",),
    scalings=("default", "yarn"),
    fixed=(),
    biases=((True, True, True, True),),
    window=True,
    windowed_layers="even",
    sinks=(True,),
    router_bias=(True,),
)
_QWEN3_NEXT = replace(
    _MIXTURE,
    kind="Qwen3-Next",
    families=("qwen3_next", "qwen3_5"),
    shares=None,
    scalings=("default",),
    fixed=(),
    qk_norm=(True,),
    attentions=("delta", "heads"),
    output_gate=(True,),
    shared_experts=True,
    needs_shared_experts=True,
    shared_gate=(True,),
)
_GEMMA2 = replace(
    LLAMA,
    kind="Gemma 2",
    families=("gemma2",),
    activations=(maxtext_gemma.ACTIVATION,),
    scalings=("default",),
    fixed=(),
    window=True,
    windowed_layers="even",
    divisor=True,
    scores_cap=True,
    logits_cap=True,
    scaled_embedding=(True,),
    norms_after=(True,),
)
_GEMMA3 = replace(
    _GEMMA2,
    kind="Gemma 3",
    families=("gemma3",),
    scalings=("default", "linear"),
    windowed_layers="five of six",
    local_rope=True,
    qk_norm=(True,),
)
#: Blocks that have a table. In MoE blocks, the weights of the selected experts always add up to 1: MaxText
#: takes the softmax over the selected experts alone, so norm_topk_prob has no effect.
#: source: MaxText layers/decoders.py, layers/moe.py (RoutedMoE.get_topk), configs/models
BLOCKS = (
    DecoderBlock("llama", LLAMA, {"llama": "llama2", "mistral": "mistral"}, interleaved=True),
    DecoderBlock(
        "llama", replace(LLAMA, kind="Qwen3", qk_norm=(True,)), {"qwen3": "qwen3"}, {"use_qk_norm": True}
    ),
    DecoderBlock("mixtral", replace(_MIXTURE, kind="Mixtral"), {"mixtral": "mixtral"}),
    DecoderBlock(
        "qwen_moe",
        replace(_MIXTURE, kind="Qwen3-MoE", qk_norm=(True,)),
        {"qwen3_moe": "qwen3_moe"},
        {"use_qk_norm": True, "norm_topk_prob": True},
    ),
    DecoderBlock(
        "deepseek_v3",
        _DEEPSEEK,
        {"deepseek_v3": "deepseek"},
        {"attention_type": "mla", "routed_score_func": "sigmoid", "routed_bias": True},
    ),
    DecoderBlock(
        "gpt_oss",
        _GPT_OSS,
        {"gpt_oss": "gpt_oss"},
        maxtext_windows.SETTINGS,
        cycle=Cycle(2, "layers_{}"),
    ),
    DecoderBlock(
        "gemma2",
        _GEMMA2,
        {"gemma2": "gemma2"},
        maxtext_gemma.SETTINGS,
        cycle=Cycle(2, None, {"local": [0], "global": [1]}),
    ),
    DecoderBlock(
        "gemma3",
        _GEMMA3,
        {"gemma3_text": "gemma3"},
        maxtext_gemma.SETTINGS,
        cycle=Cycle(6, "layers_{}", remainder="layers_remainder.layers_{}"),
    ),
    DecoderBlock(
        "qwen3_next",
        _QWEN3_NEXT,
        {"qwen3_next": "qwen3_next", "qwen3_5_moe_text": "qwen3_5"},
        maxtext_delta.SETTINGS,
    ),
)


def find_block(family: str, qk_norm: bool, config: Mapping[str, Any]) -> DecoderBlock:
    """Return the block that tensor names and a yml show.

    Args:
        family: the family of the table that fits the names.
        qk_norm: True if there are query and key norms.
        config: the yml; without query and key norms, it shows whether they are missing or the block has none.
    """
    near = [block for block in BLOCKS if block.family == family]
    shown = [block for block in near if qk_norm and block.qk_norm]
    named = [block for block in near if config.get("decoder_block") in block.names.values()]
    return (shown or named or near)[0]


def block_of(model: Model) -> DecoderBlock:
    """Return the block that computes a model.

    Raises:
        FastshardError: ``FS514``, with one finding for each reason, if no block does.
    """
    positions = model.max_positions
    kinds = [block.says for block in BLOCKS]
    if positions and unsupported.fitting(model, kinds)[1]:
        # All that the model may read is within the window.
        model = replace(model, blocks=tuple(_drop_window(block, positions) for block in model.blocks))
    unsupported.refuse("MaxText", kinds, model)
    block = BLOCKS[kinds.index(unsupported.fitting(model, kinds)[0])]
    if block.is_latent and (lacking := maxtext_latent.list_lacks(model)):
        raise unsupported.refused("MaxText", block.says, lacking)
    if block.is_windowed and (lacking := maxtext_windows.list_lacks(model)):
        raise unsupported.refused("MaxText", block.says, lacking)
    if block.is_gemma and (lacking := maxtext_gemma.list_lacks(model)):
        raise unsupported.refused("MaxText", block.says, lacking)
    if block.is_delta and (lacking := maxtext_delta.list_lacks(model)):
        raise unsupported.refused("MaxText", block.says, lacking)
    return block


def _drop_window(block: Block, positions: int) -> Block:
    """Return the block without its window, if the window covers the given number of positions."""
    window = block.attention.window
    if window is None or window < positions:
        return block
    return replace(block, attention=replace(block.attention, window=None))


def is_mixture(family: str) -> bool:
    """Return True if the tables of a family describe MoE models."""
    return any(block.family == family and block.is_mixture for block in BLOCKS)


def is_latent(family: str) -> bool:
    """Return True if the tables of a family describe multi-latent attention."""
    return any(block.family == family and block.is_latent for block in BLOCKS)


def is_windowed(family: str) -> bool:
    """Return True if the tables of a family describe windows in every second layer."""
    return any(block.family == family and block.is_windowed for block in BLOCKS)


def find_cycle(family: str, length: int | None) -> Cycle | None:
    """Return the cycle of different layers in a family; None if all layers are alike.

    Args:
        family: the family of a table.
        length: the number of layers in the cycle; None if it is unknown.
    """
    return next((block.make_cycle(length) for block in BLOCKS if block.family == family), None)


def is_delta(family: str) -> bool:
    """Return True if the tables of a family describe gated delta nets."""
    return any(block.family == family and block.is_delta for block in BLOCKS)


def is_gemma(family: str) -> bool:
    """Return True if the tables of a family describe norms after attention and MLP and scaled embeddings."""
    return any(block.family == family and block.is_gemma for block in BLOCKS)


def has_local_rope(family: str) -> bool:
    """Return True if layers with a window have their own rotary embedding in a family."""
    return any(block.family == family and block.says.local_rope for block in BLOCKS)


def find_joined_layers(family: str) -> int:
    """Return how many layers of a family MaxText counts as one."""
    return next((block.joined_layers for block in BLOCKS if block.family == family), 1)


def count_joined_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers of the model of a ``config.json`` MaxText counts as one."""
    return next((block.joined_layers for block in BLOCKS if config.get("model_type") in block.names), 1)


def names_family(config: Mapping[str, Any], family: str) -> bool:
    """Return True if a yml's decoder_block belongs to a family."""
    named = config.get("decoder_block")
    return any(named in block.names.values() for block in BLOCKS if block.family == family)


def is_known(decoder_block: Any) -> bool:
    """Return True for a decoder_block that has a table."""
    return any(decoder_block in block.names.values() for block in BLOCKS)


def is_maxtext(config: Mapping[str, Any]) -> bool:
    """Return True for a config that MaxText reads, False for other configs."""
    if "model_type" in config or "architectures" in config:
        return False
    return any(key in config for key in _TELLING) or any(str(key).startswith("base_") for key in config)


@dataclass(frozen=True)
class Pairs:
    """The rotary embedding of a MaxText model."""

    #: True if the two elements of a pair are adjacent.
    interleaved: bool
    #: True if frequencies are scaled as in Llama 3.1.
    scaled: bool


def pairs_of(config: Mapping[str, Any], block: DecoderBlock) -> Pairs | None:
    """Return the rotary embedding that a yml or ``config.json`` states; MaxText checkpoints do not state it.

    The result is None if the order of queries and keys is unknown. This is the case for a Llama yml with
    certain ``model_name`` values, and for a ``config.json`` without scaling, which MaxText can run with
    either order.
    source: MaxText layers/attentions.py (init_rotary_embedding)

    Raises:
        FastshardError: ``FS211`` for invalid values, ``FS514`` for another rotary embedding.
    """
    if block.has_one_order:
        return Pairs(block.is_latent, False)
    if not config:
        return None
    if not is_maxtext(config):
        rope, several = huggingface.rope_of(config)
        if several:
            raise unsupported.refused("MaxText", block.says, several)
        return Pairs(True, True) if rope.kind == "llama3" else None
    kind, model = config.get("rope_type"), str(config.get("model_name") or "")
    if str(kind).lower().startswith("llama3.1") or model.startswith("llama3.1"):
        return Pairs(True, flag(config, "rope_use_scale") is not False)
    if kind is None and not block.interleaved:
        return Pairs(False, False)
    if kind is None:
        # llama3.2 and later are not told apart by MaxText's own code and its converters alike.
        return Pairs(False, False) if model.startswith(("llama2", "llama3-", "mistral")) else None
    if str(kind).lower() != "default":
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"transformers has no {block.says.kind} with this rope_type",
            expected="default | llama3.1",
            got=shown(kind),
            help=_MERGE,
        )
    return Pairs(False, False)


@dataclass(frozen=True)
class MaxText:
    """The dialect of MaxText, and of Paxml models, which MaxText runs."""

    name: ClassVar[str] = "MaxText"
    #: Facts from the ``config.json`` of transformers' Llama, used in place of a yml; None if there is none.
    config_facts: Mapping[str, bool] | None = None

    def read(self, values: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model that a yml describes, or a ``config.json`` that was passed in its place.

        Raises:
            FastshardError: ``FS211`` for an invalid value, ``FS209`` if the yml does not determine the order
                of queries and keys, or how many experts process a token, ``FS215`` for a
                config of another model.
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
        tied = evidence.facts.get("tied", False)
        block = find_block(evidence.family, evidence.facts.get("qk_norm", False), values)
        pairs = pairs_of(values, block)
        if values and not is_maxtext(values):
            return self._of_config(values, evidence)
        if values and pairs is None:
            raise FastshardError.of(
                codes.FACT_UNKNOWN,
                "the order of queries and keys depends on `rope_type`, which is not stated",
                help="pass MaxText's yml, which must state rope_type: default or llama3.1, or the model_name",
                run=["--config FILE"],
            )
        experts = _read_experts(values, block)
        remarks, assumed = [_order_open(block)] if pairs is None else [], {}
        found: dict[str, float | None] = {}
        for name, key, theirs in (
            ("rope.base", "rope_max_timescale", "rope_theta"),
            ("eps", "normalization_layer_epsilon", "rms_norm_eps"),
        ):
            found[name] = None
            if not values:
                # A guess would be a model that loads and is wrong.
                subject = (
                    f"{theirs} (MaxText's {key}): config.json lacks it, and transformers uses its own default"
                )
                remarks.append(_report_assumed(subject, "warning"))
                continue
            if values.get(key) is None:
                assumed[name], found[name] = key, _DEFAULTS[key]
            else:
                found[name] = positive_number(values, key, _DEFAULTS[key])
        scaled = pairs is not None and pairs.scaled
        rope = Rope(
            found["rope.base"], 1.0, "llama3" if scaled else "default", LLAMA3_SCALING if scaled else {}
        )
        grouped = evidence.axes.get("r", 1) > 1 or bool(evidence.facts.get("gqa"))
        blocks: tuple[Block, ...] = (Block(Attention(qk_norm=block.qk_norm, grouped=grouped), experts),)
        others, positions = _besides(values, tied, block), None
        if block.is_latent:
            rope, some = maxtext_latent.read_rope(values, found["rope.base"])
            others += some
            positions = maxtext_latent.read_max_positions(values)
            blocks = _list_blocks(experts, evidence)
            remarks += _list_warnings(found["eps"], values)
        if block.is_windowed and values:
            rope, some = maxtext_windows.read_rope(values, found["rope.base"])
            others += some
            positions = maxtext_latent.read_max_positions(values)
            blocks = maxtext_windows.list_blocks(values, experts, evidence, grouped)
        if block.is_gemma:
            rope, local = maxtext_gemma.read_rope(values, found["rope.base"], block.says.local_rope)
            others += maxtext_gemma.list_own_lacks(values)
            assert block.cycle is not None
            blocks = maxtext_gemma.list_blocks(
                values, evidence, blocks[0].attention, local, block.cycle.length
            )
        if block.is_delta and values:
            rope, some = maxtext_delta.read_rope(values, found["rope.base"])
            others += some
            blocks = maxtext_delta.list_blocks(experts, evidence, grouped)
        if values.get("decoder_block") is None and len(block.names) > 1:
            remarks.append(_report_assumed(f"decoder_block: config.json says {block.says.kind}", "note"))
        lacking = ["max_position_embeddings"] if positions is None else []
        remarks.append(
            _report_assumed(
                f"{', '.join([*lacking, 'bos_token_id', 'eos_token_id'])}: config.json lacks them, and "
                "transformers uses its own defaults",
                "warning",
            )
        )
        return Model(
            framework=self.name,
            family=evidence.family,
            eps=found["eps"],
            activation=block.activation,
            rope=rope,
            blocks=blocks,
            tied=tied,
            scaled_embedding=block.is_gemma,
            norms_after=block.is_gemma,
            # MaxText caps the logits of a tied output layer alone. source: MaxText layers/decoders.py
            logits_cap=maxtext_gemma.read_cap(values, maxtext_gemma.LOGITS_CAP) if tied else None,
            max_positions=positions,
            # MaxText's block attends to all positions before. source: MaxText models/mistral.py
            kin=block.model_type(values.get("decoder_block")),
            others=tuple(others),
            words=_WORDS,
            assumed=assumed,
            remarks=tuple(remarks),
        )

    def _of_config(self, config: Mapping[str, Any], evidence: Evidence) -> Model:
        """Return the model of a ``config.json``, if the tensors match it."""
        facts = {"tied": evidence.facts.get("tied", False)}
        block = find_block(evidence.family, evidence.facts.get("qk_norm", False), {})
        qkv, out, mlp, _ = next(iter(block.says.biases))
        facts |= {"attention_bias": qkv, "out_bias": out, "shared_expert": False}
        facts |= {} if mlp else {"mlp_bias": False}
        facts["qk_norm"] = block.qk_norm
        if block.is_delta:
            # Of these its classes have no choice.
            facts = {key: facts[key] for key in ("tied", "attention_bias", "out_bias")}
        declared = self.config_facts
        differing = sorted(
            key for key in facts if declared is not None and declared.get(key, False) != facts[key]
        )
        if declared is None or differing:
            with_ = f" with {', '.join(f'{key}: {facts[key]}' for key in differing)}" if differing else ""
            raise FastshardError.of(
                codes.CONFIG_DISAGREES,
                "the config describes another model than the tensors",
                expected="a " + " or ".join(kind.capitalize() for kind in block.names) + with_,
                got=shown(config.get("model_type")),
                help="pass the config of this model",
                run=["--config FILE"],
            )
        seen = replace(evidence, facts={**evidence.facts, **facts})
        model = huggingface.DIALECT.read(config, seen)
        if model.experts is not None and not model.experts.normalised and not block.says.unnormalised:
            raise FastshardError.of(
                codes.CONFIG_DISAGREES,
                f"{model.word('experts.normalised', 'norm_topk_prob')}: MaxText always normalises the "
                "weights of the chosen experts",
                expected="true",
                got="false",
                help="pass the config of this model",
                run=["--config FILE"],
            )
        if pairs_of(config, block) is not None:
            return model
        return replace(model, remarks=(*model.remarks, _order_open(block)))

    def write(
        self, model: Model, interleaved: bool, tied: bool, file: str
    ) -> tuple[dict[str, Any], list[Finding]]:
        """Return the yml keys that describe a model, and the assumptions made.

        Args:
            model: the model.
            interleaved: the order of queries and keys to write.
            tied: True if the output layer shares the embedding's weights.
            file: the yml's name in messages.

        Raises:
            FastshardError: ``FS514`` for a model that MaxText's block cannot compute.
        """
        block = block_of(model)
        model.settled("parallel", "activation")
        written = ["eps", "rope.base", "rope.share", "rope.scaling"]
        written += ["experts.best"] if model.experts is not None else []
        findings = model.list_assumptions(*written, file=file)
        if (window := model.attention.window) is not None and not block.is_windowed:
            findings.append(
                Finding.of(
                    codes.NOT_PROVABLE,
                    f"sliding_window {window} is left out: up to max_position_embeddings "
                    f"{model.max_positions}, MaxText's full attention computes the same",
                    severity="note",
                    file=file,
                )
            )
        out = {
            "mlp_activations": ["silu", "linear"],
            "rope_max_timescale": int(model.rope.base or 10_000),
            # source: transformers models/{llama,mistral}/configuration_*.py
            "normalization_layer_epsilon": 1e-6 if model.eps is None else model.eps,
            "decoder_block": block.names.get(str(model.kin), next(iter(block.names.values()))),
            **block.settings,
        }
        if block.is_latent:
            out |= maxtext_latent.write(model)
            findings += maxtext_latent.list_warnings(model.eps, "", file)
        elif block.is_windowed:
            out |= maxtext_windows.write(model)
        elif block.is_delta:
            out |= maxtext_delta.write(model)
        elif block.is_gemma:
            out |= maxtext_gemma.write(model, block.says.local_rope)
        else:
            out |= order(interleaved, model.rope.kind == "llama3")
        if model.experts is not None:
            out["num_experts_per_tok"] = model.experts.best
        if tied and block.is_gemma:
            # The division of the logits by sqrt(emb_dim) undoes the factor in the embedding.
            out["normalize_embedding_logits"] = True
        elif tied:
            # MaxText would divide the logits by sqrt(emb_dim). source: MaxText configs/base.yml
            out["normalize_embedding_logits"] = False
            findings.append(
                Finding.of(
                    codes.NOT_PROVABLE,
                    "the output layer is tied to the embedding: MaxText computes the same only with "
                    "logits_via_embedding: true and normalize_embedding_logits: false",
                    severity="warning",
                    file=file,
                )
            )
        return out, findings


def order(interleaved: bool, scaled: bool) -> dict[str, Any]:
    """Return the yml keys for the order of pairs. They are always written, because the values depend on the
    order.
    """
    return {"rope_type": "llama3.1", "rope_use_scale": scaled} if interleaved else {"rope_type": "default"}


def _read_experts(config: Mapping[str, Any], block: DecoderBlock) -> Experts | None:
    """Return the expert settings of a yml; None for a block without experts."""
    if not block.is_mixture:
        return None
    best = _best(config)
    return maxtext_latent.read_experts(config, best) if block.is_latent else Experts(best)


def _list_blocks(experts: Experts | None, evidence: Evidence) -> tuple[Block, ...]:
    """Return the kinds of layers of a model with multi-latent attention, whose first layers are dense."""
    attention = Attention("latent", latent_queries=evidence.facts.get("q_lora", False))
    dense = evidence.sets["dense"][1] if "dense" in evidence.sets else ()
    return change_layers([Block(attention, experts)], dense, evidence.axes.get("L", 0), drop_experts)


def _list_warnings(eps: float | None, config: Mapping[str, Any]) -> list[Finding]:
    name = config.get("model_name")
    return maxtext_latent.list_warnings(eps, None if name is None else str(name))


def _best(config: Mapping[str, Any]) -> int:
    """Return how many experts process a token.

    Raises:
        FastshardError: ``FS209`` if nothing states it, ``FS211`` for an invalid number.
    """
    key = "num_experts_per_tok"
    if config.get(key) is None:
        # MaxText's own default is 1: the yml of a model states it, or a model_name, whose yml is not here.
        raise error_for([unstated(key, "")])
    return whole_number(config, key, 1)


def _besides(config: Mapping[str, Any], tied: bool, block: DecoderBlock) -> list[Lack]:
    """List features of a MaxText model that no other framework computes. source: MaxText configs/base.yml"""
    activations = config.get("mlp_activations", ["silu", "linear"])
    linear = config.get("rope_linear_scaling_factor", 1.0)
    least, experts = config.get("rope_min_timescale", 1), config.get("num_experts", 1)
    first = block.settings.get("mlp_activations", ["silu"])[0]
    # Of text, three positions of a token are one. source: MaxText layers/embeddings.py
    neutral: tuple[str, ...] = ("use_mrope",) if block.is_delta else ()
    neutral += (maxtext_gemma.SCORES_CAP, maxtext_gemma.LOGITS_CAP) if block.is_gemma else ()
    absent = [(key, config.get(key)) for key in _ABSENT if key not in neutral]
    name, names = config.get("decoder_block"), list(block.names.values())
    norms = config.get("use_qk_norm")
    checks = [
        ("decoder_block", " | ".join(names), name, name is None or name in names),
        ("mlp_activations", f"['{first}', 'linear']", activations, activations == [first, "linear"]),
        ("rope_min_timescale", "1", least, least == 1),
        ("rope_linear_scaling_factor", "1.0", linear, linear == 1 or block.says.local_rope),
        (
            "use_qk_norm",
            str(block.states_qk_norm).lower(),
            norms,
            bool(norms) == block.states_qk_norm or (norms is None and block.qk_norm) or block.is_gemma,
        ),
        ("num_experts", "1", experts, experts == 1 or block.is_mixture),
        *((key, "none", value, not value) for key, value in absent),
    ]
    if block.says.window and not block.says.local_rope:
        base = config.get(maxtext_gemma.LOCAL_BASE)
        checks.append((maxtext_gemma.LOCAL_BASE, "-1", base, maxtext_gemma.is_off(base)))
    if block.says.local_rope:
        model, known = config.get("model_name"), maxtext_gemma.NAMES
        checks.append(("model_name", " | ".join(known), model, model is None or model in known))
    if block.is_mixture:
        checks += _routing(config, block)
    if tied:
        # The embedding of Gemma is stored times sqrt(emb_dim).
        normalised = config.get("normalize_embedding_logits", True)
        expected = block.is_gemma
        checks.append(("normalize_embedding_logits", shown(expected), normalised, normalised is expected))
    settings = [
        (key, shown(expected), default if config.get(key) is None else config[key], expected)
        for key, (expected, default) in block.fixed.items()
    ]
    lacking = [Lack(key, text, shown(got)) for key, text, got, expected in settings if got != expected]
    return lacking + [Lack(what, expected, shown(got)) for what, expected, got, fits in checks if not fits]


def _routing(config: Mapping[str, Any], block: DecoderBlock) -> list[tuple[str, str, Any, bool]]:
    """List routing checks: name, expected value, found value, and whether they match."""
    checks = [
        (key, shown(neutral), config.get(key), config.get(key) in (None, neutral))
        for key, neutral in ({} if block.is_latent else _NEUTRAL_ROUTING).items()
    ]
    # With sparse_matmul no token is dropped. source: MaxText layers/moe.py, RoutedMoE.__call__
    capacity, sparse = config.get("capacity_factor"), config.get("sparse_matmul", True)
    unlimited = capacity is None or (isinstance(capacity, (int, float)) and capacity <= 0)
    return [*checks, ("capacity_factor", "-1.0", capacity, unlimited or sparse is True)]


def _order_open(block: DecoderBlock) -> Finding:
    taken, other = ("llama3.1", "default") if block.interleaved else ("default", "llama3.1")
    return _report_assumed(
        f"rope_type: assumed to be {taken}, whose order of queries and keys MaxText's converter writes; for "
        f"a run with rope_type {other}, pass its yml with --config",
        "warning",
    )


def report_unstated(key: str, file: str) -> Finding:
    """Build the warning for a setting that determines the model and that a yml cannot state."""
    return _report_assumed(
        f"{key}, which has a default in MaxText: set it before MaxText runs with this yml",
        "warning",
    ).replace(file=file)


def _report_assumed(what: str, severity: str) -> Finding:
    return Finding.of(
        codes.DEFAULT_ASSUMED,
        f"not stated: {what}",
        severity=severity,
        help="pass the model's config.json, or correct the one that is written",
        run=["--config FILE"],
    )


DIALECT = MaxText()
