"""Quantised weights that ranks have divided: torch DCP, and the safetensors of its Hugging Face writer, of
two ranks."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dequantised_oracle import ORACLES
from forks import Forks
from helpers import assert_refused, at_once, cli, read_result
from quantised_maker import FORMS, LAYERS, LINEAR, Tensors, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

#: Forms that are saved in other containers too.
OTHERWISE = ("fp8 blocks", "ct 4 bit")
CONTAINERS = ("hf", "fsdp")
#: Forms that are tried with every run of the tests.
CHOSEN = ("fp8 blocks", "fp8 tensor", "ct 4 bit", "gptq 3 bit", "awq", "bnb nf4 nested", "modelopt nvfp4")
UP = "model.layers.1.mlp.up_proj"


def divided(tensors: Tensors, mesh: Any, dim: int = 0) -> dict[str, Any]:
    """Each tensor divided among two ranks, as FSDP divides parameters."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        placed = Shard(min(dim, tensor.ndim - 1)) if tensor.ndim else Replicate()
        local = tensor
        if tensor.ndim:
            parts = tensor.view(torch.uint8).reshape(*tensor.shape, -1).chunk(2, placed.dim)
            local = (
                parts[dist.get_rank()] if dist.get_rank() < len(parts) else parts[0].narrow(placed.dim, 0, 0)
            )
            local = local.clone().view(tensor.dtype).reshape(local.shape[:-1])
        made[name] = DTensor.from_local(
            local, mesh, [placed], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
        )
    return made


def rank_of(folder: Path, rank: int, forms: str) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=90))
    mesh = init_device_mesh("cpu", (2,))
    for number, form in enumerate(FORMS):
        if (form in CHOSEN) != (forms == "chosen"):
            continue
        _, tensors = model(form)
        dcp.save(divided(tensors, mesh), checkpoint_id=folder / f"{number}")
        dcp.save(divided(tensors, mesh, 1), checkpoint_id=folder / f"{number}_columns")
        lost = {name: t for name, t in tensors.items() if name != companion(tensors)}
        dcp.save(divided(lost, mesh), checkpoint_id=folder / f"{number}_lost")
    if forms != "chosen":
        dist.destroy_process_group()
        return
    for form in OTHERWISE:
        _, tensors = model(form)
        lost = {name: t for name, t in tensors.items() if name != companion(tensors)}
        for name, held in (("whole", tensors), ("lost", lost)):
            at = folder / f"hf_{form.replace(' ', '_')}_{name}"
            dcp.save(
                divided(held, mesh),
                storage_writer=dcp.HuggingFaceStorageWriter(str(at), save_distributed=True),
            )
            at = folder / f"fsdp_{form.replace(' ', '_')}_{name}"
            at.mkdir(exist_ok=True)
            torch.save(divided(held, mesh), at / f"model_world_size_2_rank_{rank}.pt")
    _, tensors = model("fp8 blocks")
    damaged = dict(tensors)
    damaged[f"{UP}.weight_scale_inv"] = torch.zeros_like(tensors[f"{UP}.weight_scale_inv"])
    dcp.save(divided(damaged, mesh), checkpoint_id=folder / "zero")
    dist.destroy_process_group()


def companion(tensors: Tensors) -> str:
    """A tensor without which the codes of one weight have no values."""
    words = ("weight_scale_inv", "weight_scale", "scale", "scales", "weight.absmax", "SCB")
    return next(name for word in words for name in tensors if name == f"{UP}.{word}")


def save(folder: Path, forms: str) -> Path:
    """What two ranks save: of the forms that are tried with every run, or of the others."""
    forks = Forks(
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
        "pytest",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join(sys.path),
    )
    logs = [folder / f"log{rank}" for rank in range(2)]
    try:
        forks.launch(Path(__file__), [folder, forms], logs, [{"RANK": str(rank)} for rank in range(2)])
    finally:
        forks.kill()
    for number, form in enumerate(FORMS):
        names = [f"{number}", f"{number}_lost", f"{number}_columns"]
        names += [f"{c}_{form.replace(' ', '_')}_{name}" for c in CONTAINERS for name in ("whole", "lost")]
        names += ["zero"] if form == "fp8 blocks" else []
        for name in names:
            if (folder / name).exists():
                (folder / name / "config.json").write_text(json.dumps(model(form)[0]))
    return folder


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("chosen"), "chosen")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("others"), "others")


@pytest.fixture
def saved(request: pytest.FixtureRequest) -> Path:
    """The folder that holds the form of a test."""
    called = getattr(request.node, "callspec", None)
    form = called.params.get("form", CHOSEN[0]) if called is not None else CHOSEN[0]
    folder: Path = request.getfixturevalue("chosen" if form in CHOSEN else "others")
    return folder


@pytest.mark.parametrize("form", at_once(FORMS, CHOSEN))
def test_a_whole_model_has_no_finding_and_keeps_its_bytes(form: str, saved: Path, tmp_path: Path) -> None:
    folder = saved / str(list(FORMS).index(form))
    ran = cli("verify", folder)
    assert ran.code == 0 and not [f for f in ran.doc["findings"] if f["severity"] != "note"], ran.out
    assert cli("merge", folder, tmp_path / "out").code == 0
    have, want = read_result(tmp_path / "out"), model(form)[1]
    assert have.keys() == want.keys()
    assert all(have[n].dtype == t.dtype and same_bytes(have[n], t) for n, t in want.items())


def same_bytes(have: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(
        have.contiguous().flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8)
    )


@pytest.mark.parametrize("form", at_once(FORMS, CHOSEN))
def test_a_lost_companion_is_named(form: str, saved: Path, tmp_path: Path) -> None:
    folder = saved / f"{list(FORMS).index(form)}_lost"
    name = companion(model(form)[1])
    ran = cli("verify", folder)
    assert ran.code == 3 and name in {f["tensor"] for f in ran.having("FS102")}, ran.out
    assert_refused(folder, tmp_path / "out", "FS102", exit=3, tensor=name)
    assert_refused(folder, tmp_path / "out", "FS102", exit=3, tensor=name, command=("convert", "--to", "hf"))


@pytest.mark.parametrize("form", at_once(ORACLES, CHOSEN))
def test_values_are_those_of_the_reference(form: str, saved: Path, tmp_path: Path) -> None:
    folder = saved / str(list(FORMS).index(form))
    ran = cli("merge", folder, tmp_path / "out", "--dtype", "bf16", "--accept", "non-finite")
    assert ran.code == 0, ran.out
    have, (_, tensors) = read_result(tmp_path / "out"), model(form)
    for layer in range(LAYERS):
        for part, (o, i) in LINEAR.items():
            module = f"model.layers.{layer}.{part}"
            own = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
            want = ORACLES[form](own, o, i, torch.bfloat16)
            number = ~want.isnan()
            assert torch.equal(
                have[f"{module}.weight"][number].view(torch.int16), want[number].view(torch.int16)
            ), module
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("form", OTHERWISE)
@pytest.mark.parametrize("container", CONTAINERS)
def test_other_containers_of_ranks(container: str, form: str, saved: Path, tmp_path: Path) -> None:
    at, (_, tensors) = f"{container}_{form.replace(' ', '_')}", model(form)
    ran = cli("verify", saved / f"{at}_whole")
    assert ran.code == 0, ran.out
    lost = cli("verify", saved / f"{at}_lost")
    assert lost.code == 3 and companion(tensors) in {f["tensor"] for f in lost.having("FS102")}, lost.out
    assert cli("merge", saved / f"{at}_whole", tmp_path / "kept").code == 0
    have = read_result(tmp_path / "kept")
    assert have.keys() == tensors.keys() and all(same_bytes(have[n], t) for n, t in tensors.items())
    for source, out in ((saved / f"{at}_whole", "out"), (tmp_path / "kept", "again")):
        assert cli("merge", source, tmp_path / out, "--dtype", "bf16").code == 0
    assert cli("diff", tmp_path / "out", tmp_path / "again").code == 0


@pytest.mark.parametrize("form", at_once(FORMS, CHOSEN))
def test_divided_columns_have_the_values_of_divided_rows(form: str, saved: Path, tmp_path: Path) -> None:
    number = list(FORMS).index(form)
    rows, columns = saved / str(number), saved / f"{number}_columns"
    assert cli("merge", columns, tmp_path / "kept").code == 0
    have, want = read_result(tmp_path / "kept"), model(form)[1]
    assert have.keys() == want.keys() and all(same_bytes(have[n], t) for n, t in want.items())
    cast = ("--dtype", "bf16", "--accept", "non-finite")
    codes = [cli("merge", source, tmp_path / f"{source.name}_out", *cast).code for source in (rows, columns)]
    assert codes == ([0, 0] if form in ORACLES else [2, 2])
    if form in ORACLES:
        assert cli("diff", tmp_path / f"{number}_out", tmp_path / f"{number}_columns_out").code == 0


def test_scales_that_are_zero_are_named(saved: Path) -> None:
    ran = cli("verify", saved / "zero")
    assert ran.code == 1
    assert [f["tensor"] for f in ran.doc["findings"] if f["severity"] == "error"] == [
        f"{UP}.weight_scale_inv"
    ], ran.out


if __name__ == "__main__":
    import os

    rank_of(Path(sys.argv[1]), int(os.environ["RANK"]), sys.argv[2])
