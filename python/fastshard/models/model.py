"""The framework-neutral description of a model: what it computes, whichever framework trained or loads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..common import codes
from ..common.errors import FastshardError, Finding, error_for
from ..common.records import dataclass, field, replace
from ..layouts import model_classes
from ..layouts.declaration import Evidence, Source

#: eps of transformers' latent norms. They use their own default, whatever a config states.
#: source: transformers models/deepseek_v3 (DeepseekV3Attention: q_a_layernorm, kv_a_layernorm)
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class Lack:
    """A feature that a model has and a format lacks."""

    #: The source's name for the feature.
    what: str
    expected: str
    got: str
    #: The layers that have it; None for all.
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rope:
    """A rotary embedding."""

    #: Base of the frequencies; None if it is not stated.
    base: float | None = None
    #: The fraction of a head that is rotated.
    share: float = 1.0
    #: ``default``, or the kind of scaling by transformers' name.
    kind: str = "default"
    #: Parameters of the scaling, by transformers' keys.
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experts:
    """The experts and the router of an MoE layer."""

    #: Number of experts that process a token.
    best: int
    #: True if the weights of the chosen experts add up to 1.
    normalised: bool = True
    #: How experts are scored: ``softmax`` or ``sigmoid``.
    scores: str = "softmax"
    #: True if each expert has a bias that is added to its score only for the choice.
    correction: bool = False
    #: True if the scores themselves include a bias.
    router_bias: bool = False
    #: Number of expert groups, and number of groups from which the best experts are chosen.
    groups: int = 1
    best_groups: int = 1
    #: Factor by which the weights are multiplied.
    scale: float = 1.0
    #: True if there are also shared experts, which process every token.
    shared: bool = False
    #: True if a gate weights the shared experts' output for each token.
    shared_gate: bool = False


@dataclass(frozen=True)
class Attention:
    """How the tokens of a block attend to each other."""

    #: One of ``model_classes.ATTENTIONS``.
    kind: str = "heads"
    #: Number of positions that a token sees, including itself; None for all previous ones.
    window: int | None = None
    qk_norm: bool = False
    #: True if several query heads share keys and values.
    grouped: bool = False
    #: True if queries come from a latent too.
    latent_queries: bool = False
    #: True if a gate, computed together with the queries, scales the heads' output.
    output_gate: bool = False
    #: True if the softmax of each head counts a trained number as one more score.
    sinks: bool = False
    #: The number whose root divides the scores; None for the size of a head.
    divisor: int | None = None
    #: The number at which tanh caps the scores; None if they have no cap.
    scores_cap: float | None = None
    #: Its rotary embedding; None if it is the model's.
    rope: Rope | None = None
    #: Number of tokens that an indexer chooses for each token; None without an indexer.
    indexed: int | None = None


@dataclass(frozen=True)
class Block:
    """A kind of layer: attention, and an MLP or experts."""

    attention: Attention = Attention()
    #: The experts; None for an MLP.
    experts: Experts | None = None
    #: Biases of queries, keys and values; of the attention output; of the first MLP projections; of the MLP
    #: output.
    biases: tuple[bool, bool, bool, bool] = (False, False, False, False)
    #: Its layers in ascending order; None for all.
    layers: tuple[int, ...] | None = None


def change_layers(
    blocks: Iterable[Block], layers: Collection[int], count: int, change: Callable[[Block], Block]
) -> tuple[Block, ...]:
    """Return the kinds of layers after some layers have changed.

    A kind without remaining layers is kept, because a config still states its settings.

    Args:
        blocks: the kinds of layers.
        layers: the layers to change; with an empty list, the kinds are unchanged.
        count: the total number of layers.
        change: returns the changed kind.
    """
    if not layers:
        return tuple(blocks)
    found = []
    for block in blocks:
        have = range(count) if block.layers is None else block.layers
        found.append(replace(block, layers=tuple(n for n in have if n not in layers)))
        if changed := tuple(n for n in have if n in layers):
            found.append(replace(change(block), layers=changed))
    return tuple(found)


def drop_experts(block: Block) -> Block:
    """Return the block with an MLP instead of experts."""
    return replace(block, experts=None)


def take_window(window: int | None, rope: Rope | None = None) -> Callable[[Block], Block]:
    """Return the change that adds a window to a block, and a rotary embedding if the block has its own."""
    return lambda block: replace(block, attention=replace(block.attention, window=window, rope=rope))


def take_delta_net(block: Block) -> Block:
    """Return the block with a gated delta net instead of heads."""
    return replace(block, attention=Attention("delta"), biases=(False, False, *block.biases[2:]))


@dataclass(frozen=True)
class Model:
    """A model described by what it computes, without sizes, which come from the tensors."""

    #: The framework whose values were read.
    framework: str
    #: The common layout through which its tensors are converted.
    family: str
    #: ``RMSNorm``, ``LayerNorm``, or the source's name for another norm.
    norm: str = "RMSNorm"
    norm_bias: bool = False
    eps: float | None = None
    #: True if eps is added outside the root.
    eps_outside: bool = False
    gated: bool | None = True
    #: The activation by transformers' name; for a gated MLP, the function applied to the gate.
    activation: str | None = "silu"
    #: True if attention and MLP see the same input; None if this is not stated.
    parallel: bool | None = False
    #: The position encoding: ``rotary``, or the source's name for another one.
    positions: str = "rotary"
    rope: Rope = Rope()
    #: The kinds of layers.
    blocks: tuple[Block, ...] = (Block(),)
    #: Number of MTP layers after the other layers.
    further_layers: int = 0
    tied: bool = False
    #: True if embeddings are multiplied by the root of their size.
    scaled_embedding: bool = False
    #: True if there are norms after attention and MLP, besides those before.
    norms_after: bool = False
    #: The number at which tanh caps the logits; None if they have no cap.
    logits_cap: float | None = None
    max_positions: int | None = None
    #: Ids of special tokens, by transformers' keys.
    tokens: Mapping[str, int] = field(default_factory=dict)
    #: The transformers class to use if several classes compute the same.
    kin: str | None = None
    #: The transformers class that the user requires.
    required_class: str | None = None
    #: Other features for which no other framework has terms.
    others: tuple[Lack, ...] = ()
    #: The source's names for the fields.
    words: Mapping[str, str] = field(default_factory=dict)
    #: Fields that are not stated, each with a finding that explains the consequence.
    unknown: Mapping[str, Finding] = field(default_factory=dict)
    #: Fields that are not stated and have the source's default value, each with the source's key.
    assumed: Mapping[str, str] = field(default_factory=dict)
    #: Findings to report whenever the model is written; their file is the one written.
    remarks: tuple[Finding, ...] = ()
    #: transformers' config of the model, if that was read.
    config: Mapping[str, Any] | None = None

    @property
    def block(self) -> Block:
        """The first kind of layers other than gated delta nets."""
        others = (block for block in self.blocks if block.attention.kind != "delta")
        return next(others, self.blocks[0])

    @property
    def window(self) -> int | None:
        """The window of the first kind of layers with a window; None if no layer has one."""
        windows = (block.attention.window for block in self.blocks if block.layers != ())
        return next((window for window in windows if window is not None), None)

    @property
    def windowed_layers(self) -> tuple[int, ...] | None:
        """The layers with a window in ascending order, if other layers have none; None if all layers are
        alike.
        """
        blocks = [block for block in self.blocks if block.layers != ()]
        if len({block.attention.window for block in blocks}) == 1:
            return None
        windowed = (block.layers or () for block in blocks if block.attention.window is not None)
        return tuple(sorted(layer for layers in windowed for layer in layers))

    @property
    def local_rope(self) -> Rope:
        """The rotary embedding of layers with a window."""
        return next((rope for block in self.blocks if (rope := block.attention.rope)), self.rope)

    @property
    def attention(self) -> Attention:
        """The attention of :attr:`block`."""
        return self.block.attention

    @property
    def biases(self) -> tuple[bool, bool, bool, bool]:
        """The biases of :attr:`block`."""
        return self.block.biases

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layers that have any; None if no layer has experts."""
        return next((block.experts for block in self.blocks if block.experts is not None), None)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers without experts in ascending order, if other layers have experts."""
        if self.experts is None:
            return ()
        dense = (block.layers or () for block in self.blocks if block.experts is None)
        return tuple(sorted(layer for layers in dense for layer in layers))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The layers with gated delta nets, in ascending order."""
        delta = (block.layers or () for block in self.blocks if block.attention.kind == "delta")
        return tuple(sorted(layer for layers in delta for layer in layers))

    def word(self, name: str, default: str | None = None) -> str:
        """Return the source's name for a field."""
        return self.words.get(name, default or name)

    def list_assumptions(self, *fields: str, file: str) -> list[Finding]:
        """List the assumptions about fields that are written to a file, and the remarks."""
        found = [
            Finding.of(
                codes.DEFAULT_ASSUMED,
                f"{self.assumed[name]} is not stated; {self.framework}'s default {self._value(name)!r} is "
                "written",
                file=file,
                help="pass the training config",
                run=["--config FILE"],
            )
            for name in fields
            if name in self.assumed
        ]
        return found + [remark.replace(file=file) for remark in self.remarks]

    def settled(self, *fields: str) -> None:
        """Require that fields which affect values are stated.

        Raises:
            FastshardError: ``FS209`` for fields that are not stated.
        """
        if open_ := [self.unknown[name] for name in fields if name in self.unknown]:
            raise error_for(open_)

    def _value(self, name: str) -> Any:
        first, _, rest = name.partition(".")
        value = getattr(self, first)
        return getattr(value, rest) if rest else value


def read_model(source: Source) -> Model:
    """Return the model of a source, from its values and its tensors.

    Raises:
        FastshardError: ``FS211`` for an invalid value, ``FS514`` if the meaning of its values is
            unknown.
    """
    description = source.model
    if description.dialect is None:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"fastshard knows no conversion for {source.called}: its tensors can only be merged",
        )
    own = {} if source.binding.own_table is None else model_classes.of_table(source.binding.own_table)
    binding = source.binding
    evidence = Evidence(description.family or "", binding.facts, binding.axes, own, binding.sets)
    read = description.dialect.read(description.config or {}, evidence)
    assert isinstance(read, Model)
    return read


def unstated(key: str, values: str, why: str = "which is not stated") -> Finding:
    """Build the finding for a field that determines the model and is not stated."""
    return Finding.of(
        codes.FACT_UNKNOWN,
        f"the model depends on `{key}`, {why}",
        help=f"pass the training config, which must state {key}{values}",
        run=["--config FILE"],
    )
