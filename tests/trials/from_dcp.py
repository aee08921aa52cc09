"""Models of random families, saved as torch DCP by one rank and by two: each result with a config.json is
loaded, or refused.

    python tests/trials/from_dcp.py --count 64 --seed 0

A small causal language model of each family, under the names that it has in memory, and with a prefix before
each of them: merged, and converted to Hugging Face. Transformers must load what is published with no tensor
missing and every value as it was; what is saved without a prefix must not be refused.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastshard
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import transformers
from families import HEADS, ask_transformers_here, made, name_families
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

#: What is before every name of half of the checkpoints: a trainer's own word.
PREFIXES = {"plain": "", "prefixed": "policy."}
#: Models that are saved by one start of the ranks.
TOGETHER = 8
TARGETS = {"merge": None, "convert": "hf"}


def save_by_rank(rank: int, world: int, port: int, names: Sequence[str], folder: Path) -> None:
    """Saves the models as one rank of several, each tensor divided along its first dimension."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    mesh = None
    if world > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (world,))
    for name in names:
        model = made(name, HEADS["causal"])
        shared: dict[int, torch.Tensor | DTensor] = {}
        for kind, prefix in PREFIXES.items():
            content: dict[str, Any] = {}
            for key, tensor in model.state_dict().items():
                if mesh is None or not tensor.ndim:
                    content[prefix + key] = tensor
                    continue
                # Tied tensors are one tensor.
                at = tensor.data_ptr()
                if at not in shared:
                    shared[at] = distribute_tensor(tensor, mesh, [Shard(0)])
                content[prefix + key] = shared[at]
            place = folder / f"{name}-{kind}"
            dcp.save(content, checkpoint_id=place, no_dist=mesh is None)
            if rank == 0:
                model.config.architectures = [type(model).__name__]
                model.config.save_pretrained(place)
    if mesh is not None:
        torch.distributed.destroy_process_group()


def save(world: int, names: Sequence[str], folder: Path) -> None:
    """Saves the models as torch DCP, by this process or by several."""
    if world == 1:
        save_by_rank(0, 1, 0, names, folder)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(save_by_rank, (world, port, names, folder), nprocs=world)


def find_differences(model: Any, out: Path) -> str:
    """Says what transformers finds missing or other in a result; empty if nothing."""
    try:
        loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    except Exception as error:
        return f"transformers does not load it: {error}"
    lacking = {key: sorted(map(str, names))[:3] for key, names in report.items() if names}
    lacking.pop("unexpected_keys", None)
    state = loaded.state_dict()
    other = [name for name, t in model.state_dict().items() if not torch.equal(state[name].to(t.dtype), t)]
    return f"{lacking or ''}{f'{len(other)} tensors differ, {other[0]}' if other else ''}"


def can_load_itself(model: Any, folder: Path) -> bool:
    """False for a class that does not load all that it has in memory: some change the size of a tied tensor
    when they tie it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return not find_differences(model, folder)


def try_one(model: Any, source: Path, kind: str, to: str | None, out: Path) -> tuple[str, str]:
    """Converts a checkpoint and judges what came of it: the outcome, and what is wrong with it, if
    anything."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        fastshard.convert(source, out, to, fsync=False)
    except fastshard.FastshardError as error:
        first = error.findings[0]
        return "refused", f"{first.code}: {first}" if kind == "plain" else ""
    if not (out / "config.json").exists():
        return "published without config.json", "" if to is None else "it is for Hugging Face"
    return "loaded", find_differences(model, out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=64, metavar="N", help="families (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "from_dcp", metavar="DIR"
    )
    parser.add_argument("--family", action="append", metavar="NAME", help="this one only (repeatable)")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ask_transformers_here(a.folder / "cache")
    models = (
        (name, model)
        for name in a.family or name_families(a.seed)
        if (model := made(name, HEADS["causal"])) is not None and can_load_itself(model, a.folder / "itself")
    )
    tried: list[str] = []
    outcomes: Counter[tuple[int, str, str, str]] = Counter()
    wrong = 0
    first = itertools.islice(models, a.count)
    while group := list(itertools.islice(first, TOGETHER)):
        tried += [name for name, _ in group]
        shutil.rmtree(a.folder, ignore_errors=True)
        for world in (1, 2):
            folder = a.folder / str(world)
            save(world, [name for name, _ in group], folder)
            for (name, model), kind, (verb, to) in itertools.product(group, PREFIXES, TARGETS.items()):
                ending, why = try_one(model, folder / f"{name}-{kind}", kind, to, a.folder / "out")
                outcomes[world, kind, verb, ending] += 1
                if why:
                    wrong += 1
                    print(f"{name}, {kind}, {world} rank(s), {verb}: {ending}: {why}", flush=True)
    for (world, kind, verb, ending), count in sorted(outcomes.items()):
        print(f"{world} rank(s), {kind}, {verb}: {count} {ending}")
    print(f"{len(tried)} families, wrong: {wrong}: {' '.join(tried)}")
    shutil.rmtree(a.folder, ignore_errors=True)
    return 1 if wrong or len(tried) < min(a.count, len(a.family or range(a.count))) else 0


if __name__ == "__main__":
    sys.exit(main())
