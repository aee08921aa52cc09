"""Checkpoints that real frameworks save now: none may be refused, and every warning is listed.

    python tests/trials/fresh_saves.py --folder /dev/shm/fresh

Each framework that is installed saves the small models that the tests make with it, in all its forms: torch
FSDP, DeepSpeed, megatron-core and Orbax. Each checkpoint is verified and merged. What transformers saves is
in `families.py`, torch DCP of many families in `from_dcp.py`.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fastshard
import transformers
from families import ask_transformers_here

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / folder) for folder in (".", "makers", "real_deepspeed", "fsdp")]

#: Cases of the makers that are refused on purpose: a DTensor that was never reduced, flat parameters that
#: state neither names nor shapes, master weights that were never refreshed, and those that megatron-core
#: itself writes beside their places.
REFUSED = ("partial", "fsdp1_flat", "_forgotten", "tp2_dp2_shifted__fully_reshardable")
#: Saves Orbax's forms of one tree in a process of its own, since jax does not fork.
ORBAX = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
root = sys.argv[1]
values = np.random.default_rng(0)
def array(*shape):
    return jax.numpy.asarray(values.standard_normal(shape, dtype=np.float32))
tree = {"params": {"layer": {"kernel": array(64, 32), "bias": array(32)}, "list": [array(3), array(4)]},
        "half": array(3, 4).astype("bfloat16"), "step": np.int32(7), "nothing": None}
for ocdbt in (False, True):
    for zarr3 in (False, True):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        ocp.Checkpointer(handler).save(f"{root}/pytree_ocdbt{ocdbt}_zarr3{zarr3}/3/items", tree)
ocp.StandardCheckpointer().save(f"{root}/standard/3/items", {"params": tree["params"]})
with ocp.CheckpointManager(f"{root}/manager", item_names=("state", "metadata")) as manager:
    for step in (1, 2):
        manager.save(step, args=ocp.args.Composite(
            state=ocp.args.StandardSave({"params": tree["params"]}),
            metadata=ocp.args.JsonSave({"epoch": step})))
    manager.wait_until_finished()
"""


def save_by_fsdp(root: Path) -> Iterator[Path]:
    """Saves rank files of FSDP1 and FSDP2, and families of transformers as DCP and as rank files."""
    import families_maker
    import fsdp_maker

    fsdp_maker.make(root, 4, [name for name in fsdp_maker.CASES if name not in REFUSED])
    yield from sorted(path for path in root.iterdir() if path.is_dir())
    families = root.with_name("families")
    fsdp_maker.make(families, 2, [*families_maker.FAMILIES, *families_maker.WHOLE])
    yield from sorted(path for path in families.glob("*/*") if path.is_dir())


def save_by_deepspeed(root: Path) -> Iterator[Path]:
    """Saves what two ranks of DeepSpeed train in each configuration."""
    from launching import launch

    root.mkdir()
    launch("train", root)
    yield from sorted(path.parent for path in root.glob("*/latest"))


def save_by_megatron(root: Path) -> Iterator[Path]:
    """Saves models as torch_dist and as rank files, and optimizers in each form of megatron-core."""
    for maker, pattern in (("make_models", "*/*/"), ("make_optimizer", "*/")):
        out = root / maker
        subprocess.run([sys.executable, TESTS / "real_megatron" / f"{maker}.py", out], check=True)
        yield from sorted(path for path in out.glob(pattern) if path.is_dir())


def save_by_orbax(root: Path) -> Iterator[Path]:
    """Saves a tree in each of Orbax's forms."""
    subprocess.run([sys.executable, "-c", ORBAX, root], check=True)
    yield from sorted(root.iterdir())


#: By framework: the module that it needs, and what saves its checkpoints.
FRAMEWORKS: dict[str, tuple[str, Callable[[Path], Iterator[Path]]]] = {
    "fsdp": ("torch", save_by_fsdp),
    "deepspeed": ("deepspeed", save_by_deepspeed),
    "megatron": ("megatron", save_by_megatron),
    "orbax": ("orbax", save_by_orbax),
}


def find_findings(path: Path) -> list[fastshard.Finding]:
    """Lists the errors and warnings of a verification and of a merge."""
    out = path.with_name(f"{path.name}-out")
    findings = list(fastshard.verify(path))
    try:
        findings += fastshard.convert(path, out, None, fsync=False).findings
    except fastshard.FastshardError as error:
        findings += error.findings
    shutil.rmtree(out, ignore_errors=True)
    return [finding for finding in findings if finding.severity != "note"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "fresh_saves", metavar="DIR"
    )
    parser.add_argument(
        "--framework", action="append", choices=FRAMEWORKS, help="this one only (repeatable; default: all)"
    )
    a = parser.parse_args()
    shutil.rmtree(a.folder, ignore_errors=True)
    a.folder.mkdir(parents=True)
    ask_transformers_here(a.folder / "cache")
    transformers.logging.set_verbosity_error()
    errors = 0
    warnings: collections.Counter[str] = collections.Counter()
    for name in a.framework or FRAMEWORKS:
        module, save = FRAMEWORKS[name]
        if importlib.util.find_spec(module) is None:
            print(f"{name}: {module} is not installed")
            continue
        count = 0
        for path in save(a.folder / name):
            if path.name.endswith(REFUSED):
                continue
            count += 1
            for finding in find_findings(path):
                is_error = finding.severity == "error"
                errors += is_error
                warnings[finding.code] += not is_error
                shown = path.relative_to(a.folder)
                print(f"{shown}: {finding.code} {finding.severity}: {finding.message}", flush=True)
        print(f"{name}: {count} checkpoints", flush=True)
    print(f"errors: {errors}, warnings: {json.dumps({code: n for code, n in warnings.items() if n})}")
    shutil.rmtree(a.folder, ignore_errors=True)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
