"""Torch files that the core writes: any value and any tensor, against torch and Python's zipfile."""

from __future__ import annotations

import math
import shutil
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from fastshard import _core
from fastshard.targets.pickle_tree import TensorOf, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils.serialization import config

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
OPTIONS = {"threads": 1, "memory": 2 << 30, "publish": {"fsync": False}}

keys = st.one_of(st.text(max_size=8), st.integers(-(2**63), 2**63 - 1))
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=9),
)
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=6)


def values(count: int) -> st.SearchStrategy[Any]:
    leaves = st.one_of(plain, st.integers(0, count - 1).map(lambda i: TensorOf(f"t{i}")))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=5),
            st.lists(inner, max_size=5).map(tuple),
            st.dictionaries(keys, inner, max_size=5),
            st.dictionaries(keys, inner, max_size=5).map(OrderedDict),
        ),
        max_leaves=25,
    )


def same(want: Any, have: Any, by_name: dict[str, torch.Tensor]) -> bool:
    if isinstance(want, TensorOf):
        tensor = by_name[want]
        return (
            have.dtype == tensor.dtype
            and have.shape == tensor.shape
            and have.is_contiguous()
            and have.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
        )
    if type(want) is not type(have):
        return False
    if isinstance(want, float):
        return want == have or (math.isnan(want) and math.isnan(have))
    if isinstance(want, (list, tuple)):
        return len(want) == len(have) and all(same(w, h, by_name) for w, h in zip(want, have, strict=True))
    if isinstance(want, dict):
        # The order of keys is kept too.
        return list(want) == list(have) and all(same(want[k], have[k], by_name) for k in want)
    return bool(want == have)


def write(folder: Path, value: Any, made: dict[str, torch.Tensor]) -> Path:
    """Has the core write a value with all tensors."""
    save_file(made, folder / "in.safetensors")
    axes, rules = [], []
    for name, tensor in made.items():
        sizes = [f"{name}a{d}" for d in range(tensor.dim())]
        axes += [f"{axis} = {n}" for axis, n in zip(sizes, tensor.shape, strict=True) if n]
        rules.append(f'[[tensor]]\nname = "{name}"\nshape = "[{", ".join(sizes)}]"')
    table = "\n".join(['layout = "x"', 'family = "x"', "[axes]", *axes, *rules])
    content = {"torch_zip": tree({"value": value, "all": [TensorOf(name) for name in made]})}
    request = {
        "source": {
            "files": {"units": [{"file": 0}]},
            "binding": {"toml": table},
            "allowances": {"non_finite": True},
        },
        "target": {"name": "x", "toml": table},
    }
    placement = {"files": [{"name": "a/b/file.pt", "content": content}], "max_shard_size": 1 << 40}
    catalog = _core.Catalog([str(folder)], [(0, "in.safetensors")], 1)
    plan = catalog.draft(request).place(placement)
    errors = [f for f in plan.findings() if f.severity == "error"]
    assert not errors, errors
    plan.write(str(folder / "out"), OPTIONS, None, None, ([], []))
    return folder / "out/a/b/file.pt"


def check(folder: Path, value: Any, made: dict[str, torch.Tensor]) -> None:
    path = write(folder, value, made)
    have = torch.load(path, weights_only=True)
    assert same(value, have["value"], made)
    assert same([TensorOf(name) for name in made], have["all"], made)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    # torch computes where each storage lies, as its own writer places them, and checks that here.
    with config.patch("load.calculate_storage_offsets", True):
        mapped = torch.load(path, weights_only=True, mmap=True)
    assert same(value, mapped["value"], made)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), specs=tensors, seed=st.integers(0, 1000))
def test_any_value_reads_back(
    data: st.DataObject, specs: list[tuple[torch.dtype, list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for i, (dtype, shape) in enumerate(specs):
        size = math.prod(shape) * dtype.itemsize
        raw = torch.randint(
            0, 2 if dtype == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8
        )
        made[f"t{i}"] = raw.view(dtype).reshape(shape)
    value = data.draw(values(len(made)))
    folder = Path(tempfile.mkdtemp())
    try:
        check(folder, value, made)
    finally:
        shutil.rmtree(folder)
