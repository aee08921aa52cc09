"""The GPT-NeoX target: files by pipeline layer or by rank, rank files with arguments, and the config.

The target writes the files that `megatron/checkpointing.py` loads through DeepSpeed. They contain no
optimizer state and no random states, so the config sets ``finetune``.
source: gpt-neox megatron/checkpointing.py and neox_arguments/neox_args.py; DeepSpeed runtime/engine.py
(`_save_checkpoint`) and runtime/pipe/module.py (`save_state_dict`)
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from .. import _core
from ..common import codes
from ..common.config_text import shown
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass
from ..common.regex import compile_when_used
from ..common.target_options import MULTIPLE, PP, TP
from ..common.topology import Topology
from ..layouts.declaration import Source
from ..models import gpt_neox
from ..models.config_fields import positive_number, whole_number
from ..models.gpt_neox import GATED, GATES, activation_of, te_differences
from ..models.model import read_model
from .base import MAX_MULTIPLE, Bound, Completed, TrainerTarget, positive
from .huggingface import model_of
from .pickle_tree import TensorOf, tree
from .request import Request

#: gpt-neox neox_args.py, make_vocab_size_divisible_by
DEFAULT_VOCAB_MULTIPLE = 128

#: model family -> layout table
_LAYOUTS = {"gpt_neox": "gpt_neox.neox", "llama": "gpt_neox.llama"}

#: Keys of a training config that describe the run, not the model. With weights alone, a run would look for
#: files that do not exist.
_RUN_KEYS = ("load", "save", "iteration", "padded_vocab_size", "s3_path", "finetune")
#: Settings of Transformer Engine modules. The result does not need them: its tensors have GPT-NeoX's own
#: names.
_TE_KEYS = (
    "te_columnparallel",
    "te_rowparallel",
    "te_layernorm_mlp",
    "te_mha",
    "te_fp8_format",
    "te_fp8_wgrad",
    "te_fp8_amax_history_len",
    "te_fp8_amax_compute_algo",
    "te_fp8_margin",
    "te_fp8_mha",
)

#: The file that names the step to load. source: DeepSpeed runtime/engine.py
_TRACKER = "latest"
#: Name of the written config in messages.
_CONFIG = "configs/fastshard.yml"

_PRECISION: dict[str, dict[str, Any]] = {
    "bfloat16": {"precision": "bfloat16", "bf16": {"enabled": True}},
    "float16": {"precision": "fp16", "fp16": {"enabled": True}},
    "float32": {"precision": "fp32"},
}

_NORM = compile_when_used(
    r"^(input_layernorm|post_attention_layernorm|attention\.qk_layernorm|norm)"
    r"\.(weight|scale|g|norm\.weight|bias|offset|norm\.bias)$"
)
#: Norm -> names of its weight and bias. source: gpt-neox megatron/model/norms.py
_NORM_NAMES = {"layernorm": ("weight", "bias"), "rmsnorm": ("scale", "offset"), "scalenorm": ("g", "bias")}


@dataclass
class NeoxTarget(TrainerTarget):
    """A GPT-NeoX checkpoint, converted from a source."""

    pipeline: bool
    names = ("gpt_neox", "gpt_neox:pipeline", "gpt_neox:sequential")
    options = (TP, PP, MULTIPLE)

    @classmethod
    def of(cls, source: Source, request: Request) -> NeoxTarget:
        """Make the target for a source.

        Raises:
            FastshardError: ``FS514`` for a model that GPT-NeoX does not support, ``FS209`` if a fact that
                decides values is unknown, ``FS515`` for impossible degrees, ``FS211`` for a config with
                values of the wrong type.
        """
        to = str(request.to)
        pipeline = not to.endswith(":sequential")
        positive(request, TP, PP, MULTIPLE)
        tp, pp, multiple = request[TP], request[PP], request[MULTIPLE]
        if pp > 1 and not pipeline:
            raise FastshardError.of(
                codes.USAGE,
                "--pp: the sequential format has no pipeline stages",
                expected="1",
                got=str(pp),
                help="choose the pipeline format",
                run=["--to gpt_neox:pipeline"],
            )
        model = None if isinstance(source.model.dialect, gpt_neox.GptNeoX) else model_of(source, "GPT-NeoX")
        config = source.model.config or {}
        facts = dict(source.binding.facts)
        if model is not None:
            gpt_neox.refuse(model)
            model.settled("parallel")
            facts = {
                "gpt_j_residual": bool(model.parallel),
                "tied": model.tied,
                "gqa": model.attention.grouped,
                "gated": bool(model.gated),
                "norms": True,
                "scalenorm": False,
                "reward": False,
            }
        layout = _LAYOUTS.get(family := (model or source.model).family or "")
        if layout is None:
            raise FastshardError.of(codes.UNSUPPORTED, f"no GPT-NeoX layout for the family {family!r}")
        if "gpt_j_residual" not in facts:
            raise FastshardError.of(
                codes.FACT_UNKNOWN,
                "the model depends on `gpt_j_residual`, which is not stated",
                help="pass the training config, which must state gpt_j_residual: true or false",
                run=["--config FILE"],
            )
        if model is None:
            features = _features(source)
            read_model(source).settled("activation")
            for kind, first, last in (
                ("attention", features.attention_bias, features.dense_bias),
                ("MLP", features.mlp_bias, features.mlp_out_bias),
            ):
                if first != last:
                    raise FastshardError.of(
                        codes.UNSUPPORTED,
                        f"GPT-NeoX has biases on both projections of its {kind}, or on neither",
                    )
        # Transformer Engine's modules and old names become GPT-NeoX's own of today.
        facts |= dict.fromkeys(("te_mha", "te_mlp", "te_dense", "te_linear2", "split_gate"), False)
        if multiple is None:
            multiple = DEFAULT_VOCAB_MULTIPLE
            key = "make_vocab_size_divisible_by"
            if model is None and config.get(key) is not None:
                multiple = whole_number(config, key, multiple)
                if multiple > MAX_MULTIPLE:
                    raise FastshardError.of(
                        codes.BAD_VALUE,
                        f"config: {key}",
                        expected=f"at most {MAX_MULTIPLE}",
                        got=str(multiple),
                    )
        return cls(source, to, Topology(tp, pp), multiple, facts, model, layout, pipeline)

    def complete(self, bound: Bound) -> Completed:
        """Return the files by layer or by rank, ``latest`` and the config.

        Norms keep the names that the source uses.
        """
        folder = f"global_step{self.iteration()}"
        config, findings = self._config(bound.axes, bound.dtype)
        state = self._state(config, self.padded(bound.axes))
        suffixes = _norm_names(config, bound.stored)
        by_layer: dict[int, list[str]] = {}
        for name in sorted(bound.tensors):
            by_layer.setdefault(int(name.split(".", 1)[0]), []).append(name)
        # DeepSpeed looks for a file of each module, also of a norm without parameters.
        by_layer.setdefault(bound.axes["L"] + 3, [])
        files: list[_core.PlacedFile] = []

        def add(name: str, rank: int, value: Any) -> None:
            content = {"torch_zip": tree(value)}
            files.append({"name": f"{folder}/{name}", "coords": {"tp": rank}, "content": content})

        layers = sorted(by_layer)
        for rank in range(self.topology.tp):
            for layer in layers if self.pipeline else ():
                inside = OrderedDict(
                    (_key(name, suffixes).partition(".")[2], TensorOf(name)) for name in by_layer[layer]
                )
                add(f"layer_{layer:02d}-model_{rank:02d}-model_states.pt", rank, inside)
            if not self.pipeline:
                module = OrderedDict(
                    (f"sequential.{_key(name, suffixes)}", TensorOf(name))
                    for layer in layers
                    for name in by_layer[layer]
                )
                add(f"mp_rank_{rank:02d}_model_states.pt", rank, {"module": module, **state})
        if self.pipeline:
            # Rank files count stages and tensor-parallel ranks together, and hold no tensors.
            for rank in range(self.topology.tp * self.topology.pp):
                add(f"mp_rank_{rank:02d}_model_states.pt", 0, {"module": None, **state})
        import yaml

        texts = {
            _TRACKER: folder,
            f"{folder}/configs/fastshard.yml": yaml.safe_dump(config, sort_keys=True),
        }
        return Completed(texts, findings, files, pointers=(_TRACKER,))

    def _state(self, config: dict[str, Any], padded: int) -> dict[str, Any]:
        """Return the content of a rank file except for its module."""
        step = self.iteration()
        samples = self.source.files.values.get("global_samples")
        dimensions = {
            "checkpoint_parallel_dimensions": {"pp_degree": self.topology.pp, "tp_degree": self.topology.tp}
        }
        return {
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": None,
            "frozen_param_shapes": None,
            "shared_params": None,
            "frozen_param_fragments": None,
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": step,
            "global_samples": samples if isinstance(samples, int) else 0,
            "dp_world_size": 1,
            "mp_world_size": self.topology.tp * self.topology.pp,
            **(dimensions if self.pipeline else {}),
            "ds_config": {},
            "iteration": step,
            # `iteration or total_iters` is what GPT-NeoX reads: 0 alone would be none.
            "total_iters": step,
            "args": {
                "num_layers": config["num_layers"],
                "hidden_size": config["hidden_size"],
                "num_attention_heads": config["num_attention_heads"],
                "max_position_embeddings": config["max_position_embeddings"],
                "make_vocab_size_divisible_by": self.multiple,
                "padded_vocab_size": padded,
                "tokenizer_type": config["tokenizer_type"],
                "model_parallel_size": self.topology.tp,
            },
        }

    def _config(self, axes: dict[str, int], dtype: str | None) -> tuple[dict[str, Any], list[Finding]]:
        """Return the training config, and findings about it."""
        findings: list[Finding] = []
        if self.model is not None:
            config, findings = gpt_neox.DIALECT.write(self.model, axes, _CONFIG)
        else:
            config = self._kept(axes, findings)
        config |= {
            "model_parallel_size": self.topology.tp,
            "pipe_parallel_size": self.topology.pp if self.pipeline else 0,
            "make_vocab_size_divisible_by": self.multiple,
            "no_weight_tying": not self.facts.get("tied", False),
            "gpt_j_residual": self.facts["gpt_j_residual"],
            "finetune": True,
        }
        if dtype in _PRECISION:
            if config.get("precision") != _PRECISION[dtype]["precision"]:
                config = {k: v for k, v in config.items() if k not in ("bf16", "fp16")}
            for key, value in _PRECISION[dtype].items():
                config.setdefault(key, value)
            config["precision"] = _PRECISION[dtype]["precision"]
        return config, findings

    def _kept(self, axes: dict[str, int], findings: list[Finding]) -> dict[str, Any]:
        """Return the source's own config, updated with the values that its tensors show."""
        given, features = self.source.model.config or {}, _features(self.source)
        config = {k: v for k, v in given.items() if k not in (*_RUN_KEYS, *_TE_KEYS)}
        for key, axis in (("num_layers", "L"), ("hidden_size", "H")):
            config[key] = axes[axis]
        config["num_attention_heads"] = axes["g"] * axes["r"]
        config["norm"] = features.norm
        if features.gqa:
            config["num_kv_heads"] = axes["g"]
        # source: gpt-neox megatron/neox_arguments/neox_args.py, all three are true by default
        for key, has in (
            ("use_bias_in_attn_linear", features.attention_bias),
            ("use_bias_in_mlp", features.mlp_bias),
            ("use_bias_in_norms", features.norm_bias),
        ):
            if config.get(key, True) is not has:
                config[key] = has
        if features.gated or config.get("activation") is not None:
            config["activation"] = activation_of(config)
        _inner_size(config, axes["F"], axes["H"], features.gated, self.source.binding.facts["split_gate"])
        findings += te_differences(given, features, _CONFIG)
        if features.learned_positions:
            config["pos_emb"] = "learned"
        for key, default in (
            ("max_position_embeddings", 2048),
            ("tokenizer_type", "GPT2BPETokenizer"),
            # Not its default: learned positions would be among the tensors.
            ("pos_emb", "rotary"),
        ):
            if config.get(key) is None:
                findings.append(
                    Finding.of(
                        codes.NOT_PROVABLE,
                        f"config: {key} is not stated; {default!r} is written",
                        severity="note",
                        file=_CONFIG,
                    )
                )
                config[key] = default
        config["max_position_embeddings"] = whole_number(config, "max_position_embeddings", 2048)
        if not isinstance(config["tokenizer_type"], str):
            got = shown(config["tokenizer_type"])
            raise FastshardError.of(codes.BAD_VALUE, "config: tokenizer_type", expected="a name", got=got)
        config.setdefault("seq_length", config["max_position_embeddings"])
        return config


def _features(source: Source) -> gpt_neox.Features:
    """Return the features with which a GPT-NeoX source was trained."""
    dialect = source.model.dialect
    assert isinstance(dialect, gpt_neox.GptNeoX) and dialect.features is not None
    return dialect.features


def _inner_size(config: dict[str, Any], inner: int, hidden: int, gated: bool, split: bool) -> None:
    """Set the MLP size of the tensors in a config, by the formula of current GPT-NeoX.

    source: gpt-neox megatron/model/transformer.py, ParallelMLP: two thirds for gated ones, rounded up; it
    takes either `intermediate_size` or `expansion_factor`

    Raises:
        FastshardError: ``FS514`` for a gated MLP whose activation has no gated form in GPT-NeoX.
    """
    if gated:
        # `mlp_type: llama` names the old modules (w1, w2, w3), whose activation is not called gated.
        config.pop("mlp_type", None)
        activation = config["activation"]
        named = GATES.get(activation, activation) if split else activation
        if named not in GATED:
            raise FastshardError.of(
                codes.UNSUPPORTED, "GPT-NeoX has no gated form of this activation", got=activation
            )
        config["activation"] = named
    stated = float(4 * hidden)
    if config.get("expansion_factor") is not None:
        stated = float(int(positive_number(config, "expansion_factor", 4) * hidden))
    if config.get("intermediate_size") is not None:
        stated = float(whole_number(config, "intermediate_size", 0))
    multiple = 1 if config.get("mlp_multiple_of") is None else whole_number(config, "mlp_multiple_of", 1)
    rows = int(stated * 2 / 3) if gated else int(stated)
    both = config.get("expansion_factor") is not None and config.get("intermediate_size") is not None
    if both or -(-rows // multiple) * multiple != (2 if gated else 1) * inner:
        config.pop("expansion_factor", None)
        config |= {"intermediate_size": 3 * inner if gated else inner, "mlp_multiple_of": 1}


def _norm_names(config: dict[str, Any], stored: Iterable[str]) -> tuple[str, str]:
    """Return the names of a norm's weight and bias: those of the source, or the default ones for the kind of
    norm.
    """
    for name in stored:
        match = _NORM.match(re.sub(r"^(module\.)?(sequential\.)?(\d+\.)?", "", name))
        if match and match[1] != "post_attention_layernorm" and not match[2].endswith(("bias", "offset")):
            bias = {"scale": "offset", "norm.weight": "norm.bias"}.get(match[2], "bias")
            return match[2], bias
    kind = str(config.get("norm", "layernorm")).removeprefix("te_")
    return _NORM_NAMES.get(kind, _NORM_NAMES["layernorm"])


def _key(name: str, suffixes: tuple[str, str]) -> str:
    """Return a tensor's name with the given names for a norm's weight and bias."""
    layer, _, rest = name.partition(".")
    match = _NORM.match(rest)
    if match is None:
        return name
    return f"{layer}.{match[1]}.{suffixes[match[2].endswith(('bias', 'offset'))]}"
