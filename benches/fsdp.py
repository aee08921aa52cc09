"""Rank files of FSDP, against verl's own merger: part of P17 of all_bars.py, and what each side accepts of
damage.

    python benches/fsdp.py damage

verl must be importable (``pip install --no-deps verl==0.9.1`` and what its merger imports: ray, tensordict,
omegaconf, hydra-core, codetiming, pandas, torchdata). Rank files of a Llama in bf16 are made by gloo
processes with FSDP2's own placements, and deleted afterwards. verl's merger loads all ranks, concatenates,
and saves through transformers; `convert --to hf` streams. Both results are compared tensor by tensor. Neither
side brings its output to disk. fastshard proves that the parts tile, compares CRC32 and hashes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compare import merge, peer
from dcp import TARGETS, WORLD, cut, flip, judged, llama
from measure import Place, Result, compare, digests, expect_same, find_lack, remove, workplace
from tokenizers import Tokenizer
from tokenizers.models import WordLevel


def save(rank: int, world: int, folder: str, size: int, seed: int) -> None:
    """One rank: its rows of every tensor, as verl saves them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{seed}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    random = torch.Generator().manual_seed(seed * world + rank)
    state: dict[str, torch.Tensor] = {}
    for name, shape in llama(size)[1].items():
        part = -(-shape[0] // world)
        rows = max(0, min(shape[0], (rank + 1) * part) - rank * part)
        local = torch.empty([rows, *shape[1:]], dtype=torch.bfloat16).normal_(generator=random)
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    torch.save(state, f"{folder}/{seed}/model_world_size_{world}_rank_{rank}.pt")
    dist.destroy_process_group()


def write(folder: Path, size: int, world: int, seed: int) -> Path:
    """The files of all ranks, with what verl keeps beside them."""
    out = folder / str(seed)
    (out / "huggingface").mkdir(parents=True)
    code = "import sys, fsdp; a = sys.argv; fsdp.save(int(a[1]), int(a[2]), a[3], int(a[4]), int(a[5]))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(world), str(folder), str(size), str(seed)],
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    if any(rank.wait() for rank in ranks):
        raise RuntimeError("a rank that writes its file failed")
    config = llama(size)[0] | {"dtype": "bfloat16"}
    (out / "huggingface/config.json").write_text(json.dumps(config))
    # verl's merger saves a tokenizer too, and stops where there is none.
    Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(out / "huggingface/tokenizer.json"))
    (out / "huggingface/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (out / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    return out


def measure_p17(place: Place) -> Iterator[Result]:
    """Both sides on one save; their results must be the same tensors."""
    nbytes = 2 * sum(torch.Size(s).numel() for s in llama(place.size)[1].values())
    result = Result(f"rank files of FSDP, {WORLD} ranks", "fastshard", "verl's merger", TARGETS, nbytes)
    if reason := find_lack("verl"):
        result.reason = reason
        yield result
        return
    source, out = write(place.disk, place.size, WORLD, 1), place.disk / "out"
    ours, theirs = merge(source, out, to="hf"), peer(result.peer, "verl_merge", source, out)
    yield compare(result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(digests))
    remove(source)


def plain_first(root: Path, files: list[Path]) -> None:
    """A buffer whose name comes first in the alphabet: no DTensor."""
    for file in files:
        content = torch.load(file, weights_only=False)
        torch.save({"a_buffer": torch.ones(3, dtype=torch.bfloat16), **content}, file)


def as_buffers(files: list[Path]) -> None:
    """Archives that do not tell under which name they were saved."""
    for file in files:
        content = torch.load(file, weights_only=False)
        with file.open("wb") as stream:
            torch.save(content, stream)


def swapped(root: Path, files: list[Path]) -> None:
    as_buffers(files)
    content = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    files[2].write_bytes(content)


def copied(root: Path, files: list[Path]) -> None:
    as_buffers(files)
    shutil.copy(files[1], files[2])


DAMAGE: list[tuple[str, Callable[[Path, list[Path]], object]]] = [
    ("none", lambda root, files: None),
    ("none (a plain buffer first)", plain_first),
    ("a rank's file is gone", lambda root, files: files[2].unlink()),
    ("the last rank's file is gone", lambda root, files: files[-1].unlink()),
    ("a file is another rank's", copied),
    ("two files are swapped", swapped),
    (
        "a file is of another step",
        lambda root, files: shutil.copy(root.parent / "2" / files[1].name, files[1]),
    ),
    ("a file is cut short", lambda root, files: cut(files[1])),
    ("one bit is flipped", lambda root, files: flip(files[1])),
]


def ours(root: Path, out: Path, truth: dict[str, str], *more: str) -> str:
    """The finding's code, or what was published."""
    from fastshard.cli import main as fastshard_main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        code = fastshard_main(["merge", str(root), str(out), "--json", "--memory", "2GiB", *more])
    document: dict[str, Any] = json.loads(text.getvalue())
    if code:
        found = [f["code"] for f in document["findings"] if f["severity"] == "error"]
        return ", ".join(dict.fromkeys(found))
    return judged(out, truth)


def theirs(root: Path, out: Path, truth: dict[str, str]) -> str:
    """What verl's merger makes of it."""
    arguments = {"src": str(root), "out": str(out), "threads": 1}
    command = [sys.executable, str(Path(__file__).with_name("sides.py")), "verl_merge", json.dumps(arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = [line for line in ran.stderr.splitlines() if line and not line.startswith((" ", "["))][-1]
        return f"error: {last.split(':')[0].rpartition('.')[2]}"
    return judged(out, truth)


def damage(folder: Path) -> str:
    """A table of what each side makes of damaged copies."""
    size, world = 1 << 20, 4
    for seed in (1, 2):
        write(folder, size, world, seed)
    good = folder / "good"
    assert ours(folder / "1", good, {}) == "right"
    truth = digests(good)
    lines = [
        "| damage | verl | fastshard | fastshard with `--expect` a manifest of the good one |",
        "|---|---|---|---|",
    ]
    for what, spoil in DAMAGE:
        root = folder / "damaged"
        shutil.copytree(folder / "1", root)
        spoil(root, sorted(root.glob("model_*.pt")))
        judgements = [theirs(root, folder / "theirs", truth), ours(root, folder / "ours", truth)]
        judgements.append(
            ours(root, folder / "expected", truth, "--expect", str(good / "fastshard.manifest.json"))
        )
        lines.append(f"| {what} | {' | '.join(judgements)} |")
        for path in (root, folder / "theirs", folder / "ours", folder / "expected"):
            shutil.rmtree(path, ignore_errors=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("damage",))
    parser.add_argument("--dir", default=None, type=workplace)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastshard-fsdp-", dir=options.dir) as name:
        print(damage(Path(name)))


if __name__ == "__main__":
    main()
