"""The MaxText target: names, shapes and other contents of a train state.

source: MaxText configs/base.yml, configs/models, checkpoint_conversion/to_maxtext.py,
    standalone_scripts/convert_gpt3_ckpt_from_paxml.py,
common/checkpointing.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, field
from ..common.target_options import FUSED_QKV, MULTIPLE, ROPE_TYPE, SCAN_AXIS
from ..layouts import jax_train_states, tables
from ..layouts.declaration import Source
from ..layouts.jax_train_states import Cycle, Names, Rules
from ..layouts.maxtext_names import FILE, default_names
from ..models import maxtext, maxtext_delta, maxtext_gemma, maxtext_latent, maxtext_windows
from ..models.model import Model
from .base import Bound, Completed, padded_rows, positive
from .form import Form
from .huggingface import model_of
from .request import Request

NAMES = ("maxtext", "maxtext:scan", "maxtext:unscan")
#: source: MaxText configs/base.yml
_SCAN_AXIS = 1
#: dtypes of the counters if the source is from another framework. source: jax default of int32; Orbax casts.
_COUNTERS = {"U32": "I32", "U64": "I64"}


@dataclass
class MaxTextTarget:
    """A MaxText train state, or its parameters alone, converted from a source."""

    source: Source
    name: str
    layout: str
    facts: dict[str, bool]
    #: Axis along which layers are stacked; None for separate layers.
    scan: int | None
    optimizer: bool
    #: The model; None if the source is a MaxText or Paxml checkpoint.
    model: Model | None
    #: Multiple to which the vocabulary is padded, if requested.
    multiple: int | None = None
    names: Names = field(default_factory=default_names)
    #: The cycle of different layers, if there is one, and the total number of layers.
    cycle: Cycle | None = None
    layers: int = 0

    @classmethod
    def of(cls, source: Source, request: Request) -> MaxTextTarget:
        """Make the target for a source.

        Without scaling, both values of ``--rope-type`` compute the same result from differently ordered
        queries and keys.

        Raises:
            FastshardError: ``FS514`` for a model that MaxText's blocks do not compute, or for another
                framework's optimizer; ``FS209`` if a fact that decides values is unknown, ``FS515`` for
                options that do not apply.
        """
        to, optimizer, multiple = str(request.to), request.optimizer, request[MULTIPLE]
        fused_qkv, rope_type = request[FUSED_QKV], request[ROPE_TYPE]
        scan = _scan(to, request[SCAN_AXIS])
        positive(request, MULTIPLE)
        if optimizer and not source.optimizer.moments_named:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"the optimizer state of {source.framework} cannot be converted to MaxText's",
                expected="a train state of MaxText or Paxml",
                got=source.framework,
                help="leave out --optimizer to convert only the weights, or choose a target that can hold "
                "it (universal, dcp)",
                run=["--to dcp"],
            )
        rules = source.optimizer.rules if isinstance(source.optimizer.rules, Rules) else None
        own = isinstance(source.model.dialect, maxtext.MaxText)
        family = source.model.family
        if own and family == "gpt3":
            fused = source.binding.facts.get("fused_qkv", True) if fused_qkv is None else fused_qkv
            facts, model = {"fused_qkv": fused}, None
            if rope_type is not None:
                raise FastshardError.of(codes.USAGE, "--rope-type: GPT-3 has no rotary embedding")
        elif fused_qkv is not None:
            raise FastshardError.of(codes.USAGE, "--fused-qkv: only GPT-3 has such projections in MaxText")
        elif own:
            kept = ("tied", "qk_norm", "q_lora", "routed_bias")
            facts = {fact: source.binding.facts[fact] for fact in kept if fact in source.binding.facts}
            _refuse_order(_block(source), rope_type)
            facts["interleaved"], model = _kept_order(source, rope_type), None
        else:
            model = model_of(source, "MaxText")
            block = maxtext.block_of(model)
            family = block.family
            _refuse_order(block, rope_type)
            facts = {"tied": model.tied, "qk_norm": model.attention.qk_norm}
            facts["interleaved"] = _order(model, block, rope_type)
            if block.is_latent:
                facts |= {"q_lora": model.attention.latent_queries, "routed_bias": True}
        layout = f"maxtext.{family}"
        # A checkpoint of MaxText's own keeps the names of its state.
        same = source.binding.layout is not None and source.binding.layout.startswith("maxtext.")
        names = rules.names if same and rules is not None else default_names()
        if rules is not None and own:
            cycle, layers = rules.cycle, source.binding.axes.get("L", 0)
        else:
            cycle, layers = _find_cycle(model) if model is not None else (None, 0)
        cycle = None if cycle is None else cycle.of_layers(layers)
        if scan is not None and cycle is not None and cycle.length > maxtext_delta.LONGEST_CYCLE:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "no layout for a scan of so many different layers",
                expected=f"cycles of {maxtext_delta.LONGEST_CYCLE} layers at most, or unstacked layers",
                got=str(cycle.length),
                help="write the layers unstacked",
                run=["--to maxtext:unscan"],
            )
        return cls(source, to, layout, facts, scan, optimizer, model, multiple, names, cycle, layers)

    def form(self) -> Form:
        """Return the form of the result, with the derived table."""
        derived = jax_train_states.table(
            tables.table(self.layout),
            self.names,
            scan=self.scan,
            cycle=self.cycle,
            optimizer="kept" if self.optimizer else "absent",
        )
        sets = {} if self.cycle is None else self.cycle.list_sets(self.layers)
        return Form(self.name, derived, facts=self.facts, sets=sets, pad_multiple=self.multiple)

    def vocabulary(self, axes: dict[str, int]) -> int:
        """Return the number of rows of the embedding."""
        return padded_rows(axes, self.multiple or 1)

    def counters(self, outputs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, str]]:
        """Return the counters whose dtype changes: name -> (dtype in the source, dtype to write).

        The engine refuses a number that does not fit into the new dtype.

        Args:
            outputs: name and dtype of each output as planned.
        """
        counting = {"step", self.names.count}
        return {
            name: (kind, _COUNTERS[kind]) for name, kind in outputs if name in counting and kind in _COUNTERS
        }

    def constants(self, outputs: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Return leaves that do not come from a tensor of the source: name -> (dtype, value)."""
        if not self._state or "step" in set(outputs):
            return {}
        # source: MaxText checkpoint_conversion/to_maxtext.py (a step of 0, a Python int)
        return {"step": ("I64", 0)}

    @property
    def empty(self) -> list[tuple[str, ...]]:
        """Empty nodes of the tree: a train state without the optimizer has one."""
        return [("opt_state",)] if self._state and not self.optimizer else []

    @property
    def _state(self) -> bool:
        """False for parameters that are stored as a separate tree."""
        return self.names.root == self.names.declared

    def metadata(self) -> dict[str, Any]:
        """Return the content of ``_CHECKPOINT_METADATA.custom_metadata``."""
        return {"scan_layers": self.scan is not None}

    def complete(self, bound: Bound) -> Completed:
        """Return a yml that describes the model, and the assumptions.

        The files themselves are those of Orbax.
        """
        config, findings = _yml(self, bound.axes)
        return Completed({FILE: _dump(config)}, findings + self.rounded(bound.axes) + self._ordered())

    def _ordered(self) -> list[Finding]:
        """Return a note on the MaxText settings that this order of queries and keys requires."""
        if self.model is None or "a" in self.source.binding.axes or not self.facts.get("interleaved"):
            return []
        return [
            Finding.of(
                codes.NOT_PROVABLE,
                "queries and keys are in the order of MaxText's rope_type llama3.1, as its own converter "
                "writes them",
                file=FILE,
                help="run MaxText with this yml; for a model_name without that rope_type (llama2, mistral), "
                "convert with the default",
                run=["--rope-type default"],
            )
        ]

    def rounded(self, axes: dict[str, int]) -> list[Finding]:
        """Report values that the other layout changes by an operation without an exact inverse."""
        if self.model is None:
            return []
        block = maxtext.block_of(self.model)
        found: list[Finding] = []
        if block.scales_queries:
            found += scaled(
                "queries", axes.get("s", axes.get("d", 1)), "decoder.layers.self_attention.query.kernel"
            )
        if block.is_gemma:
            found += scaled("embeddings", axes["H"], "token_embedder.embedding")
            found.append(_rounded("norms are stored plus 1", "may change", "decoder.decoder_norm.scale"))
        return found


def scaled(what: str, under_root: int, tensor: str) -> list[Finding]:
    """Return a note if the root by which weights are scaled is not a power of two."""
    if under_root & (under_root - 1) == 0 and under_root.bit_length() % 2:
        return []
    return [_rounded(f"{what} are scaled by sqrt({under_root})", "changes", tensor)]


def _rounded(what: str, consequence: str, tensor: str) -> Finding:
    return Finding.of(
        codes.LOSSY,
        f"{what} and rounded once: converting back {consequence} their last bits",
        tensor=tensor,
        help="compare with a tolerance of one unit in the last place, or with the op applied",
    )


def _scan(to: str, axis: int | None) -> int | None:
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or not -5 <= axis <= 5):
        raise FastshardError.of(codes.USAGE, "--param-scan-axis", expected="an axis, e.g. 1", got=repr(axis))
    if to == "maxtext:unscan":
        if axis is not None:
            raise FastshardError.of(
                codes.USAGE, "--param-scan-axis: unstacked layers have no such axis", got=str(axis)
            )
        return None
    axis = _SCAN_AXIS if axis is None else axis
    if axis > 1 or axis < -1:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "MaxText cannot stack the norms, which are vectors, along this axis",
            expected="--param-scan-axis 0, 1 or -1",
            got=str(axis),
        )
    return axis


def _rope_type(name: str | None) -> bool | None:
    """Return True if a ``rope_type`` interleaves pairs; None if there is no ``rope_type``."""
    if name not in (None, "default", "llama3.1"):
        raise FastshardError.of(codes.USAGE, "--rope-type", expected="default | llama3.1", got=repr(name))
    return None if name is None else name == "llama3.1"


def _kept_order(source: Source, rope_type: str | None) -> bool:
    """Return the order of pairs for a MaxText source: its own, unless the caller chooses another."""
    wanted = _rope_type(rope_type)
    if wanted is None:
        return source.binding.facts["interleaved"]
    rope = maxtext.pairs_of(source.model.config or {}, _block(source))
    if rope is None:
        raise FastshardError.of(
            codes.FACT_UNKNOWN,
            "the order of queries and keys depends on the source's `rope_type`, which is not stated",
            help="leave out --rope-type to keep the order, or pass MaxText's yml",
            run=["--config FILE"],
        )
    _fits(rope.scaled, wanted)
    return wanted


def _block(source: Source) -> maxtext.DecoderBlock:
    """Return the block of a MaxText source."""
    config = source.model.config or {}
    return maxtext.find_block(str(source.model.family), source.binding.facts["qk_norm"], config)


def _order(model: Model, block: maxtext.DecoderBlock, rope_type: str | None) -> bool:
    """Return the order of pairs for a model from another format: as requested, or as MaxText's converter
    writes it.
    """
    wanted, scaled = _rope_type(rope_type), model.rope.kind == "llama3"
    _fits(scaled, wanted)
    return block.interleaved or scaled if wanted is None else wanted


def _refuse_order(block: maxtext.DecoderBlock, rope_type: str | None) -> None:
    """Refuse a ``rope_type`` for a block that has only one order.

    Raises:
        FastshardError: ``FS515``.
    """
    if rope_type is not None and block.has_one_order:
        raise FastshardError.of(
            codes.USAGE,
            f"--rope-type: {block.says.kind} of MaxText has only one order of queries and keys",
            help="leave it out",
        )


def _find_cycle(model: Model) -> tuple[Cycle | None, int]:
    """Return the cycle of a model's layers, if they differ, and the number of its layers."""
    layers = sum(len(block.layers or ()) for block in model.blocks)
    return maxtext.block_of(model).make_cycle(maxtext_delta.count_layers_of_cycle(model)), layers


def _fits(scaled: bool, wanted: bool | None) -> None:
    if scaled and wanted is False:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "MaxText scales frequencies as Llama 3.1 does only with rope_type llama3.1",
            expected="--rope-type llama3.1",
            got="default",
        )


def _yml(target: MaxTextTarget, axes: dict[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    """Return MaxText's config of the model, and the assumptions.

    Raises:
        FastshardError: ``FS514`` for a model that MaxText's block does not compute, ``FS211`` for values of
            the wrong type.
    """
    source = target.source
    given = source.model.config or {}
    is_own_yml = target.model is None and maxtext.is_maxtext(given)
    gpt3, latent = "fused_qkv" in target.facts, "a" in axes
    family = target.layout.removeprefix("maxtext.")
    cycle, delta, gemma = target.cycle, maxtext.is_delta(family), maxtext.is_gemma(family)
    joined = maxtext.find_joined_layers(family)
    # Settings that decide the model and that nothing states.
    open_: list[str] = []
    if axes["L"] % joined:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"each of MaxText's layers is {joined} layers of this model, one with a window and one without",
            expected=f"a number of layers that is a multiple of {joined}",
            got=str(axes["L"]),
        )
    is_cut = cycle is not None and cycle.remainder is None and axes["L"] % cycle.length != 0
    if cycle is not None and target.scan is not None and is_cut:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            f"MaxText scans cycles of {cycle.length} different layers, but the number of layers is no "
            f"multiple of {cycle.length}",
            expected=f"a multiple of {cycle.length}, or unstacked layers",
            got=str(axes["L"]),
            help="write the layers unstacked",
            run=["--to maxtext:unscan"],
        )
    if delta and axes["S"] != axes["M"]:
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "MaxText's shared expert is as large as each routed expert",
            expected=str(axes["M"]),
            got=str(axes["S"]),
        )
    # Attention over a latent has keys and values for each head.
    heads = axes["h"] if gpt3 else axes["a"] if latent else axes["g"] * axes["r"]
    out: dict[str, Any] = {
        "base_emb_dim": axes["H"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads if gpt3 or latent else axes["g"],
        **({} if delta else {"base_mlp_dim": axes["F"]}),
        "base_num_decoder_layers": axes["L"] // joined,
        **({} if latent else {"head_dim": axes["d"]}),
        "vocab_size": target.vocabulary(axes),
        "scan_layers": target.scan is not None,
        **({} if target.scan is None else {"param_scan_axis": target.scan}),
    }
    if delta:
        if target.model is None and (is_own_yml or not given):
            open_ += maxtext_delta.list_unstated(given)
        has_heads = maxtext_delta.SIZES["k"] not in open_
        out |= {"num_experts": axes["E"], **maxtext_delta.write_sizes(axes, has_heads=has_heads)}
    elif "E" in axes:
        out |= {"base_moe_mlp_dim": axes["M"] if latent else axes["F"], "num_experts": axes["E"]}
    if latent:
        out |= {key: axes.get(axis, 0) for axis, key in maxtext_latent.SIZES.items()}
        out |= {"shared_experts": axes["S"] // axes["M"]}
        out |= {"first_num_dense_layers": len(source.binding.sets["dense"][1])}
    if target.optimizer and target.names.count == "opt_state.count":
        # Optax numbers the states of its chain; this optimizer alone has these names. source: MaxText
        # optimizers
        out["opt_type"] = "adam_pax"
    findings: list[Finding] = []
    if is_own_yml:
        kept = (
            *maxtext.KEPT,
            *(maxtext_latent.KEPT if latent or delta else ()),
            *(maxtext_windows.KEPT if maxtext.is_windowed(family) else ()),
            *(maxtext_delta.KEPT if delta else ()),
            *(maxtext_gemma.KEPT if gemma else ()),
        )
        out |= {key: given[key] for key in kept if given.get(key) is not None}
    if gpt3:
        out |= {
            "decoder_block": "gpt3",
            "mlp_activations": ["gelu"],
            "trainable_position_size": axes["S"],
            "fused_qkv": target.facts["fused_qkv"],
            "logits_via_embedding": True,
            "normalize_embedding_logits": False,
        }
        return out, findings
    tied = target.facts["tied"]
    out["logits_via_embedding"] = tied
    if target.model is None:
        block = _block(source)
        if len(block.names) == 1 or delta:
            out = {"decoder_block": next(iter(block.names.values())), **block.settings} | out
        if delta and cycle is not None:
            out[maxtext_delta.CYCLE] = cycle.length
        if block.is_mixture:
            best = given.get("num_experts_per_tok")
            out |= {} if best is None else {"num_experts_per_tok": best}
            open_ += ["num_experts_per_tok"] if best is None else []
        if gemma:
            open_ += maxtext_gemma.list_unstated(given if is_own_yml else {}, maxtext.has_local_rope(family))
        findings += [maxtext.report_unstated(key, FILE) for key in open_]
        rope = maxtext.pairs_of(given, block)
        if rope is not None and not block.has_one_order:
            out |= maxtext.order(target.facts["interleaved"], rope.scaled)
    else:
        told, findings = maxtext.DIALECT.write(target.model, target.facts["interleaved"], tied, FILE)
        out |= told
        if maxtext.has_local_rope(family):
            out["model_name"] = name = _find_model_name(target.model, axes)
            findings.append(maxtext_gemma.warn_of_name(name, FILE))
    return out, findings


def _find_model_name(model: Model, axes: dict[str, int]) -> str:
    """Return the model_name under which MaxText divides the scores of a model as the model does.

    Raises:
        FastshardError: ``FS514`` if there is none.
    """
    divisor = model.attention.divisor
    name = maxtext_gemma.find_model_name(divisor, axes)
    if name is None:
        width = axes["H"] // (axes["g"] * axes["r"])
        raise FastshardError.of(
            codes.UNSUPPORTED,
            "MaxText has no Gemma 3 model with this query_pre_attn_scalar",
            expected=f"{axes['d']} (head_dim) or {width} (hidden_size / num_attention_heads)",
            got=str(divisor),
        )
    return name


def _dump(config: dict[str, Any]) -> str:
    """Format a config as yml."""
    import yaml

    head = "# Made of the checkpoint that was converted; overrides MaxText's configs/base.yml.\n"
    return head + str(yaml.safe_dump(config, sort_keys=False, default_flow_style=None))
