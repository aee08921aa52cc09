"""Real Orbax restores what is written here, and what it writes is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Two devices, before jax is loaded: arrays are restored divided over them too.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fastshard
import numpy as np
import pytest
from helpers import FIXTURES

jax = pytest.importorskip("jax", reason="pip install '.[orbax-real]'")
ocp = pytest.importorskip("orbax.checkpoint", reason="pip install '.[orbax-real]'")

NODES = FIXTURES / "orbax" / "mp2_local_BROKEN_063_zarr3"
PAXML = FIXTURES / "orbax" / "paxml_gpt3_micro_weights"


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for key, value in enumerate(tree):
            yield from leaves(value, (*path, str(key)))
    elif tree is not None:
        yield ".".join(path), np.asarray(tree)


def hashes(tree: Any) -> dict[str, tuple[list[int], str]]:
    return {
        name: (list(a.shape), hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest())
        for name, a in leaves(tree)
    }


def expected(fixture: Path) -> dict[str, tuple[list[int], str]]:
    described = json.loads((fixture / "expected.json").read_text())
    return {name: (t["shape"], t["sha256"]) for name, t in described["tensors"].items()}


def restored(way: str, out: Path, step: int) -> Any:
    item = out / str(step) / "items"
    if way == "PyTreeCheckpointer":
        return ocp.PyTreeCheckpointer().restore(item)
    if way == "StandardCheckpointer":
        return ocp.StandardCheckpointer().restore(item)
    if way == "CheckpointManager":
        handlers = {"items": ocp.PyTreeCheckpointHandler()}
        with ocp.CheckpointManager(out, item_names=("items",), item_handlers=handlers) as manager:
            assert manager.latest_step() == step
            return manager.restore(step, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))["items"]
    from orbax.checkpoint import v1

    return v1.load_checkpointables(out / str(step))["items"]


@pytest.mark.parametrize("way", ["PyTreeCheckpointer", "StandardCheckpointer", "CheckpointManager", "v1"])
@pytest.mark.parametrize("zarr2", [False, True], ids=["ocdbt-zarr3", "plain-zarr2"])
def test_a_repaired_checkpoint_is_restored(way: str, zarr2: bool, tmp_path: Path) -> None:
    fastshard.convert([NODES / "node0", NODES / "node1"], tmp_path / "out", to="orbax", zarr2=zarr2)
    assert hashes(restored(way, tmp_path / "out", 4000)) == expected(NODES)


@pytest.mark.parametrize("zarr2", [False, True], ids=["ocdbt-zarr3", "plain-zarr2"])
def test_arrays_are_restored_divided_over_devices(zarr2: bool, tmp_path: Path) -> None:
    fastshard.convert(PAXML, tmp_path / "out", to="maxtext", zarr2=zarr2)
    whole = dict(leaves(restored("PyTreeCheckpointer", tmp_path / "out", 4000)))
    item = tmp_path / "out" / "4000" / "items"
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    assert mesh.size == 2

    def placed(array: Any) -> Any:
        divided = array.ndim > 0 and array.shape[0] % 2 == 0
        spec = (
            jax.sharding.PartitionSpec("fsdp" if divided else None)
            if array.ndim
            else jax.sharding.PartitionSpec()
        )
        return ocp.ArrayRestoreArgs(sharding=jax.sharding.NamedSharding(mesh, spec))

    tree = ocp.PyTreeCheckpointer().restore(item)
    arguments = jax.tree.map(lambda a: placed(np.asarray(a)), tree)
    divided = ocp.PyTreeCheckpointer().restore(item, restore_args=arguments)
    seen = dict(leaves(divided))
    assert set(seen) == set(whole)
    for name, array in whole.items():
        np.testing.assert_array_equal(seen[name], array)
    kernel = divided["params"]["params"]["decoder"]["layers"]["mlp"]["wi"]["kernel"]
    assert len(kernel.addressable_shards) == 2
    assert kernel.addressable_shards[0].data.shape[0] * 2 == kernel.shape[0]


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "plain"])
@pytest.mark.parametrize("zarr3", [True, False], ids=["zarr3", "zarr2"])
def test_what_orbax_writes_is_read(ocdbt: bool, zarr3: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "params": {"w": rng.standard_normal((7, 5), dtype=np.float32), "list": [np.arange(3), np.zeros(4)]},
        "half": jax.numpy.asarray(rng.standard_normal((3, 4)), jax.numpy.bfloat16),
        "flags": np.array([True, False]),
        "step": np.int32(7),
        "nothing": None,
        "empty": {},
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    ocp.Checkpointer(handler).save(tmp_path / "3" / "items", tree)
    source = fastshard.open(tmp_path / "3" / "items")
    got = {
        name: (list(t.shape), hashlib.sha256(t.numpy().tobytes()).hexdigest()) for name, t in source.items()
    }
    assert got == hashes(tree)
    # And back, its lists and empty nodes included.
    fastshard.convert(source, tmp_path / "out", to="orbax")
    again = ocp.PyTreeCheckpointer().restore(tmp_path / "out" / "3" / "items")
    before = ocp.PyTreeCheckpointer().restore(tmp_path / "3" / "items")
    assert hashes(again) == hashes(before)
    assert jax.tree.structure(again) == jax.tree.structure(before)


@pytest.mark.parametrize("zarr3", [True, False], ids=["zarr3", "zarr2"])
def test_replicas_in_folders_of_their_own_are_read(zarr3: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def placed(array: np.ndarray, *spec: str | None) -> jax.Array:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.device_put(array, sharding)

    tree = {
        "divided": placed(rng.standard_normal((8, 6), dtype=np.float32), "x"),
        "replicated": placed(rng.standard_normal((64, 32), dtype=np.float32)),
        "step": placed(np.int32(9)),
    }
    handler = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=True, enable_replica_parallel_separate_folder=True
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    pytree = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=zarr3, type_handler_registry=registry)
    ocp.Checkpointer(pytree).save(tmp_path / "3" / "items", tree)
    stores = {p.name for p in (tmp_path / "3" / "items").glob("ocdbt.*")}
    assert "ocdbt.process_replica_0" in stores
    for given in (tmp_path, tmp_path / "3", tmp_path / "3" / "items"):
        source = fastshard.open(given)
        got = {
            name: (list(t.shape), hashlib.sha256(t.numpy().tobytes()).hexdigest())
            for name, t in source.items()
        }
        assert got == hashes(jax.tree.map(np.asarray, tree))


def test_numbers_and_texts_come_back_as_what_they_were(tmp_path: Path) -> None:
    tree = {"w": np.arange(6.0), "count": 7, "rate": 2.5, "text": "hello"}
    ocp.PyTreeCheckpointer().save(tmp_path / "3" / "items", tree)
    fastshard.convert(tmp_path / "3" / "items", tmp_path / "out", to="orbax")
    again = ocp.PyTreeCheckpointer().restore(tmp_path / "out" / "3" / "items")
    before = ocp.PyTreeCheckpointer().restore(tmp_path / "3" / "items")
    assert (again["count"], again["rate"], again["text"]) == (7, 2.5, "hello")
    assert [type(again[k]) for k in ("count", "rate", "text")] == [
        type(before[k]) for k in ("count", "rate", "text")
    ]


def test_dtypes_and_names_are_those_that_were_saved(tmp_path: Path) -> None:
    kinds = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "complex64", "bfloat16")
    numbers = 2.0 ** (np.arange(12).reshape(4, 3) % 5)
    tree = {kind: jax.numpy.asarray(numbers, kind) for kind in kinds}
    tree |= {"complex128": numbers * (1 + 2j), "a": np.arange(3), "a.b": np.arange(4)}
    ocp.PyTreeCheckpointer().save(tmp_path / "3" / "items", tree)
    for zarr2 in (False, True):
        fastshard.convert(tmp_path / "3" / "items", tmp_path / f"out{zarr2}", to="orbax", zarr2=zarr2)
        again = ocp.PyTreeCheckpointer().restore(tmp_path / f"out{zarr2}" / "3" / "items")
        assert hashes(again) == hashes(tree)
        assert {k: v.dtype for k, v in again.items()} == {k: v.dtype for k, v in tree.items()}


def test_integers_of_four_bits_are_kept_as_int8(tmp_path: Path) -> None:
    tree = {"w": np.arange(6.0), "q": jax.numpy.asarray([1, -2, 7, -8], "int4")}
    ocp.PyTreeCheckpointer().save(tmp_path / "3" / "items", tree)
    fastshard.convert(tmp_path / "3" / "items", tmp_path / "out", to="orbax")
    wide = {"w": tree["w"], "q": np.array([1, -2, 7, -8], np.int8)}
    assert hashes(ocp.PyTreeCheckpointer().restore(tmp_path / "out" / "3" / "items")) == hashes(wide)


def test_two_leaves_that_orbax_stores_as_one_are_refused(tmp_path: Path) -> None:
    tree = {"a": {"b": np.arange(3.0)}, "a.b": np.arange(3.0) + 1, "w": np.arange(2.0)}
    ocp.PyTreeCheckpointer().save(tmp_path / "3" / "items", tree)
    with pytest.raises(fastshard.FastshardError) as refused:
        fastshard.convert(tmp_path / "3" / "items", tmp_path / "out", to=None)
    assert refused.value.code == "FS206" and refused.value.tensor == "a.b"


def test_a_tree_with_lists_is_written_whole_or_not(tmp_path: Path) -> None:
    tree = {"layers": [np.arange(3), np.arange(4)]}
    ocp.PyTreeCheckpointer().save(tmp_path / "3" / "items", tree)
    with pytest.raises(fastshard.FastshardError) as error:
        fastshard.convert(tmp_path / "3" / "items", tmp_path / "out", to="orbax", exclude=["layers.0"])
    assert error.value.code == "FS515"
