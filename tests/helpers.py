"""Shared by the tests: running the command line, reading results, damaging checkpoints."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import fastshard
import pytest
import torch
from fastshard.cli import main
from fastshard.expected import transformers_process, transformers_worker
from holding import HANG
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
NEOX = FIXTURES / "gpt_neox/neox_pp_tp2"
NEOX_SEQ = FIXTURES / "gpt_neox/neox_seq_tp2"
TP4 = FIXTURES / "sharded/tp4_micro"
HF = FIXTURES / "sharded/hf_sharded"
STEP = "global_step4"
#: Model types that transformers has no class for: it comes with the weights.
TYPES_WITH_OWN_CODE = frozenset({"kimi_k2"})


@dataclass
class Ran:
    """What a run of the command line came to."""

    code: int
    out: str
    err: str

    @property
    def doc(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def findings(self) -> list[dict[str, Any]]:
        return self.doc["findings"]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [f for f in self.findings if f["severity"] == "error"]

    @property
    def not_checked(self) -> str:
        """What was not checked, in one text; nothing where an error was found."""
        return "; ".join(self.doc.get("not_checked", ()))

    def having(self, code: str, **parts: str) -> list[dict[str, Any]]:
        """Findings of a code whose fields contain the given texts; ``file`` is any of those that one is
        about."""
        return [
            f
            for f in self.findings
            if f["code"] == code
            and all(
                part in " ".join(files_of([f])) if key == "file" else part in str(f.get(key, ""))
                for key, part in parts.items()
            )
        ]


def files_of(findings: Iterable[dict[str, Any]]) -> list[str]:
    """The files that findings are about."""
    return [file for f in findings for file in f.get("files") or [f["file"]] if "file" in f]


def at_once(values: Iterable[Any], chosen: Container[Any]) -> list[Any]:
    """Values of a parameter of which some are tried with every run of the tests; the others are slow."""
    return [v if v in chosen else pytest.param(v, marks=pytest.mark.slow) for v in values]


def cli(*argv: object, json_output: bool = True) -> Ran:
    """Runs `fastshard` in this process."""
    arguments = [os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in argv]
    if json_output:
        arguments.append("--json")
    if (
        arguments[0] in ("merge", "convert", "plan", "verify", "stats", "diff", "manifest", "master-weights")
        and "--memory" not in arguments
    ):
        # torch alone holds more here than the command line's default budget.
        arguments += ["--memory", "2GiB"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def few_steps(most: int) -> Iterator[None]:
    """Asserts that this thread executes no more lines of fastshard's Python than ``most``: work, not time.

    What a module executes while it is imported does not count, nor do objects that end: both depend on the
    tests that ran before.
    """
    package, imports = os.path.dirname(fastshard.__file__), 0  # noqa: PTH120 - compared with names of code
    lines: Counter[str] = Counter()

    def count_import(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal imports
        imports -= event == "return"
        return count_import

    def count_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not imports:
            lines[f"{frame.f_code.co_filename.removeprefix(package)}:{frame.f_code.co_name}"] += 1
        return count_line

    def follow_call(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal imports
        if not frame.f_code.co_filename.startswith(package):
            return None
        if frame.f_code.co_name == "<module>":
            imports += 1
            return count_import
        return count_line

    gc.collect()
    before = sys.gettrace()
    gc.disable()
    sys.settrace(follow_call)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()
    assert lines.total() <= most, f"{lines.total()} lines were executed, most in {lines.most_common(9)}"


_ASKING = threading.Lock()


def ask_transformers_here(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Has transformers asked in this process, with a cache of its own: an import of torch takes seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS", raising=False)

    def answer(question: dict[str, Any], *_: object) -> Any:
        # Two at once would leave torch.nn.init as transformers changes it meanwhile.
        with _ASKING:
            return json.loads(json.dumps(transformers_worker.answer_to(question)))

    monkeypatch.setattr(transformers_process, "answer_of", answer)


def spawn(*argv: object, **options: Any) -> subprocess.Popen[str]:
    """Runs `fastshard` in a process of its own."""
    command = [sys.executable, "-m", "fastshard", *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def in_a_mount(script: str, *argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs shell lines in a mount namespace of their own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", script, "sh", *map(str, argv)]
    if os.geteuid() == 0:
        del command[1:3]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
        env=os.environ | {"PYTHON": sys.executable} | environment,
    )


def copy(source: Path, destination: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(source, destination)
    return destination


def state_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file below a folder: time of change and hash."""
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest())
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def sha256(tensor: torch.Tensor) -> str:
    """Hash of the logical bytes."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def read_result(out: Path) -> dict[str, torch.Tensor]:
    """Tensors of a result, read with the safetensors library; index and files must agree."""
    index = out / "model.safetensors.index.json"
    if not index.exists():
        return load_file(out / "model.safetensors")
    document = json.loads(index.read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(document["weight_map"].values())):
        with safe_open(out / name, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                assert document["weight_map"][key] == name
                tensors[key] = file.get_tensor(key)
    assert set(tensors) == set(document["weight_map"])
    assert document["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return tensors


def assert_refused(
    ckpt: Path | list[Path],
    out: Path,
    code: str,
    *,
    exit: int = 1,
    command: tuple[object, ...] = ("merge",),
    options: tuple[object, ...] = (),
    **parts: str,
) -> Ran:
    """A run is refused with this finding; nothing appears at `out` or beside it; sources stay as they are."""
    sources = [ckpt] if isinstance(ckpt, Path) else ckpt
    before = [state_of(source) for source in sources]
    beside = sorted(p.name for p in out.parent.iterdir())
    ran = cli(command[0], *sources, out, *command[1:], *options)
    listed = [(f["code"], f.get("file"), f.get("rank"), f.get("tensor"), f["message"]) for f in ran.findings]
    assert ran.having(code, **parts), f"no {code} with {parts} among {listed}"
    assert ran.code == exit, f"exit code {ran.code}, not {exit}: {listed}"
    assert ran.doc["exit_code"] == exit
    assert sorted(p.name for p in out.parent.iterdir()) == beside, "something was left beside the destination"
    assert [state_of(source) for source in sources] == before, "a source was changed"
    return ran


def flip_bit(file: Path, offset: int, bit: int = 3) -> None:
    """Flips one bit in place."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def flip_payload(file: Path, tensor: torch.Tensor) -> None:
    """Flips one bit in the middle of a tensor's bytes, found by searching for them."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    start = file.read_bytes().find(raw)
    assert start >= 0, "the tensor's bytes are not in the file"
    flip_bit(file, start + len(raw) // 2)


def load_pt(file: Path) -> Any:
    """Content of a .pt file of our own fixtures."""
    return torch.load(file, weights_only=False)


def edit_pt(file: Path, change: Any) -> None:
    """Loads, changes and saves a .pt file."""
    content = load_pt(file)
    change(content)
    torch.save(content, file)


def edit_safetensors(file: Path, change: Any) -> None:
    """Loads, changes and saves a safetensors file."""
    tensors = load_file(file)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})


def layer_file(layer: int, rank: int) -> str:
    """Name of a pipeline layer file."""
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"


def rank_file(rank: int) -> str:
    """Name of a rank file."""
    return f"mp_rank_{rank:02d}_model_states.pt"
