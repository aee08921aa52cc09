"""A training loop with FSDP2 and torch DCP on gloo ranks, and the guard; one fault at each of three steps.

    python sharded_loop.py OUT

Each rank prints what its guard found, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import fastshard
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fastshard.integrations import after_save, before_training
from holding import HANG
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

#: What goes wrong at which step.
FAULTS = {3: "file", 4: "nan", 5: "frozen"}


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.ModuleDict({"tower": nn.Linear(8, 8), "body": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
    model["tower"].requires_grad_(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model["tower"], *model["body"]):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    try:
        guard = before_training(out, timeout=float(os.environ.get("TIMEOUT", HANG)))
    except fastshard.FastshardError as error:
        print(json.dumps({"refused": [f.to_dict() for f in error.findings]}))
        return
    checks = []
    for step in range(1, 7):
        model["body"](model["tower"](torch.randn(4, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        if FAULTS.get(step) == "nan":
            state["model"]["body.0.weight"] = state["model"]["body.0.weight"] * torch.nan
        if FAULTS.get(step) == "frozen":
            state["model"] = {n: t for n, t in state["model"].items() if not n.startswith("tower")}
        path = Path(out) / f"step-{step}"
        dcp.save(state, checkpoint_id=path)
        if FAULTS.get(step) == "file" and rank == 0:
            (path / "__1_0.distcp").unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            verdict = after_save(path)
            by_headers = guard.last_proven
            guard.results(HANG)
        if verdict is not None:
            errors = [f for f in verdict.findings if f.severity == "error"]
            full = [v for v in guard.results() if v.path == verdict.path]
            checks.append(
                {
                    "headers": sorted({f.code for f in errors}),
                    "full": sorted({f.code for v in full for f in v.findings if f.severity == "error"}),
                    "texts": [str(f) for f in errors] + [str(f) for v in full for f in v.findings],
                    "by_headers": by_headers and by_headers.name,
                    "proven": guard.last_proven and guard.last_proven.name,
                    "warnings": len(caught),
                }
            )
    print(json.dumps({"rank": rank, "steps": checks}))


if __name__ == "__main__":
    main(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
