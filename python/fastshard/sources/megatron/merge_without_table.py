"""Full tensors of rank files without a table. Module names show how ranks divide them, and extents in the
arguments prove it.

A tensor for which neither is conclusive is refused by name.

source: megatron/core/tensor_parallel/layers.py, megatron/core/transformer (attention, mlp,
    multi_latent_attention, moe),
megatron/core/models (gpt, bert, T5, vision); before core: megatron/model/{language_model,transformer}.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from ... import _core
from ...common import codes
from ...common.errors import FastshardError, Finding
from ...common.records import dataclass, field
from ...common.regex import compile_when_used
from ...layouts.declaration import Assembled
from ...models import megatron_sizes

#: The first layer number in a name.
_LAYER = compile_when_used(r"^((?:[^.]+\.)*?layers\.)(\d{1,9})\.")
_EXPERT = compile_when_used(
    r"(\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)(?=\d)))(\d{1,9})(?!\d)"
)
#: A number higher than in any model.
_ENDLESS = compile_when_used(r"(\d{10,})")
#: Per-rank FP8 scales, and values computed from the config.
_NO_WEIGHTS = compile_when_used(r"(?:\._extra_state|\.inv_freq)$")
#: Tensors that each rank stores in full.
_ALIKE = compile_when_used(
    r"(?:norm\.(?:weight|bias)|layer_?norm_(?:weight|bias)|(?:^|\.)ln_(?:pre|post)\.(?:weight|bias)"
    r"|\.router\.(?:weight|bias|expert_bias)|(?:position|tokentype)_embeddings\.weight|\.gate_weight"
    r"|(?:linear_proj|linear_fc2|attention\.dense|dense_4h_to_h)\.bias|\.linear_fc2\.bias\d*"
    r"|(?:^|\.)(?:conv1\.(?:weight|bias)|class_token)"
    r"|(?:lm_head\.dense|pooler\.dense|binary_head)\.(?:weight|bias)"
    r"|relative_attention_bias\.weight)$"
)
#: How ranks divide a module's tensors: name, dimension, and the extent of the full tensor as a sum.
_DIVIDED = [
    (compile_when_used(rf"(?:^|\.){name}$"), dimension, extent)
    for name, dimension, extent in (
        (r"word_embeddings\.weight|output_layer\.(?:weight|bias)", 0, "words"),
        (r"(?:linear_qkv|query_key_value)\.(?:weight|bias)", 0, "heads"),
        (
            r"(?:self_attention|inter_attention|cross_attention|attention)\.(?:linear_proj|dense)\.weight",
            1,
            "values",
        ),
        (r"linear_q\.(?:weight|bias)", 0, "queries"),
        (r"linear_kv\.(?:weight|bias)", 0, "keys"),
        (r"linear_q_proj\.weight|linear_q_up_proj\.weight", 0, "latent_queries"),
        (r"linear_q_down_proj\.weight", 0, "latent_rank_q"),
        (r"linear_kv_down_proj\.weight", 0, "latent_rank_kv"),
        (r"linear_kv_up_proj\.weight", 0, "latent_keys"),
        (r"eh_proj\.weight", 0, "hidden"),
        (r"shared_experts\.linear_fc1\.(?:weight|bias)", 0, "shared"),
        (r"shared_experts\.linear_fc2\.weight", 1, "shared"),
        (r"experts\..*linear_fc1\.(?:weight|bias)\d*", 0, "experts"),
        (r"experts\..*linear_fc2\.weight\d*", 1, "experts"),
        (r"mlp\.(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)", 0, "mlp"),
        (r"mlp\.(?:linear_fc2|dense_4h_to_h)\.weight", 1, "mlp"),
    )
]
#: Maximum number of MTP layers; no model has as many.
_MOST = 1 << 16
_FIRST = compile_when_used(r"(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*$")


@dataclass(frozen=True)
class Place:
    """A rank file's part of a model: one chunk of its stage."""

    file: int
    path: str
    label: str
    key: str
    chunk: int
    stage: int
    tp: int
    #: Expert-tensor-parallel rank, and expert-parallel rank.
    etp: int
    ep: int


@dataclass
class _Tensor:
    """A full tensor: how it is divided, and which ranks store each part."""

    shape: list[int]
    #: The dimension that ranks divide, and the number of equal parts of the full tensor, each of which is
    #: divided among the ranks.
    dimension: int | None
    parts: int
    #: Number of ranks that divide it.
    degree: int
    #: Number of elements on each rank.
    numel: int
    #: By rank: (file, tensor in it); copies follow one another.
    holders: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def pieces(self, copy: int) -> list[Any]:
        """Return ranges if ranks divide rows, or boxes if they divide columns.

        The last copy replaces a missing one.
        """
        holders = [copies[min(copy, len(copies) - 1)] for _, copies in sorted(self.holders.items())]
        if not self.dimension:
            each = self.numel // self.parts
            return [(each, *holder, part * each) for part in range(self.parts) for holder in holders]
        size = list(self.shape)
        size[self.dimension] //= self.degree
        firsts = [[0] * len(size) for _ in holders]
        for rank, first in enumerate(firsts):
            first[self.dimension] = rank * size[self.dimension]
        return [(first, size, *holder) for first, holder in zip(firsts, holders, strict=True)]


class Wholes:
    """The tensors of all ranks.

    Args:
        args: the run's arguments.
        tp: number of ranks that divide a tensor.
        etp: number of ranks that divide an expert's tensor.
        ep: number of ranks that divide the experts.
    """

    def __init__(self, args: Mapping[str, Any], tp: int, etp: int, ep: int) -> None:
        self.args, self.tp, self.etp, self.ep = args, tp, etp, ep
        self.found: dict[str, _Tensor] = {}
        self.findings: list[Finding] = []
        self.left: list[str] = []

    def read(self, places: list[Place], tensors: dict[int, Sequence[_core.StoredTensor]]) -> None:
        """Combine the tensors of all files.

        Raises:
            FastshardError: ``FS514`` for a tensor whose division among ranks is unknown.
        """
        tensors_by_place = {place: self._of(place, tensors[place.file]) for place in places}
        bases = self._bases(tensors_by_place)
        own = {
            place: {name: shape for name, (_, shape) in tensors.items()}
            for place, tensors in tensors_by_place.items()
        }
        firsts: dict[tuple[int, int], Place] = {}
        for place, shapes in own.items():
            first = firsts.setdefault((place.stage, place.chunk), place)
            if shapes != own[first]:
                self._differ(place, shapes, first, own[first])
        if self.findings:
            return
        for place, numbered in tensors_by_place.items():
            for name, (number, shape) in numbered.items():
                self._add(place, self._named(name, place, bases), name, number, shape, own[place])
        self._check_against_arguments(places[0].path if places else None)

    def _check_against_arguments(self, file: str | None) -> None:
        """Compare the kinds of layers with the arguments, since only these state the required kinds.

        Raises:
            FastshardError: ``FS514`` naming the argument that differs.
        """
        layers: dict[int, set[str]] = {}
        further: set[int] = set()
        for name in self.found:
            if match := _LAYER.match(name):
                if match[1] == "decoder.layers.":
                    layers.setdefault(int(match[2]), set()).add(name[match.end() :])
                elif match[1] == "mtp.layers.":
                    further.add(int(match[2]))
        mixed = {n for n, names in layers.items() if any(name.startswith("mlp.experts.") for name in names)}
        shared = {n for n, names in layers.items() if any(".shared_experts." in f".{name}" for name in names)}
        every = self.args.get("moe_layer_freq", 1)
        called = mixed
        if self.args.get("num_experts") and isinstance(every, int) and every > 0:
            called = {n for n in layers if n % every == 0}
        elif self.args.get("num_experts") and isinstance(every, list):
            called = {n for n, is_mixed in enumerate(every) if is_mixed}
        further_layers = megatron_sizes.size(self.args, "mtp_num_layers") or 0
        if self.args.get("mtp_use_repeated_layer"):
            # One layer, used again and again.
            further_layers = min(further_layers, 1)
        latent = any("latent" in name for names in layers.values() for name in names)
        for key, expected, got in (
            ("moe_layer_freq", called, mixed),
            (
                "moe_shared_expert_intermediate_size",
                mixed if self.args.get("moe_shared_expert_intermediate_size") else set(),
                shared,
            ),
            ("mtp_num_layers", set(range(min(further_layers, _MOST))), further),
            ("moe_latent_size", bool(self.args.get("moe_latent_size")), latent),
        ):
            if layers and self.args and expected != got:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    f"the layers differ from those that {key} requires",
                    file=file,
                    expected=f"{key} {self.args.get(key)}: {_format_layers(expected)}",
                    got=_format_layers(got),
                    help="copy all rank files of this model again; the arguments are from another model, or "
                    "tensors are missing",
                )

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the full tensors by name."""
        return {name: tensor.shape for name, tensor in self.found.items()}

    def assembled(self) -> Iterator[Assembled]:
        """Yield the tensors, and then additional copies of tensors that several ranks store."""
        whole = {name: t for name, t in self.found.items() if len(t.holders) == t.degree}
        most = max((len(h) for t in whole.values() for h in t.holders.values()), default=0)
        for n in range(most):
            present = {name: t for name, t in whole.items() if any(len(h) > n for h in t.holders.values())}
            tensors = [(name, t.shape, t.pieces(n)) for name, t in present.items()]
            first = next(iter(present.values()))
            file = next(h[min(n, len(h) - 1)] for h in first.holders.values())[0]
            yield Assembled(file, {"replica": n} if most > 1 else {}, None, None, tensors, frozen=True)

    def incomplete(self) -> Iterator[str]:
        """Return the names of tensors for which a rank's part is missing."""
        return (name for name, t in self.found.items() if len(t.holders) != t.degree)

    def _of(self, place: Place, tensors: Sequence[_core.StoredTensor]) -> dict[str, tuple[int, list[int]]]:
        """Return the number and shape of each tensor of a model, by its name in the file."""
        own: dict[str, tuple[int, list[int]]] = {}
        for number, tensor in enumerate(tensors):
            path = [str(part) for part in tensor["path"]]
            if path[0] == place.key and len(path) > 1:
                name = ".".join(path[1:])
                if _NO_WEIGHTS.search(name):
                    self.left.append(name)
                else:
                    own[name] = (number, tensor["shape"])
        return own

    def _bases(self, tensors_by_place: Mapping[Place, Iterable[str]]) -> dict[tuple[str, int, int], int]:
        """Count the layers before each stage and virtual stage, separately for each list of layers."""
        counts: dict[tuple[str, int, int], set[int]] = {}
        for place, own in tensors_by_place.items():
            for name in own:
                if match := _ENDLESS.search(name):
                    got = f"one of {len(match[1])} digits"
                    raise _refused(name[:80], place, "the number of a layer or an expert", "a count", got)
                if match := _LAYER.match(name):
                    counts.setdefault((match[1], place.chunk, place.stage), set()).add(int(match[2]))
        bases: dict[tuple[str, int, int], int] = {}
        totals: dict[str, int] = {}
        for (top, chunk, stage), numbers in sorted(counts.items()):
            base = bases[top, chunk, stage] = totals.get(top, 0)
            totals[top] = base + max(numbers) + 1
            if len(numbers) <= max(numbers):
                lacking = next(n for n in range(len(numbers)) if n not in numbers)
                self._lacks_layer(f"{top}{base + lacking}", f"pp {stage}")
        layers = megatron_sizes.size(self.args, "num_layers")
        for top in (
            "decoder.layers.",
            "language_model.encoder.layers.",
            "language_model.transformer.layers.",
        ):
            if layers and totals.get(top, layers) < layers:
                self._lacks_layer(f"{top}{totals[top]}", None)
        return bases

    def _lacks_layer(self, layer: str, rank: str | None) -> None:
        self.findings.append(
            Finding.of(
                codes.MISSING_TENSOR,
                "all tensors of this layer are missing",
                tensor=layer,
                rank=rank,
                expected=f"num_layers {self.args.get('num_layers')} in the arguments",
                got="no such layer",
                help="copy the files of the pipeline stage that held it",
            )
        )

    def _named(self, name: str, place: Place, bases: Mapping[tuple[str, int, int], int]) -> str:
        """Return the name with layers and experts numbered within the full model."""
        if match := _LAYER.match(name):
            layer = int(match[2]) + bases[match[1], place.chunk, place.stage]
            name = f"{match[1]}{layer}{name[match.end(2) :]}"
        if (match := _EXPERT.search(name)) and self.ep > 1:
            total = megatron_sizes.size(self.args, "num_experts")
            if total is None or total % self.ep:
                raise _refused(
                    name, place, "num_experts", f"a multiple of {self.ep}", str(self.args.get("num_experts"))
                )
            if int(match[2]) >= total // self.ep:
                raise _refused(
                    name,
                    place,
                    "num_experts",
                    f"{total // self.ep} experts on this rank",
                    f"expert {match[2]}",
                )
            expert = int(match[2]) + place.ep * (total // self.ep)
            name = f"{name[: match.start(2)]}{expert}{name[match.end(2) :]}"
        return name

    def _differ(
        self, place: Place, own: Mapping[str, list[int]], first: Place, others: Mapping[str, list[int]]
    ) -> None:
        """Report how the tensors of two ranks in the same stage differ."""
        name = next(
            n
            for n in sorted(own.keys() | others.keys())
            if n not in own or n not in others or own[n] != others[n]
        )
        there = name in own and name in others
        self.findings.append(
            Finding.of(
                codes.SHAPE if there else codes.MISSING_TENSOR,
                "shape" if there else "one rank of a stage lacks a tensor that another rank has",
                file=place.path if there or name not in own else first.path,
                tensor=name,
                rank=place.label if there or name not in own else first.label,
                expected=f"{others.get(name) or own.get(name)}, as in "
                f"{first.path if name in others else place.path}",
                got=str(own[name]) if there else "no such tensor",
                help="copy the file of this rank again; it is from another run or another number of ranks",
            )
        )

    def _add(
        self,
        place: Place,
        name: str,
        stored: str,
        number: int,
        shape: list[int],
        own: Mapping[str, list[int]],
    ) -> None:
        expert = ".mlp.experts." in name
        degree, rank = (self.etp, place.etp) if expert else (self.tp, place.tp)
        dimension, parts = self._divided(place, stored, shape, own, degree)
        whole = list(shape)
        if dimension is not None:
            whole[dimension] *= degree
        if dimension is None:
            degree, rank = 1, 0
        new = _Tensor(whole, dimension, parts, degree, prod(shape))
        tensor = self.found.setdefault(name, new)
        if tensor.shape != new.shape:
            raise _refused(name, place, "its shape", str(tensor.shape), str(new.shape))
        tensor.holders.setdefault(rank, []).append((place.file, number))

    def _divided(
        self, place: Place, name: str, shape: list[int], own: Mapping[str, list[int]], degree: int
    ) -> tuple[int | None, int]:
        """Return the dimension that ranks divide, and the number of parts that are divided separately.

        The dimension is None if each rank has the full tensor.
        """
        if degree == 1 or _ALIKE.search(name):
            return None, 1
        rule = next((r for r in _DIVIDED if r[0].search(name) and len(shape) > r[1]), None)
        if rule is None:
            raise _refused(name, place, "no known module has this name", None, None)
        _, dimension, extent = rule
        total = self._extents[extent]
        parts = 1
        if _FIRST.search(name):
            parts = self._gates(place, name, shape, own)
            if parts > 1 and degree > 1 and self.args.get("moe_mlp_glu_interleave_size"):
                size = str(self.args["moe_mlp_glu_interleave_size"])
                raise _refused(
                    name,
                    place,
                    "gates interleaved with other rows (moe_mlp_glu_interleave_size)",
                    "None",
                    size,
                )
            total = None if total is None else total * parts
        if total is not None and shape[dimension] * degree == total:
            return dimension, parts
        if total is not None and shape[dimension] == total:
            return None, 1
        raise _refused(
            name,
            place,
            f"its size along dimension {dimension}",
            f"a part or all of {total}, by the arguments" if total else "arguments that state it",
            str(shape[dimension]),
        )

    def _gates(self, place: Place, name: str, shape: list[int], own: Mapping[str, list[int]]) -> int:
        """Return 2 if a first projection has a gate, otherwise 1.

        With a gate, it has twice as many rows as the second projection has inputs.
        """
        second = re.sub(r"\.bias(?=\d*$)", ".weight", name)
        second = second.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
        columns = own.get(second, [0])[-1]
        parts = 2 if shape[0] == 2 * columns else 1
        gated = self.args.get("swiglu")
        if shape[0] != parts * columns or (isinstance(gated, bool) and gated != (parts == 2)):
            raise _refused(
                name, place, "its rows", f"one or two for each column of {second}, by swiglu", str(shape[0])
            )
        return parts

    @cached_property
    def _extents(self) -> dict[str, int | None]:
        """Extents of divided dimensions in full tensors, according to the arguments; None if they are not
        stated.
        """

        def sized(*keys: str) -> int | None:
            return next((n for key in keys if (n := megatron_sizes.size(self.args, key)) is not None), None)

        heads, hidden = sized("num_attention_heads"), sized("hidden_size")
        groups = (sized("num_query_groups") if self.args.get("group_query_attention") else None) or heads
        each = sized("kv_channels") or (hidden // heads if heads and hidden and hidden % heads == 0 else None)
        rope, latent = sized("qk_pos_emb_head_dim"), bool(self.args.get("multi_latent_attention"))
        queried, value = sized("qk_head_dim"), sized("v_head_dim")
        low = sized("kv_lora_rank")
        queries = heads and each and heads * each * (2 if self.args.get("attention_output_gate") else 1)
        keys = groups and each and 2 * groups * each
        return {
            "words": sized("padded_vocab_size"),
            "hidden": hidden,
            "heads": queries and keys and queries + keys,
            "queries": heads and each and heads * each,
            "keys": keys,
            "values": heads and (value if latent else each) and heads * ((value if latent else each) or 0),
            "latent_queries": heads and queried and rope and heads * (queried + rope),
            "latent_rank_q": sized("q_lora_rank"),
            "latent_rank_kv": low and rope and low + rope,
            "latent_keys": heads and queried and value and heads * (queried + value),
            "shared": sized("moe_shared_expert_intermediate_size"),
            "experts": sized("moe_ffn_hidden_size", "ffn_hidden_size"),
            "mlp": sized("ffn_hidden_size"),
        }


def _format_layers(layers: set[int] | bool) -> str:
    if isinstance(layers, bool):
        return "some" if layers else "none"
    return f"layers {', '.join(map(str, sorted(layers)))}"[:80] if layers else "none"


def _refused(name: str, place: Place, what: str, expected: str | None, got: str | None) -> FastshardError:
    return FastshardError.of(
        codes.UNSUPPORTED,
        f"it is uncertain how ranks divide this tensor: {what}",
        file=place.path,
        tensor=name,
        rank=place.label,
        expected=expected,
        got=got,
        help="save it in the torch_dist format, which states where each part belongs, or describe it in "
        "your own layout (--layout FILE.toml)",
    )
