"""What `--to maxtext` writes in Orbax's form, and the options of the command line that shape it."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
import yaml
from fastshard import FastshardError
from fastshard.zarr.array_writer import StoreWriter
from helpers import FIXTURES, cli
from jax_maker import (
    STEP,
    Size,
    assert_same,
    converted,
    hf_llama,
    llama_config,
    maxtext_gpt3_state,
    maxtext_llama,
    paxml_state,
    read,
    saved,
    saved_orbax,
    saved_paxml,
)

SIZE = Size()


@pytest.fixture
def paxml(tmp_path: Path) -> Path:
    return saved_paxml(paxml_state(SIZE), tmp_path / "paxml")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    saved(hf_llama(SIZE), tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(llama_config(SIZE)))
    return tmp_path / "hf"


def told(out: Path, step: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the step and the item say of themselves."""
    checkpoint = json.loads((out / step / "_CHECKPOINT_METADATA").read_text())
    return checkpoint, json.loads((out / step / "items/_METADATA").read_text())


def yml(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((out / "maxtext_model.yml").read_text())
    return document


@pytest.mark.parametrize("step", [2**31, 4_000_000_000, 2**32 - 1])
@pytest.mark.parametrize("optimizer", [False, True])
def test_a_step_that_does_not_fit_is_refused(step: int, optimizer: bool, tmp_path: Path) -> None:
    tree = paxml_state(SIZE) | {"step": np.array(step, np.uint32)}
    folder = saved_paxml(tree, tmp_path / "paxml")
    with pytest.raises(FastshardError) as error:
        converted(folder, tmp_path / "out", "maxtext", optimizer=optimizer)
    assert (error.value.code, error.value.tensor, error.value.exit_code) == ("FS211", "step", 2)
    assert str(step) in str(error.value)
    assert not (tmp_path / "out").exists()
    # Nothing is wrong with the checkpoint: with its own types it is kept.
    assert converted(folder, tmp_path / "same", "orbax")[0]["step"] == step


def test_the_greatest_step_that_fits(tmp_path: Path) -> None:
    tree = paxml_state(SIZE) | {"step": np.array(2**31 - 1, np.uint32)}
    have, _ = converted(saved_paxml(tree, tmp_path / "paxml"), tmp_path / "out", "maxtext")
    assert (have["step"].dtype, have["step"]) == (np.int32, 2**31 - 1)


@pytest.mark.parametrize("are_shared", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_buffers_that_are_used_again_hold_one_block_at_a_time(
    mapped: bool, are_shared: bool, paxml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that somebody looks at still, as the store's library may, is not written to again."""
    want, _ = converted(paxml, tmp_path / "want", "maxtext")
    views: list[tuple[memoryview, bytes]] = []
    spares = []

    class Writer(StoreWriter):
        def take_spare(self, size: int) -> bytearray | mmap.mmap | None:
            spare: bytearray | mmap.mmap | None = super().take_spare(size)
            if spare is None and mapped:
                spare = mmap.mmap(-1, size)
            elif spare is not None:
                spares.append(size)
                if are_shared:
                    views.append((memoryview(spare), bytes(spare)))
            return spare

    # Every block waits for its own commit, and is a spare from then on.
    monkeypatch.setattr("fastshard.zarr.array_writer._UNDER_WAY", 0)
    monkeypatch.setattr("fastshard.zarr.array_writer.StoreWriter", Writer)
    have, _ = converted(paxml, tmp_path / "have", "maxtext")
    assert_same(have, want)
    assert spares
    for view, content in views:
        assert bytes(view) == content


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_step_of_maxtexts_own_keeps_its_type(dtype: Any, tmp_path: Path) -> None:
    step = np.array(2**31 - 1, dtype)
    tree = maxtext_llama(hf_llama(SIZE), SIZE, 1) | {"step": step}
    have, _ = converted(saved_orbax(tree, tmp_path / "first"), tmp_path / "out", "maxtext:unscan")
    assert_same(have, maxtext_llama(hf_llama(SIZE), SIZE, None) | {"step": step})


@pytest.mark.parametrize("to", ["maxtext", "maxtext:scan", "maxtext:unscan"])
@pytest.mark.parametrize("optimizer", [False, True], ids=["weights", "optimizer"])
def test_the_tree_of_a_train_state(to: str, optimizer: bool, paxml: Path, tmp_path: Path) -> None:
    have, _ = converted(paxml, tmp_path / "out", to, optimizer=optimizer)
    checkpoint, item = told(tmp_path / "out", "4000")
    assert checkpoint["custom_metadata"] == {"scan_layers": to != "maxtext:unscan"}
    assert list(checkpoint["item_handlers"]) == ["items"]
    tree = item["tree_metadata"]
    entries = {".".join(k["key"] for k in entry["key_metadata"]): entry for entry in tree.values()}
    assert set(tree) == {str(tuple(name.split("."))) for name in entries}
    empty = {name for name, entry in entries.items() if entry["value_metadata"]["skip_deserialize"]}
    assert empty == (set() if optimizer else {"opt_state"})
    assert set(entries) - empty == set(have)
    if not optimizer:
        assert entries["opt_state"] == {
            "key_metadata": [{"key": "opt_state", "key_type": 2}],
            "value_metadata": {"value_type": "Dict", "skip_deserialize": True},
        }
        assert not [name for name in have if name.startswith("opt_state")]


def test_a_source_without_a_step_is_at_step_0(llama: Path, tmp_path: Path) -> None:
    have, _ = converted(llama, tmp_path / "out", "maxtext")
    assert_same(have, maxtext_llama(hf_llama(SIZE), SIZE, 1) | STEP)
    checkpoint, item = told(tmp_path / "out", "0")
    assert checkpoint["custom_metadata"] == {"scan_layers": True}
    assert {"('step',)", "('opt_state',)"} < set(item["tree_metadata"])


def test_parameters_alone_have_neither_step_nor_state(tmp_path: Path) -> None:
    tree = {n.removeprefix("params."): a for n, a in maxtext_llama(hf_llama(SIZE), SIZE, 1).items()}
    have, _ = converted(saved_orbax(tree, tmp_path / "params"), tmp_path / "out", "maxtext")
    assert_same(have, tree)
    _, item = told(tmp_path / "out", "7")
    assert set(item["tree_metadata"]) == {str(tuple(name.split("."))) for name in tree}


# The command line.


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_param_scan_axis(axis: int, llama: Path, tmp_path: Path) -> None:
    assert cli("convert", llama, tmp_path / "out", "--to", "maxtext", "--param-scan-axis", axis).code == 0
    assert_same(read(tmp_path / "out"), maxtext_llama(hf_llama(SIZE), SIZE, axis) | STEP)
    assert yml(tmp_path / "out")["param_scan_axis"] == axis


@pytest.mark.parametrize(
    ("flags", "fused"), [([], True), (["--fused-qkv"], True), (["--no-fused-qkv"], False)]
)
def test_fused_qkv(flags: list[str], fused: bool, paxml: Path, tmp_path: Path) -> None:
    assert cli("convert", paxml, tmp_path / "out", "--to", "maxtext", "--optimizer", *flags).code == 0
    assert_same(read(tmp_path / "out"), maxtext_gpt3_state(SIZE, 1, fused))
    assert yml(tmp_path / "out")["fused_qkv"] is fused
    # Without a flag it stays as it is.
    assert cli("convert", tmp_path / "out", tmp_path / "apart", "--to", "maxtext:unscan").code == 0
    assert_same(read(tmp_path / "apart"), maxtext_gpt3_state(SIZE, None, fused, optimizer=False))


@pytest.mark.parametrize(
    ("flags", "rope"),
    [([], "llama3.1"), (["--rope-type", "llama3.1"], "llama3.1"), (["--rope-type", "default"], "default")],
)
def test_rope_type(flags: list[str], rope: str, llama: Path, tmp_path: Path) -> None:
    ran = cli("convert", llama, tmp_path / "out", "--to", "maxtext", *flags)
    assert ran.code == 0
    assert len(ran.having("FS109", message="queries and keys", severity="note")) == (rope == "llama3.1")
    assert_same(read(tmp_path / "out"), maxtext_llama(hf_llama(SIZE), SIZE, 1, rope=rope) | STEP)
    assert yml(tmp_path / "out")["rope_type"] == rope


@pytest.mark.parametrize("zarr2", [False, True])
def test_zarr2(zarr2: bool, paxml: Path, tmp_path: Path) -> None:
    flags = ["--zarr2"] if zarr2 else []
    assert cli("convert", paxml, tmp_path / "out", "--to", "maxtext", "--optimizer", *flags).code == 0
    item = tmp_path / "out/4000/items"
    assert (item / "manifest.ocdbt").exists() is not zarr2
    names = {path.parent.name for path in item.glob("*/.zarray")}
    assert names == (set(maxtext_gpt3_state(SIZE, 1)) if zarr2 else set())
    _, described = told(tmp_path / "out", "4000")
    assert (described["use_ocdbt"], described["use_zarr3"]) == (not zarr2, not zarr2)
    assert_same(read(tmp_path / "out"), maxtext_gpt3_state(SIZE, 1))


@pytest.mark.parametrize(
    ("to", "flags"),
    [
        (to, flags)
        for to in ("hf", "megatron:legacy", "gpt_neox", "dcp", "tp-safetensors", "orbax")
        for flags in (
            ["--param-scan-axis", "0"],
            ["--fused-qkv"],
            ["--no-fused-qkv"],
            ["--rope-type", "default"],
            ["--zarr2"],
        )
        if (to, flags) != ("orbax", ["--zarr2"])
    ],
    ids=lambda v: v if isinstance(v, str) else v[0],
)
def test_flags_of_maxtext_towards_other_targets(
    to: str, flags: list[str], llama: Path, tmp_path: Path
) -> None:
    ran = cli("convert", llama, tmp_path / "out", "--to", to, *flags)
    assert [f["code"] for f in ran.errors] == ["FS515"]
    assert ran.code == 2
    assert flags[0].replace("--no-", "--") in ran.errors[0]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("source", "flags", "code"),
    [
        ("paxml", ["--to", "maxtext", "--rope-type", "default"], "FS515"),
        ("llama", ["--to", "maxtext", "--no-fused-qkv"], "FS515"),
        ("llama", ["--to", "maxtext:unscan", "--param-scan-axis", "1"], "FS515"),
        ("llama", ["--to", "maxtext", "--param-scan-axis", "2"], "FS514"),
    ],
)
def test_flags_that_do_not_fit_the_model(
    source: str, flags: list[str], code: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    ran = cli("convert", request.getfixturevalue(source), tmp_path / "out", *flags)
    assert [f["code"] for f in ran.errors] == [code]
    assert not (tmp_path / "out").exists()


def test_the_yml_beside_a_result_is_read_again(tmp_path: Path) -> None:
    twin = FIXTURES / "maxtext_twins/a_hf_f32_single"
    fastshard.convert(twin, tmp_path / "maxtext", to="maxtext", rope_type="default")
    fastshard.convert(tmp_path / "maxtext", tmp_path / "hf", to="hf")
    assert fastshard.diff(tmp_path / "hf", twin) == []
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"]) == (10000.0, 1e-05)


def test_nothing_is_left_of_a_result_that_is_refused(tmp_path: Path) -> None:
    state = paxml_state(SIZE)
    state["step"] = np.array(4_000_000_000, np.uint32)
    (tmp_path / "out").mkdir()
    with pytest.raises(FastshardError):
        fastshard.convert(saved_paxml(state, tmp_path / "paxml"), tmp_path / "out" / "it", to="maxtext")
    assert list((tmp_path / "out").iterdir()) == []
