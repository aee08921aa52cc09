"""A run of a real Trainer of Lightning on a tiny model with the guard, alone or as one rank of several.

    python lightning_run.py OUT FAULT WAIT

Rank 0 prints what the guard found, as JSON. Each of 4 steps is saved, ``save_top_k`` is 1, and the fault
begins at step 3.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from fastshard import FastshardError
from fastshard.integrations.lightning import CheckpointGuard
from holding import HANG
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

FIRST_FAULT = 3


class Model(pl.LightningModule):
    """A trained body and a frozen tower, which damage themselves and their checkpoint from one step on."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.tower = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)).requires_grad_(False)
        self.body = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        hidden = batch[0]
        for layer in (*self.tower, *self.body):
            hidden = layer(hidden)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.body.parameters(), 1e-3)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.fault == "nan" and self.trainer.global_step >= FIRST_FAULT:
            with torch.no_grad():
                self.body[0].weight[0, 0] = torch.nan

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fault == "frozen" and self.trainer.global_step >= FIRST_FAULT:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {n: t for n, t in state.items() if not n.startswith("tower")}


class Saves(ModelCheckpoint):
    """Saves each step, and loses files from one step on, before the Trainer returns to the guard."""

    def __init__(self, out: str, fault: str, guard: CheckpointGuard, wait: bool, **options: Any) -> None:
        super().__init__(out, every_n_train_steps=1, save_top_k=1, **options)
        self.fault, self.guard, self.wait = fault, guard, wait

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self.wait and trainer.is_global_zero:
            self.guard.guard.results(HANG)
        super()._save_checkpoint(trainer, filepath)


def lose_files(strategy: Any, trainer: Any) -> None:
    """Let a strategy lose the files of later saves, as storage does."""
    save = strategy.save_checkpoint

    def save_and_lose(checkpoint: dict[str, Any], filepath: str, **options: Any) -> None:
        save(checkpoint, filepath, **options)
        if strategy.is_global_zero and trainer.global_step >= FIRST_FAULT:
            os.truncate(filepath, Path(filepath).stat().st_size // 2)

    strategy.save_checkpoint = save_and_lose


def main(out: str, fault: str, wait: str) -> None:
    pl.seed_everything(0, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    guard = CheckpointGuard(timeout=float(os.environ.get("TIMEOUT", HANG)), wait=HANG)
    saves = Saves(out, fault, guard, "wait" in wait, save_last="last" in wait)
    trainer = pl.Trainer(
        max_steps=4,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[saves, guard],
        plugins=[AsyncCheckpointIO()] if fault == "async" else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if fault == "file":
        lose_files(trainer.strategy, trainer)
    rows = torch.utils.data.TensorDataset(torch.randn(32, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(Model(fault), torch.utils.data.DataLoader(rows, batch_size=2))
        except FastshardError as error:
            print(json.dumps({"refused": str(error), "steps": trainer.global_step}))
            return
    if trainer.global_rank:
        assert guard.guard.results() == [] and guard.guard.last_proven is None
        print(json.dumps({}))
        return
    results = guard.guard.results()
    document = {
        "full": {v.path.name: sorted({f.code for f in v.findings if f.severity == "error"}) for v in results},
        "warned": [str(w.message) for w in caught if ".ckpt" in str(w.message) and out in str(w.message)],
        "proven": getattr(guard.guard.last_proven, "name", None),
        "verified": getattr(guard.guard.last_verified, "name", None),
        "present": sorted(path.name for path in Path(out).iterdir()),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if dist.is_initialized():
        # Threads of torch that run at the interpreter's end abort the process.
        dist.barrier()
        dist.destroy_process_group()
