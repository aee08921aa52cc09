"""One small checkpoint of every format that is read, and what it holds, told by others than fastshard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import dtensor_maker
import easylm_maker
import maxtext_deepseek
import maxtext_gemma
import maxtext_mixtures
import names_maker
import nemo_maker
import numpy as np
import tensorstore
import torch
import torch.distributed.checkpoint as dcp
import yaml
import zero_maker
from helpers import FIXTURES, HF, read_result, sha256
from jax_maker import LLAMA31, Size, Tree, hf_llama, llama_yml, maxtext_gpt3, maxtext_llama, saved_orbax, sha
from levanter_maker import as_levanter, as_train_state, save
from orbax_maker import describe, painted
from orbax_maker import write as write_array
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

SHARDED = FIXTURES / "sharded"
TWINS = FIXTURES / "maxtext_twins"
ORBAX = FIXTURES / "orbax"
Hashes = dict[str, str]


@dataclass(frozen=True)
class Origin:
    """A checkpoint, and the answers."""

    #: As `inspect` says it.
    framework: str
    #: Lays the checkpoint into a folder.
    make: Callable[[Path], None]
    #: sha256 by name of what a merge gives.
    merged: Callable[[], Hashes]
    #: sha256 by name of what the conversion to the hub gives; None where no target of another layout takes
    #: this model.
    answer: Callable[[], Hashes] | None = None
    #: The target that all others are led back to.
    hub: str = "hf"
    #: Its vocabulary without padding, given to every conversion: targets that pad lead back to it.
    vocab: int | None = None
    #: Stages over which its layers divide.
    stages: int = 2
    #: Its head's size is no power of four: MaxText's queries are rounded.
    rounded: bool = False
    #: It holds fp32 master weights of its bfloat16 weights too.
    masters: bool = False


def copied(source: Path) -> Callable[[Path], None]:
    """A fixture without its answers."""

    def make(root: Path) -> None:
        shutil.copytree(source, root, ignore=shutil.ignore_patterns("expected*.json", "holes.json"))

    return make


def told(fixture: Path, *keys: str, file: str = "expected.json") -> Callable[[], Hashes]:
    """The hashes of a fixture; later keys override."""

    def hashes() -> Hashes:
        document: dict[str, Any] = json.loads((fixture / file).read_text())
        return {name: entry["sha256"] for key in keys for name, entry in document[key].items()}

    return hashes


def model() -> dict[str, torch.Tensor]:
    """The Llama that the made checkpoints hold, as transformers wrote it."""
    return read_result(HF)


def hashed(dtype: torch.dtype | None = None, before: str = "") -> Callable[[], Hashes]:
    return lambda: {
        before + name: sha256(tensor.to(dtype or tensor.dtype)) for name, tensor in model().items()
    }


def with_config(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(HF / "config.json", root)
    return root


def bin_files(root: Path) -> None:
    """source: transformers, modeling_utils.py of 4.x: save_pretrained(safe_serialization=False)"""
    tensors = model()
    names = sorted(tensors)
    weight_map = {}
    for part, held in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{part:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in held}, with_config(root) / file)
        weight_map |= dict.fromkeys(held, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (root / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def rank_shards(root: Path) -> None:
    """source: torch/distributed/checkpoint/hf_storage.py, HuggingFaceStorageWriter: rows over two ranks"""
    for rank in range(2):
        parts, offsets = {}, {}
        for name, tensor in model().items():
            parts[name] = tensor.chunk(2)[rank].contiguous()
            offsets[name] = {"saved_offsets": [rank * len(tensor.chunk(2)[0])] + [0] * (tensor.ndim - 1)}
        told = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        file = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(parts, with_config(root) / file, metadata=told)


def zero(stage: int, universal: bool = False) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        tensors = {name: tensor.float() for name, tensor in model().items()}
        run = zero_maker.Run(stage, 2, torch.bfloat16, [tensors])
        (zero_maker.universal if universal else zero_maker.write)(root, run)
        with_config(root)

    return make


def torch_dcp(root: Path) -> None:
    dcp.save(model(), checkpoint_id=with_config(root), no_dist=True)


def dcp_stages(root: Path) -> None:
    """Two pipeline stages, each with a state dict of its own under a key."""
    stages: dict[str, dict[str, torch.Tensor]] = {"stage_0": {}, "stage_1": {}}
    for name, tensor in model().items():
        parts = name.split(".")
        stage = int(parts[2]) // 2 if "layers" in parts else int("embed_tokens" not in name)
        stages[f"stage_{stage}"][name] = tensor
    dcp.save(stages, checkpoint_id=with_config(root), no_dist=True)


def nemo_weights() -> Hashes:
    return {f"module.{name}": sha256(tensor) for name, tensor in nemo_maker.read_weights().items()}


def nemo(root: Path) -> None:
    nemo_maker.make(root)


def fsdp_ranks(root: Path) -> None:
    dtensor_maker.rank_files(with_config(root), model(), 3)


def spelled(names: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """A DCP under another trainer's names."""

    def make(root: Path) -> None:
        dcp.save(names(model()), checkpoint_id=with_config(root), no_dist=True)

    return make


def of_torchtitan(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    sizes = json.loads((HF / "config.json").read_text())
    return names_maker.titan(state, sizes["num_attention_heads"], sizes["num_key_value_heads"], turned=True)


def of_olmo_core(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return names_maker.olmo(state, "llama")


def hashed_as(names: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[], Hashes]:
    return lambda: {name: sha256(tensor) for name, tensor in names(model()).items()}


def maxtext(fixture: Path) -> Callable[[Path], None]:
    """With the yml of its run, which says in what order queries and keys are."""
    size = Size(layers=3, hidden=48, groups=2, heads=4, head_dim=16, ffn=80, vocab=250)

    def make(root: Path) -> None:
        copied(fixture)(root)
        (root / "maxtext_model.yml").write_text(yaml.safe_dump(llama_yml(size, **LLAMA31)))

    return make


def maxtext_mixture(kind: str) -> Callable[[Path], None]:
    """With compressed chunks, in which damage shows."""

    def make(root: Path) -> None:
        item = maxtext_mixtures.checkpoint(kind, root) / "7/items"
        _compress(item, maxtext_mixtures.held(kind, 1))

    return make


def maxtext_latent(root: Path) -> None:
    maxtext_deepseek.checkpoint("plain", root)
    _compress(root / "7/items", deepseek_arrays())


@cache
def deepseek_arrays() -> dict[str, np.ndarray]:
    config, tensors, _ = maxtext_deepseek.files("plain")
    return maxtext_deepseek.arrange(tensors, config, 1)


NNX_SIZE = Size()


def nnx_arrays() -> dict[str, np.ndarray]:
    """A Llama as RL of MaxText saves it: below ``base``, layers as a list, each variable with its value."""
    weights = maxtext_llama(hf_llama(NNX_SIZE), NNX_SIZE, None)
    names = (name.removeprefix("params.params.").replace("layers_", "layers.") for name in weights)
    return {f"base.{name}.value": array for name, array in zip(names, weights.values(), strict=True)}


def maxtext_nnx(root: Path) -> None:
    saved_orbax(nnx_arrays(), root)
    _compress(root / "7/items", nnx_arrays())
    (root / "maxtext_model.yml").write_text(yaml.safe_dump(llama_yml(NNX_SIZE, **LLAMA31)))


def _compress(item: Path, arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        shutil.rmtree(item / name)
        write_array(item, name, array, list(array.shape))


ARRAYS = {"weights": painted(6, 8), "counts": painted(5)}


def plain_orbax(root: Path) -> None:
    """Arrays of no model that anybody knows."""
    item = root / "5/default"
    item.mkdir(parents=True)
    for name, values in ARRAYS.items():
        write_array(item, name, values, [3, 4][: values.ndim])
    describe(item, list(ARRAYS))
    (root / "5/_CHECKPOINT_METADATA").write_text("{}")


def levanter_arrays() -> dict[str, np.ndarray]:
    """A step in the form of today: layers stacked, float32, the optimizer's moments beside the model."""
    return as_train_state(as_levanter(AutoModelForCausalLM.from_pretrained(HF)))


def levanter(root: Path) -> None:
    save(with_config(root) / "step-20", levanter_arrays())


def easylm_arrays() -> dict[easylm_maker.Keys, torch.Tensor]:
    """A train state in the dtype of the fixture, the optimizer's moments beside the model."""
    weights = easylm_maker.as_easylm(AutoModelForCausalLM.from_pretrained(HF, dtype=torch.bfloat16))
    return easylm_maker.as_train_state(weights)


def easylm(root: Path) -> None:
    easylm_maker.write_stream(with_config(root) / "streaming_train_state_80", easylm_arrays().items())


def of_paxml() -> Hashes:
    """What MaxText has of the fixture, made by numpy alone."""
    state = ORBAX / "paxml_gpt3_micro_weights/checkpoints/checkpoint_00004000/state"
    prefix = "mdl_vars.params.lm."
    tree: Tree = {}
    for folder in state.glob(f"{prefix}*"):
        store = {"driver": "file", "path": f"{folder}/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": store}).result()
        tree[folder.name.removeprefix(prefix)] = np.asarray(array.read().result())
    weights = {f"params.params.{name}": sha(array) for name, array in maxtext_gpt3(tree, 1).items()}
    return weights | {"step": sha(np.array(4000, np.int32))}


def of_maxtext_mixture(kind: str) -> Origin:
    """A mixture of MaxText's, in stacks of layers."""
    return Origin(
        "MaxText",
        maxtext_mixture(kind),
        lambda: {name: sha(array) for name, array in maxtext_mixtures.held(kind, 1).items()},
        lambda: {name: sha(array) for name, array in maxtext_mixtures.told(kind)[1].items()},
        vocab=250,
        stages=3,
    )


def of_maxtext_gemma(kind: str) -> Origin:
    """A Gemma of MaxText's, in stacks of layers."""

    @cache
    def arrays() -> tuple[Tree, Tree]:
        config, tensors, _ = maxtext_gemma.files(kind)
        return tensors, maxtext_gemma.arrange(tensors, config, 1)

    def save(root: Path) -> None:
        _compress(maxtext_gemma.checkpoint(kind, root) / "7/items", arrays()[1])

    return Origin(
        "MaxText",
        save,
        lambda: {name: sha(array) for name, array in arrays()[1].items()},
        lambda: {name: sha(array) for name, array in arrays()[0].items()},
        vocab=250,
    )


ORIGINS: dict[str, Origin] = {
    "hf_safetensors": Origin(
        "Hugging Face",
        copied(HF),
        told(SHARDED / "hf_sharded", "tensors"),
        told(SHARDED / "hf_sharded", "tensors"),
        vocab=1000,
        rounded=True,
    ),
    "hf_bin": Origin(
        "Hugging Face",
        bin_files,
        hashed(),
        hashed(),
        vocab=1000,
        rounded=True,
    ),
    "hf_rank_shards": Origin(
        "Hugging Face rank shards",
        rank_shards,
        hashed(),
        hashed(),
        vocab=1000,
        rounded=True,
    ),
    "tp_safetensors": Origin(
        "per-rank safetensors",
        copied(SHARDED / "tp4_micro"),
        told(SHARDED / "tp4_micro", "tensors"),
        told(SHARDED / "tp4_micro", "tensors"),
        vocab=250,
        rounded=True,
    ),
    "neox_pipeline": Origin(
        "GPT-NeoX",
        copied(FIXTURES / "gpt_neox/neox_pp_tp2"),
        told(FIXTURES / "gpt_neox/neox_pp_tp2", "merged"),
        told(FIXTURES / "gpt_neox/neox_pp_tp2", "hf", "hf_trimmed_to_true_vocab"),
        vocab=509,
    ),
    "neox_llama": Origin(
        "GPT-NeoX",
        copied(FIXTURES / "gpt_neox/llama_gqa_pp_tp2"),
        told(FIXTURES / "gpt_neox/llama_gqa_pp_tp2", "merged"),
        told(FIXTURES / "gpt_neox/llama_gqa_pp_tp2", "hf", "hf_trimmed_to_true_vocab"),
        vocab=509,
        stages=3,
        rounded=True,
    ),
    "neox_sequential": Origin(
        "GPT-NeoX",
        copied(FIXTURES / "gpt_neox/neox_seq_tp2"),
        told(FIXTURES / "gpt_neox/neox_seq_tp2", "merged"),
        told(FIXTURES / "gpt_neox/neox_seq_tp2", "hf", "hf_trimmed_to_true_vocab"),
        vocab=509,
    ),
    "megatron_legacy": Origin(
        "Megatron-LM",
        copied(SHARDED / "megatron_legacy_tp2_pp2"),
        told(SHARDED / "megatron_legacy_tp2_pp2", "tensors"),
        told(SHARDED / "megatron_legacy_tp2_pp2", "tensors", file="expected_hf.json"),
        vocab=1000,
        rounded=True,
    ),
    "megatron_torch_dist": Origin(
        "Megatron-LM (torch_dist)",
        copied(SHARDED / "megatron_torch_dist_tp2_pp2"),
        told(SHARDED / "megatron_torch_dist_tp2_pp2", "tensors"),
        told(SHARDED / "megatron_torch_dist_tp2_pp2", "tensors", file="expected_hf.json"),
        vocab=1000,
        rounded=True,
    ),
    "nemo": Origin(
        "NeMo (torch_dist)",
        nemo,
        nemo_weights,
        told(SHARDED / "megatron_torch_dist_tp2_pp2", "tensors", file="expected_hf.json"),
        vocab=1000,
        rounded=True,
    ),
    "zero1": Origin("DeepSpeed", zero(1), hashed(), hashed(), vocab=1000, rounded=True, masters=True),
    "zero2": Origin("DeepSpeed", zero(2), hashed(), hashed(), vocab=1000, rounded=True, masters=True),
    "zero3": Origin(
        "DeepSpeed",
        zero(3),
        hashed(torch.float32),
        hashed(torch.float32),
        vocab=1000,
        rounded=True,
    ),
    "zero1_no_model": Origin(
        "DeepSpeed",
        copied(FIXTURES / "deepspeed/zero1_bf16_dp2"),
        told(FIXTURES / "deepspeed/zero1_bf16_dp2", "params_16bit"),
    ),
    "universal": Origin(
        "DeepSpeed universal",
        zero(1, universal=True),
        hashed(torch.float32),
        hashed(torch.float32),
        vocab=1000,
        rounded=True,
    ),
    "dcp": Origin("torch DCP", torch_dcp, hashed(), hashed(), vocab=1000, rounded=True),
    "dcp_stages": Origin("torch DCP", dcp_stages, hashed(), hashed(), vocab=1000, rounded=True),
    "fsdp": Origin(
        "torch DCP",
        copied(SHARDED / "dcp_fsdp2"),
        told(SHARDED / "dcp_fsdp2", "tensors"),
    ),
    "fsdp_ranks": Origin("FSDP rank files", fsdp_ranks, hashed(), hashed(), vocab=1000, rounded=True),
    "torch_checkpointing": Origin(
        "torch_checkpointing",
        copied(SHARDED / "torch_checkpointing_pt"),
        told(SHARDED / "torch_checkpointing_pt", "tensors"),
        told(SHARDED / "torch_checkpointing_pt", "tensors"),
        vocab=34,
    ),
    "torchtitan": Origin(
        "torch DCP",
        spelled(of_torchtitan),
        hashed_as(of_torchtitan),
        hashed(),
        vocab=1000,
        rounded=True,
    ),
    "olmo_core": Origin(
        "torch DCP",
        spelled(of_olmo_core),
        hashed_as(of_olmo_core),
        hashed(),
        vocab=1000,
        rounded=True,
    ),
    "colossalai": Origin(
        "ColossalAI",
        copied(SHARDED / "colossalai_049_tp2_pp2/modeling"),
        told(SHARDED / "colossalai_049_tp2_pp2", "tensors"),
        told(SHARDED / "colossalai_049_tp2_pp2", "tensors"),
        vocab=1000,
        rounded=True,
    ),
    "maxtext_scan": Origin(
        "MaxText",
        maxtext(TWINS / "a_mt_f32_scan"),
        told(TWINS / "a_mt_f32_scan", "maxtext_tensors"),
        told(TWINS / "a_mt_f32_scan", "hf_tensors"),
        vocab=250,
        stages=3,
    ),
    "maxtext_unscan": Origin(
        "MaxText",
        maxtext(TWINS / "a_mt_bf16_unscan_noocdbt_zarr2"),
        told(TWINS / "a_mt_bf16_unscan_noocdbt_zarr2", "maxtext_tensors"),
        told(TWINS / "a_mt_bf16_unscan_noocdbt_zarr2", "hf_tensors"),
        vocab=250,
        stages=3,
    ),
    "maxtext_nnx": Origin(
        "MaxText",
        maxtext_nnx,
        lambda: {name: sha(array) for name, array in nnx_arrays().items()},
        lambda: {name: sha(array) for name, array in hf_llama(NNX_SIZE).items()},
        vocab=50,
        stages=3,
    ),
    "maxtext_mixtral": of_maxtext_mixture("mixtral"),
    "maxtext_qwen3_moe": of_maxtext_mixture("qwen3_moe"),
    "maxtext_deepseek": Origin(
        "MaxText",
        maxtext_latent,
        lambda: {name: sha(array) for name, array in deepseek_arrays().items()},
        lambda: {name: sha(array) for name, array in maxtext_deepseek.files("plain")[1].items()},
        vocab=250,
    ),
    "maxtext_gemma2": of_maxtext_gemma("gemma2"),
    "maxtext_gemma3": of_maxtext_gemma("gemma3 cut"),
    "maxtext_gpt3": Origin(
        "MaxText",
        copied(ORBAX / "gpt3_micro_scan_bf16_zarr2"),
        told(ORBAX / "gpt3_micro_scan_bf16_zarr2", "tensors"),
        told(ORBAX / "gpt3_micro_scan_bf16_zarr2", "tensors"),
        hub="maxtext:scan",
    ),
    "levanter": Origin(
        "Levanter",
        levanter,
        lambda: {name: sha(array) for name, array in levanter_arrays().items()},
        hashed(torch.float32),
        vocab=1000,
        rounded=True,
    ),
    "easylm": Origin(
        "EasyLM",
        easylm,
        lambda: {".".join(keys): sha256(tensor) for keys, tensor in easylm_arrays().items()},
        hashed(),
        vocab=1000,
        rounded=True,
    ),
    "orbax": Origin(
        "Orbax",
        plain_orbax,
        lambda: {name: sha(array) for name, array in ARRAYS.items()},
    ),
    "paxml": Origin(
        "Paxml",
        copied(ORBAX / "paxml_gpt3_micro_weights"),
        told(ORBAX / "paxml_gpt3_micro_weights", "tensors"),
        of_paxml,
        hub="maxtext:scan",
    ),
}
