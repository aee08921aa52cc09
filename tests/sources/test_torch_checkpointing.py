"""Checkpoints of Meta's torch_checkpointing: both forms are read as the package wrote them, and each kind of
damage is told."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FIXTURES, cli, copy, edit_safetensors, flip_payload, read_result, sha256
from safetensors.torch import load_file, save_file

SAVED = {form: FIXTURES / f"sharded/torch_checkpointing_{form}" for form in ("pt", "safetensors")}
BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=list(SAVED))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy(SAVED[request.param], tmp_path / "step_3")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The form whose files hold local tensors alone."""
    return copy(SAVED["safetensors"], tmp_path / "step_3")


def told(root: Path, *keys: str) -> dict[str, str]:
    document: dict[str, Any] = json.loads((root / "expected.json").read_text())
    return {name: entry["sha256"] for key in keys for name, entry in document.get(key, {}).items()}


def hashes(out: Path) -> dict[str, str]:
    return {name: sha256(tensor) for name, tensor in read_result(out).items()}


def rank_file(root: Path, rank: int, item: str = "model") -> Path:
    (found,) = root.glob(f"{item}_{rank}.*")
    return found


def edit_metadata(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = root / "metadata.pkl"
    content = pickle.loads(path.read_bytes())
    change(content)
    path.write_bytes(pickle.dumps(content))


def groups(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content["metadata"]["model"]["nested_path_to_metadata"][json.dumps([name])]
    return found


def data(content: dict[str, Any], name: str) -> dict[str, Any]:
    """What is said of one tensor, no longer shared with what is said of others."""
    packed = groups(content, name)[0]["sharding_metadata"]
    packed["data"] = pickle.loads(pickle.dumps(packed["data"]))
    found: dict[str, Any] = packed["data"]
    return found


def refused(root: Path, tmp_path: Path, code: str) -> list[dict[str, Any]]:
    """The errors of a code; nothing is written."""
    out = tmp_path / "refused"
    for verb in ("verify", "merge"):
        ran = cli(verb, root, *([out] if verb == "merge" else []))
        assert ran.code in (1, 2, 3), ran.out
        assert not ran.having("FS520"), ran.out
    assert not out.exists()
    errors = [error for error in ran.errors if error["code"] == code]
    assert errors, ran.out
    return errors


@pytest.mark.parametrize("how", [["merge"], ["convert", "--to", "hf"]])
def test_what_the_package_saved_is_merged(how: list[str], saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = cli(how[0], saved, out, *how[1:])
    assert ran.code == 0, ran.out
    assert hashes(out) == told(saved, "tensors")
    assert cli("verify", saved).code == 0


def test_names_are_kept_without_a_config_and_a_config_may_be_given(saved: Path, tmp_path: Path) -> None:
    config = (saved / "config.json").rename(tmp_path / "llama.json")
    assert cli("merge", saved, tmp_path / "plain").code == 0
    assert hashes(tmp_path / "plain") == told(saved, "tensors", "buffers")
    ran = cli("convert", saved, tmp_path / "hf", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "hf") == told(saved, "tensors")


def test_inspect_names_what_is_not_read(saved: Path) -> None:
    ran = cli("inspect", saved)
    assert ran.code == 0
    assert [one for one in ran.having("FS212") if "'model' is read" in one["message"]]
    assert "optimizer, step" in ran.out


def test_steps_of_a_run_and_one_that_is_being_written(saved: Path, tmp_path: Path) -> None:
    """The package writes into a folder with a prefix, and renames it when all ranks are done."""
    run = tmp_path / "run"
    for step in ("step_3", "step_7", "tmp_step_9"):
        copy(saved, run / step)
    rank_file(run / "tmp_step_9", 2).unlink()
    assert cli("inspect", run).doc["step"] == "step_7"
    ran = cli("merge", run, tmp_path / "out", "--step", "step_3")
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "out") == told(saved, "tensors")


def test_each_file_that_is_removed(saved: Path, tmp_path: Path) -> None:
    for path in sorted(saved.iterdir()):
        if path.name in ("expected.json", "config.json"):
            continue
        content = path.read_bytes()
        path.unlink()
        if path.name.startswith("model_"):
            (error,) = refused(saved, tmp_path, "FS101")
            assert error["file"] == path.name and error["rank"] == f"rank {path.stem[-1]}"
        elif path.name == "metadata.pkl" and not list(saved.glob("model_*.pt")):
            # Of files of torch.save the DTensors state the same.
            refused(saved, tmp_path, "FS513")
        else:
            out = tmp_path / f"without_{path.stem}"
            assert cli("merge", saved, out).code == 0
            assert hashes(out) == told(saved, "tensors")
        path.write_bytes(content)


def test_without_a_resharder_the_package_writes_no_metadata(tmp_path: Path) -> None:
    saved = copy(SAVED["pt"], tmp_path / "saved")
    (saved / "metadata.pkl").unlink()
    assert cli("merge", saved, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == told(saved, "tensors")
    for rank in range(4):
        aside = rank_file(saved, rank).rename(tmp_path / "aside")
        (error,) = refused(saved, tmp_path, "FS101")
        assert error["file"] == f"model_{rank}.pt"
        aside.rename(saved / f"model_{rank}.pt")
    swap(saved, (2, 3))
    refused(saved, tmp_path, "FS113")


def test_numbers_of_whole_models_are_no_ranks(tmp_path: Path) -> None:
    """A script's epochs have such names too, and no parts in them."""
    folder = tmp_path / "epochs"
    folder.mkdir()
    for epoch in (0, 1):
        torch.save({"weight": torch.full((4, 4), float(epoch))}, folder / f"model_{epoch}.pt")
    (error,) = refused(folder, tmp_path, "FS513")
    assert "name the file itself" in error["help"]
    assert cli("merge", folder / "model_1.pt", tmp_path / "out").code == 0


def test_files_of_two_nodes(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for rank in (2, 3):
        path = rank_file(saved, rank)
        path.rename(other / path.name)
    refused(saved, tmp_path, "FS101")
    assert cli("merge", saved, other, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == told(saved, "tensors")


def test_a_file_beyond_the_last_rank_is_not_read(saved: Path, tmp_path: Path) -> None:
    path = rank_file(saved, 3)
    shutil.copy(path, path.with_stem("model_4"))
    ran = cli("merge", saved, tmp_path / "out")
    assert ran.code == 0 and ran.having("FS108"), ran.out
    assert hashes(tmp_path / "out") == told(saved, "tensors")


def swap(root: Path, pair: tuple[int, int]) -> None:
    one, other = (rank_file(root, rank) for rank in pair)
    aside = one.rename(root / "aside")
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("pair", [(0, 2), (1, 3)])
def test_swapped_files(saved: Path, pair: tuple[int, int], tmp_path: Path) -> None:
    is_torch = rank_file(saved, 0).suffix == ".pt"
    swap(saved, pair)
    errors = refused(saved, tmp_path, "FS113" if is_torch else "FS201")
    assert "model_" in json.dumps(errors)


@pytest.mark.parametrize("pair", [(0, 1), (2, 3)])
def test_swapped_files_of_equal_shapes_are_told_by_dtensors(pair: tuple[int, int], tmp_path: Path) -> None:
    """Files of torch.save say which rank wrote them, files of safetensors do not: verify says that then."""
    saved = {form: copy(SAVED[form], tmp_path / form) for form in SAVED}
    for root in saved.values():
        swap(root, pair)
    refused(saved["pt"], tmp_path, "FS113")
    ran = cli("verify", saved["safetensors"], json_output=False)
    assert ran.code == 0 and "files or chunks that were swapped would not be noticed" in ran.out + ran.err


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(placements=[{"type": "Shard", "dim": 0}] * 2),
        lambda found: found.update(global_shape=[36, 16]),
        lambda found: found["placements"].__setitem__(0, {"type": "Replicate"}),
        lambda found: found["mesh_spec"].update(mesh_data=(0, 2, 1, 3)),
    ],
    ids=["order", "shape", "copies", "mesh"],
)
def test_metadata_that_states_other_boxes(
    saved: Path, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    edit_metadata(saved, lambda content: change(data(content, HEAD)))
    errors = refused(saved, tmp_path, "FS201")
    assert HEAD in json.dumps(errors)


def test_metadata_that_states_another_dtype(saved: Path, tmp_path: Path) -> None:
    edit_metadata(saved, lambda content: data(content, HEAD).update(dtype="torch.bfloat16"))
    assert HEAD in json.dumps(refused(saved, tmp_path, "FS202"))


def test_a_part_with_another_shape(local: Path, tmp_path: Path) -> None:
    edit_safetensors(rank_file(local, 1), lambda tensors: tensors.update({HEAD: tensors[HEAD][:-1].clone()}))
    (error,) = refused(local, tmp_path, "FS201")
    assert (error["tensor"], error["rank"]) == (HEAD, "rank 1")
    assert error["got"] == "[8, 16]" and error["expected"].startswith("[9, 16], from [17, 0]")


def test_a_part_that_a_file_has_lost(local: Path, tmp_path: Path) -> None:
    edit_safetensors(rank_file(local, 2), lambda tensors: tensors.pop(NORM))
    (error,) = refused(local, tmp_path, "FS102")
    assert (error["tensor"], error["rank"], error["file"]) == (NORM, "rank 2", "model_2.safetensors")


def test_a_part_that_metadata_does_not_name(local: Path, tmp_path: Path) -> None:
    """Nothing says of which tensor the local one is a part, whatever its shape."""

    def forget(content: dict[str, Any]) -> None:
        del content["metadata"]["model"]["nested_path_to_metadata"][json.dumps([HEAD])]

    edit_metadata(local, forget)
    assert HEAD in json.dumps(refused(local, tmp_path, "FS207"))


def test_copies_that_differ(saved: Path, tmp_path: Path) -> None:
    """Norms are the same on both tensor-parallel ranks."""
    path = rank_file(saved, 3)
    if path.suffix == ".pt":
        content = torch.load(path, weights_only=False)
        flip_payload(path, content[NORM]._local_tensor)
        refused(saved, tmp_path, "FS301")
    else:
        edit_safetensors(path, lambda tensors: tensors[NORM].add_(1))
        refused(saved, tmp_path, "FS302")


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 3)])
def test_a_copied_rank_file_is_found_though_ranks_hold_the_same_norms(
    pair: tuple[int, int], local: Path, tmp_path: Path
) -> None:
    """Of norms, which all ranks of a group hold alike, one rank's alone is read."""
    source, copied = pair
    shutil.copy(rank_file(local, source), rank_file(local, copied))
    ran = cli("verify", local)
    assert ran.code == 1 and ran.having("FS303"), ran.out
    assert f"model_{copied}.safetensors" in ran.out


def test_a_plain_tensor_may_be_on_one_rank_alone(local: Path, tmp_path: Path) -> None:
    (local / "config.json").unlink()
    for rank in (0, 1, 3):
        edit_safetensors(rank_file(local, rank), lambda tensors: tensors.pop(BUFFER))
    assert cli("merge", local, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == told(local, "tensors", "buffers")
    edit_safetensors(rank_file(local, 2), lambda tensors: tensors.pop(BUFFER))
    assert BUFFER in json.dumps(refused(local, tmp_path, "FS102"))


def test_ranks_that_state_their_own_boxes(local: Path, tmp_path: Path) -> None:
    """``CheckpointableTensor``: each rank states a box (default_metadata.py). Rows are as of FSDP2 here."""

    def state(content: dict[str, Any]) -> None:
        rows = {0: (0, 9), 1: (17, 9), 2: (9, 8), 3: (26, 8)}
        groups(content, HEAD)[:] = [
            {
                "ranks": (rank,),
                "sharding_metadata": {
                    "type": "default_tensor_v1",
                    "data": {
                        "global_shape": [34, 16],
                        "global_offsets": [[first, 0]],
                        "local_offsets": [[0, 0]],
                        "local_sizes": [[count, 16]],
                        "dtype": "torch.float32",
                    },
                },
            }
            for rank, (first, count) in rows.items()
        ]

    edit_metadata(local, state)
    assert cli("merge", local, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == told(local, "tensors")

    def hole(content: dict[str, Any]) -> None:
        del groups(content, HEAD)[1]

    edit_metadata(local, hole)
    assert HEAD in json.dumps(refused(local, tmp_path, "FS205"))


def test_a_tensor_on_two_meshes_is_compared(local: Path, tmp_path: Path) -> None:
    """FSDP2 divides norms over meshes of its own, ranks 0 and 2, and 1 and 3: each has all of the norm.

    Here the second mesh divides it in another way: rank 1 has all of it, rank 3 nothing."""
    assert [
        group["ranks"] for group in groups(pickle.loads((local / "metadata.pkl").read_bytes()), NORM)
    ] == [
        (0, 2),
        (1, 3),
    ]
    whole = torch.cat([load_file(rank_file(local, rank))[NORM] for rank in (1, 3)])

    def alone(content: dict[str, Any]) -> None:
        second = groups(content, NORM)[1]
        told = pickle.loads(pickle.dumps(second["sharding_metadata"]["data"]))
        told["mesh_spec"] |= {"mesh_shape": (1,), "mesh_data": (1,)}
        groups(content, NORM)[1] = {
            "ranks": (1,),
            "sharding_metadata": {"type": "DTensorShardingMetadata", "data": told},
        }

    edit_metadata(local, alone)
    edit_safetensors(rank_file(local, 1), lambda tensors: tensors.update({NORM: whole}))
    edit_safetensors(rank_file(local, 3), lambda tensors: tensors.pop(NORM))
    assert cli("merge", local, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == told(local, "tensors")
    edit_safetensors(rank_file(local, 1), lambda tensors: tensors[NORM].add_(1))
    refused(local, tmp_path, "FS302")


def test_version_1(saved: Path, tmp_path: Path) -> None:
    """source: distributed_metadata.py, ``_convert_v1_to_v2``"""

    def flatten(content: dict[str, Any]) -> None:
        items = content["metadata"]
        content["metadata"] = {
            json.dumps([item, *json.loads(key)]): entry
            for item, told in items.items()
            for key, entry in told["nested_path_to_metadata"].items()
        }
        content["rank_to_layout_info_mappings"] = {
            rank: {item: told["rank_to_layout_info"][rank] for item, told in items.items()}
            for rank in range(4)
        }
        content["version"] = "1.0"

    edit_metadata(saved, flatten)
    assert cli("merge", saved, tmp_path / "out").code == 0
    assert hashes(tmp_path / "out") == told(saved, "tensors")


def test_another_item_is_chosen_by_its_name(local: Path, tmp_path: Path) -> None:
    """Of an actor and a critic neither is taken silently."""
    for name in ("actor", "critic"):
        for rank in range(4):
            tensors = load_file(rank_file(local, rank))
            save_file(
                {key: tensor + (name == "critic") for key, tensor in tensors.items()},
                local / f"{name}_{rank}.safetensors",
            )

    def two(content: dict[str, Any]) -> None:
        model = content["metadata"].pop("model")
        for name in ("actor", "critic"):
            layouts = {
                rank: told | {"file_path": told["file_path"].replace("model", name)}
                for rank, told in model["rank_to_layout_info"].items()
            }
            content["metadata"][name] = model | {"rank_to_layout_info": layouts}

    edit_metadata(local, two)
    for rank in range(4):
        (local / f"model_{rank}.safetensors").unlink()
    refused(local, tmp_path, "FS106")
    ran = cli("merge", local, tmp_path / "out", "--prefix", "actor")
    assert ran.code == 0, ran.out
    assert hashes(tmp_path / "out") == told(local, "tensors")


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("place", ["whole", "within"])
def test_a_hostile_pickle_is_refused_and_not_run(saved: Path, place: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = saved / "metadata.pkl"
    if place == "whole":
        path.write_bytes(pickle.dumps(Hostile(mark)))
    else:
        edit_metadata(saved, lambda content: content["metadata"].update(extra=Hostile(mark)))
    (error,) = refused(saved, tmp_path, "FS602")
    assert error["file"] == "metadata.pkl" and error["got"] in ("posix.system", "os.system")
    assert not mark.exists()
    # The pickle is what it is named for: whoever loads it runs it.
    pickle.loads(path.read_bytes())
    assert mark.exists()


def test_a_name_that_leaves_the_folder(local: Path, tmp_path: Path) -> None:
    def leave(content: dict[str, Any]) -> None:
        content["metadata"]["model"]["rank_to_layout_info"][1]["file_path"] = "../model_1.safetensors"

    edit_metadata(local, leave)
    refused(local, tmp_path, "FS603")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(world_size=5),
        lambda content: content.update(world_size="4"),
        lambda content: content["metadata"]["model"].pop("rank_to_layout_info"),
        lambda content: groups(content, HEAD).clear(),
        lambda content: groups(content, HEAD)[0].update(ranks=(0, 1)),
        lambda content: data(content, HEAD).update(global_shape=[-34, 16]),
        lambda content: data(content, HEAD).update(placements=[{"type": "Shard", "dim": 0}]),
        lambda content: data(content, HEAD)["placements"].__setitem__(0, {"type": "Partial"}),
        lambda content: content["metadata"]["model"]["rank_to_layout_info"].update(
            {1: content["metadata"]["model"]["rank_to_layout_info"][0]}
        ),
    ],
)
def test_metadata_that_the_package_does_not_write(
    local: Path, change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    edit_metadata(local, change)
    (error,) = refused(local, tmp_path, "FS601")
    assert error["file"] == "metadata.pkl" and "metadata.pkl" in error["help"]


def test_an_own_class_of_shards_is_refused_by_name(local: Path, tmp_path: Path) -> None:
    edit_metadata(local, lambda content: groups(content, HEAD)[0]["sharding_metadata"].update(type="mine_v1"))
    (error,) = refused(local, tmp_path, "FS514")
    assert error["got"] == "mine_v1" and error["tensor"] == HEAD


def test_metadata_of_another_tool_stops_nobody(tmp_path: Path) -> None:
    """A pickle of that name beside a complete model is somebody else's."""
    model = copy(FIXTURES / "sharded/hf_sharded", tmp_path / "model")
    for content in (pickle.dumps({"epochs": 3}), b"no pickle at all"):
        (model / "metadata.pkl").write_bytes(content)
        assert cli("inspect", model).doc["framework"].startswith("Hugging Face")


def test_metadata_of_many_ranks_is_read(local: Path, tmp_path: Path) -> None:
    """The mesh of thousands of ranks is one object in the pickle, whatever tensors lie on it."""
    ranks = 2048
    mesh = {
        "mesh_shape": [ranks],
        "mesh_data": list(range(ranks)),
        "mesh_dim_names": ["dp"],
    }

    def divide(content: dict[str, Any]) -> None:
        content["world_size"] = ranks
        entries = content["metadata"]["model"]["nested_path_to_metadata"]
        entries.clear()
        for number in range(300):
            about = {"global_shape": [ranks, 8], "dtype": "torch.float32", "mesh_spec": mesh}
            about["placements"] = [{"type": "Shard", "dim": 0}]
            packed = {"type": "DTensorShardingMetadata", "data": about}
            group = {"ranks": mesh["mesh_data"], "sharding_metadata": packed}
            entries[json.dumps([f"layers.{number}.weight"])] = [group]
        files = content["metadata"]["model"]["rank_to_layout_info"]
        form = next(iter(files.values()))
        files.clear()
        files |= {rank: {**form, "file_path": f"model_{rank}.safetensors"} for rank in range(ranks)}

    edit_metadata(local, divide)
    found = refused(local, tmp_path, "FS101")
    assert any("model_4" in (error["file"] or "") or "rank 4" in (error["rank"] or "") for error in found), (
        found
    )


def test_an_object_in_metadata_that_nothing_uses_is_refused(saved: Path, tmp_path: Path) -> None:
    """The core makes no object of it, and says so."""
    from fastshard import _core

    path = saved / "metadata.pkl"
    path.write_bytes(pickle.dumps({"a": [1, 2.5, None, True, "x"], 3: (4, [5])}))
    assert _core.plain_pickle(path) == {"a": [1, 2.5, None, True, "x"], 3: [4, [5]]}
    shared: list[int] = [1]
    path.write_bytes(pickle.dumps([shared, shared]))
    one, other = _core.plain_pickle(path)
    assert one is other
    for content in (
        b"cos\nsystem\n0N.",
        pickle.dumps({1, 2}),
        pickle.dumps(b"x"),
        pickle.dumps(1 << 70),
        b"\x80",
    ):
        path.write_bytes(content)
        with pytest.raises(_core.CoreError) as caught:
            _core.plain_pickle(path)
        assert caught.value.args[0][0].code == "FS602"


def test_another_item_is_not_taken_for_the_model_that_is_not_described(saved: Path, tmp_path: Path) -> None:
    """An item without a resharder has files and no description; an average beside it is not the model."""

    def describe_average(content: dict[str, Any]) -> None:
        model = content["metadata"].pop("model")
        layouts = {
            rank: told and told | {"file_path": told["file_path"].replace("model", "average")}
            for rank, told in model["rank_to_layout_info"].items()
        }
        content["metadata"]["average"] = model | {"rank_to_layout_info": layouts}

    edit_metadata(saved, describe_average)
    for file in sorted(saved.glob("model_*")):
        shutil.copy(file, file.with_name(file.name.replace("model_", "average_")))
    (error,) = refused(saved, tmp_path, "FS514")
    assert "'model'" in error["message"] and error["got"].startswith("average")
    out = tmp_path / "out"
    assert cli("merge", saved, out, "--prefix", "average").code == 0
    for file in saved.glob("model_*"):
        file.unlink()
    assert cli("merge", saved, tmp_path / "alone").code == 0
    assert hashes(tmp_path / "alone") == hashes(out) == told(saved, "tensors")
