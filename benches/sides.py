"""One side of a comparison, in a process of its own: `python benches/sides.py SIDE JSON`.

Imports are done before the clock starts. Prints one JSON object: wall and CPU seconds (children
included), the peaks of resident and anonymous memory that the process reads of itself (or, while it waits
for programs, of those), calls that read and write, and their bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What is measured; it may return figures that it took itself.
Job = Callable[[], "dict[str, float] | None"]
#: The names of files that are opened before and after a job, for who reads a trace.
BEGIN, END = "/dev/null/job-begins", "/dev/null/job-ends"


def status(key: str, process: str = "self") -> int:
    """A field of a process's status, in bytes."""
    text = Path(f"/proc/{process}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key)), 0)


def list_children(process: str) -> list[str]:
    """The processes that a process began, and that those began."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        for child in file.read_text().split():
            found += [child, *list_children(child)]
    return found


def count_io() -> dict[str, float]:
    """Calls that read and write, and their bytes: of this process and of the children it has waited for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    fields = {name: int(value) for name, value in (line.split(":") for line in lines)}
    names = {"reads": "syscr", "writes": "syscw", "read_bytes": "rchar", "written_bytes": "wchar"}
    return {name: fields[field] for name, field in names.items()}


def mark(path: str) -> None:
    """Leaves a line in a trace."""
    with contextlib.suppress(OSError):
        os.open(path, os.O_RDONLY)


def cpu() -> float:
    """Seconds of CPU of this process and of the children it has waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in uses)


class Peak:
    """Peak of the anonymous memory of this process, or of the programs that it waits for.

    It is sampled: the system keeps a high-water mark only of all memory.
    """

    def __init__(self, programs: bool) -> None:
        self.anonymous = 0
        self._programs = programs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _look(self) -> None:
        # A program may end while it is looked at.
        with contextlib.suppress(OSError):
            processes = list_children("self") if self._programs else ["self"]
            self.anonymous = max(self.anonymous, sum(status("RssAnon:", process) for process in processes))

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._look()

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()


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

    # Adapters, targets, what plans, and numpy for some casts are imported when they are first used: before
    # the clock starts.
    if "dtype" in a:
        importlib.import_module("numpy")
    fs.plan(
        a["src"],
        a.get("to"),
        **{k: v for k, v in options.items() if k in ("dtype", "layout", "config", "weights")},
    )

    def job() -> None:
        fs.convert(a["src"], a["out"], a.get("to"), **options)

    return job


def verify(a: dict[str, Any]) -> Job:
    import fastshard as fs

    # What verify imports when it is called.
    fixture = Path(__file__).parents[1] / "tests/fixtures/sharded/hf_sharded"
    with tempfile.TemporaryDirectory() as folder:
        fs.merge(fixture, Path(folder, "out"), fsync=False)
        fs.verify(Path(folder, "out"), threads=a["threads"])

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
            if a.get("cast"):
                merged[name] = merged[name].to(torch.bfloat16)
        Path(a["out"]).mkdir()
        save_file(merged, str(Path(a["out"]) / "model.safetensors"), metadata={"format": "pt"})

    return job


def zero_to_fp32(a: dict[str, Any]) -> Job:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # What it imports when it is called.
    for module in ("huggingface_hub.serialization._torch", "safetensors.torch", "torch.distributed.tensor"):
        importlib.import_module(module)
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

    # What it imports when it is called: a model's and a tokenizer's classes, and what transformers finds
    # installed.
    for module in (
        "transformers.models.llama.modeling_llama",
        "transformers.tokenization_utils_tokenizers",
        "deepspeed",
        "accelerate",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    def job() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            config = ModelMergerConfig(
                operation="merge",
                backend="fsdp",
                local_dir=a["src"],
                target_dir=a["out"],
                hf_model_config_path=str(Path(a["src"]) / "huggingface"),
                trust_remote_code=False,
            )
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
    """Any program, its start included."""

    def job() -> None:
        subprocess.run(a["command"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return job


def commands(a: dict[str, Any]) -> Job:
    """Programs one after another, their starts included; ``before`` runs ahead, when ``remove`` is gone."""
    for folder in a["remove"]:
        shutil.rmtree(folder, ignore_errors=True)
    for words in a["before"]:
        subprocess.run(words, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def job() -> None:
        for words in a["commands"]:
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return job


def obstore_reads(a: dict[str, Any]) -> Job:
    """All large files below an address, in ranges of 8 MiB by four threads, with conditions."""
    from concurrent.futures import ThreadPoolExecutor

    import obstore

    store = obstore.store.from_url(a["address"], client_options={"allow_http": True})

    def job() -> None:
        files = [meta for batch in obstore.list(store) for meta in batch if meta["size"] > 1 << 20]
        step = 8 << 20
        ranges = [(meta, at) for meta in files for at in range(0, meta["size"], step)]

        def read(one: tuple[Any, int]) -> int:
            meta, at = one
            options: Any = {"range": (at, min(at + step, meta["size"])), "if_match": meta["e_tag"]}
            return len(obstore.get(store, meta["path"], options=options).bytes())

        with ThreadPoolExecutor(4) as pool:
            total = sum(pool.map(read, ranges))
        assert total == sum(meta["size"] for meta in files)

    return job


def program_speed(a: dict[str, Any]) -> Job:
    """A kernel of the core, by a program that times it itself and prints GB/s."""

    def job() -> dict[str, float]:
        ran = subprocess.run([a["program"], a["filter"]], check=True, capture_output=True, text=True)
        seconds = a["nbytes"] / float(ran.stdout.split()[-2]) / 1e9
        return {"wall": seconds, "cpu": seconds}

    return job


def kernel(a: dict[str, Any]) -> Job:
    """The same of torch or numpy on one thread, after a first run."""
    import numpy as np
    import torch

    rows, columns = a["shape"]
    source: Any = torch.ones(rows, columns, dtype=getattr(torch, a["dtype"]))
    # Results are touched before the clock starts, as those of the core's program are.
    out: Any = torch.ones(
        source.t().shape if "transpose" in a["work"] else source.shape, dtype=torch.bfloat16
    )
    work: dict[str, Callable[[], object]] = {
        "torch transpose": lambda: out.copy_(source.t()),
        "numpy transpose": lambda: np.copyto(
            out.view(torch.int16).numpy(), source.view(torch.int16).numpy().T
        ),
        "torch cast": lambda: out.copy_(source),
    }

    def job() -> dict[str, float]:
        seconds = []
        for _ in range(4):
            begun = time.perf_counter()
            work[a["work"]]()
            seconds.append(time.perf_counter() - begun)
        return {"wall": min(seconds[1:]), "cpu": min(seconds[1:])}

    return job


def cast_script(a: dict[str, Any]) -> Job:
    """Load every rank, concatenate, round to bfloat16, save."""
    return script({**a, "cast": True})


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
                    "shape": value.shape,
                    "data_type": "float32",
                    "chunk_grid": {"name": "regular", "configuration": inner},
                    "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
                },
            }
            ts.open(spec, create=True, context=context).result().write(value).result()

    return job


def cli(a: dict[str, Any]) -> Job:
    """A fastshard command in this process, whose memory can then be read."""
    from fastshard.cli import main as fastshard_main

    def job() -> None:
        code: str | int | None
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                code = fastshard_main(a["command"])
            except SystemExit as stop:
                code = stop.code
        assert not code, code

    return job


def model(a: dict[str, Any]) -> Job:
    """A model of transformers in memory: from a view, or converted and loaded. Its logits are left at
    ``out``."""
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


def write_logits(folder: Path, logits: Any) -> None:
    """Writes the bytes of logits into a folder."""
    import torch

    folder.mkdir()
    (folder / "logits").write_bytes(logits.contiguous().view(torch.uint8).numpy().tobytes())


def layerwise(a: dict[str, Any]) -> Job:
    """The logits of a model from its shards, a decoder layer at a time; they are left at ``out``."""
    import fastshard as ours
    import torch

    # What it imports when it is called, and the peer below.
    import transformers.conversion_mapping
    import transformers.core_model_loading
    import transformers.models.llama.modeling_llama  # noqa: F401
    from fastshard.evaluation.layerwise_model import LayerwiseModel

    tokens = torch.tensor(json.loads(Path(a["tokens"]).read_text()))[None]

    def job() -> None:
        logits = LayerwiseModel(ours.open(a["source"], to="hf")).run(tokens)
        write_logits(Path(a["out"]), logits)

    return job


def disk_offload(a: dict[str, Any]) -> Job:
    """The same of a converted copy, by accelerate's hooks, which load each module when it runs."""
    import torch
    import transformers.models.llama.modeling_llama

    tokens = torch.tensor(json.loads(Path(a["tokens"]).read_text()))[None]

    def job() -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            a["src"], dtype="auto", device_map={"": "disk"}, offload_folder=a["folder"]
        ).eval()
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
        write_logits(Path(a["out"]), logits)

    return job


SIDES = {
    f.__name__: f
    for f in (
        fastshard,
        verify,
        copy,
        consolidate,
        consolidate_ranks,
        torch_save,
        script,
        zero_to_fp32,
        command,
        commands,
        obstore_reads,
        cli,
        paxml_script,
        model,
        layerwise,
        disk_offload,
        verl_merge,
        fp8_dequantizer,
        program_speed,
        kernel,
        cast_script,
    )
}
#: Sides whose work is done by other programs.
PROGRAMS = ("copy", "command", "commands", "program_speed")


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    job = SIDES[name](arguments)
    if "torch" in sys.modules and "threads" in arguments:
        sys.modules["torch"].set_num_threads(arguments["threads"])
    with Peak(programs=name in PROGRAMS) as peak:
        mark(BEGIN)
        modules = len(sys.modules)
        calls, before, wall = count_io(), cpu(), time.perf_counter()
        more = job() or {}
        wall, spent = time.perf_counter() - wall, cpu() - before
        calls = {name: count - calls[name] for name, count in count_io().items()}
        mark(END)
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    figures = {"wall": wall, "cpu": spent, "rss": status("VmHWM:"), "anonymous": peak.anonymous}
    print(
        json.dumps({**figures, "children": children, "imports": len(sys.modules) - modules, **calls, **more})
    )


if __name__ == "__main__":
    main()
