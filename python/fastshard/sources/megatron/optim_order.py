"""The order of a Megatron-LM rank's parameters, by their torch_dist names, and each parameter's part on the
rank.

A checkpoint does not name the contents of the distributed optimizer's buffers; they are in the module's
order. If the kind of layers is not stated, each kind is tried. If none or several fit, the buffers are
refused.
source: megatron/core/models/gpt/{gpt_model,gpt_layer_specs}.py, megatron/core/transformer/{attention,mlp}.py,
megatron/core/transformer/moe/{moe_layer,experts}.py, megatron/core/parallel_state.py (RankGenerator)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...common.errors import FastshardError
from ...common.records import dataclass
from ...common.regex import compile_when_used
from ...models import megatron_sizes
from .optim_flat import Part, UnknownPlaces

#: Tensors that are not trained.
BUFFERS = compile_when_used(r"(\.router\.expert_bias|\.inv_freq|_extra_state)$")

_ATTENTION = (
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm.bias",
    "self_attention.k_layernorm.weight",
    "self_attention.k_layernorm.bias",
)
_PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_NORM1 = ("self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.layer_norm_bias")
_NORM2 = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias")
_OWN1 = ("input_layernorm.weight", "input_layernorm.bias")
_OWN2 = ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias")
_FC1 = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
_FC2 = ("mlp.linear_fc2.weight", "mlp.linear_fc2.bias")
_ROUTER = ("mlp.router.weight", "mlp.router.bias")
#: Parameters by ``transformer_impl``: norms are separate modules, or parameters of the layer after them; the
#: keys are the same.
_LAYERS = {
    "local": (*_OWN1, *_NORM1, *_PROJ, *_QKV, *_ATTENTION, *_OWN2, *_NORM2, *_ROUTER, *_FC1, *_FC2),
    "transformer_engine": (
        *_OWN1,
        *_PROJ,
        *_NORM1,
        *_QKV,
        *_ATTENTION,
        *_OWN2,
        *_ROUTER,
        *_NORM2,
        *_FC1,
        *_FC2,
    ),
}
_EXPERTS = "mlp.experts.experts."
_FIRST = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_LAST = (
    "decoder.final_layernorm.weight",
    "decoder.final_layernorm.bias",
    "output_layer.weight",
    "output_layer.bias",
)

#: Name, shape, chunks (first index, extent), dtype.
Weights = dict[str, tuple[list[int], list[tuple[list[int], list[int]]], str]]


@dataclass(frozen=True)
class Kind:
    """The properties that determine the order of parameters."""

    #: ``transformer_impl``
    layers: str
    #: True if a rank's experts are one module (grouped), False if they are separate modules.
    grouped: bool

    @property
    def called(self) -> str:
        """The kind in the terms of the arguments."""
        return f"--transformer-impl {self.layers}" + (", --moe-grouped-gemm" if self.grouped else "")


def count(args: dict[str, Any], name: str) -> int | None:
    """Return a size or degree from the arguments; None if it is not stated.

    Raises:
        UnknownPlaces: if it is not a positive integer.
    """
    try:
        return megatron_sizes.size(args, name)
    except FastshardError as error:
        raise UnknownPlaces(
            f"{name} among the arguments", "a positive integer", str(args.get(name))
        ) from error


def kinds(args: dict[str, Any], experts: bool) -> list[Kind]:
    """List the kinds that the arguments allow."""
    implementation = args.get("transformer_impl")
    layers = (
        [implementation] if isinstance(implementation, str) and implementation in _LAYERS else list(_LAYERS)
    )
    grouped = args.get("moe_grouped_gemm")
    if not experts:
        either = [False]
    else:
        either = [grouped] if isinstance(grouped, bool) else [False, True]
    if experts and grouped and (args.get("moe_use_legacy_grouped_gemm") or implementation == "local"):
        raise UnknownPlaces(
            "grouped experts of the older kind keep their master weights transposed, which is not supported"
        )
    return [Kind(one, two) for one in layers for two in either]


class Ranks:
    """The parameters of each model-parallel rank.

    Args:
        weights: tensors of the model.
        args: the run's arguments.
        most: number of chunks of optimizer state; there are at most as many parameters.
    """

    def __init__(self, weights: Weights, args: dict[str, Any], most: int) -> None:
        if not args:
            raise UnknownPlaces("no arguments state the number of ranks (common.pt)")
        self.weights = {name: entry for name, entry in weights.items() if not BUFFERS.search(name)}
        self.tp = count(args, "tensor_model_parallel_size") or 1
        self.pp = count(args, "pipeline_model_parallel_size") or 1
        self.vp = count(args, "virtual_pipeline_model_parallel_size") or 1
        self.ep = count(args, "expert_model_parallel_size") or 1
        self.etp = count(args, "expert_tensor_parallel_size") or self.tp
        self.tied = not args.get("untie_embeddings_and_output_weights", "output_layer.weight" in weights)
        self.stacked = any(
            name.startswith("decoder.layers.") and not name[15:16].isdigit() for name in weights
        )
        self.layers = self._layers(args)
        experts = max(
            (e[0][-3] for name, e in self.weights.items() if _EXPERTS in name and len(e[0]) > 2), default=1
        )
        if self.layers * experts > most or self.pp * self.vp > self.layers:
            raise UnknownPlaces(
                f"{self.layers} layers in {self.pp} x {self.vp} stages", None, f"{most} chunks"
            )
        self._stages = self._divided(args)
        #: By name: where chunks begin in each dimension.
        self._cuts: dict[str, list[list[int]]] = {}

    def _layers(self, args: dict[str, Any]) -> int:
        if self.stacked:
            shapes = (e[0] for name, e in self.weights.items() if name.startswith("decoder.layers."))
            return max((shape[0] for shape in shapes if shape), default=0)
        numbers = [int(m[1]) for name in self.weights if (m := re.match(r"decoder\.layers\.(\d+)\.", name))]
        layers = max(numbers, default=-1) + 1
        if args.get("num_layers") not in (None, layers):
            raise UnknownPlaces("number of layers", str(args["num_layers"]), str(layers))
        return layers

    def _divided(self, args: dict[str, Any]) -> dict[tuple[int, int], range]:
        """Return the layers of each (stage, virtual stage)."""
        for name in (
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "mtp_num_layers",
        ):
            if args.get(name):
                raise UnknownPlaces(
                    f"layers assigned to stages by {name} are not supported", "none", str(args[name])
                )
        ends = [count(args, f"decoder_{n}_pipeline_num_layers") for n in ("first", "last")]
        counts: list[int]
        if any(ends):
            inner = self.pp - sum(n is not None for n in ends)
            left = self.layers - sum(n or 0 for n in ends)
            if self.vp > 1 or (inner and left % inner) or (not inner and left):
                raise UnknownPlaces("stages with different numbers of layers are not supported")
            counts = [left // inner if inner else 0] * self.pp
            counts[0] = counts[0] if ends[0] is None else ends[0]
            counts[-1] = counts[-1] if ends[1] is None else ends[1]
            starts = [sum(counts[:s]) for s in range(self.pp)]
            return {(s, 0): range(starts[s], starts[s] + counts[s]) for s in range(self.pp)}
        if self.layers % (self.pp * self.vp):
            raise UnknownPlaces(
                "the layers cannot be divided evenly among the stages",
                f"a multiple of {self.pp * self.vp}",
                str(self.layers),
            )
        each = self.layers // (self.pp * self.vp)
        return {
            (s, v): range(at, at + each)
            for s in range(self.pp)
            for v in range(self.vp)
            for at in [v * (self.layers // self.vp) + s * each]
        }

    def parts(self, kind: Kind, tp: int, pp: int, chunk: int) -> list[Part]:
        """List the parameters that are not in separate expert buffers, in the model's order."""
        found: list[Part] = []
        apart = self.ep > 1
        first, last = (pp, chunk) == (0, 0), (pp, chunk) == (self.pp - 1, self.vp - 1)
        if first:
            found += [p for name in _FIRST for p in self._one(name, [], tp, self.tp)]
        for layer in self._stages[pp, chunk]:
            for suffix in _LAYERS[kind.layers]:
                name, at = self._of_layer(suffix, layer)
                found += self._one(name, at, tp, self.tp)
            if not apart:
                found += self._experts(kind, layer, tp, 0)
        if last:
            found += [p for name in _LAST for p in self._one(name, [], tp, self.tp)]
            if self.tied and self.pp * self.vp > 1:
                found += self._one(_FIRST[0], [], tp, self.tp)
        if self.tied and self.pp > 1:
            for part in found:
                part.shared = part.name == _FIRST[0]
        return found

    def experts(self, kind: Kind, tp: int, ep: int, pp: int, chunk: int) -> list[Part]:
        """List the parameters that are in separate expert buffers, in the model's order."""
        return [p for layer in self._stages[pp, chunk] for p in self._experts(kind, layer, tp, ep)]

    def unused(self) -> set[str]:
        """Return the names of weights without a part on any rank."""
        return self.weights.keys() - self._cuts.keys()

    def _of_layer(self, suffix: str, layer: int) -> tuple[str, list[int]]:
        return (
            (f"decoder.layers.{suffix}", [layer])
            if self.stacked
            else (f"decoder.layers.{layer}.{suffix}", [])
        )

    def _experts(self, kind: Kind, layer: int, tp: int, ep: int) -> Iterator[Part]:
        ends = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")
        names = [self._of_layer(_EXPERTS + end, layer) for end in ends]
        stored = [(name, at) for name, at in names if name in self.weights]
        if not stored:
            return
        shape = self.weights[stored[0][0]][0]
        total = shape[len(stored[0][1])] if len(shape) > len(stored[0][1]) else 0
        if total % self.ep:
            raise UnknownPlaces(
                "the experts cannot be divided evenly among the ranks", f"a multiple of {self.ep}", str(total)
            )
        if kind.grouped and len(stored) > 2:
            raise UnknownPlaces("grouped experts with biases: the order of their master weights is unknown")
        local = range(ep * (total // self.ep), (ep + 1) * (total // self.ep))
        pairs = (
            [(n, a, e) for n, a in stored for e in local]
            if kind.grouped
            else [(n, a, e) for e in local for n, a in stored]
        )
        for name, at, expert in pairs:
            yield from self._one(name, [*at, expert], tp, self.etp)

    def _one(self, name: str, at: list[int], rank: int, degree: int) -> Iterator[Part]:
        """Yield a rank's part of a tensor, below the given first indices; nothing if it does not exist."""
        if name not in self.weights:
            return
        shape, chunks, dtype = self.weights[name]
        if len(shape) < len(at) or any(n >= size for n, size in zip(at, shape, strict=False)):
            raise UnknownPlaces(f"shape of {name}", f"indices up to {at}", str(shape))
        if name not in self._cuts:
            self._cuts[name] = [sorted({lo[d] for lo, _ in chunks}) for d in range(len(shape))]
        outer = len(at)
        cuts = self._cuts[name]
        divided = [d for d in range(outer, len(shape)) if len(cuts[d]) > 1]
        inner = shape[outer:]
        lo, size = [*at, *[0] * len(inner)], [*[1] * outer, *inner]
        boxes = [(lo, size)]
        if divided:
            (d, *others) = divided
            count = len(cuts[d])
            extent = shape[d] // count
            regular = cuts[d] == [n * extent for n in range(count)] and shape[d] == count * extent
            # Gate and up are chunks of their own.
            starts = (
                [rank]
                if count == degree
                else [rank, degree + rank]
                if count == 2 * degree and "_fc1." in name
                else []
            )
            if others or not regular or not starts:
                raise UnknownPlaces(
                    f"{name} is not divided among {degree} tensor-parallel ranks", None, f"{count} chunks"
                )
            boxes = [
                ([*lo[:d], n * extent, *lo[d + 1 :]], [*size[:d], extent, *size[d + 1 :]]) for n in starts
            ]
            inner = [*inner]
            inner[d - outer] = extent * len(starts)
        yield Part(name, inner, dtype, boxes=boxes)
