"""Trees of flax NNX that real Orbax writes, as MaxText and Tunix save them, and each file lost once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from helpers import assert_refused, cli
from jax_maker import STEP, Size, Tree, assert_same, hf_llama, llama_config, maxtext_llama, read

jax = pytest.importorskip("jax", reason="pip install '.[orbax-real]'")
ocp = pytest.importorskip("orbax.checkpoint", reason="pip install '.[orbax-real]'")

SIZE = Size()
HF = hf_llama(SIZE)


def state(scan: int | None, lists: bool = False) -> dict[str, Any]:
    """The state of a module: nodes by name, lists of layers, each variable a node with its ``value``."""
    tree: dict[str, Any] = {
        "decoder": {
            "rngs": {"params": {"key": {"value": jax.random.key(0)}, "count": {"value": jax.numpy.uint32(3)}}}
        }
    }
    for name, array in maxtext_llama(HF, SIZE, scan).items():
        *path, last = name.removeprefix("params.params.").split(".")
        node = tree
        for part in path:
            kind, _, number = part.partition("_")
            if lists and kind == "layers" and number:
                layers = node.setdefault(kind, [{} for _ in range(SIZE.layers)])
                node = layers[int(number)]
            else:
                node = node.setdefault(part, {})
        node[last] = {"value": jax.numpy.asarray(array)}
    return tree


def saved_by_tunix(folder: Path, model: dict[str, Any]) -> Path:
    """Model and optimizer as items of one step: tunix/sft/checkpoint_manager.py."""
    moments = {"0": {"mu": {"decoder": {"decoder_norm": {"scale": {"value": jax.numpy.ones(SIZE.hidden)}}}}}}
    with ocp.v1.training.Checkpointer(folder) as checkpointer:
        checkpointer.save_checkpointables(
            3, {"model_params": model, "optimizer_state": {"opt_state": moments}}, custom_metadata={"loss": 1}
        )
    return folder


def saved_by_maxtext(folder: Path, model: dict[str, Any], **how: Any) -> Path:
    """One item: MaxText's converter of other checkpoints, and its SFT before Tunix had items."""
    handler = ocp.PyTreeCheckpointHandler(**how)
    with ocp.CheckpointManager(folder, item_names=("items",), item_handlers={"items": handler}) as manager:
        manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(model)))
    return folder


def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(llama_config(SIZE)))
    return file


def to_hf(folder: Path, tmp_path: Path, name: str = "hf") -> Tree:
    ran = cli("convert", folder, tmp_path / name, "--to", "hf", "--config", config_file(tmp_path))
    assert ran.code == 0, ran.out
    return read(tmp_path / name)


@pytest.mark.parametrize("scan", [None, 1, "lists"])
@pytest.mark.parametrize("writer", ["tunix", "ocdbt", "files"])
def test_what_orbax_saves_of_nnx_is_the_model(writer: str, scan: int | str | None, tmp_path: Path) -> None:
    axis = scan if isinstance(scan, int) else None
    model = {"base": state(axis, scan == "lists")} if writer == "tunix" else state(axis, scan == "lists")
    if writer == "tunix":
        folder = saved_by_tunix(tmp_path / "run", model)
        (note,) = [f for f in cli("inspect", folder).having("FS212") if "optimizer_state" in f["message"]]
        assert note["severity"] == "note"
    else:
        how = {"use_ocdbt": writer == "ocdbt", "use_zarr3": writer == "ocdbt"}
        folder = saved_by_maxtext(tmp_path / "run", model, **how)
    assert_same(to_hf(folder, tmp_path), HF)
    assert cli("verify", folder).code == 0
    ran = cli("convert", folder, tmp_path / "maxtext", "--to", "maxtext")
    assert ran.code == 0, ran.out
    assert_same(read(tmp_path / "maxtext"), maxtext_llama(HF, SIZE, 1) | STEP)
    (item,) = (tmp_path / "maxtext").glob("*/items")
    restored = ocp.PyTreeCheckpointer().restore(item)
    assert set(restored["params"]["params"]["decoder"]) == {"decoder_norm", "layers", "logits_dense"}
    assert_same(to_hf(tmp_path / "maxtext", tmp_path, "again"), HF)


@pytest.mark.parametrize("writer", ["tunix", "ocdbt"])
def test_each_file_once_lost_is_found_or_carries_nothing(writer: str, tmp_path: Path) -> None:
    if writer == "tunix":
        folder = saved_by_tunix(tmp_path / "run", {"base": state(None, True)})
    else:
        folder = saved_by_maxtext(tmp_path / "run", state(1))
    config = config_file(tmp_path)
    carrying = []
    for n, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        aside = tmp_path / "aside"
        shutil.move(file, aside)
        out = tmp_path / f"out{n}"
        ran = cli("convert", folder, out, "--to", "hf", "--config", config)
        if ran.code == 0:
            assert_same(read(out), HF)
        else:
            assert ran.errors, ran.out
            assert not out.exists()
            carrying.append(str(file.relative_to(folder)))
        shutil.move(aside, file)
    assert any("/d/" in name for name in carrying), carrying
    assert any(name.endswith("manifest.ocdbt") for name in carrying), carrying
    assert_same(to_hf(folder, tmp_path), HF)


def test_the_optimizers_item_by_itself_is_merged(tmp_path: Path) -> None:
    folder = saved_by_tunix(tmp_path / "run", {"base": state(1)})
    ran = cli("merge", folder / "3/optimizer_state", tmp_path / "out")
    assert ran.code == 0, ran.out
    assert set(read(tmp_path / "out")) == {"opt_state.0.mu.decoder.decoder_norm.scale.value"}
    # Its names are not those of weights.
    assert_refused(
        folder / "3/optimizer_state", tmp_path / "hf", "FS514", exit=2, command=("convert", "--to", "hf")
    )


def test_a_model_that_is_gone_is_not_its_optimizer(tmp_path: Path) -> None:
    folder = saved_by_tunix(tmp_path / "run", {"base": state(1)})
    shutil.rmtree(folder / "3/model_params")
    for ckpt in (folder, folder / "3"):
        assert_refused(ckpt, tmp_path / "out", "FS101", exit=3, message="model_params is missing")
