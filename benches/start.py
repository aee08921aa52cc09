"""How long it takes to start: `import fastshard`, `fastshard --version`, and looking at small checkpoints,
above bare Python.

    python benches/all_bars.py --only P9,P18

Rounds are interleaved. Names: a checkpoint of very many tensors is planned (P18).
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import synthetic
from measure import Place, Result, Side, Target, compare, remove

ROOT = Path(__file__).parents[1]
#: Small checkpoints of the tests, by what they are.
CHECKPOINTS = {
    "Hugging Face": "sharded/hf_sharded",
    "Megatron-LM": "sharded/megatron_legacy_tp2_pp2",
    "DeepSpeed": "deepspeed/zero1_bf16_dp2",
    "GPT-NeoX": "gpt_neox/neox_pp_tp2",
    "DCP": "sharded/dcp_fsdp2",
}
#: Milliseconds above bare Python that a side may take.
BARS = {"import": 3, "--version": 10, "inspect": 60, "verify": 70}


def write_names(folder: Path, count: int) -> None:
    """Writes a checkpoint of many tensors of one number."""
    names = [f"t{number:07d}" for number in range(count)]
    entries = {
        n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * count))


def list_sides() -> dict[str, Side]:
    """What is measured, each a process of its own; the first is bare Python."""
    run = ["-m", "fastshard"]
    found = {
        "bare Python": ["-c", "pass"],
        "import": ["-c", "import fastshard"],
        "--version": [*run, "--version"],
    }
    for verb in ("inspect", "verify"):
        for name, path in CHECKPOINTS.items():
            found[f"{verb} {name}"] = [*run, verb, str(ROOT / "tests/fixtures" / path)]
    return {
        name: Side(name, "command", {"command": [sys.executable, *command]})
        for name, command in found.items()
    }


def measure_p9(place: Place) -> Iterator[Result]:
    """Every start above bare Python's, and a plan of an index of 175B."""
    bare, *others = list_sides().values()
    rounds = 4 * place.rounds if place.full else place.rounds
    both = Result("all starts", "", "", (), 0)
    compare(both, [bare, *others], rounds, source=Path(__file__), out=None)
    for side in others:
        records = {label: both.records[label] for label in (side.label, bare.label)}
        targets = (Target("above_ms", BARS[side.label.split()[0]]),)
        yield Result(side.label, side.label, bare.label, targets, 0, records, state="warm")
    source = place.memory / "index"
    entries = synthetic.sparse(source, 512)
    for verb in ("inspect", "plan"):
        side = Side(verb, "cli", {"command": [verb, str(source), "--accept", "holes"]})
        result = Result(
            f"{verb} of 175B, {entries:,} entries in 512 files",
            side.label,
            "",
            (Target("seconds", 0.150),),
            0,
        )
        yield compare(result, [side], place.rounds, source=source / "layout.json", out=None)
    remove(source)


def measure_p18(place: Place) -> Iterator[Result]:
    """Names: opened, resolved and planned, a quarter of them and all."""
    count = 1_000_000 if place.full else 20_000
    source, seconds = place.memory / "names", 0.0
    for names in (count // 4, count):
        source.mkdir()
        write_names(source, names)
        command = ["plan", str(source), "--memory", "4GiB"]
        side = Side("plan", "cli", {"command": command})
        result = Result(f"plan of {names:,} names", side.label, "", (), 0)
        compare(result, [side], 1, source=source, out=None)
        if names == count:
            result.more["growth"] = result.figures()["seconds"] / seconds
            # Four times the names in at most five times the time: linear, with room for noise.
            result.targets = (Target("growth", 5),)
            if place.full:
                result.targets += (Target("seconds", 10), Target("peak_mib", 512))
        seconds = result.figures()["seconds"]
        yield result
        remove(source)
