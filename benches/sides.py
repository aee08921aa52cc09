"""One side of a comparison, in a process of its own: `python benches/sides.py SIDE JSON`.

Imports are done before the clock starts. Prints one JSON object: wall and CPU seconds (children
included) and the peaks of resident and anonymous memory that the process reads of itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = Callable[[], object]


def status(key: str) -> int:
    """A field of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key)), 0)


def cpu() -> float:
    """Seconds of CPU of this process and of the children it has waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in uses)


class Peak:
    """Peak of the anonymous memory, sampled: the system keeps a high-water mark only of all of it."""

    def __init__(self) -> None:
        self.anonymous = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.anonymous = max(self.anonymous, status("RssAnon:"))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.anonymous = max(self.anonymous, status("RssAnon:"))


def fsync(path: Path) -> None:
    """Brings files and directories to disk."""
    for inside in [*path.rglob("*"), path, path.parent]:
        fd = os.open(inside, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def fastshard(a: dict[str, Any]) -> Job:
    import fastshard as fs

    options = {
        k: a[k] for k in ("threads", "fsync", "memory", "dtype", "layout", "config", "weights") if k in a
    }
    return lambda: fs.convert(a["src"], a["out"], a.get("to"), **options)


def verify(a: dict[str, Any]) -> Job:
    import fastshard as fs

    def job() -> None:
        errors = [f for f in fs.verify(a["src"], threads=a["threads"]) if f.severity == "error"]
        assert not errors, errors

    return job


def copy(a: dict[str, Any]) -> Job:
    def job() -> None:
        subprocess.run(["cp", "-r", "--reflink=never", a["src"], a["out"]], check=True)
        if a["fsync"]:
            fsync(Path(a["out"]))

    return job


def consolidate(a: dict[str, Any]) -> Job:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = list(json.loads((Path(a["src"]) / "layout.json").read_text())["tp_dim"])
    # Its threads take one output file each: as many files of equal parts as threads.
    part = -(-len(names) // a["threads"])
    index = {name: i // part + 1 for i, name in enumerate(names)}

    def job() -> None:
        Path(a["out"]).mkdir()
        consolidate_safetensors_files(a["src"], a["out"], index, num_threads=a["threads"])

    return job


def script(a: dict[str, Any]) -> Job:
    """Load every rank, concatenate, save: what everybody writes."""
    import torch
    from safetensors.torch import load_file, save_file

    def job() -> None:
        source = Path(a["src"])
        dims = json.loads((source / "layout.json").read_text())["tp_dim"]
        ranks = [load_file(p) for p in sorted(source.glob("*.safetensors"))]
        merged = {}
        for name, dim in dims.items():
            parts = [rank[name] for rank in ranks]
            merged[name] = parts[0] if dim is None else torch.cat(parts, dim=dim)
        Path(a["out"]).mkdir()
        save_file(merged, str(Path(a["out"]) / "model.safetensors"), metadata={"format": "pt"})

    return job


def zero_to_fp32(a: dict[str, Any]) -> Job:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    def job() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            convert_zero_checkpoint_to_fp32_state_dict(a["src"], a["out"], safe_serialization=True)

    return job


def consolidate_ranks(a: dict[str, Any]) -> Job:
    """torch's consolidation of rank shards that its HuggingFaceStorageWriter wrote."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    def job() -> None:
        Path(a["out"]).mkdir()
        consolidate_safetensors_files(a["src"], a["out"], a["index"], num_threads=a["threads"])

    return job


def torch_save(a: dict[str, Any]) -> Job:
    """torch's conversion of a distributed checkpoint to one file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def job() -> None:
        Path(a["out"]).mkdir()
        dcp_to_torch_save(a["src"], Path(a["out"]) / "model.pt")

    return job


def verl_merge(a: dict[str, Any]) -> Job:
    """verl's merger of FSDP's rank files, which writes what transformers saves."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    def job() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            config = ModelMergerConfig(
                operation="merge", backend="fsdp", local_dir=a["src"], target_dir=a["out"],
                hf_model_config_path=str(Path(a["src"]) / "huggingface"), trust_remote_code=False,
            )  # fmt: skip
            FSDPModelMerger(config).merge_and_save()

    return job


def fp8_dequantizer(a: dict[str, Any]) -> Job:
    """compressed-tensors' values of fp8 blocks, file by file, as its converter writes them."""
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
    from safetensors.torch import load_file, save_file

    dequantizer = FP8BlockDequantizer.from_pretrained(a["src"])

    def job() -> None:
        out = Path(a["out"])
        out.mkdir()
        for file in sorted(Path(a["src"]).glob("*.safetensors")):
            save_file(dequantizer.process(load_file(file)), out / file.name, {"format": "pt"})

    return job


def command(a: dict[str, Any]) -> Job:
    return lambda: subprocess.run(a["command"], check=True, stdout=subprocess.DEVNULL)


def paxml_script(a: dict[str, Any]) -> Job:
    """Paxml's arrays in MaxText's order, one whole array after another."""
    import numpy as np
    import tensorstore as ts

    source = next(Path(a["src"]).glob("checkpoints/*"))
    context = ts.Context({"file_io_sync": False})

    def job() -> None:
        item = Path(a["out"]) / "4000" / "items"
        item.mkdir(parents=True)
        for name, (to, order) in a["mapping"].items():
            path = f"{source}/mdl_vars.params.lm.{name}/"
            read = ts.open({"driver": "zarr", "kvstore": {"driver": "file", "path": path}}).result()
            value = np.ascontiguousarray(np.transpose(read.read().result(), order))
            chunk = list(value.shape)
            chunk[0] = max(1, chunk[0] // 16)
            inner = {"chunk_shape": chunk}
            little = {"name": "bytes", "configuration": {"endian": "little"}}
            sharding = {
                **inner,
                "codecs": [little, {"name": "zstd", "configuration": {"level": 3, "checksum": False}}],
                "index_codecs": [little, {"name": "crc32c"}],
            }
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "ocdbt", "base": f"file://{item}/", "path": f"params.params.{to}/"},
                "metadata": {
                    "shape": value.shape, "data_type": "float32",
                    "chunk_grid": {"name": "regular", "configuration": inner},
                    "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                },
            }  # fmt: skip
            ts.open(spec, create=True, context=context).result().write(value).result()

    return job


def cli(a: dict[str, Any]) -> Job:
    """A fastshard command in this process, whose memory can then be read."""
    from fastshard.cli import main as fastshard_main

    def job() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                code = fastshard_main(a["command"])
            except SystemExit as stop:
                code = stop.code
        assert not code, code

    return job


def model(a: dict[str, Any]) -> Job:
    """A model of transformers in memory: from a view, or converted and loaded. Its logits are left at ``out``."""
    import fastshard as ours
    import torch
    import transformers

    def job() -> None:
        if a["how"] == "convert":
            ours.convert(a["source"], a["into"], to="hf", fsync=False)
            kind = transformers.AutoModelForCausalLM
            made = kind.from_pretrained(a["into"], dtype="auto").eval()
        else:
            made = ours.load_model(a["source"], verify=a["how"] == "verified")
        with torch.no_grad():
            torch.save(made(torch.arange(16)[None]).logits, a["out"])

    return job


SIDES = {
    f.__name__: f
    for f in (
        fastshard, verify, copy, consolidate, consolidate_ranks, torch_save, script, zero_to_fp32, command, cli,
        paxml_script, model, verl_merge, fp8_dequantizer,
    )
}  # fmt: skip


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    job = SIDES[name](arguments)
    threads = arguments.get("threads")
    if name in (
        "consolidate",
        "consolidate_ranks",
        "torch_save",
        "script",
        "zero_to_fp32",
        "verl_merge",
        "fp8_dequantizer",
    ):
        import torch

        torch.set_num_threads(threads)
    with Peak() as peak:
        before, wall = cpu(), time.perf_counter()
        job()
        wall, spent = time.perf_counter() - wall, cpu() - before
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    figures = {"wall": wall, "cpu": spent, "rss": status("VmHWM:"), "anonymous": peak.anonymous}
    print(json.dumps({**figures, "children": children}))


if __name__ == "__main__":
    main()
