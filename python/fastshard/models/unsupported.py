"""The only place that refuses a model because a format lacks its features."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ..common import codes
from ..common.errors import FastshardError, Finding, error_for
from ..common.finding_facts import runs_of
from ..common.formatting import runs
from ..common.records import dataclass, replace
from .model import Block, Experts, Lack, Model

#: No bias.
_NONE = (False, False, False, False)
#: Names of the sets of biases in messages.
_PLACES = (
    "queries, keys and values",
    "attention's output",
    "the MLP's first projections",
    "the MLP's output",
)

#: Patterns of layers with a window: all layers of a cycle but the last, by the cycle's length and name.
PATTERNS = {
    "even": (2, "every second layer, from the first on"),
    "five of six": (6, "all but every sixth layer"),
}

#: Names of the kinds of attention in messages.
ATTENTIONS = {
    "heads": "keys and values of heads",
    "latent": "keys and values from a latent (MLA)",
    "delta": "gated delta nets",
}


@dataclass(frozen=True)
class Says:
    """The properties that one kind of model in a format can have; for a field that is None, any value is
    allowed.
    """

    #: Its name in messages, e.g. ``Llama``.
    kind: str
    #: Families whose tensors the format's layout can convert.
    families: Collection[str] = ("llama",)
    norm: str = "RMSNorm"
    norm_bias: bool = False
    gated: bool = True
    activations: Collection[str] | None = None
    parallel: Collection[bool] = (False,)
    #: Fractions of a head that may be rotated.
    shares: Collection[float] | None = (1.0,)
    #: Supported kinds of rotary scaling.
    scalings: Collection[str] | None = None
    #: Required values of Llama 3's scaling.
    fixed: tuple[tuple[str, float], ...] = ()
    #: True if the base of the rotary embedding must be an integer.
    whole_base: bool = False
    #: True if attention may have a window.
    window: bool = False
    #: Which layers may have a window: ``all``, exactly those of a pattern in ``PATTERNS``, or ``any``.
    windowed_layers: str = "all"
    #: True if layers with a window may have their own rotary embedding, which is never scaled.
    local_rope: bool = False
    #: True if the root of another number than the size of a head may divide the scores.
    divisor: bool = False
    #: Whether tanh may cap scores, and logits.
    scores_cap: bool = False
    logits_cap: bool = False
    #: Whether embeddings may be multiplied by the root of their size, or must be.
    scaled_embedding: Collection[bool] = (False,)
    #: Whether there may be norms after attention and MLP, besides those before, or must be.
    norms_after: Collection[bool] = (False,)
    biases: Collection[tuple[bool, bool, bool, bool]] = (_NONE,)
    qk_norm: Collection[bool] = (False,)
    grouped: Collection[bool] = (False, True)
    #: True if there may be MTP layers.
    further_layers: bool = False
    #: Supported kinds of attention.
    attentions: Collection[str] = ("heads",)
    #: Whether the heads may have an output gate, or must have one.
    output_gate: Collection[bool] = (False,)
    #: Whether the softmax of the heads may have sinks, or must have them.
    sinks: Collection[bool] = (False,)
    #: Whether an indexer may choose the tokens that attention sees, or must do so.
    indexed: Collection[bool] = (False,)
    #: True for MoE models; and whether the weights of the chosen experts may be unnormalised.
    experts: bool = False
    unnormalised: bool = False
    #: How experts may be scored, and whether each may have a bias that affects only the choice.
    scores: Collection[str] = ("softmax",)
    corrected: bool = False
    #: Whether the scores may have a bias, or must have one.
    router_bias: Collection[bool] = (False,)
    #: Whether experts may be chosen from the best groups; whether their weights may be scaled; whether there
    #: may be shared experts.
    grouped_experts: bool = False
    scaled_experts: bool = False
    shared_experts: bool = False
    #: True if every MoE layer must have shared experts.
    needs_shared_experts: bool = False
    #: Whether shared experts may have a gate, or must have one.
    shared_gate: Collection[bool] = (False,)
    #: Which layers may have no experts: ``none``, the ``first`` ones, or ``any``.
    dense_layers: str = "none"

    def lacks(self, model: Model) -> list[Lack]:
        """List the features of a model that this kind lacks."""
        return [
            *model.others,
            *self._shared(model),
            *self._positions(model),
            *self._windows(model),
            *self._blocks(model),
            *self._mixture(model),
        ]

    def _blocks(self, model: Model) -> Iterator[Lack]:
        """List the features of layers that this kind lacks, each once, with its layers."""
        found: dict[Lack, list[Block]] = {}
        blocks_with_layers = [block for block in model.blocks if block.layers != ()]
        for block in blocks_with_layers:
            for lack in self._block(model, block):
                found.setdefault(lack, []).append(block)
        for lack, blocks in found.items():
            layers = tuple(sorted(layer for block in blocks for layer in block.layers or ()))
            yield lack if len(blocks) == len(blocks_with_layers) else replace(lack, layers=layers)

    def _shared(self, model: Model) -> Iterator[Lack]:
        """List the features common to all layers that this kind lacks."""
        if model.norm != self.norm:
            yield Lack(model.word("norm"), self.norm, model.norm)
        elif model.norm_bias != self.norm_bias:
            yield Lack(model.word("norm"), f"{self.norm} {_with(self.norm_bias)}", _with(model.norm_bias))
        if model.gated is not None and model.gated != self.gated:
            yield Lack(model.word("gated", "MLP"), _gated(self.gated), _gated(model.gated))
        allowed = self.activations
        if allowed is not None and model.activation is not None and model.activation not in allowed:
            yield Lack(model.word("activation"), " | ".join(sorted(allowed)), model.activation)
        if model.parallel is not None and model.parallel not in self.parallel:
            yield Lack(
                model.word("parallel", "parallel residual"), _either(self.parallel), _flag(model.parallel)
            )
        if model.scaled_embedding not in self.scaled_embedding:
            word = model.word("scaled_embedding", "scale of embeddings")
            yield Lack(word, _either(self.scaled_embedding), _flag(model.scaled_embedding))
        if model.norms_after not in self.norms_after:
            word = model.word("norms_after", "norms after attention and MLP")
            yield Lack(word, _either(self.norms_after), _flag(model.norms_after))
        if model.logits_cap is not None and not self.logits_cap:
            yield Lack(model.word("logits_cap", "cap of logits"), "none", f"{model.logits_cap:g}")
        if model.further_layers and not self.further_layers:
            word = model.word("further_layers", "number of MTP layers")
            yield Lack(word, "none", str(model.further_layers))

    def _positions(self, model: Model) -> Iterator[Lack]:
        rope = model.rope
        if model.positions != "rotary":
            yield Lack(model.word("positions", "position embedding"), "rotary", model.positions)
        if self.shares is not None and rope.share not in self.shares:
            shares = " | ".join(f"{share:g}" for share in self.shares)
            yield Lack(model.word("rope.share", "share of a head that is rotated"), shares, f"{rope.share:g}")
        if self.scalings is not None and rope.kind not in self.scalings:
            word = model.word("rope.scaling", "scaling of rotary embeddings")
            yield Lack(word, " | ".join(self.scalings), rope.kind)
        else:
            for key, value in self.fixed if rope.kind == "llama3" else ():
                if rope.scaling.get(key, value) != value:
                    word = model.word("rope.scaling", "scaling of rotary embeddings")
                    yield Lack(f"{word} ({key})", f"{value:g}", str(rope.scaling[key]))
        if self.whole_base and rope.base is not None and not float(rope.base).is_integer():
            yield Lack(model.word("rope.base", "base of rotary embeddings"), "an integer", f"{rope.base!r}")

    def _windows(self, model: Model) -> Iterator[Lack]:
        """List the features that this kind lacks for models with a window in only some layers."""
        layers, window = model.windowed_layers, model.window
        if self.windowed_layers == "all" and self.window and layers is not None:
            word = model.word("window", "sliding window")
            yield Lack(f"{word} in some layers", "in all layers or in none", str(window))
        if self.windowed_layers not in PATTERNS:
            return
        length, name = PATTERNS[self.windowed_layers]
        count = sum(len(block.layers or ()) for block in model.blocks)
        windowed = tuple(range(count)) if layers is None and window is not None else layers
        if windowed != tuple(layer for layer in range(count) if (layer + 1) % length):
            got = "all" if layers is None and window is not None else runs_of(runs(layers or ())) or "none"
            yield Lack("set of layers with a sliding window", name, got)

    def _block(self, model: Model, block: Block) -> Iterator[Lack]:
        """List the features of one kind of layer that this kind of model lacks."""
        attention, experts = block.attention, block.experts
        if block.biases not in self.biases:
            expected = " | ".join(sorted({_places(biases) for biases in self.biases}))
            yield Lack(model.word("biases", "set of biases"), expected, _places(block.biases))
        if attention.window is not None and not self.window:
            yield Lack(model.word("window", "sliding window"), "none", str(attention.window))
        if attention.divisor is not None and not self.divisor:
            word = model.word("divisor", "number whose root divides the scores")
            yield Lack(word, "the size of a head", str(attention.divisor))
        if attention.scores_cap is not None and not self.scores_cap:
            yield Lack(model.word("scores_cap", "cap of scores"), "none", f"{attention.scores_cap:g}")
        word = model.word("local_rope", "rotary embedding of layers with a window")
        if attention.rope is not None and not self.local_rope:
            yield Lack(word, "that of other layers", f"another, with base {attention.rope.base}")
        elif self.local_rope and attention.window is not None:
            kind = (attention.rope or model.rope).kind
            if kind != "default":
                yield Lack(word, "default", kind)
        has_heads = attention.kind != "delta"
        if has_heads and attention.output_gate not in self.output_gate:
            word = model.word("output_gate", "gate of attention's output")
            yield Lack(word, _either(self.output_gate), _flag(attention.output_gate))
        if has_heads and attention.sinks not in self.sinks:
            word = model.word("sinks", "sinks of attention")
            yield Lack(word, _either(self.sinks), _flag(attention.sinks))
        is_indexed = attention.indexed is not None
        if is_indexed not in self.indexed:
            word = model.word("indexed", "indexer of attention")
            yield Lack(word, _either(self.indexed), _flag(is_indexed))
        if has_heads and attention.qk_norm not in self.qk_norm:
            word = model.word("qk_norm", "norm of queries and keys")
            yield Lack(word, _either(self.qk_norm), _flag(attention.qk_norm))
        if attention.kind not in self.attentions:
            word = model.word("attention", "kind of attention")
            yield Lack(
                word, " | ".join(ATTENTIONS[one] for one in self.attentions), ATTENTIONS[attention.kind]
            )
        if attention.grouped not in self.grouped:
            word = model.word("grouped", "grouping of heads")
            yield Lack(word, "as many key heads as query heads", "fewer")
        if experts is not None and self.experts:
            yield from self._experts(model, experts)

    def _experts(self, model: Model, experts: Experts) -> Iterator[Lack]:
        if not experts.normalised and not self.unnormalised:
            word = model.word("experts.normalised", "routing of experts")
            yield Lack(
                word, "weights of the best experts that add up to 1", "weights that are not normalised"
            )
        if experts.scores not in self.scores:
            word = model.word("experts.scores", "scores of experts")
            yield Lack(word, " | ".join(self.scores), experts.scores)
        if experts.router_bias not in self.router_bias:
            word = model.word("experts.router_bias", "bias of the router")
            yield Lack(word, _either(self.router_bias), _flag(experts.router_bias))
        for has, may_have, field, expected, got in (
            (experts.correction, self.corrected, "correction", "no bias for the choice of experts", "a bias"),
            (experts.groups > 1, self.grouped_experts, "groups", "one group of experts", "several"),
            (
                experts.scale != 1,
                self.scaled_experts,
                "scale",
                "expert weights without scaling",
                "scaled ones",
            ),
            (experts.shared, self.shared_experts, "shared", "no shared experts", "shared experts"),
        ):
            if has and not may_have:
                yield Lack(model.word(f"experts.{field}", "kind of experts"), expected, got)
        if self.needs_shared_experts and not experts.shared:
            word = model.word("experts.shared", "kind of experts")
            yield Lack(word, "shared experts", "no shared experts")
        if experts.shared_gate not in self.shared_gate:
            word = model.word("experts.shared_gate", "gate of shared experts")
            yield Lack(word, _either(self.shared_gate), _flag(experts.shared_gate))

    def _mixture(self, model: Model) -> Iterator[Lack]:
        """List the features that this kind lacks for layers with experts and layers without."""
        has_experts, dense = model.experts is not None, model.dense_layers
        if has_experts != self.experts:
            word = model.word("experts", "mixture of experts")
            yield Lack(word, "experts" if self.experts else "none", "experts" if has_experts else "none")
            return
        are_first = dense == tuple(range(len(dense)))
        if dense and (self.dense_layers == "none" or (self.dense_layers == "first" and not are_first)):
            expected = "none" if self.dense_layers == "none" else "the first layers"
            yield Lack(
                model.word("dense_layers", "set of layers without experts"), expected, runs_of(runs(dense))
            )


def fitting(model: Model, kinds: Iterable[Says]) -> tuple[Says, list[Lack]]:
    """Return the first kind that fits a model, or the one that lacks the fewest features, and the features
    that it lacks.
    """
    found = [(kind, kind.lacks(model)) for kind in kinds]
    return min(found, key=lambda pair: len(pair[1]))


def refuse(format: str, kinds: Iterable[Says], model: Model) -> None:
    """Refuse a model that no kind of a format fits.

    The message states either that the tensors fit no layout, or each missing feature under its source's name.

    Raises:
        FastshardError: ``FS514``.
    """
    kinds = list(kinds)
    near = [kind for kind in kinds if model.family in kind.families]
    if not near:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"no {format} layout for the family {model.family!r}",
            expected=" | ".join(dict.fromkeys(family for kind in kinds for family in kind.families)),
            got=_name_with_features(kinds, model),
            help=f"merge it, which writes the tensors under {model.framework}'s own names",
            run=["fastshard merge CKPT OUT"],
        )
    kind, lacking = fitting(model, near)
    if lacking:
        raise refused(format, kind, lacking)


def _name_with_features(kinds: Iterable[Says], model: Model) -> str:
    """Return a model's family, with the features that no kind of a format has in brackets."""
    lacks = [[lack.what for lack in kind.lacks(model)] for kind in kinds]
    features = [what for what in dict.fromkeys(lacks[0]) if all(what in others for others in lacks)]
    return f"{model.family} ({', '.join(features)})" if features else model.family


def refused(format: str, kind: Says, lacks: list[Lack], help: str | None = None) -> FastshardError:
    """Build the error for features that a format lacks, each under its source's name."""
    return error_for(
        [
            Finding.of(
                codes.UNSUPPORTED,
                f"{format} has no {kind.kind} model with this {lack.what}{_in_layers(lack)}",
                expected=lack.expected,
                got=lack.got,
                help=help,
            )
            for lack in lacks
        ]
    )


def _in_layers(lack: Lack) -> str:
    if not lack.layers:
        return ""
    return f" (layer{'s' if len(lack.layers) > 1 else ''} {runs_of(runs(lack.layers))})"


def _with(bias: bool) -> str:
    return "with biases" if bias else "without biases"


def _gated(gated: bool) -> str:
    return "a gated one" if gated else "a plain one"


def _flag(value: bool) -> str:
    return str(value).lower()


def _either(values: Collection[bool]) -> str:
    return " | ".join(sorted(_flag(value) for value in values))


def _places(biases: tuple[bool, ...]) -> str:
    """Name the projections that have biases."""
    places = [place for place, has in zip(_PLACES, biases, strict=True) if has]
    return (
        "on all" if len(places) == len(_PLACES) else ("on " + " and ".join(places) if places else "on none")
    )
