"""A file that is named by itself: a part of a checkpoint is refused, a model is taken."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dtensor_maker import Version
from dtensor_maker import save as save_dtensors
from helpers import FIXTURES, Ran, cli, read_result
from safetensors.torch import save_file

#: The fixtures' files that hold a model by themselves: of DeepSpeed's stages 0 to 2 without model parallelism
#: the rank file.
COMPLETE = re.compile(
    r"(^|/)model\.safetensors$|^(deepspeed|universal|stale_masters_zero1_bf16_dp2)/(?!pipe|zero3).*mp_rank_00_model_states\.pt$"
    r"|^stale_masters.*mp_rank_00_model_states\.pt$"
)
#: Files that say something of tensors and hold none.
TEXTS = re.compile(r"\.(json|md|yml|txt|zarray|ocdbt|metadata)$|/(latest\w*|_METADATA|_sharding)$")
#: A pickle, and a torch file of a number: neither holds tensors.
NO_TENSORS = {r"/metadata\.pkl$": "FS514", r"/step_\d+\.pt$": "FS515"}
#: A step of which one host's files are all that is there, or that is made to be refused.
BROKEN = ("BROKEN", "stale_masters", "normdiverged", "te_pp_tp1_stale_postln")
FILES = sorted(path.relative_to(FIXTURES).as_posix() for path in FIXTURES.rglob("*") if path.is_file())


@pytest.mark.parametrize("family", sorted({file.split("/")[0] for file in FILES if "/" in file}))
def test_each_file_of_every_fixture(family: str, tmp_path: Path) -> None:
    """No part is merged by itself, and the folder that the help names holds the checkpoint."""
    folders: dict[str, str] = {}
    for file in (f for f in FILES if f.startswith(f"{family}/")):
        ran = cli("merge", FIXTURES / file, tmp_path / "out")
        if COMPLETE.search(file):
            assert ran.code == 0, (file, ran.out)
            shutil.rmtree(tmp_path / "out")
            continue
        assert not (tmp_path / "out").exists(), file
        if TEXTS.search(file):
            assert ran.code == 2 and ran.having("FS513"), (file, ran.out)
            continue
        code = next((code for pattern, code in NO_TENSORS.items() if re.search(pattern, file)), "FS118")
        assert ran.code == 2 and [f["code"] for f in ran.errors] == [code], (file, ran.out)
        if code != "FS118":
            continue
        folders.setdefault(ran.errors[0]["run"][0], file)
    for command, file in folders.items():
        after = cli(*shlex.split(command)[1:])
        assert after.code == 0 or any(word in file for word in BROKEN), (file, after.out)


def tensors(*layers: int, seed: int = 0, ends: bool = True) -> dict[str, torch.Tensor]:
    """A model's tensors, or those of a stage of it."""
    torch.manual_seed(seed)
    names = [f"model.layers.{n}.mlp.weight" for n in layers]
    if ends:
        names += ["model.embed_tokens.weight", "lm_head.weight"]
    return {name: torch.randn(8, 4) for name in names}


def save(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    return path


def arguments(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**values)


def refused(path: Path, folder: Path, out: Path) -> Ran:
    """Asserts that a part is refused by all verbs, and that the help names the folder."""
    for verb in ("merge", "verify", "inspect"):
        ran = cli(verb, path, *([out] if verb == "merge" else []))
        assert ran.code == 2, (verb, ran.out)
        (finding,) = ran.errors
        assert finding["code"] == "FS118" and finding["run"][0] == f"fastshard verify {folder}", finding
        assert not out.exists()
    return ran


def accepted(path: Path, out: Path) -> dict[str, torch.Tensor]:
    """Asserts that a file is taken for a model, and returns what is made of it."""
    ran = cli("merge", path, out)
    assert ran.code == 0 and not ran.having("FS118"), ran.out
    return read_result(out)


def test_a_file_counted_by_its_name(tmp_path: Path) -> None:
    file = save(tmp_path / "run/model-00001-of-00005.safetensors", tensors(0))
    refused(file, tmp_path / "run", tmp_path / "out")
    alone = save(tmp_path / "alone/model-00001-of-00001.safetensors", tensors(0))
    assert len(accepted(alone, tmp_path / "out")) == 3


@pytest.mark.parametrize(
    "index",
    ["model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors.index.fp16.json"],
)
def test_a_file_that_an_index_lists_among_others(index: str, tmp_path: Path) -> None:
    file = save(tmp_path / "run/first.safetensors", tensors(0))
    (tmp_path / "run" / index).write_text(
        json.dumps({"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}})
    )
    refused(file, tmp_path / "run", tmp_path / "out")
    # One that lists it alone, or others, says nothing of it.
    for files in (("first.safetensors",), ("x.safetensors", "y.safetensors")):
        (tmp_path / "run" / index).write_text(json.dumps({"weight_map": dict(enumerate(files))}))
        accepted(file, tmp_path / f"out_{files[0]}")


@pytest.mark.parametrize(
    "args",
    [
        arguments(tensor_model_parallel_size=2, world_size=2),
        arguments(tensor_model_parallel_size=1, pipeline_model_parallel_size=4),
        arguments(expert_model_parallel_size=8),
        {"model_parallel_size": 2},
        {"pipe_parallel_size": 2, "model_parallel_size": 1},
    ],
    ids=["tp", "pp", "ep", "neox-tp", "neox-pp"],
)
def test_a_rank_file_whose_arguments_divide_the_model(args: Any, tmp_path: Path) -> None:
    file = save(tmp_path / "run/model_optim_rng.pt", {"args": args, "model": tensors(0)})
    refused(file, tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    "args",
    [
        arguments(world_size=8, rank=3, local_rank=3, data_parallel_size=8),
        arguments(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, world_size=8),
        {"model_parallel_size": 1, "pipe_parallel_size": 0},
    ],
    ids=["ddp", "megatron", "neox"],
)
def test_data_parallelism_divides_nothing(args: Any, tmp_path: Path) -> None:
    file = save(tmp_path / "run/checkpoint.pt", {"model": tensors(0), "args": args})
    assert len(accepted(file, tmp_path / "out")) == 3


def test_a_rank_folder_of_megatron(tmp_path: Path) -> None:
    """Without arguments the folders beside it tell."""
    for rank in range(2):
        save(tmp_path / f"run/mp_rank_0{rank}/model_optim_rng.pt", {"model": tensors(0, seed=rank)})
    refused(tmp_path / "run/mp_rank_01/model_optim_rng.pt", tmp_path / "run", tmp_path / "out")
    ran = cli("inspect", tmp_path / "run/mp_rank_01")
    assert ran.code == 2 and ran.errors[0]["run"] == [f"fastshard verify {tmp_path / 'run'}"], ran.out


def test_a_partition_under_another_name(tmp_path: Path) -> None:
    state = {"single_partition_of_fp32_groups": [torch.ones(8)], "partition_count": 2}
    file = save(tmp_path / "run/state.pt", {"optimizer_state_dict": state})
    refused(file, tmp_path / "run", tmp_path / "out")
    zero3 = {
        "ds_version": "0.19",
        "module": {"w": torch.empty(0)},
        "param_shapes": [{"w": torch.Size([4, 4])}],
    }
    refused(save(tmp_path / "run/model.pt", zero3), tmp_path / "run", tmp_path / "out")
    moe = {"ds_version": "0.19", "module": {"w": torch.ones(2)}, "num_experts": [4]}
    refused(save(tmp_path / "run/moe.pt", moe), tmp_path / "run", tmp_path / "out")
    plain = {
        "ds_version": "0.19",
        "module": {"w": torch.ones(2)},
        "num_experts": [1],
        "dp_world_size": 4,
        "mp_world_size": 1,
    }
    accepted(save(tmp_path / "run/plain.pt", plain), tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        "model_{}.pt",
        "pytorch_model_{}.bin",
        "rank_{}.safetensors",
        "rank{}.pt",
        "model-0000{}.safetensors",
        "model-stage-0000{}-shard-00001.safetensors",
        "weights.rank_{}.pt",
    ],
)
def test_siblings_that_hold_other_tensors(name: str, tmp_path: Path) -> None:
    first = save(tmp_path / "run" / name.format(1), tensors(0))
    save(tmp_path / "run" / name.format(2), tensors(1, ends=False))
    refused(first, tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", ["model_{}.pt", "rank_{}.safetensors"])
def test_siblings_that_hold_other_boxes(name: str, tmp_path: Path) -> None:
    """The last rank has what is left of a dimension."""
    first = save(
        tmp_path / "run" / name.format(0), {"a.weight": torch.ones(6, 4), "norm.weight": torch.ones(4)}
    )
    save(tmp_path / "run" / name.format(1), {"a.weight": torch.ones(5, 4), "norm.weight": torch.ones(4)})
    refused(first, tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["tp_rank_0{}.safetensors", "model_tp{}.pt", "mp_rank_0{}.pt", "consolidated.mp_{}.pt"]
)
def test_ranks_that_divide_the_model(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / "run" / name.format(rank), tensors(0, seed=rank))
    refused(tmp_path / "run" / name.format(1), tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("model_0.pt", ["model_1.pt", "model_2.pt"]),
        ("epoch_1.safetensors", ["epoch_2.safetensors"]),
        ("rank_0.pt", ["rank_1.pt"]),
        ("model_ep1.pt", ["model_ep2.pt"]),
        ("consolidated.safetensors", ["model.safetensors"]),
        ("model.safetensors", ["model.fp16.safetensors", "ema.safetensors"]),
        ("ema.safetensors", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
    ],
)
def test_copies_are_models(name: str, others: list[str], tmp_path: Path) -> None:
    """Epochs, moving averages and ranks of data parallelism hold the same names and shapes."""
    for number, other in enumerate([name, *others]):
        save(tmp_path / "run" / other, tensors(0, 1, seed=number))
    assert len(accepted(tmp_path / "run" / name, tmp_path / "out")) == 4


def test_an_epoch_with_the_optimizers_state_is_a_copy(tmp_path: Path) -> None:
    state = {"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}
    save(tmp_path / "run/epoch_1.pt", tensors(0))
    save(tmp_path / "run/epoch_2.pt", tensors(0, seed=1) | state)
    assert len(accepted(tmp_path / "run/epoch_1.pt", tmp_path / "out")) == 3


def test_other_models_beside_it(tmp_path: Path) -> None:
    """A model of another size, and the further models of one script of accelerate."""
    sizes = {0: (8, 4), 1: (16, 8)}
    for number, shape in sizes.items():
        content = {"embed.weight": torch.ones(32, shape[1]), "mlp.weight": torch.ones(*shape)} | (
            {"extra": torch.ones(2)} if number else {}
        )
        save(tmp_path / f"sizes/model_{number}.pt", content)
    accepted(tmp_path / "sizes/model_0.pt", tmp_path / "out0")
    save(tmp_path / "gan/model.safetensors", {"generator.weight": torch.ones(2)})
    for number in (1, 2):
        save(tmp_path / f"gan/model_{number}.safetensors", {f"critic{number}.weight": torch.ones(2)})
    accepted(tmp_path / "gan/model_1.safetensors", tmp_path / "out1")


def test_a_dtensor_that_is_replicated_everywhere_is_full(tmp_path: Path) -> None:
    version, full = Version(15, (2,), ("dp",)), torch.randn(4, 4)
    for kind, state, local in (("Replicate", {}, full), ("Shard", {"dim": 0}, full[2:])):
        part = version.tensor(
            local.clone(), full, version.device_mesh(1), (version.placement(kind, **state),)
        )
        save_dtensors({"model": {"w.weight": part}}, tmp_path / f"{kind}.pt")
    (merged,) = accepted(tmp_path / "Replicate.pt", tmp_path / "out").values()
    assert torch.equal(merged, full)
    refused(tmp_path / "Shard.pt", tmp_path, tmp_path / "other")


def test_other_formats_are_named(tmp_path: Path) -> None:
    """A sound file of another format is not broken."""
    for name, head, what in (
        ("model.gguf", b"GGUF", "GGUF"),
        ("model.bin", b"GGUF", "GGUF"),
        ("model.onnx", b"\x08\x07", "compiled"),
        ("weights.npz", b"PK\x03\x04", "arrays"),
        ("tf_model.h5", b"\x89HDF", "TensorFlow"),
    ):
        file = tmp_path / name
        file.write_bytes(head + bytes(64))
        ran = cli("verify", file)
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS513"], ran.out
        assert what in ran.errors[0]["message"], ran.out


def test_a_part_is_taken_on_purpose(tmp_path: Path) -> None:
    file = save(tmp_path / "run/model-00002-of-00002.safetensors", tensors(1, ends=False))
    ran = cli("merge", file, tmp_path / "out", "--accept", "part")
    assert ran.code == 0 and ran.having("FS118")[0]["severity"] == "warning", ran.out
    manifest = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert [f["decided"] for f in manifest["findings"] if f["code"] == "FS118"] == ["accept part"]
    # The manifest in the result says so, and accepts nothing.
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 0 and ran.having("FS118", severity="warning"), ran.out
    assert cli("verify", tmp_path / "out", "--fail-on", "warning").code == 1
    assert cli("merge", tmp_path / "out", tmp_path / "again").code == 2
    assert cli("merge", tmp_path / "out", tmp_path / "again", "--accept", "part").code == 0
    # Nothing reads a file of these without the others.
    distcp = FIXTURES / "sharded/dcp_fsdp2/__0_0.distcp"
    assert cli("merge", distcp, tmp_path / "other", "--accept", "part").code == 2
