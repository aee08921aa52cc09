"""The neutral description of a model: what it computes, for any framework that trained or loads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ..common import codes
from ..common.errors import FastshardError, Finding, error_for
from ..common.records import dataclass, field, replace
from ..layouts import model_classes
from ..layouts.declaration import Evidence, Source

#: What transformers' norms of latents add, whatever a config says: they take their own default.
#: source: transformers models/deepseek_v3 (DeepseekV3Attention: q_a_layernorm, kv_a_layernorm)
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class Lack:
    """A feature that a model has and a format lacks."""

    #: By the name that the source has for it.
    what: str
    expected: str
    got: str
    #: The layers that have it; None for all.
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rope:
    """A rotary embedding."""

    #: None where nothing states it.
    base: float | None = None
    #: The part of a head that is rotated.
    share: float = 1.0
    #: ``default``, or the kind of its scaling, as transformers calls it.
    kind: str = "default"
    #: What the scaling hangs on, by transformers' keys.
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    #: Experts that a token goes through.
    best: int
    #: The weights of these add up to 1.
    normalised: bool = True
    #: How experts are scored: ``softmax`` or ``sigmoid``.
    scores: str = "softmax"
    #: Each expert has a bias that is added to its score for the choice alone.
    correction: bool = False
    #: The scores themselves have a bias.
    router_bias: bool = False
    #: Groups of experts, and the number of groups among whose experts the best are chosen.
    groups: int = 1
    best_groups: int = 1
    #: The weights are multiplied by this.
    scale: float = 1.0
    #: Further experts that every token goes through.
    shared: bool = False
    #: What these give is weighed for each token.
    shared_gate: bool = False


@dataclass(frozen=True)
class Attention:
    """How the tokens of a block see each other."""

    #: One of ``model_classes.ATTENTIONS``.
    kind: str = "heads"
    #: Positions that a token sees, itself among them; None for all before it.
    window: int | None = None
    qk_norm: bool = False
    #: Several heads of queries share keys and values.
    grouped: bool = False
    #: Queries come from a latent, too.
    latent_queries: bool = False
    #: A gate, computed together with the queries, scales the heads' output.
    output_gate: bool = False
    #: The softmax of each head counts a number of its own as one more score.
    sinks: bool = False
    #: The number of tokens that an indexer chooses for each; None without an indexer.
    indexed: int | None = None


@dataclass(frozen=True)
class Block:
    """A kind of layers: attention, and an MLP or a mixture of experts."""

    attention: Attention = Attention()
    #: None for an MLP.
    experts: Experts | None = None
    #: Biases of queries, keys and values; of attention's output; of the MLP's first projections; of its
    #: output.
    biases: tuple[bool, bool, bool, bool] = (False, False, False, False)
    #: Its layers, ascending; None for all.
    layers: tuple[int, ...] | None = None


def change_layers(
    blocks: Iterable[Block], layers: Collection[int], count: int, change: Callable[[Block], Block]
) -> tuple[Block, ...]:
    """Return the kinds of layers after a change of some layers.

    A kind that is left without layers stays: a config states its settings all the same.

    Args:
        blocks: the kinds of layers.
        layers: the layers to be changed; with none of them the kinds stay as they are.
        count: the number of all layers.
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
    """Return the block with an MLP in place of the experts."""
    return replace(block, experts=None)


def take_window(window: int | None) -> Callable[[Block], Block]:
    """Return the change that gives a block a window."""
    return lambda block: replace(block, attention=replace(block.attention, window=window))


def take_delta_net(block: Block) -> Block:
    """Return the block with a gated delta net in place of heads."""
    return replace(block, attention=Attention("delta"), biases=(False, False, *block.biases[2:]))


@dataclass(frozen=True)
class Model:
    """A model by what it computes, without sizes: these come from the tensors."""

    #: Whose values were read.
    framework: str
    #: The hub in which its tensors meet those of other layouts.
    family: str
    #: ``RMSNorm``, ``LayerNorm``, or another by its source's word.
    norm: str = "RMSNorm"
    norm_bias: bool = False
    eps: float | None = None
    #: eps is added to the root, not below it.
    eps_outside: bool = False
    gated: bool | None = True
    #: As transformers names it; of a gated MLP what is applied to the gate.
    activation: str | None = "silu"
    #: Attention and MLP see the same input; None where nothing states it.
    parallel: bool | None = False
    #: How positions get in: ``rotary``, or another by its source's word.
    positions: str = "rotary"
    rope: Rope = Rope()
    #: The kinds of its layers.
    blocks: tuple[Block, ...] = (Block(),)
    #: Layers after the others that predict further tokens.
    further_layers: int = 0
    tied: bool = False
    max_positions: int | None = None
    #: Ids of special tokens, by transformers' keys.
    tokens: Mapping[str, int] = field(default_factory=dict)
    #: The class of transformers that is meant where several compute the same.
    kin: str | None = None
    #: The class of transformers that the user requires.
    required_class: str | None = None
    #: What is computed besides, which no other framework has words for.
    others: tuple[Lack, ...] = ()
    #: What the source calls its fields.
    words: Mapping[str, str] = field(default_factory=dict)
    #: Fields that nothing states, and what that leaves open.
    unknown: Mapping[str, Finding] = field(default_factory=dict)
    #: Fields that nothing states and whose value is the source's own default: the source's key.
    assumed: Mapping[str, str] = field(default_factory=dict)
    #: What is to be said of it wherever it is written; the file is that which is written.
    remarks: tuple[Finding, ...] = ()
    #: transformers' own config of it, if that is what was read.
    config: Mapping[str, Any] | None = None

    @property
    def block(self) -> Block:
        """The first kind of layers, but for gated delta nets."""
        others = (block for block in self.blocks if block.attention.kind != "delta")
        return next(others, self.blocks[0])

    @property
    def window(self) -> int | None:
        """The window of the first kind of layers that have one; None if no layer has."""
        windows = (block.attention.window for block in self.blocks if block.layers != ())
        return next((window for window in windows if window is not None), None)

    @property
    def windowed_layers(self) -> tuple[int, ...] | None:
        """The layers with a window, ascending, where others have none; None where all layers are alike."""
        blocks = [block for block in self.blocks if block.layers != ()]
        if len({block.attention.window for block in blocks}) == 1:
            return None
        windowed = (block.layers or () for block in blocks if block.attention.window is not None)
        return tuple(sorted(layer for layers in windowed for layer in layers))

    @property
    def attention(self) -> Attention:
        """The attention of that kind of layers."""
        return self.block.attention

    @property
    def biases(self) -> tuple[bool, bool, bool, bool]:
        """The biases of that kind of layers."""
        return self.block.biases

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts of the first layers that have one; None if no layer has."""
        return next((block.experts for block in self.blocks if block.experts is not None), None)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers without experts of a model in which others have them, ascending."""
        if self.experts is None:
            return ()
        dense = (block.layers or () for block in self.blocks if block.experts is None)
        return tuple(sorted(layer for layers in dense for layer in layers))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The layers with gated delta nets, ascending."""
        delta = (block.layers or () for block in self.blocks if block.attention.kind == "delta")
        return tuple(sorted(layer for layers in delta for layer in layers))

    def word(self, name: str, default: str | None = None) -> str:
        """Return the source's name of a field."""
        return self.words.get(name, default or name)

    def list_assumptions(self, *fields: str, file: str) -> list[Finding]:
        """List the assumptions about the fields that are written to a file, and the remarks."""
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
        """Require fields that affect values.

        Raises:
            FastshardError: ``FS209`` for those that are not stated.
        """
        if open_ := [self.unknown[name] for name in fields if name in self.unknown]:
            raise error_for(open_)

    def _value(self, name: str) -> Any:
        first, _, rest = name.partition(".")
        value = getattr(self, first)
        return getattr(value, rest) if rest else value


def read_model(source: Source) -> Model:
    """Return the model of a source, by its values and its tensors.

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
    """Build the finding for a field on which the model depends and that is not stated."""
    return Finding.of(
        codes.FACT_UNKNOWN,
        f"the model depends on `{key}`, {why}",
        help=f"pass the training config, which must state {key}{values}",
        run=["--config FILE"],
    )
