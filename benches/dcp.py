"""torch's distributed checkpoints, against torch's own tools: part of P17 of all_bars.py, and what each side
accepts of damage.

    python benches/dcp.py damage

Makes a DCP and a directory of rank shards (HuggingFaceStorageWriter, save_distributed) of a Llama in bf16 by
gloo processes with torch's own writers, and deletes them afterwards. `dcp_to_torch_save` gives one .pt file,
`consolidate_safetensors_files` one safetensors file per thread, `merge` safetensors; tensors are compared by
hash. Neither side brings its output to disk. fastshard checks coverage, shapes against config.json and CRC32
(of DCP), and hashes what it writes; torch's tools do none of that.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compare import merge, peer
from measure import THREADS, Place, Result, Target, compare, digests, expect_same, remove, workplace

WORLD = 4
#: Also those of rank files of FSDP.
TARGETS = (
    Target("wall_ratio", 0.10, least_bytes=2 << 30),
    Target("memory_ratio", 1 / 64, least_bytes=2 << 30),
)
SHARDED, RANKS = "DCP", "rank shards"


def llama(nbytes: int) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """config.json and shapes of a Llama of about `nbytes` in bf16; rows of the vocabulary divide unevenly."""
    sizes = ((1 << 30, 2048, 32003), (64 << 20, 512, 4099), (8 << 20, 256, 2051), (0, 64, 515))
    hidden, vocab = next((hidden, vocab) for least, hidden, vocab in sizes if nbytes >= least)
    wide, shapes = hidden * 5 // 2, {"model.embed_tokens.weight": [vocab, hidden]}
    layers = 0
    while layers < 2 or 2 * sum(torch.Size(s).numel() for s in shapes.values()) < nbytes - 2 * vocab * hidden:
        at = f"model.layers.{layers}."
        shapes |= {f"{at}self_attn.{p}_proj.weight": [hidden, hidden] for p in "qkvo"}
        shapes |= {f"{at}mlp.{p}_proj.weight": [wide, hidden] for p in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": [hidden, wide]}
        shapes |= {f"{at}{n}.weight": [hidden] for n in ("input_layernorm", "post_attention_layernorm")}
        layers += 1
    shapes |= {"model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return config, shapes


def save(rank: int, world: int, folder: str, size: int, seed: int, extra: bool) -> None:
    """One rank: its rows of every tensor, in both forms."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{seed}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
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
    if extra:
        state |= {"scalar": torch.tensor(3.5), "counts": torch.arange(6)}
    dcp.save(state, checkpoint_id=f"{folder}/{SHARDED}-{seed}")
    # torch's own consolidation cannot read integers, so that they have a directory of their own.
    for form, held in ((RANKS, {n: t for n, t in state.items() if n != "counts"}), ("integers", state)):
        if form == RANKS or extra:
            writer = HuggingFaceStorageWriter(path=f"{folder}/{form}-{seed}", save_distributed=True)
            dcp.save(held, storage_writer=writer)
    dist.destroy_process_group()


def write(folder: Path, size: int, world: int, seed: int, extra: bool = False) -> None:
    """Both forms, with a config.json beside each."""
    code = (
        "import sys, dcp; a = sys.argv; dcp.save(int(a[1]), int(a[2]), a[3], int(a[4]), int(a[5]), a[6] == "
        "'1')"
    )
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                str(rank),
                str(world),
                str(folder),
                str(size),
                str(seed),
                str(int(extra)),
            ],
            cwd=Path(__file__).parent,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    if any(rank.wait() for rank in ranks):
        raise RuntimeError("a rank that writes the checkpoint failed")
    (folder / f"store-{seed}").unlink(missing_ok=True)
    for made in folder.glob(f"*-{seed}"):
        (made / "config.json").write_text(json.dumps(llama(size)[0]))


def contents(out: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a result of either side."""
    found = digests(out)
    for file in out.glob("*.pt"):
        state = torch.load(file, mmap=True, weights_only=True)
        for name, tensor in state.items():
            found[name] = hashlib.sha256(
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
    return found


def mapping(size: int, extra: bool = False, parts: int = THREADS) -> dict[str, int]:
    """consolidate's threads take one output file each: as many files of equal parts as threads."""
    names = [*llama(size)[1], *(["scalar"] if extra else [])]
    return {name: i * parts // len(names) + 1 for i, name in enumerate(names)}


def measure_p17(place: Place) -> Iterator[Result]:
    """Both sides on each form; their outputs must be the same tensors."""
    # Each rank is a process that imports torch.
    world = WORLD if place.full else 2
    write(place.disk, place.size, world, 1)
    out = place.disk / "out"
    nbytes = 2 * sum(torch.Size(s).numel() for s in llama(place.size)[1].values())
    for form, name, run in (
        (SHARDED, "dcp_to_torch_save", "torch_save"),
        (RANKS, "DCP consolidate", "consolidate_ranks"),
    ):
        source = place.disk / f"{form}-1"
        ours = merge(source, out)
        theirs = peer(name, run, source, out, index=mapping(place.size))
        targets = TARGETS if form == SHARDED else ()
        result = Result(f"{form}, {world} ranks", ours.label, theirs.label, targets, nbytes)
        yield compare(
            result, [theirs, ours], place.rounds, source=source, out=out, check=expect_same(contents)
        )
        remove(source)


# --- damage ---


def metadata(root: Path, change: Callable[[Any], None]) -> None:
    """Loads, changes and saves `.metadata` with torch's own classes."""
    content = pickle.loads((root / ".metadata").read_bytes())
    change(content)
    (root / ".metadata").write_bytes(pickle.dumps(content))


def header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the header of a safetensors file."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    change(table)
    text = json.dumps(table).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def flip(file: Path) -> None:
    """One bit in the middle of the file."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)


def cut(file: Path) -> None:
    """The last tenth is lost."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 9 // 10])


EMBED = "model.embed_tokens.weight"


def hole(content: Any) -> None:
    chunks = content.state_dict_metadata[EMBED].chunks
    lost = chunks.pop(1)
    index = next(i for i in content.storage_data if i.fqn == EMBED and i.offset == lost.offsets)
    del content.storage_data[index]


def overlap(content: Any) -> None:
    """The second chunk lies one row further up than it should."""
    import dataclasses

    chunks = content.state_dict_metadata[EMBED].chunks
    old = chunks[1]
    moved = torch.Size([old.offsets[0] - 1, *old.offsets[1:]])
    chunks[1] = type(old)(offsets=moved, sizes=old.sizes)
    index = next(i for i in content.storage_data if i.fqn == EMBED and i.offset == old.offsets)
    content.storage_data[dataclasses.replace(index, offset=moved)] = content.storage_data.pop(index)


def forget(content: Any) -> None:
    """One tensor is in no record."""
    name = "model.layers.1.mlp.up_proj.weight"
    del content.state_dict_metadata[name]
    for index in [i for i in content.storage_data if i.fqn == name]:
        del content.storage_data[index]


def shift(table: dict[str, Any]) -> None:
    """A chunk one row further up than it should be."""
    info = json.loads(table["__metadata__"]["DCP_SHARDING_INFO"])
    info[EMBED]["saved_offsets"][0] -= 1
    table["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)


def other_step(file: Path) -> None:
    """The rank's file of another save (seed 2) of the same run."""
    there = file.parent.parent / f"{file.parent.name.removesuffix('-damaged')[:-1]}2" / file.name
    shutil.copy(there, file)


#: (form, what, what is done to the copy)
DAMAGE: list[tuple[str, str, Callable[[Path, list[Path]], object]]] = [
    (SHARDED, "none", lambda root, files: None),
    (SHARDED, "the last rank's file is missing", lambda root, files: files[-1].unlink()),
    (SHARDED, "a middle rank's file is missing", lambda root, files: files[1].unlink()),
    (SHARDED, "`.metadata` is missing", lambda root, files: (root / ".metadata").unlink()),
    (SHARDED, "hole: a chunk is not in `.metadata`", lambda root, files: metadata(root, hole)),
    (SHARDED, "two chunks overlap in `.metadata`", lambda root, files: metadata(root, overlap)),
    (SHARDED, "a tensor is not in `.metadata`", lambda root, files: metadata(root, forget)),
    (SHARDED, "one bit is flipped", lambda root, files: flip(files[1])),
    (SHARDED, "a file is cut short", lambda root, files: cut(files[1])),
    (SHARDED, "a file is another rank's", lambda root, files: shutil.copy(files[2], files[1])),
    (SHARDED, "a file is of another step", lambda root, files: other_step(files[1])),
    (RANKS, "none (a 0-d tensor among them)", lambda root, files: None),
    ("integers", "none (integers among them)", lambda root, files: None),
    (RANKS, "the last rank's file is missing", lambda root, files: files[-1].unlink()),
    (RANKS, "a middle rank's file is missing", lambda root, files: files[1].unlink()),
    (RANKS, "two chunks overlap", lambda root, files: header(files[1], shift)),
    (RANKS, "one bit is flipped", lambda root, files: flip(files[1])),
    (RANKS, "a file is cut short", lambda root, files: cut(files[1])),
    (RANKS, "a file is another rank's", lambda root, files: shutil.copy(files[2], files[1])),
    (RANKS, "a file is of another step", lambda root, files: other_step(files[1])),
]


def judged(out: Path, truth: dict[str, str]) -> str:
    """Whether a published result is the right one."""
    have = contents(out)
    wrong = [n for n in truth if have.get(n) != truth[n]]
    return "right" if not wrong else f"**silently wrong**: {len(wrong)} of {len(truth)} tensors"


def theirs(form: str, root: Path, out: Path, size: int, truth: dict[str, str]) -> str:
    """What torch's tool makes of it."""
    arguments = {"src": str(root), "out": str(out), "threads": 1, "index": mapping(size, extra=True, parts=1)}
    if form == "integers":
        arguments["index"] |= {"counts": 1}
    side = "torch_save" if form == SHARDED else "consolidate_ranks"
    command = [sys.executable, str(Path(__file__).with_name("sides.py")), side, json.dumps(arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = [line for line in ran.stderr.splitlines() if line and not line.startswith((" ", "["))][-1]
        return f"error: {last.split(':')[0].rpartition('.')[2]}"
    try:
        return judged(out, truth)
    except Exception as error:
        return f"**output that cannot be read** ({type(error).__name__})"


def ours(root: Path, out: Path, truth: dict[str, str], expect: Path | None = None) -> str:
    """The finding's code, or what was published."""
    from fastshard.cli import main as fastshard_main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        more = ["--expect", str(expect)] if expect else []
        code = fastshard_main(["merge", str(root), str(out), "--json", "--memory", "2GiB", *more])
    document = json.loads(text.getvalue())
    if code:
        found = [f["code"] for f in document["findings"] if f["severity"] == "error"]
        return ", ".join(dict.fromkeys(found))
    return judged(out, truth)


def damage(folder: Path) -> str:
    """A table of what each side makes of damaged copies."""
    size, world = 1 << 20, 4
    for seed in (1, 2):
        write(folder, size, world, seed, extra=True)
    truth, manifests = {}, {}
    for form in (SHARDED, RANKS, "integers"):
        good = folder / f"good-{form}"
        assert ours(folder / f"{form}-1", good, {}) == "right"
        manifests[form] = good
        truth[form] = contents(good)
    # Ours and torch's own loading of the DCP agree on every tensor before anything is damaged.
    assert theirs(SHARDED, folder / f"{SHARDED}-1", folder / "check", size, truth[SHARDED]) == "right"
    assert all(truth[SHARDED][n] == h for form in truth for n, h in truth[form].items())
    lines = [
        "| input | damage | torch | fastshard | fastshard with `--expect` a manifest of the good one |",
        "|---|---|---|---|---|",
    ]
    for form, what, spoil in DAMAGE:
        root = folder / f"{form}-1-damaged"
        shutil.copytree(folder / f"{form}-1", root)
        spoil(root, sorted([*root.glob("*.distcp"), *root.glob("*.safetensors")]))
        told = [
            theirs(form, root, folder / "theirs", size, truth[form]),
            ours(root, folder / "ours", truth[form]),
            ours(root, folder / "expected", truth[form], manifests[form]),
        ]
        lines.append(f"| {RANKS if form != SHARDED else form} | {what} | {' | '.join(told)} |")
        for made in (root, folder / "theirs", folder / "ours", folder / "expected"):
            shutil.rmtree(made, ignore_errors=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("damage",))
    parser.add_argument("--dir", type=workplace, default=None, help="a folder for the checkpoints")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fastshard-bench-", dir=options.dir) as name:
        print(damage(Path(name)))


if __name__ == "__main__":
    main()
