"""Folders of runs with several steps, as trainers leave them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from helpers import FIXTURES, HF


def copy_steps(step: Path, run: Path, *names: str) -> Path:
    """A run with copies of one step."""
    run.mkdir()
    for name in names:
        shutil.copytree(step, run / name)
    return run


def huggingface(folder: Path) -> Path:
    """A run of the Trainer: one step is cut in the middle, one is being written."""
    run = copy_steps(HF, folder / "hf", "checkpoint-9", "checkpoint-20", "checkpoint-100")
    (run / "checkpoint-20/model-00002-of-00004.safetensors").unlink()
    shutil.copytree(HF, run / "tmp-checkpoint-200")
    (run / "runs").mkdir()
    return run


def megatron(folder: Path) -> Path:
    """A run of Megatron-LM: a step lost a stage, and the tracker names it; the newest is empty."""
    step = FIXTURES / "sharded/megatron_legacy_tp2_pp2/iter_0000010"
    run = copy_steps(step, folder / "megatron", "iter_0000010", "iter_0000020")
    for rank in (0, 1):
        shutil.rmtree(run / f"iter_0000020/mp_rank_0{rank}_001")
    (run / "iter_0000030").mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("20\n")
    return run


def deepspeed(folder: Path) -> Path:
    """A run of DeepSpeed: the newest step lacks its model states; the tracker names a step that is gone."""
    step = FIXTURES / "deepspeed/zero1_bf16_dp2/global_step4"
    run = copy_steps(step, folder / "deepspeed", "global_step4", "global_step8")
    (run / "global_step8/mp_rank_00_model_states.pt").unlink()
    (run / "latest").write_text("global_step12")
    return run


def dcp(folder: Path) -> Path:
    """A run with DCP: one step lost a file, one has no ``.metadata``."""
    run = copy_steps(FIXTURES / "sharded/dcp_fsdp2", folder / "dcp", "step-10", "step-20", "step-30")
    (run / "step-20/__1_0.distcp").unlink()
    (run / "step-30/.metadata").unlink()
    return run


def orbax(folder: Path) -> Path:
    """A run of Orbax, below `checkpoints`: a step lost chunks, one is being written, a folder is no step."""
    step = FIXTURES / "orbax/mp2_shared_good_063_zarr3_elided_zeros/checkpoints/4000"
    (folder / "orbax").mkdir()
    run = copy_steps(step, folder / "orbax/checkpoints", "4000", "8000", "12000.orbax-checkpoint-tmp-0")
    (run / "8000/items/ocdbt.process_1/manifest.ocdbt").unlink()
    (run / "2026").mkdir()
    (run / "2026/notes.txt").write_text("no step")
    return folder / "orbax"


#: Each maker of a run, and the verdicts on its steps in their order.
RUNS: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    "hf": (
        huggingface,
        {
            "checkpoint-9": "complete",
            "checkpoint-20": "incomplete",
            "checkpoint-100": "complete",
            "tmp-checkpoint-200": "unfinished",
        },
    ),
    "megatron": (
        megatron,
        {"iter_0000010": "complete", "iter_0000020": "incomplete", "iter_0000030": "unfinished"},
    ),
    "deepspeed": (deepspeed, {"global_step4": "complete", "global_step8": "incomplete"}),
    "dcp": (dcp, {"step-10": "complete", "step-20": "incomplete", "step-30": "unfinished"}),
    "orbax": (
        orbax,
        {"4000": "complete", "8000": "incomplete", "12000.orbax-checkpoint-tmp-0": "unfinished"},
    ),
}
