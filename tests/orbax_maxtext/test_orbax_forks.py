"""A process that is forked from one that has used TensorStore is refused; TensorStore itself would end it by
SIGABRT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import FIXTURES
from holding import HANG

STORE = FIXTURES / "orbax" / "paxml_gpt3_micro_weights"
#: What a child does, by name: with a checkpoint that its parent has opened, or one of its own.
CHILDREN = {
    "convert": "fastshard.convert(STORE, OUT, to='orbax')",
    "open and read": "next(iter(fastshard.open(STORE).values())).numpy()",
    "read what the parent opened": "next(iter(opened.values())).numpy()",
    # A verification lists its errors.
    "verify what the parent opened": "raise fastshard.FastshardError(fastshard.verify(opened))",
}
SCRIPT = """
import json, os, sys
import fastshard
STORE, OUT, parent_reads = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
opened = fastshard.open(STORE) if parent_reads else None
if opened is not None:
    next(iter(opened.values())).numpy()
sys.stdout.flush()
if (child := os.fork()) == 0:
    code = 0
    try:
        {work}
    except fastshard.FastshardError as error:
        print(json.dumps([error.code, str(error)]), flush=True)
        code = 1
    os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("work", CHILDREN)
def test_a_fork_of_a_process_that_used_tensorstore_is_refused(work: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorstore", reason="pip install '.[orbax]'")
    command = [
        sys.executable,
        "-c",
        SCRIPT.replace("{work}", CHILDREN[work]),
        STORE,
        tmp_path / "out",
        "True",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    finding, code = ran.stdout.splitlines()
    assert code == "1" and json.loads(finding)[0] == "FS514" and "spawn" in finding, ran.stdout + ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_fork_of_a_process_that_has_not_used_it_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore", reason="pip install '.[orbax]'")
    work = CHILDREN["open and read"]
    command = [sys.executable, "-c", SCRIPT.replace("{work}", work), STORE, tmp_path / "out", "False"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True)
    assert ran.stdout.split() == ["0"], ran.stdout + ran.stderr
