"""Checkpoints with one thing wrong, made of good fixtures by what happens to files: ``python tests/damage.py CASE OUT``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from helpers import FIXTURES, edit_safetensors, flip_bit, layer_file, rank_file

#: Changes the copy at a root.
Damage = Callable[[Path], object]


def lost(pattern: str) -> Damage:
    def apply(root: Path) -> None:
        found = sorted(root.glob(pattern))
        assert found, pattern
        for path in found:
            path.unlink()

    return apply


def cut(name: str) -> Damage:
    """At 60 %."""

    def apply(root: Path) -> None:
        whole = (root / name).read_bytes()
        (root / name).write_bytes(whole[: len(whole) * 3 // 5])

    return apply


def over(source: str, name: str) -> Damage:
    """A file copied over another."""
    return lambda root: shutil.copyfile(root / source, root / name)


def swapped(one: str, other: str) -> Damage:
    def apply(root: Path) -> None:
        (root / one).rename(root / "aside")
        (root / other).rename(root / one)
        (root / "aside").rename(root / other)

    return apply


def flipped(name: str, part: float = 0.5) -> Damage:
    return lambda root: flip_bit(root / name, int((root / name).stat().st_size * part))


def says(name: str, text: str) -> Damage:
    return lambda root: (root / name).write_text(text)


def sliced(name: str, tensor: str, parts: int) -> Damage:
    """One rank's rows, saved as all of them; they are padded to a multiple of 64 times the ranks."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        rows = -(-len(tensors[tensor]) // (64 * parts)) * 64
        tensors[tensor] = tensors[tensor][:rows]

    return lambda root: edit_safetensors(root / name, change)


def none(root: Path) -> None:
    """Nothing: it is a fixture that is wrong as it lies there."""


NEOX, TP4, HF = "gpt_neox/neox_pp_tp2", "sharded/tp4_micro", "sharded/hf_sharded"
ZERO, ZERO3 = "deepspeed/zero1_bf16_dp2", "deepspeed/zero3_bf16_dp2"
LEGACY, DIST = "sharded/megatron_legacy_tp2_pp2", "sharded/megatron_torch_dist_tp2_pp2"
DCP, COLOSSAL = "sharded/dcp_tp_micro", "sharded/colossalai_049_tp2_pp2/modeling"
OPTIM = "global_step4/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
LAYER = "maxtext_twins/a_mt_bf16_unscan_noocdbt_zarr2"

#: name -> (fixture, what happens to it)
CASES: dict[str, tuple[str, Damage]] = {
    "neox_missing_shard": (NEOX, lost(f"*/{layer_file(3, 1)}")),
    "neox_missing_layer": (NEOX, lost("*/layer_04-*")),
    "neox_truncated": (NEOX, cut(f"global_step4/{layer_file(2, 1)}")),
    "neox_bit_flipped": (NEOX, flipped(f"global_step4/{layer_file(3, 0)}")),
    "neox_copied_shard": (NEOX, over(f"global_step4/{layer_file(3, 0)}", f"global_step4/{layer_file(3, 1)}")),
    "neox_swapped_ranks": (NEOX, swapped(f"global_step4/{layer_file(3, 0)}", f"global_step4/{layer_file(3, 1)}")),
    "neox_no_config": (NEOX, lost("*/configs/*.yml")),
    "neox_latest_points_nowhere": (NEOX, says("latest", "global_step9")),
    "neox_norms_drifted": ("gpt_neox/neox_pp_tp2_normdiverged", none),
    "neox_sequential_missing_rank": ("gpt_neox/neox_seq_tp2", lost(f"*/{rank_file(1)}")),
    "zero1_missing_rank": (ZERO, lost(OPTIM.format(1))),
    "zero1_truncated": (ZERO, cut(OPTIM.format(1))),
    "zero1_copied_rank": (ZERO, over(OPTIM.format(0), OPTIM.format(1))),
    "zero1_stale_masters": ("stale_masters_zero1_bf16_dp2", none),
    "zero3_missing_rank": (ZERO3, lost("*/*rank_1_*")),
    "universal_missing_parameter": ("universal/zero1_bf16_dp2", lost("*/zero/embed.weight/fp32.pt")),
    "megatron_missing_rank": (LEGACY, lost("*/mp_rank_01_001/*")),
    "megatron_copied_rank": (
        LEGACY,
        over("iter_0000010/mp_rank_00_000/model_optim_rng.pt", "iter_0000010/mp_rank_01_000/model_optim_rng.pt"),
    ),
    "torch_dist_missing_file": (DIST, lost("*/__3_1.distcp")),
    "dcp_no_metadata": (DCP, lost(".metadata")),
    "dcp_missing_file": (DCP, lost("__1_0.distcp")),
    "dcp_truncated": (DCP, cut("__1_0.distcp")),
    "tp_missing_rank": (TP4, lost("tp_rank_02*")),
    "tp_copied_rank": (TP4, over("tp_rank_00.safetensors", "tp_rank_01.safetensors")),
    "tp_truncated": (TP4, cut("tp_rank_01.safetensors")),
    "tp_no_layout_no_config": (TP4, lost("*.json")),
    "hf_missing_file": (HF, lost("model-00003-of-00004.safetensors")),
    "hf_copied_file": (HF, over("model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors")),
    "hf_embed_is_a_slice": (HF, sliced("model-00001-of-00004.safetensors", "model.embed_tokens.weight", 4)),
    "hf_index_is_no_json": (HF, says("model.safetensors.index.json", "{")),
    "colossalai_missing_stage": (COLOSSAL, lost("model-stage-00002*")),
    "colossalai_no_index": (COLOSSAL, lost("model.safetensors.index.json")),
    "maxtext_missing_chunk": (LAYER, lost("0/items/*layers_1.mlp.wo.kernel/0.0")),
    "maxtext_missing_array": (LAYER, lost("0/items/*layers_1.mlp.wo.kernel/.zarray")),
    "orbax_lone_host": ("orbax/mp2_local_BROKEN_063_zarr3/node0", none),
    "orbax_lone_host_that_is_not_primary": ("orbax/mp2_local_BROKEN_0128_zarr3_primarynone/node1", none),
    "paxml_missing_chunk": ("orbax/paxml_gpt3_micro_weights", lost("*/*/state/*linear.w/0.1.0")),
}  # fmt: skip


def made(name: str, root: Path) -> Path:
    """One of the cases, without the answers of its fixture."""
    fixture, apply = CASES[name]
    shutil.copytree(FIXTURES / fixture, root, ignore=shutil.ignore_patterns("expected*.json", "holes.json"))
    apply(root)
    return root


if __name__ == "__main__":
    made(sys.argv[1], Path(sys.argv[2]))
