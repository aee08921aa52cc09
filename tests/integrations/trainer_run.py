"""A run of a real transformers Trainer on a tiny model with the guard, alone or as one rank of several.

    python trainer_run.py OUT FAULT WAIT

Rank 0 prints what the guard found, as JSON. Each of 4 steps is saved, ``save_total_limit`` is 1, and the
fault begins at step 3. A run whose folder has a checkpoint resumes from it and does 4 steps more.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fastshard import FastshardError
from fastshard.integrations.transformers import CheckpointGuard
from holding import HANG
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

FIRST_FAULT = 3
FROZEN = "model.layers.1.mlp"


class Faults(TrainerCallback):
    """Damages checkpoints or the model from one step on; stands before the guard in the list of callbacks."""

    def __init__(self, fault: str, guard: CheckpointGuard, wait: bool) -> None:
        self.fault, self.guard, self.wait = fault, guard, wait

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.wait and args.should_save:
            self.guard.guard.results(HANG)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step < FIRST_FAULT:
            return
        if self.fault == "nan":
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
        if self.fault == "frozen":
            model._keys_to_ignore_on_save = {name for name in model.state_dict() if name.startswith(FROZEN)}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.fault == "file" and args.should_save and state.global_step >= FIRST_FAULT:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "model.safetensors").unlink()


def main(out: str, fault: str, wait: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(FROZEN)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 8))]
    resumed = [int(path.name.rpartition("-")[2]) for path in Path(out).glob("checkpoint-*")]
    args = TrainingArguments(
        out,
        max_steps=4 + max(resumed, default=0),
        save_steps=1,
        save_total_limit=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        report_to=[],
        disable_tqdm=True,
    )
    guard = CheckpointGuard(timeout=float(os.environ.get("TIMEOUT", HANG)), wait=HANG)
    trainer = Trainer(
        model, args, train_dataset=rows, callbacks=[Faults(fault, guard, wait == "wait"), guard]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.train(resume_from_checkpoint=bool(resumed))
        except FastshardError as error:
            print(json.dumps({"refused": str(error), "steps": trainer.state.global_step}))
            return
    if args.process_index:
        assert guard.guard.results() == [] and guard.guard.last_proven is None
        print(json.dumps({"limit": args.save_total_limit}))
        return
    results = guard.guard.results()
    document = {
        "full": {v.path.name: sorted({f.code for f in v.findings if f.severity == "error"}) for v in results},
        "warned": [str(w.message) for w in caught if "checkpoint-" in str(w.message)],
        "proven": getattr(guard.guard.last_proven, "name", None),
        "verified": getattr(guard.guard.last_verified, "name", None),
        "present": sorted(path.name for path in Path(out).iterdir()),
        "limit": args.save_total_limit,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if dist.is_initialized():
        # Threads of torch that run at the interpreter's end abort the process.
        dist.barrier()
        dist.destroy_process_group()
