"""SIGBUS: faults of our own maps are ours, all others go where they went before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from holding import HANG
from safetensors.numpy import save_file

#: Gathers columns from a map, as dividing a matrix over ranks does, so that the handler is there.
GATHER = """
import faulthandler, mmap, signal, sys
from fastshard import _core
def gather():
    table = 'layout = "t"\\nfamily = "t"\\n[shard]\\ntp = ["F"]\\n'
    table += '[[tensor]]\\nname = "w"\\nshape = "[K, F]"\\n'
    catalog = _core.Catalog([sys.argv[1]], [(0, "w.safetensors")], 1)
    draft = catalog.draft({
        "source": {
            "files": {"units": [{"file": 0, "coords": {}, "bases": {}, "rank": ""}]},
            "binding": {"toml": table},
        },
        "target": {"name": "to", "toml": table, "degrees": {"tp": 4}},
    })
    plan = draft.place({"max_shard_size": 1 << 40})
    found, _, _ = plan.check({"threads": 2, "memory": 1 << 30})
    assert not [f for f in found if f.severity == "error"], found
def fault():
    with open(sys.argv[1] + "/own", "wb+") as file:
        file.write(b"1" * 8192)
        file.flush()
        view = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        return view[5000]
"""

ORDERS = {
    "none": "gather()",
    "before": "faulthandler.enable(); gather()",
    "after": "gather(); faulthandler.enable()",
    "between": "gather(); faulthandler.enable(); gather()",
    "twice": "faulthandler.enable(); gather(); faulthandler.disable(); gather(); faulthandler.enable(); "
    "gather()",
}


@pytest.mark.parametrize("how", ["fault()", "signal.raise_signal(signal.SIGBUS)"])
@pytest.mark.parametrize("order", ORDERS)
def test_bus_error_of_somebody_else_ends_the_process_as_before(order: str, how: str, tmp_path: Path) -> None:
    save_file({"w": np.ones((512, 8192), np.float32)}, tmp_path / "w.safetensors")
    code = f"{GATHER}\n{ORDERS[order]}; print('gathered', flush=True); {how}"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=HANG
    )
    assert ran.stdout == "gathered\n", ran.stderr
    assert ran.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in ran.stderr) == (order != "none")
