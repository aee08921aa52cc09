"""Tiny Megatron-LM checkpoints with an optimizer, laid out here by the rules of its buffers, without
megatron-core.

That these rules are Megatron's is shown by ``real_megatron/test_optimizer.py``, which reads what real
megatron-core saved. What was never written in a buffer is NaN here. source:
megatron/core/distributed/param_and_grad_buffer.py, megatron/core/optimizer/distrib_optimizer.py (core 0.16.1;
0.13.1 for ``fully_sharded_model_space``)
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCAB, EXPERTS = 2, 32, 24, 4, 2, 96, 4
SLOTS = ("exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]

#: (name in a rank's file, name in torch_dist, how ranks divide it), as modules come with Transformer Engine
#: and without.
_PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.weight", "columns")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight", "rows")
_NORM1, _NORM2 = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
_MLP = [
    ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight", "gated"),
    ("mlp.linear_fc2.weight", "mlp.linear_fc2.weight", "columns"),
]
ORDERS = {
    "local": [
        ("input_layernorm.weight", _NORM1, ""),
        _PROJ,
        _QKV,
        ("pre_mlp_layernorm.weight", _NORM2, ""),
        *_MLP,
    ],
    "transformer_engine": [_PROJ, (_NORM1, _NORM1, ""), _QKV, (_NORM2, _NORM2, ""), *_MLP],
}
_ROUTER = ("mlp.router.weight", "mlp.router.weight", "")
_EXPERTS = [("linear_fc1.weight", "gated"), ("linear_fc2.weight", "columns")]


@dataclass
class Local:
    """A parameter of a rank: where it belongs, and its values of each kind."""

    name: str
    key: str
    #: First indices in the whole tensor, before the rank's own dimensions.
    at: list[int]
    cut: str
    values: State
    #: The rank that cuts follow, of how many.
    rank: int = 0
    degree: int = 1
    expert: bool = False

    @property
    def numel(self) -> int:
        return self.values[""].numel()


@dataclass
class Run:
    """What a run was: its degrees, and how it saved."""

    tp: int = 1
    dp: int = 2
    ep: int = 1
    spec: str = "local"
    bucket: int | None = None
    seed: int = 0
    grouped: bool = False
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def moe(self) -> bool:
        return self.ep > 1

    def _norm2(self) -> str:
        own = self.moe and self.spec == "transformer_engine"
        return "pre_mlp_layernorm.weight" if own else _NORM2

    def whole(self) -> dict[str, State]:
        """Every tensor of torch_dist: weights (""), masters and moments."""
        generator = torch.Generator().manual_seed(self.seed)
        stacked = {
            _NORM1: [HIDDEN],
            self._norm2(): [HIDDEN],
            _PROJ[1]: [HIDDEN, HIDDEN],
            _QKV[1]: [(HEADS + 2 * GROUPS) * HIDDEN // HEADS, HIDDEN],
        }
        if self.moe:
            stacked |= {
                "mlp.router.weight": [EXPERTS, HIDDEN],
                "mlp.experts.experts.linear_fc1.weight": [EXPERTS, 2 * FFN, HIDDEN],
                "mlp.experts.experts.linear_fc2.weight": [EXPERTS, HIDDEN, FFN],
            }
        else:
            stacked |= {"mlp.linear_fc1.weight": [2 * FFN, HIDDEN], "mlp.linear_fc2.weight": [HIDDEN, FFN]}
        shapes = {f"decoder.layers.{key}": [LAYERS, *shape] for key, shape in stacked.items()}
        shapes |= {
            "embedding.word_embeddings.weight": [VOCAB, HIDDEN],
            "decoder.final_layernorm.weight": [HIDDEN],
            "output_layer.weight": [VOCAB, HIDDEN],
        }
        found = {}
        for key, shape in shapes.items():
            master = torch.randn(shape, generator=generator)
            moments = {slot: torch.randn(shape, generator=generator) for slot in SLOTS}
            found[key] = {"": master.bfloat16(), "param": master, **moments}
        return found

    def locals(self, tp: int, ep: int = 0) -> list[Local]:
        """A rank's parameters, in the order of its modules."""
        whole = self.whole()

        def one(name: str, key: str, at: list[int], cut: str, expert: bool = False) -> Local:
            values = {}
            for kind, tensor in whole[key].items():
                for index in at:
                    tensor = tensor[index]
                if cut == "rows":
                    tensor = tensor.chunk(self.tp, 0)[tp]
                elif cut == "columns":
                    tensor = tensor.chunk(self.tp, 1)[tp]
                elif cut == "gated":
                    tensor = torch.cat([half.chunk(self.tp, 0)[tp] for half in tensor.chunk(2, 0)])
                values[kind] = tensor.contiguous()
            return Local(name, key, at, cut, values, tp, self.tp, expert)

        found = [one("embedding.word_embeddings.weight", "embedding.word_embeddings.weight", [], "rows")]
        for layer in range(LAYERS):
            order = [o for o in ORDERS[self.spec] if not (self.moe and o in _MLP)]
            if self.moe:
                # No layer that could be fused with the norm follows it.
                order = [
                    o if o[1] != _NORM2 else ("pre_mlp_layernorm.weight", self._norm2(), "") for o in order
                ]
                order.append(_ROUTER)
            for name, key, cut in order:
                found.append(one(f"decoder.layers.{layer}.{name}", f"decoder.layers.{key}", [layer], cut))
            each = EXPERTS // self.ep
            pairs = [(j, e) for j in range(each) for e in _EXPERTS]
            if self.grouped:
                pairs = [(j, e) for e in _EXPERTS for j in range(each)]
            for j, (end, cut) in pairs if self.moe else []:
                name = f"decoder.layers.{layer}.mlp.experts.local_experts.{j}.{end}"
                key = f"decoder.layers.mlp.experts.experts.{end}"
                found.append(one(name, key, [layer, ep * each + j], cut, True))
        found.append(one("decoder.final_layernorm.weight", "decoder.final_layernorm.weight", [], ""))
        found.append(one("output_layer.weight", "output_layer.weight", [], "rows"))
        return found

    def arguments(self, **more: Any) -> Namespace:
        known = {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": FFN,
            "num_attention_heads": HEADS,
            "group_query_attention": True,
            "num_query_groups": GROUPS,
            "kv_channels": HIDDEN // HEADS,
            "padded_vocab_size": VOCAB,
            "swiglu": True,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-5,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "position_embedding_type": "rope",
            "rotary_base": 10000,
            "untie_embeddings_and_output_weights": True,
            "max_position_embeddings": 64,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": 1,
            "world_size": self.tp * self.dp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.tp,
            "iteration": 10,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": self.bucket is not None,
            "ddp_bucket_size": self.bucket,
            "transformer_impl": self.spec,
        }
        if self.moe:
            known |= {"num_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "moe_grouped_gemm": self.grouped}
        return Namespace(**known | self.args | more)


def laid_out(parameters: list[Local], dp: int, bucket: int | None) -> list[dict[str, Any]]:
    """A buffer's buckets: parameters with their starts and ends in it, where it begins and ends, padded and
    not."""
    buckets: list[dict[str, Any]] = []
    start = begin = 0
    held: list[tuple[Local, int, int]] = []

    def close() -> int:
        unpadded = held[-1][2]
        divisor = math.lcm(dp, 128)
        end = math.ceil(unpadded / divisor) * divisor
        buckets.append({"held": list(held), "begin": begin, "unpadded": unpadded, "end": end})
        held.clear()
        return end

    for parameter in parameters[::-1]:
        start = math.ceil(start / 64) * 64
        end = start + parameter.numel
        held.append((parameter, start, end))
        start = end
        if bucket is not None and end - begin >= bucket:
            start = begin = close()
    if held:
        close()
    return buckets


def boxes(local: Local, tensor: torch.Tensor) -> list[tuple[list[int], torch.Tensor]]:
    """The chunks that torch_dist makes of a rank's tensor: (first index, values)."""
    lead = (1,) * len(local.at)
    if local.cut == "gated":
        gate, up = tensor.chunk(2, 0)
        starts = [local.rank * len(gate), (local.degree + local.rank) * len(gate)]
        return [
            ([*local.at, start, 0], half.reshape(*lead, *half.shape))
            for start, half in zip(starts, (gate, up), strict=True)
        ]
    lo = [0] * tensor.dim()
    if local.cut:
        dimension = 0 if local.cut == "rows" else 1
        lo[dimension] = local.rank * tensor.shape[dimension]
    return [([*local.at, *lo], tensor.reshape(*lead, *tensor.shape))]


#: Name -> (shape, chunks)
Tensors = dict[str, tuple[list[int], list[tuple[list[int], torch.Tensor]]]]


def write_dcp(folder: Path, tensors: Tensors, objects: dict[str, Any] | None = None, files: int = 2) -> None:
    """``.metadata`` and ``.distcp`` files; chunks go to the files in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = [io.BytesIO() for _ in range(files)]
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    count = 0

    def put(index: MetadataIndex, value: Any) -> None:
        nonlocal count
        file, content = count % files, contents[count % files]
        begin = content.tell()
        torch.save(value, content)
        stored[index] = _StorageInfo(f"__{file}_0.distcp", begin, content.tell() - begin)
        count += 1

    for name, (shape, chunks) in tensors.items():
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=chunks[0][1].dtype),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(lo), chunk.shape) for lo, chunk in chunks],
        )
        for lo, chunk in chunks:
            put(MetadataIndex(name, torch.Size(lo)), chunk.clone())
    for name, value in (objects or {}).items():
        described[name] = BytesStorageMetadata()
        put(MetadataIndex(name), value)
    for file, content in enumerate(contents):
        (folder / f"__{file}_0.distcp").write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, None, stored)))


def _copies(run: Run) -> list[tuple[tuple[int, int], list[Local]]]:
    """(optimizer, group of ranks), and the parameters in its buffer."""
    found = [((0, tp), [p for p in run.locals(tp) if not p.expert]) for tp in range(run.tp)]
    if run.moe:
        for ep in range(run.ep):
            for tp in range(run.tp):
                held = [p for p in run.locals(tp, ep) if p.expert]
                found.append(((1, ep * run.tp + tp), held))
    return found


def _model(run: Run, kinds: dict[str, str], values: dict[int, State] | None = None) -> Tensors:
    """Tensors by parameter: (kind of value -> prefix of the name); copies of a box are saved once."""
    whole = run.whole()
    found: Tensors = {}
    for _, parameters in _copies(run):
        for local in parameters:
            for kind, prefix in kinds.items():
                tensor = (values or {}).get(id(local), local.values)[kind]
                _, chunks = found.setdefault(prefix + local.key, (list(whole[local.key][kind].shape), []))
                chunks += [box for box in boxes(local, tensor) if box[0] not in [lo for lo, _ in chunks]]
    return found


def _shifted(parameters: list[Local], dp: int, bucket: int | None) -> dict[int, State]:
    """What ``fully_reshardable`` saves: the gathered vector lacks padding between buckets, offsets in it do
    not."""
    buckets = laid_out(parameters, dp, bucket)
    found: dict[int, State] = {}
    for kind in ("param", *SLOTS):
        flat = []
        for one in buckets:
            part = torch.zeros(one["unpadded"] - one["begin"])
            for local, start, end in one["held"]:
                part[start - one["begin"] : end - one["begin"]] = local.values[kind].reshape(-1)
            flat.append(part)
        vector = torch.cat([*flat, torch.zeros(buckets[-1]["end"])])
        for one in buckets:
            for local, start, end in one["held"]:
                found.setdefault(id(local), {})[kind] = vector[start:end].reshape(local.values[kind].shape)
    return found


def buckets(run: Run) -> Tensors:
    """``dp_reshardable``: a chunk for what each data-parallel rank has of each parameter, and for each
    gap."""
    found: Tensors = {}
    for (chain, group), parameters in _copies(run):
        prefix = f"chained_{chain}." if run.moe else ""
        dp = run.dp if chain == 0 else max(run.dp // run.ep, 1)
        for number, one in enumerate(laid_out(parameters, dp, run.bucket)):
            begin, unpadded = one["begin"], one["unpadded"] - one["begin"]
            each = (one["end"] - begin) // dp
            name = (
                f"{prefix}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0"
                f".dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}"
            )
            bounds = {0, unpadded, *(n for n in range(0, unpadded, each))}
            bounds |= {at - begin for _, start, end in one["held"] for at in (start, end)}
            cuts = sorted(bounds)
            for kind in ("param", *SLOTS):
                vector = torch.full((unpadded,), float("nan"))
                for local, start, end in one["held"]:
                    vector[start - begin : end - begin] = local.values[kind].reshape(-1)
                chunks = [([a], vector[a:b]) for a, b in itertools.pairwise(cuts)]
                found[f"{name}.{kind}"] = ([unpadded], chunks)
    return found


def _cells(run: Run) -> Tensors:
    """``fully_sharded_model_space``: a rank's shard flat, behind an axis of counts for each of the
    parameter's."""
    found: Tensors = {}
    whole = run.whole()
    for (chain, _), parameters in _copies(run):
        dp = run.dp if chain == 0 else max(run.dp // run.ep, 1)
        for one in laid_out(parameters, dp, run.bucket):
            each = (one["end"] - one["begin"]) // dp
            for local, start, end in one["held"]:
                # Where data-parallel ranks cut the parameter.
                at = [one["begin"] + n * each - start for n in range(1, dp)]
                cuts = sorted({0, end - start, *(n for n in at if 0 < n < end - start)})
                for kind in ("param", *SLOTS):
                    shape = whole[local.key][kind].shape
                    begin = 0
                    for lo, box in boxes(local, local.values[kind]):
                        size = box.numel()
                        counts = [total // part for total, part in zip(shape, box.shape, strict=True)]
                        cell = [n // part for n, part in zip(lo, box.shape, strict=True)]
                        slot = "fp32_param" if kind == "param" else kind
                        name = f"optimizer.state.{slot}.{local.key}"
                        _, chunks = found.setdefault(name, ([*counts, size], []))
                        flat = box.reshape(-1)
                        inner = sorted({0, size, *(n - begin for n in cuts if 0 < n - begin < size)})
                        for a, b in itertools.pairwise(inner):
                            place = [*cell, a]
                            if place not in [c for c, _ in chunks]:
                                chunks.append((place, flat[a:b].reshape(*[1] * len(cell), b - a)))
                        begin += size
    return found


def torch_dist(root: Path, run: Run, form: str, **tensors: Any) -> Path:
    """A checkpoint of torch_dist; `tensors` replace what the form gives."""
    folder = root / "iter_0000010"
    held = _model(run, {"": ""})
    objects = {}
    if form == "fully_reshardable":
        values: dict[int, State] = {}
        found: Tensors = {}
        for (chain, _), parameters in _copies(run):
            dp = run.dp if chain == 0 else max(run.dp // run.ep, 1)
            values = _shifted(parameters, dp, run.bucket)
            for local in parameters:
                for kind in ("param", *SLOTS):
                    name = f"optimizer.state.{kind}.{local.key}"
                    _, chunks = found.setdefault(name, (list(run.whole()[local.key][""].shape), []))
                    new = boxes(local, values[id(local)][kind])
                    chunks += [box for box in new if box[0] not in [lo for lo, _ in chunks]]
        held |= found
    elif form == "dp_reshardable":
        held |= buckets(run)
    elif form == "fully_sharded_model_space":
        held |= _cells(run)
    elif form == "dp_zero_gather_scatter":
        objects = {
            f"optimizer.distributed.dp_group_idx_{tp}.param_state/shard_0_1": {0: 1} for tp in range(run.tp)
        }
    write_dcp(folder, held | tensors, objects)
    groups = [{"lr": 0.01, "weight_decay": 0.01, "step": 7.0}, {"lr": 0.01, "weight_decay": 0.0, "step": 7.0}]
    common = {
        "args": run.arguments(),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "optimizer": {"param_state_sharding_type": form, "optimizer": {"param_groups": groups}},
    }
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def rank_folder(run: Run, tp: int, ep: int = 0) -> str:
    return f"mp_rank_{tp:02d}" + (f"_{ep:03d}" if run.ep > 1 else "")


def legacy(root: Path, run: Run, distributed: bool = True) -> Path:
    """A checkpoint of rank files, with ``distrib_optim.pt`` beside each or with the optimizer in them."""
    step = root / "iter_0000010"
    groups = [{"lr": 0.01, "step": 7.0}, {"lr": 0.01, "step": 7.0}]
    dtypes = (torch.bfloat16, torch.float32)
    for tp in range(run.tp):
        for ep in range(run.ep):
            folder = step / rank_folder(run, tp, ep)
            folder.mkdir(parents=True)
            parameters = run.locals(tp, ep)
            parts = [[p for p in parameters if p.expert is expert] for expert in (False, True)][: 1 + run.moe]
            content: dict[str, Any] = {
                "args": run.arguments(use_distributed_optimizer=distributed),
                "checkpoint_version": 3.0,
                "iteration": 10,
                "model": {p.name: p.values[""] for p in parameters},
            }
            state: list[Any] = []
            own: list[Any] = []
            for expert, held in enumerate(parts):
                if distributed:
                    own.append({"optimizer": {"param_groups": groups}})
                    if ep and not expert:
                        state.append(None)
                        continue
                    dp = run.dp if not expert else max(run.dp // run.ep, 1)
                    buckets = laid_out(held, dp, run.bucket)
                    vectors: dict[str, Any] = {}
                    for kind in ("param", *SLOTS):
                        cut = []
                        for one in buckets:
                            vector = torch.full((one["unpadded"] - one["begin"],), float("nan"))
                            for local, start, end in one["held"]:
                                vector[start - one["begin"] : end - one["begin"]] = local.values[
                                    kind
                                ].reshape(-1)
                            cut.append(vector)
                        vectors[kind] = torch.cat(cut)
                    vectors["numel_unpadded"] = len(vectors["param"])
                    state.append({"buckets_coalesced": True, 0: {dtypes: vectors}})
                else:
                    of_groups = [
                        [p for p in held if (p.values[""].dim() == 1) is flat] for flat in (False, True)
                    ]
                    of_groups = [group for group in of_groups if group]
                    numbered = [p for group in of_groups for p in group]
                    numbers = {id(p): n for n, p in enumerate(numbered)}
                    own.append(
                        {
                            "optimizer": {
                                "state": {
                                    n: {"step": torch.tensor(7.0)} | {s: p.values[s] for s in SLOTS}
                                    for n, p in enumerate(numbered)
                                },
                                "param_groups": [
                                    {"lr": 0.01, "params": [numbers[id(p)] for p in g]} for g in of_groups
                                ],
                            },
                            "fp32_from_fp16_params": [
                                [p.values["param"] for p in group] for group in of_groups
                            ],
                        }
                    )
            content["optimizer"] = own if run.moe else own[0]
            torch.save(content, folder / "model_optim_rng.pt")
            if distributed:
                torch.save(state if run.moe else state[0], folder / "distrib_optim.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def wanted(run: Run, *, legacy_names: bool = False, masters: bool = False, optimizer: bool = True) -> State:
    """What a merge gives."""
    found: State = {}
    for key, values in run.whole().items():
        entries = {"": values["param" if masters else ""]} | (
            {s: values[s] for s in SLOTS} if optimizer else {}
        )
        for kind, tensor in entries.items():
            end = f".{kind}" if kind else ""
            if not (legacy_names and key.startswith("decoder.layers.")):
                found[key + end] = tensor
                continue
            for layer in range(LAYERS):
                suffix = key.removeprefix("decoder.layers.")
                own = {k: n for n, k, _ in ORDERS[run.spec]}.get(suffix, suffix)
                if ".experts.experts." in key:
                    for expert in range(EXPERTS):
                        name = own.replace("experts.experts.", f"experts.local_experts.{expert}.")
                        found[f"decoder.layers.{layer}.{name}{end}"] = tensor[layer, expert]
                else:
                    found[f"decoder.layers.{layer}.{own}{end}"] = tensor[layer]
    return found
