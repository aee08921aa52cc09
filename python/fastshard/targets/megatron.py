"""The Megatron-LM target: rank files of the legacy form, or chunks of torch_dist, at any tp and pp.

The target writes only weights, so a run loads them with ``--finetune`` or ``--no-load-optim --no-load-rng``.
source: Megatron-LM megatron/training/checkpointing.py, megatron/core/dist_checkpointing (torch_dist),
megatron/core/models/gpt
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .. import _core
from ..common import codes
from ..common.errors import FastshardError, Finding
from ..common.records import dataclass, replace
from ..common.target_options import MULTIPLE, PP, TP
from ..layouts.declaration import Source
from ..models import megatron
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
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
#: Norms are parts of the linear layers that follow them: in torch_dist always, in rank files with
#: Transformer Engine. source: megatron/core/models/gpt/gpt_layer_specs.py (sharded_state_dict_keys_map)
_TE_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
#: Linear layers keep what Transformer Engine needs for FP8 beside their weights: nothing, here.
_LINEARS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_ATTENTION = "self_attention.core_attention"
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
#: How the run of a source laid its model out, which is not how it is written: `--use-checkpoint-args` takes
#: these.
_PLACED: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_split_rank": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
}
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass
class MegatronTarget(TrainerTarget):
    """A Megatron-LM checkpoint, converted from a source."""

    layout: str = "megatron.legacy"
    names = ("megatron", "megatron:legacy", "megatron:legacy-local", "megatron:torch_dist")
    options = (TP, PP, MULTIPLE)

    @classmethod
    def of(cls, source: Source, request: Request) -> MegatronTarget:
        """Make the target for a source.

        Raises:
            FastshardError: ``FS514`` for a model that Megatron-LM does not support, ``FS209`` if a fact that
                decides values is unknown, ``FS515`` for impossible degrees.
        """
        positive(request, TP, PP, MULTIPLE)
        tp, pp, multiple = request[TP], request[PP], request[MULTIPLE]
        model = None
        if source.model.dialect is megatron.DIALECT:
            facts = dict(source.binding.facts)
            if facts["moe"]:
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "a mixture of experts is not written for Megatron-LM",
                    help="convert it to hf, or merge it under Megatron's own names",
                )
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
        name = "megatron:torch_dist" if request.to == "megatron" else str(request.to)
        # With tied embeddings the last of several stages has a copy of them. source: megatron/core
        # gpt_model.py
        output_layer = not facts["tied"] or (pp > 1 and name != "megatron:torch_dist")
        facts |= {"split_gate": name == "megatron:torch_dist", "output_layer": output_layer}
        return cls(source, name, tp, pp, multiple or _VOCAB_MULTIPLE, facts, model)

    def form(self) -> Form:
        """Return the form of the result."""
        return replace(super().form(), chunks=self.name == "megatron:torch_dist")

    def complete(self, bound: Bound) -> Completed:
        """Return the files of each rank, the tracker, and assumptions in the arguments."""
        layers = bound.axes["L"]
        if layers % self.pp:
            fits = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
            raise FastshardError.of(
                codes.NOT_DIVISIBLE,
                "the layers cannot be divided over this many pipeline stages",
                tensor="decoder.layers.{L}",
                expected=f"--pp {fits}",
                got=f"{layers} layers over --pp {self.pp}",
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
        if self.name == "megatron:torch_dist":
            files = self._chunks(bound, folder, common)
            texts[f"{folder}/metadata.json"] = json.dumps(_BACKEND)
        else:
            files = self._rank_files(bound, folder, common, args)
        texts[_TRACKER] = str(at) if at else "release"
        return Completed(texts, findings, files, pointers=(_TRACKER,))

    def _stage(self, name: str, layer: int | None, layers: int) -> int:
        """Return the pipeline stage of a tensor."""
        if layer is not None:
            return layer // (layers // self.pp)
        return 0 if name == _EMBEDDING else self.pp - 1

    def _rank_files(
        self, bound: Bound, folder: str, common: dict[str, Any], args: dict[str, Any]
    ) -> list[_core.PlacedFile]:
        per_stage = bound.axes["L"] // self.pp
        fused = args.get("transformer_impl") != "local"
        files: list[_core.PlacedFile] = []
        for stage in range(self.pp):
            model: OrderedDict[str, Any] = OrderedDict()
            for name, tensor in _ordered(bound.tensors):
                if self._stage(name, tensor.layer, bound.axes["L"]) != stage:
                    continue
                key = name
                if tensor.layer is not None:
                    inside = _inside(name, tensor.layer)
                    inside = _fused(inside) if fused else inside
                    key = f"{_LAYERS}{tensor.layer - stage * per_stage}.{inside}"
                model[key] = TensorOf(name)
                module, _, kind = key.rpartition(".")
                if kind == "weight" and module.endswith((*_LINEARS, "output_layer")):
                    model[f"{module}._extra_state"] = None
            for rank in range(self.tp):
                suffix = f"_{stage:03d}" if self.pp > 1 else ""
                content = {"torch_zip": tree({**common, "model": model})}
                path = f"{folder}/mp_rank_{rank:02d}{suffix}/model_optim_rng.pt"
                files.append({"name": path, "coords": {"tp": rank}, "content": content})
        return files

    def _chunks(self, bound: Bound, folder: str, common: dict[str, Any]) -> list[_core.PlacedFile]:
        """Return one file per rank, ``common.pt``, and ``.metadata`` with the place of each chunk."""
        layers, records = bound.axes["L"], Records(folder)

        def file(name: str, layer: int | None, rank: int) -> str:
            # Ranks count tensor-parallel ranks first. source: megatron/core/parallel_state.py
            return f"__{self._stage(name, layer, layers) * self.tp + rank}_0.distcp"

        for name, tensor in _ordered(bound.tensors):
            shape, full, layer = tensor.shape, tensor.whole, tensor.layer
            inside, half = _half(name if layer is None else _inside(name, layer))
            # The two halves of a gated MLP lie one after the other along the first axis.
            extents = [full[0] * (1 if half is None else 2), *full[1:]]
            for rank in range(self.tp if tensor.cuts else 1):
                at = tensor.first(rank)
                if half:
                    at[0] += full[0]
                to = file(name, layer, rank)
                if layer is None:
                    records.chunk(to, rank, name, name, extents, at, shape)
                    continue
                # Layers are stacked along an axis of their own.
                fqn, at, of = f"{_LAYERS}{_fused(inside)}", [layer, *at], [layers, *extents]
                records.chunk(to, rank, name, fqn, of, at, [1, *shape])
        for layer in range(layers):
            for module in (*_LINEARS, _ATTENTION):
                key = f"{_LAYERS}{module}._extra_state/shard_{layer}_{layers}"
                records.value(file("", layer, 0), key, [None])
        return [{"name": f"{folder}/common.pt", "content": {"torch_zip": tree(common)}}, *records.files()]

    def _args(self, bound: Bound) -> tuple[dict[str, Any], list[Finding]]:
        """Return the model's arguments: the source's own, or those derived from its Hugging Face config."""
        findings: list[Finding] = []
        if self.model is None:
            args = megatron_args.plain(self.source.model.config or {})
        else:
            args, findings = megatron.DIALECT.write(self.model, bound.axes, "args")
        # The names in rank files depend on it. source: Megatron-LM arguments.py, --transformer-impl
        args.setdefault("transformer_impl", "transformer_engine")
        if self.name == "megatron:legacy-local":
            args["transformer_impl"] = "local"
        args |= {key: value for key, value in _PLACED.items() if key in args}
        if "transformer_pipeline_model_parallel_size" in args:
            args["transformer_pipeline_model_parallel_size"] = self.pp
        args |= {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": None,
            "padded_vocab_size": self.padded(bound.axes),
            "make_vocab_size_divisible_by": self.multiple,
            "use_distributed_optimizer": False,
            "iteration": self.iteration(),
            **megatron_args.of_dtype(bound.dtype),
        }
        return args, findings


def _fused(inside: str) -> str:
    """Return a tensor's name within its layer, with norms as parts of linear layers."""
    for norm, fused in _TE_NORMS.items():
        if inside.startswith(norm):
            return fused + inside.removeprefix(norm)
    return inside


def _half(inside: str) -> tuple[str, int | None]:
    """Split a name into the name without the half of a gated MLP, and the number of the half."""
    for number, word in enumerate((".gate", ".up")):
        if inside.endswith(word):
            return inside.removesuffix(word), number
    return inside, None


def _inside(name: str, layer: int) -> str:
    """Return a tensor's name within its layer."""
    return name.removeprefix(f"{_LAYERS}{layer}.")


def _ordered(tensors: Mapping[str, Drafted]) -> list[tuple[str, Drafted]]:
    """Sort tensors as in a model's state dict: embedding, layers by number, final norm, head."""

    def place(one: tuple[str, Drafted]) -> tuple[int, int, str]:
        name, layer = one[0], one[1].layer
        if layer is not None:
            return 1, layer, _inside(name, layer)
        return (0 if name == _EMBEDDING else 3 if name.startswith("output_layer") else 2), 0, name

    return sorted(tensors.items(), key=place)
