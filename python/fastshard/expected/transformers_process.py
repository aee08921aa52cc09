"""The process that queries transformers, with its own folder, environment and limits; `transformers_worker`
is its program."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["answer_of"]

_WORKER = Path(__file__).with_name("transformers_worker.py")
#: The limit on elapsed time, in multiples of the limit on CPU time.
PATIENCE = 10
#: Longer limits in seconds, including infinity, mean no limit.
_LONGEST = 1e6
#: Environment variables for the worker: paths of programs and libraries, and the language.
_ENVIRONMENT = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "SYSTEMROOT",
)


def answer_of(question: dict[str, Any], timeout: float, memory: int) -> dict[str, Any]:
    """Return the worker's answer within its limits, or the reason for its failure as ``error`` and ``kind``.

    Args:
        question: the cleaned config and the class; with ``stored``, the worker checks a load of these
            tensors.
        timeout: limit on CPU time in seconds. The limit on elapsed time is ``PATIENCE`` times as long,
            because the machine may be busy or its disk slow.
        memory: limit in bytes on the worker's private memory.
    """
    if not sys.executable:
        return {"error": "there is no Python to run it with (sys.executable)", "kind": "import"}
    try:
        return _answered(question, timeout, memory)
    except OSError as error:
        return {"error": f"its process could not be started: {error.strerror}", "kind": "import"}


def _answered(question: dict[str, Any], timeout: float, memory: int) -> dict[str, Any]:
    """Run the worker in a temporary folder.

    Raises:
        OSError: if the folder cannot be created.
    """
    if Path(tempfile.gettempdir()).resolve() == Path.cwd().resolve():
        raise OSError(errno.ENOENT, "no directory for temporary files")
    with tempfile.TemporaryDirectory(prefix="fastshard-expected-") as folder:
        root = Path(folder)
        for name in ("cwd", "home"):
            (root / name).mkdir()
        is_limited = timeout < _LONGEST
        seconds = math.ceil(timeout) if is_limited else 0
        request = json.dumps(question | {"path": _packages(), "memory": memory, "processor_seconds": seconds})
        (root / "asked.json").write_text(request, "utf-8")
        words = [sys.executable, "-I", str(_WORKER), str(root / "asked.json"), str(root / "answer.json")]
        with (root / "said").open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=root / "cwd",
                env=_environment(root / "home"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.wait(PATIENCE * timeout if is_limited else None)
            except subprocess.TimeoutExpired:
                return {"error": f"it takes longer than {PATIENCE * timeout:g} s", "kind": "limit"}
            finally:
                if process.poll() is None:
                    # All that it has started, however this ends.
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode == -signal.SIGXCPU:
            return {"error": f"it takes more than {timeout:g} s of CPU time", "kind": "limit"}
        try:
            answer: dict[str, Any] = json.loads((root / "answer.json").read_text("utf-8"))
            return answer
        except (OSError, ValueError):
            last = (root / "said").read_bytes()[-2000:].decode(errors="replace").strip().splitlines()
            why = f"its process ended with {process.returncode}" + (f": {last[-1]}" if last else "")
            return {"error": f"{why}; its memory limit is {memory >> 20:,} MiB", "kind": "limit"}


def _packages() -> list[str]:
    """List the worker's package folders: those of this process, except world-writable ones."""
    here = Path.cwd().resolve()
    own = {str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "platstdlib")}
    found = []
    for entry in sys.path:
        path = Path(entry)
        if not entry or not path.is_absolute() or path.resolve() == here or str(path.resolve()) in own:
            continue
        if (path / "transformers").is_dir() or (path / "torch").is_dir() or "site-packages" in path.parts:
            found.append(entry)
    return found


def _environment(own: Path) -> dict[str, str]:
    """Return the worker's environment: a temporary folder, and no secrets, network or device."""
    kept = {
        name: value for name, value in os.environ.items() if name in _ENVIRONMENT or name.startswith("LC_")
    }
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "USE_TORCH_XLA": "0",
        "USE_HUB_KERNELS": "0",
        "OMP_NUM_THREADS": "1",
        **dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), str(own)),
    }
