"""Peak anonymous memory of every verb over hostile and real shapes, within a budget.

    python tests/trials/memory.py                                  # all inputs, all verbs: an hour
    python tests/trials/memory.py --only "wide tensor" --scale 0.1
    python tests/trials/memory.py --verbs merge,verify

Each verb that reads a checkpoint runs with `--memory 256MiB --threads 1`. RssAnon of its process is read
every 2 ms: within that time the kernel gives it no more than some 8 MiB that the next look would not see.
Children are not counted: the one that lists expected tensors has a limit of its own. Prints the peaks in MiB,
with the exit code where that is not 0; `refused` is `FS512`. The exit code is 1 if a peak is above the
budget, or if a run ended otherwise than by an exit code of fastshard's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in (".", "makers", "quantised", "publishing")]

import test_quantised_memory as quantised  # noqa: E402
from test_quantised_memory import write_sparse  # noqa: E402
from verb_runs import KEPT, Input, find_run_id, list_verbs, make_arguments  # noqa: E402

MIB = 1 << 20
#: Factor of the sizes of all inputs.
SCALE = 1.0
PLAIN = {"quant_method": "fp8"}
HOLES = ("--accept", "holes")


def scaled(count: int) -> int:
    return max(int(count * SCALE), 16) // 16 * 16


def write_names(folder: Path, files: int, count: int, length: int = 0) -> Input:
    """Tensors of one number in several files."""
    folder.mkdir()
    count = scaled(count)
    each = -(-count // files)
    for file in range(files):
        names = [f"t{i:07d}".ljust(length, "x") for i in range(file * each, min((file + 1) * each, count))]
        entries = {
            n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)
        }
        header = json.dumps(entries).encode()
        values = np.arange(len(names), dtype="<f4") + file * each
        path = folder / f"model-{file + 1:05d}-of-{files:05d}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    return Input(folder, "t0000000".ljust(length, "x"))


def write_plain(folder: Path, shape: list[int], name: str = "a.weight") -> Input:
    """One tensor of holes."""
    write_sparse(folder, PLAIN, {name: ("F32", shape)}, {})
    (folder / "config.json").unlink()
    return Input(folder, name, HOLES)


def write_quantised(make: Callable[[Path], Path], tensor: str) -> Callable[[Path], Input]:
    return lambda folder: Input(make(folder), tensor, HOLES)


def write_block_fp8(folder: Path) -> Input:
    rows = scaled(32768)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    tensors: quantised.Stored = {
        "a.weight": ("F8_E4M3", [rows, 32768]),
        "a.weight_scale_inv": ("F32", [-(-rows // 128), 256]),
    }
    return Input(write_sparse(folder, config, tensors, {}), "a.weight", HOLES)


def write_compressed_tensors(folder: Path) -> Input:
    import quantised_maker

    rows = scaled(16384)
    config = quantised_maker.ct("float-quantized", 8, "float", strategy="channel")
    tensors: quantised.Stored = {"a.weight": ("F8_E4M3", [rows, 16384]), "a.weight_scale": ("F32", [rows, 1])}
    filled = {"a.weight_scale": np.ones(rows, "<f4").tobytes()}
    return Input(write_sparse(folder, config, tensors, filled), "a.weight", HOLES)


def write_torch_zip(folder: Path) -> Input:
    import torch

    folder.mkdir()
    state = {f"t{i}": torch.full((16,), float(i)) for i in range(scaled(50_000))}
    torch.save(state, folder / "pytorch_model.bin")
    return Input(folder, "t0")


def write_example(*words: str, tensor: str) -> Callable[[Path], Input]:
    def write(folder: Path) -> Input:
        command = [sys.executable, "-m", "fastshard.examples", *words, str(folder)]
        subprocess.run(command, check=True, capture_output=True)
        return Input(folder, tensor, target="hf")

    return write


def write_zero(stage: int) -> Callable[[Path], Input]:
    def write(folder: Path) -> Input:
        import torch
        import zero_maker

        sides = scaled(2048)
        groups = [{f"w{i}": torch.randn(sides, 2048) for i in range(6)}]
        zero_maker.write(folder, zero_maker.Run(stage, 2, torch.bfloat16, groups))
        return Input(folder, "w0")

    return write


def write_orbax(compressor: dict[str, Any] | None) -> Callable[[Path], Input]:
    def write(folder: Path) -> Input:
        import orbax_maker

        folder.mkdir()
        values = orbax_maker.painted(scaled(8192), 16384)
        orbax_maker.write(folder, "w", values, [1024, 16384], compressor=compressor)
        orbax_maker.describe(folder, ["w"])
        return Input(folder, "w")

    return write


def write_dcp(folder: Path) -> Input:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {f"w{i}": torch.randn(scaled(4096), 4096) for i in range(5)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return Input(folder, "w0", target="hf")


def write_adapter(folder: Path) -> Input:
    folder.mkdir()
    name, side = "model.layers.0.self_attn.q_proj", scaled(4096)
    write_plain(folder / "base", [side, 16384], f"{name}.weight")
    factors: quantised.Stored = {
        f"base_model.{name}.lora_A.weight": ("F32", [64, 16384]),
        f"base_model.{name}.lora_B.weight": ("F32", [side, 64]),
    }
    write_sparse(folder / "adapter", {}, factors, {})
    (folder / "adapter/model.safetensors").rename(folder / "adapter/adapter_model.safetensors")
    (folder / "adapter/config.json").unlink()
    config = {"peft_type": "LORA", "r": 64, "lora_alpha": 128, "target_modules": ["q_proj"]}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    return Input(folder / "base", f"{name}.weight", (*HOLES, "--adapter", str(folder / "adapter")))


def write_manifest(folder: Path) -> Input:
    given = write_names(folder, 1, 50_000)
    subprocess.run([sys.executable, "-m", "fastshard", "manifest", str(folder), "-q"], check=True)
    return given


def write_steps(folder: Path) -> Input:
    """A run with 500 steps, each of few bytes."""
    import torch
    import zero_maker

    zero_maker.write(folder, zero_maker.Run(1, 2, torch.bfloat16, [{"w0": torch.randn(64, 64)}]))
    for step in range(100, 600):
        shutil.copytree(folder / zero_maker.TAG, folder / f"global_step{step}", copy_function=os.link)
    (folder / "latest").write_text("global_step599")
    return Input(folder, "w0")


def write_large_config(folder: Path) -> Input:
    given = write_example("llama", tensor="lm_head.weight")(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": "x" * scaled(30_000_000)}))
    return given


def write_large_index(folder: Path) -> Input:
    given = write_names(folder, 2, 1000)
    files = sorted(path.name for path in folder.iterdir())
    index = {f"t{i:07d}": files[i // (scaled(1000) // 2)] for i in range(scaled(1000))}
    document = {"weight_map": index, "metadata": {"note": "x" * scaled(60_000_000)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return given


INPUTS: dict[str, Callable[[Path], Input]] = {
    "gpt-oss": write_quantised(quantised.gpt_oss, "m.experts.gate_up_proj_scales"),
    "fp8": write_quantised(quantised.fp8, "a.weight"),
    "nvfp4": write_quantised(quantised.nvfp4, "a.weight"),
    "bitsandbytes": write_quantised(quantised.bitsandbytes, "a.weight"),
    "gptq": write_quantised(quantised.gptq, "a.qweight"),
    "block fp8": write_block_fp8,
    "compressed-tensors": write_compressed_tensors,
    "6000 long names": lambda folder: write_names(folder, 1, 6000, 5000),
    "1000000 names": lambda folder: write_names(folder, 10, 1_000_000),
    "200000 names": lambda folder: write_names(folder, 1, 200_000),
    "wide tensor": lambda folder: write_plain(folder, [1, scaled(1 << 29)]),
    "tall tensor": lambda folder: write_plain(folder, [scaled(1 << 29), 1]),
    "64 dimensions": lambda folder: write_plain(folder, [2] * 24 + [1] * 40),
    "torch zip": write_torch_zip,
    "neox tp=4": write_example(
        "gpt_neox", "--to", "gpt_neox", "--tp", "4", tensor="0.word_embeddings.weight"
    ),
    "megatron tp=4": write_example(
        "llama", "--to", "megatron", "--tp", "4", tensor="embedding.word_embeddings.weight"
    ),
    "ZeRO-1": write_zero(1),
    "ZeRO-2": write_zero(2),
    "ZeRO-3": write_zero(3),
    "Orbax": write_orbax(None),
    "Orbax zstd": write_orbax({"id": "zstd", "level": 1}),
    "torch DCP": write_dcp,
    "adapter": write_adapter,
    "with manifest": write_manifest,
    "500 steps": write_steps,
    "config 30 MB": write_large_config,
    "index 60 MB": write_large_index,
}


def measure(argv: list[str], log: Path) -> tuple[int, float]:
    """The exit code of fastshard and the most MiB of anonymous memory that were seen in its process."""
    peak = 0
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "fastshard", *argv], stdout=output, stderr=output)
        with Path(f"/proc/{process.pid}/status").open("rb", buffering=0) as status:
            while process.poll() is None:
                status.seek(0)
                _, found, rest = status.read(4096).partition(b"RssAnon:")
                peak = max(peak, int(rest.split(None, 1)[0]) if found else 0)
                time.sleep(0.002)
    return process.returncode, peak / 1024


def run_verbs(name: str, given: Input, verbs: list[str], folder: Path, budget: int) -> tuple[list[str], int]:
    """The cells of an input's row, and how many of them are violations."""
    cells, violations, run_id = [], 0, ""
    for verb in verbs:
        if verb == "commit" and run_id:
            measure(["make-part", "1", f"{folder}/parted", "--run", run_id], folder / "log")
        argv = make_arguments(verb, given, folder, run_id)
        code, peak = measure([*argv, "--memory", f"{budget}MiB", "--threads", "1"], folder / "log")
        output = (folder / "log").read_text(errors="replace")
        run_id = find_run_id(output) if verb == "split" else run_id
        ended = "" if code == 0 else " refused" if "FS512" in output else f" ({code})"
        cells.append(f"{peak:.0f}{ended}")
        if peak > budget or code not in (0, 1, 2, 3) or "Traceback" in output:
            violations += 1
            print(f"VIOLATION {name}: {peak:.0f} MiB, exit code {code}: fastshard {' '.join(argv)[:400]}")
            print(output[-2000:] if code not in (0, 1, 2, 3) or "Traceback" in output else "", flush=True)
        if verb not in KEPT:
            for path in [
                path
                for path in folder.iterdir()
                if path.name in ("fp32", "consolidated", "converted", "part")
            ]:
                shutil.rmtree(path)
    return cells, violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where inputs are made")
    parser.add_argument("--budget", type=int, default=256, help="MiB")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all sizes")
    parser.add_argument("--only", help="inputs, by commas")
    parser.add_argument("--verbs", help="verbs, by commas")
    options = parser.parse_args()
    global SCALE
    SCALE = options.scale
    verbs = [verb for verb in list_verbs() if not options.verbs or verb in options.verbs.split(",")]
    inputs = [name for name in INPUTS if not options.only or name in options.only.split(",")]
    total = 0
    print("\t".join(["MiB", *verbs]), flush=True)
    for name in inputs:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="memory-") as folder:
            given = INPUTS[name](Path(folder, "in"))
            Path(folder, "out").mkdir()
            cells, violations = run_verbs(name, given, verbs, Path(folder, "out"), options.budget)
        print("\t".join([name, *cells]), flush=True)
        total += violations
    print(f"{len(inputs)} inputs, {len(verbs)} verbs: {total} above {options.budget} MiB")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
