"""The Megatron-LM target: rank files of the legacy form, or chunks of torch_dist, at any tp and pp.

The target writes only weights. A run loads them with ``--finetune`` or ``--no-load-optim --no-load-rng``.
source: Megatron-LM megatron/training/checkpointing.py, megatron/core/dist_checkpointing (torch_dist),
megatron/core/models/gpt
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, replace
from ..common.target_options import EP, ETP, MULTIPLE, PP, TP
from ..common.topology import Topology
from ..layouts.declaration import Source
from ..models import megatron, megatron_mixtures
from ..models.megatron_sizes import DELTA_TABLE, MIXED_TABLE, MIXED_TABLES
from . import megatron_args
from .base import MAX_MULTIPLE, Bound, Completed, Drafted, TrainerTarget, positive
from .dcp import Records
from .form import Form
from .huggingface import model_of
from .pickle_tree import Object, TensorOf, tree
from .request import Request

#: Megatron-LM arguments.py, make_vocab_size_divisible_by
_VOCAB_MULTIPLE = 128
_LAYERS = "decoder.layers."
#: Prefix of the layers that predict additional tokens (MTP), and the block in each of them.
_FURTHER, _FURTHER_BLOCK = "mtp.layers.", "transformer_layer."
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_ATTENTION_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_DELTA_NORM = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
#: Extra state of linear layers: Transformer Engine keeps its FP8 data there. It is empty here.
_LINEARS = {
    "linear_proj",
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_fc1",
    "linear_fc2",
    "eh_proj",
    "in_proj",
    "out_proj",
}
#: Suffix of the first part of a delta net's projection.
_FIRST_PART = ".query"
_ATTENTION, _DELTA = "self_attention.core_attention", ".self_attention.A_log"
_EXPERTS = "mlp.experts."
_LOCAL_EXPERTS = f"{_EXPERTS}local_experts."
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: Arguments that state how the source's run divided its model. The result may be divided differently, and
#: `--use-checkpoint-args` would read them.
_PLACED: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_split_rank": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass
class MegatronTarget(TrainerTarget):
    """A Megatron-LM checkpoint, converted from a source."""

    layout: str = "megatron.legacy"
    #: True for a run without Transformer Engine, whose modules have other names.
    is_local: bool = False
    names = (
        "megatron",
        "megatron:legacy",
        "megatron:legacy-local",
        "megatron:torch_dist",
        "megatron:torch_dist-local",
    )
    options = (TP, PP, EP, ETP, MULTIPLE)

    @classmethod
    def of(cls, source: Source, request: Request) -> MegatronTarget:
        """Make the target for a source.

        Raises:
            FastshardError: ``FS514`` for a model that Megatron-LM does not support, ``FS209`` if a fact that
                decides values is unknown, ``FS515`` for impossible degrees.
        """
        positive(request, TP, PP, EP, ETP, MULTIPLE)
        topology = Topology(request[TP], request[PP], request[EP], request[ETP] or request[TP])
        multiple = request[MULTIPLE]
        name = "megatron:torch_dist" if request.to == "megatron" else str(request.to)
        is_chunked = name.startswith("megatron:torch_dist")
        model = None
        if isinstance(source.model.dialect, megatron.Megatron):
            facts = dict(source.binding.facts)
            stated = (source.model.config or {}).get("make_vocab_size_divisible_by")
            if (
                multiple is None
                and isinstance(stated, int)
                and not isinstance(stated, bool)
                and 0 < stated <= MAX_MULTIPLE
            ):
                multiple = stated
        else:
            model = model_of(source, "Megatron-LM")
            megatron.refuse(model)
            facts = megatron.facts_of(model)
        _check_experts(topology, request, is_mixture=facts["moe"], is_chunked=is_chunked)
        # With tied embeddings the last of several stages has a copy of them. source: megatron/core
        # gpt_model.py
        output_layer = not facts["tied"] or (topology.pp > 1 and not is_chunked)
        facts |= {"split_gate": is_chunked, "split_delta": is_chunked, "output_layer": output_layer}
        args = {} if model is not None else source.model.config or {}
        is_local = name.endswith("-local") or args.get("transformer_impl") == "local"
        # Rank files of grouped experts have other names. source: Megatron-LM arguments.py, --moe-grouped-gemm
        grouped = not is_chunked and not is_local and bool(args.get("moe_grouped_gemm"))
        facts |= {"experts_sequential": facts["moe"] and not grouped, "experts_grouped": grouped}
        facts |= {"experts_flat": False, "experts_stacked": False}
        layout = "megatron.legacy"
        if model is None:
            layout = str(source.binding.layout) if source.binding.layout in MIXED_TABLES else layout
        elif megatron_mixtures.is_mixed(model):
            layout = DELTA_TABLE if megatron_mixtures.has_delta_table(model) else MIXED_TABLE
        if is_local and layout == DELTA_TABLE:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"{name} cannot be written: Megatron-LM builds gated delta nets only with Transformer Engine",
                help="choose the names of Transformer Engine",
                run=["--to megatron"],
            )
        if is_local and not is_chunked and facts.get("mla") and topology.tp > 1:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "rank files of the local modules would divide the rows of the latents over --tp",
                expected="--tp 1",
                got=f"--tp {topology.tp}",
                help="choose the names of Transformer Engine, or the format that works for all degrees",
                run=["--to megatron:legacy", "--to megatron:torch_dist-local"],
            )
        return cls(
            source, name, topology, multiple or _VOCAB_MULTIPLE, facts, model, layout, is_local=is_local
        )

    @property
    def is_chunked(self) -> bool:
        """True for torch_dist, whose ranks store chunks of the full tensors."""
        return self.name.startswith("megatron:torch_dist")

    @property
    def is_latent(self) -> bool:
        """True for multi-latent attention."""
        return self.facts.get("mla", False)

    @property
    def is_mixture(self) -> bool:
        """True for an MoE model."""
        return self.facts["moe"]

    def form(self) -> Form:
        """Return the form of the result."""
        form = replace(super().form(), chunks=self.is_chunked)
        if not self.is_mixture:
            return form
        topology = self.topology
        degrees = {"tp": topology.tp, "ep": topology.ep, "etp": topology.etp}
        return replace(form, degrees=degrees, ranks=topology.list_file_ranks())

    def complete(self, bound: Bound) -> Completed:
        """Return each rank's files, the tracker, and the assumptions in the arguments."""
        layers, pp = _count_layers(bound), self.topology.pp
        if layers % pp and not self.is_chunked:
            fits = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
            raise FastshardError.of(
                codes.NOT_DIVISIBLE,
                "the layers cannot be divided over this many pipeline stages",
                tensor="decoder.layers.{L}",
                expected=f"--pp {fits}",
                got=f"{layers} layers over --pp {pp}",
            )
        if bound.axes["L"] > layers and pp > 1 and not self.is_chunked:
            raise FastshardError.of(
                codes.UNSUPPORTED,
                "rank files of several pipeline stages cannot hold MTP layers: the last stage needs a copy "
                "of the embedding",
                expected="--pp 1",
                got=f"--pp {pp}",
                help="choose the format that works for all degrees",
                run=["--to megatron:torch_dist"],
            )
        args, findings = self._args(bound)
        # Without an iteration it is a release: what other tools convert to, loaded at iteration 0.
        at = self.iteration()
        folder = f"iter_{at:07d}" if at else "release"
        common = {
            "args": Object("argparse", "Namespace", args),
            "checkpoint_version": 3.0,
            "iteration": at,
            "num_floating_point_operations_so_far": 0,
        }
        texts = {}
        if self.is_chunked:
            # source: transformer_config.py, transformer_block.py (non_homogeneous_layers)
            is_stacked = self.layout not in MIXED_TABLES and args.get("moe_layer_freq") in (None, 1)
            files = self._chunks(bound, folder, common, is_stacked=is_stacked)
            texts[f"{folder}/metadata.json"] = json.dumps(_BACKEND)
        else:
            files = self._rank_files(bound, folder, common)
        texts[_TRACKER] = str(at) if at else "release"
        return Completed(texts, findings, files, pointers=(_TRACKER,))

    def _stage(self, name: str, layer: int | None, layers: int) -> int:
        """Return the pipeline stage of a tensor."""
        if layer is not None and layer < layers:
            return self.topology.stage(layer, layers)
        return 0 if name == _EMBEDDING else self.topology.pp - 1

    def _fused(self, inside: str, has_experts: bool, is_delta: bool) -> str:
        """Return a tensor's name within its layer, with norms fused into linear layers where Megatron-LM does
        so.

        Norms are fused in all layers with heads: always in torch_dist, in rank files only with Transformer
        Engine. With Transformer Engine, expert layers and multi-latent attention have separate norms.
        source: megatron/core/models/gpt/gpt_layer_specs.py (sharded_state_dict_keys_map)
        """
        if self.is_local:
            norms = {} if self.is_latent or not self.is_chunked else _ATTENTION_NORM | _MLP_NORM
        else:
            norms = _LATENT_NORMS if self.is_latent else _DELTA_NORM if is_delta else _ATTENTION_NORM
            norms = norms if has_experts else norms | _MLP_NORM
        for norm, fused in norms.items():
            if inside.startswith(norm):
                return fused + inside.removeprefix(norm)
        return inside

    def _rank_files(self, bound: Bound, folder: str, common: dict[str, Any]) -> list[_core.PlacedFile]:
        topology, layers = self.topology, _count_layers(bound)
        ranks = topology.list_file_ranks() if self.is_mixture else [{"tp": n} for n in range(topology.tp)]
        by_stage: list[list[tuple[str, Drafted]]] = [[] for _ in range(topology.pp)]
        for name, tensor in _ordered(bound.tensors):
            by_stage[self._stage(name, tensor.layer, layers)].append((name, tensor))
        files: list[_core.PlacedFile] = []
        for stage, tensors in enumerate(by_stage):
            for coords in ranks:
                state = tree({**common, "model": self._rank_state(tensors, coords, layers, bound)})
                path = f"{folder}/{self._folder(coords, stage)}/model_optim_rng.pt"
                files.append({"name": path, "coords": coords, "content": {"torch_zip": state}})
        return files

    def _folder(self, coords: Mapping[str, int], stage: int) -> str:
        """Return the folder name of a rank.

        source: megatron/training/checkpointing.py (get_checkpoint_name)
        """
        suffix = f"_{stage:03d}" if self.topology.pp > 1 else ""
        suffix += f"_{coords['ep']:03d}" if self.topology.ep > 1 else ""
        return f"mp_rank_{coords['tp']:02d}{suffix}"

    def _rank_state(
        self, tensors: Sequence[tuple[str, Drafted]], coords: Mapping[str, int], layers: int, bound: Bound
    ) -> OrderedDict[str, Any]:
        """Return the state dict of a rank; layers and experts are numbered from the rank's first one."""
        per_stage, mixed = layers // self.topology.pp, _find_layers_of_experts(bound)
        delta = _find_delta_layers(bound)
        experts = bound.axes["E"] // self.topology.ep if self.is_mixture else 0
        model: OrderedDict[str, Any] = OrderedDict()
        for name, tensor in tensors:
            key = name
            if tensor.layer is not None:
                prefix, inside = _split(name, tensor.layer)
                if tensor.layer < layers:
                    prefix = f"{_LAYERS}{tensor.layer % per_stage}."
                if tensor.expert is not None:
                    if tensor.expert // experts != coords["ep"]:
                        continue
                    inside = _renumber(inside, tensor.expert % experts)
                key = prefix + self._fused(inside, tensor.layer in mixed, tensor.layer in delta)
            model[key] = TensorOf(name)
            module, _, kind = key.rpartition(".")
            if kind.startswith("weight") and module.rpartition(".")[2] in {*_LINEARS, "output_layer"}:
                model[f"{module}._extra_state"] = None
        return model

    def _chunks(
        self, bound: Bound, folder: str, common: dict[str, Any], *, is_stacked: bool
    ) -> list[_core.PlacedFile]:
        """Return each rank's files, ``common.pt``, and ``.metadata`` with the place of each chunk.

        Layers are either stacked along a separate axis or numbered.
        """
        layers, experts, records = _count_layers(bound), bound.axes.get("E", 0), Records(folder)
        mixed, delta = _find_layers_of_experts(bound), _find_delta_layers(bound)
        states: dict[str, str] = {}
        for name, tensor in _ordered(bound.tensors):
            full, layer, expert = tensor.whole, tensor.layer, tensor.expert
            prefix, inside = ("", name) if layer is None else _split(name, layer)
            inside, half = _half(inside)
            # The two halves of a gated MLP lie one after the other along the first axis.
            of = [full[0] * (1 if half is None else 2), *full[1:]]
            # What precedes the tensor's own axes: positions, and their number.
            at: list[tuple[int, int]] = []
            if layer is not None:
                if is_stacked and layer < layers:
                    prefix, at = _LAYERS, [(layer, layers)]
                inside = self._fused(inside, layer in mixed, layer in delta)
                if expert is not None:
                    # Experts are stacked in any case.
                    inside, at = f"{_EXPERTS}experts.{_in_expert(inside)}", [*at, (expert, experts)]
                inside = prefix + inside
            stage = self._stage(name, layer, layers)
            for coords in self._list_ranks(tensor, experts):
                first = tensor.first(coords)
                if half:
                    first[0] += full[0]
                begin, extents = [n for n, _ in at] + first, [n for _, n in at] + of
                shape = [1] * len(at) + tensor.shape
                records.chunk(self._file(stage, coords), coords, name, inside, extents, begin, shape)
            # Of a projection that is stored in parts, the first one tells.
            module, _, kind = inside.removesuffix(_FIRST_PART).rpartition(".")
            if layer is not None and kind == "weight" and module.rpartition(".")[2] in _LINEARS:
                shard = [".".join(map(str, each)) for each in zip(*at, strict=True)] or ["0", "1"]
                states[f"{module}._extra_state/shard_{'_'.join(shard)}"] = self._file(stage, {})
        for layer in sorted(set(range(bound.axes["L"])) - delta):
            state, file = f"{_ATTENTION}._extra_state/shard", self._file(self._stage("", layer, layers), {})
            if layer >= layers:
                states[f"{_FURTHER}{layer - layers}.{_FURTHER_BLOCK}{state}_0_1"] = file
            elif is_stacked:
                states[f"{_LAYERS}{state}_{layer}_{layers}"] = file
            else:
                states[f"{_LAYERS}{layer}.{state}_0_1"] = file
        for key, file in states.items():
            records.value(file, key, [None])
        return [{"name": f"{folder}/common.pt", "content": {"torch_zip": tree(common)}}, *records.files()]

    def _file(self, stage: int, coords: Mapping[str, int]) -> str:
        """Return the file name of a rank. A rank has a second file for its experts."""
        rank = stage * self.topology.stage_ranks + self.topology.rank_of(coords)
        return f"__{rank}_{int('ep' in coords)}.distcp"

    def _list_ranks(self, tensor: Drafted, experts: int) -> list[dict[str, int]]:
        """List the ranks that store a chunk of a tensor, by parallel dimension."""
        by = "tp" if tensor.expert is None else "etp"
        degree = self.topology.tp if tensor.expert is None else self.topology.etp
        ranks = [{by: rank} for rank in range(degree if tensor.cuts else 1)]
        if tensor.expert is None:
            return ranks
        return [{**rank, "ep": tensor.expert // (experts // self.topology.ep)} for rank in ranks]

    def _args(self, bound: Bound) -> tuple[dict[str, Any], list[Finding]]:
        """Return the model's arguments: those of the source, or ones derived from its Hugging Face config."""
        findings: list[Finding] = []
        if self.model is None:
            args = megatron_args.plain(self.source.model.config or {})
        else:
            axes = bound.axes | {"L in main": _count_layers(bound)}
            args, findings = megatron.DIALECT.write(self.model, axes, "args")
        # The names in rank files depend on it. source: Megatron-LM arguments.py, --transformer-impl
        args.setdefault("transformer_impl", "transformer_engine")
        if self.is_local:
            args["transformer_impl"] = "local"
        args |= {key: value for key, value in _PLACED.items() if key in args}
        if "transformer_pipeline_model_parallel_size" in args:
            args["transformer_pipeline_model_parallel_size"] = self.topology.pp
        if self.is_mixture:
            args["expert_model_parallel_size"] = self.topology.ep
            args["expert_tensor_parallel_size"] = self.topology.etp
            grouped = args.get("moe_grouped_gemm") if self.is_chunked else self.facts["experts_grouped"]
            args["moe_grouped_gemm"] = bool(grouped)
        args |= {
            "tensor_model_parallel_size": self.topology.tp,
            "pipeline_model_parallel_size": self.topology.pp,
            "virtual_pipeline_model_parallel_size": None,
            "padded_vocab_size": self.padded(bound.axes),
            "make_vocab_size_divisible_by": self.multiple,
            "use_distributed_optimizer": False,
            "iteration": self.iteration(),
            **megatron_args.of_dtype(bound.dtype),
        }
        return args, findings


def _check_experts(topology: Topology, request: Request, *, is_mixture: bool, is_chunked: bool) -> None:
    """Refuse expert degrees for a model without experts, and degrees that rank files do not support.

    Raises:
        FastshardError: ``FS515``.
    """
    if not is_mixture and (topology.ep > 1 or request[ETP] is not None):
        option = EP if topology.ep > 1 else ETP
        raise FastshardError.of(
            codes.USAGE, f"{option.flag}: the model has no experts to divide", help="leave it out"
        )
    if topology.shares_files and not is_chunked:
        raise FastshardError.of(
            codes.USAGE,
            f"{ETP.flag}: files of several ranks would have the same name, which states only tp and ep",
            expected=f"a divisor of --tp {topology.tp}",
            got=str(topology.etp),
            help="choose another degree, or the format that records where each part belongs",
            run=["--to megatron:torch_dist"],
        )


def _count_layers(bound: Bound) -> int:
    """Count the decoder's layers, excluding those that predict additional tokens."""
    further = {tensor.layer for name, tensor in bound.tensors.items() if name.startswith(_FURTHER)}
    return bound.axes["L"] - len(further)


def _find_layers_of_experts(bound: Bound) -> set[int]:
    """Find the layers with experts."""
    tensors = bound.tensors.values()
    return {tensor.layer for tensor in tensors if tensor.layer is not None and tensor.expert is not None}


def _find_delta_layers(bound: Bound) -> set[int]:
    """Find the layers with gated delta nets."""
    return {
        tensor.layer
        for name, tensor in bound.tensors.items()
        if name.endswith(_DELTA) and tensor.layer is not None
    }


def _in_expert(inside: str) -> str:
    """Return a tensor's name within its expert."""
    return inside.rpartition("local_experts.")[2].partition(".")[2]


def _renumber(inside: str, expert: int) -> str:
    """Return a tensor's name within its layer, with the expert's number replaced."""
    if inside.startswith(_LOCAL_EXPERTS):
        return f"{_LOCAL_EXPERTS}{expert}.{_in_expert(inside)}"
    return f"{inside.rstrip('0123456789')}{expert}"


def _half(inside: str) -> tuple[str, int | None]:
    """Split a name into the name without the half of a gated MLP, and the half's number."""
    for number, word in enumerate((".gate", ".up")):
        if inside.endswith(word):
            return inside.removesuffix(word), number
    return inside, None


def _split(name: str, layer: int) -> tuple[str, str]:
    """Split a tensor's name into the prefix of its layer (or of the block in it) and the rest."""
    prefix = f"{_LAYERS}{layer}."
    if not name.startswith(prefix):
        number, _, rest = name.removeprefix(_FURTHER).partition(".")
        prefix = f"{_FURTHER}{number}." + (_FURTHER_BLOCK if rest.startswith(_FURTHER_BLOCK) else "")
    return prefix, name.removeprefix(prefix)


def _ordered(tensors: Mapping[str, Drafted]) -> list[tuple[str, Drafted]]:
    """Sort tensors as in a model's state dict: embedding, layers by number, final norm, head."""

    def place(one: tuple[str, Drafted]) -> tuple[int, int, str]:
        name, layer = one[0], one[1].layer
        if layer is not None:
            return 1, layer, _split(name, layer)[1]
        return (0 if name == _EMBEDDING else 3 if name.startswith("output_layer") else 2), 0, name

    return sorted(tensors.items(), key=place)
