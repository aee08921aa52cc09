"""Hosts that share no storage: each copies its part, hashed; put together elsewhere, every byte is what its
host has read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import FIXTURES, NEOX, cli
from safetensors.torch import save_file

MANIFEST = "fastshard.manifest.json"


def divided(source: Path, folder: Path, n: int) -> list[Path]:
    """Files of a checkpoint to `n` hosts in turn; what says which step it is lies on all."""
    hosts = [folder / f"host{i}" for i in range(n)]
    files = sorted(p for p in source.rglob("*") if p.is_file() and p.name != "expected.json")
    for i, file in enumerate(files):
        for k in range(n) if file.suffix in ("", ".yml", ".json") else [i % n]:
            to = hosts[k] / file.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
    return hosts


def pieces(hosts: list[Path], folder: Path) -> list[Path]:
    """Their parts, as they arrive elsewhere: a copy does not keep times."""
    arrived = []
    for i, host in enumerate(hosts):
        ran = cli("copy-local", host, folder / f"sent{i}")
        assert ran.code == 0, ran.out
        shutil.copytree(folder / f"sent{i}", folder / f"part{i}", copy_function=shutil.copyfile)
        arrived.append(folder / f"part{i}")
    return arrived


def weights(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


@pytest.mark.parametrize(
    "source",
    [
        NEOX,
        FIXTURES / "sharded/hf_sharded",
        FIXTURES / "sharded/dcp_fsdp2",
        FIXTURES / "sharded/megatron_legacy_tp2_pp2",
        FIXTURES / "deepspeed/zero3_bf16_dp2",
    ],
    ids=lambda path: path.name,
)
def test_all_parts_are_the_checkpoint(source: Path, tmp_path: Path) -> None:
    parts = pieces(divided(source, tmp_path, 2), tmp_path)
    assert cli("merge", source, tmp_path / "whole").code == 0
    ran = cli("merge", *parts, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert weights(tmp_path / "out") == weights(tmp_path / "whole") != {}
    assert cli("verify", *parts).code == 0
    # One of them is a part, and says so.
    ran = cli("verify", parts[0])
    assert ran.code == 3 and ran.doc["absent"]["files"], ran.out


def test_stores_of_hosts_that_wrote_to_their_own_disks(tmp_path: Path) -> None:
    broken = FIXTURES / "orbax/mp2_local_BROKEN_063_zarr3"
    parts = pieces([broken / "node0", broken / "node1"], tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert cli("merge", broken / "node0", broken / "node1", whole).code == 0
    ran = cli("merge", *parts, out)
    assert ran.code == 0, ran.out
    assert weights(out) == weights(whole) != {}


def flip(part: Path) -> Path:
    file = max((p for p in part.rglob("*.pt")), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def cut(part: Path) -> Path:
    file = max((p for p in part.rglob("*.pt")), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    return file


def lose(part: Path) -> Path:
    file = next(part.rglob("*.yml"))
    file.unlink()
    return file


def exchange(part: Path) -> Path:
    """Another file of the same kind under this name: whole by its own checksums."""
    one, other = sorted(part.rglob("layer_0*.pt"))[:2]
    other.write_bytes(one.read_bytes())
    return other


def add(part: Path) -> Path:
    one = next(part.rglob("layer_0*-model_00*.pt"))
    other = one.with_name(one.name.replace("model_00", "model_01"))
    if not other.exists():
        shutil.copyfile(one, other)
    return other


def text(part: Path) -> Path:
    """A config that no host had decides values."""
    file = next(part.glob("global_step*")) / "configs" / "zz.yml"
    file.write_text('{"rotary_pct": 0.5}')
    return file


def unsigned(part: Path) -> Path:
    (part / MANIFEST).unlink()
    return part


@pytest.mark.parametrize("damage", [flip, cut, lose, exchange, add, text, unsigned])
def test_what_was_not_there_when_its_host_read_it_is_told(
    damage: Callable[[Path], Path], tmp_path: Path
) -> None:
    parts = pieces(divided(NEOX, tmp_path, 2), tmp_path)
    name = damage(parts[1]).name
    for verb in (["merge", *parts, tmp_path / "out"], ["verify", *parts]):
        ran = cli(*verb)
        assert ran.code in (1, 2, 3), ran.out
        assert any(name in (f["file"] or "") and f["severity"] == "error" for f in ran.findings), ran.out
    assert not (tmp_path / "out").exists()


def test_a_piece_is_of_one_step_and_of_a_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "run"
    shutil.copytree(NEOX, source)
    [step] = source.glob("global_step*")
    shutil.copytree(step, source / "global_step1")
    made = fastshard.copy_local(source, tmp_path / "piece", step=step.name)
    names = {file["name"] for file in made.document["files"]}
    assert "latest" in names and not any(name.startswith("global_step1/") for name in names)
    assert made.document["kind"] == "piece" and "host's part" in made.document["not_checked"][0]
    ran = cli("copy-local", source, tmp_path / "piece")
    assert ran.code == 2 and ran.having("FS504") + ran.having("FS503") + ran.errors
    assert cli("copy-local", source, tmp_path / "piece", "--overwrite", "--step", step.name).code == 0
    (tmp_path / "empty").mkdir()
    assert cli("copy-local", tmp_path / "empty", tmp_path / "none").code == 2
    assert not (tmp_path / "none").exists()
    # Not into itself.
    assert cli("copy-local", source, source / "piece").code == 2


def test_a_pieces_manifest_is_a_manifest(tmp_path: Path) -> None:
    import jsonschema

    schema = json.loads(
        (Path(fastshard.__file__).parent / "schemas/manifest.v1.schema.json").read_text(encoding="utf-8")
    )
    fastshard.copy_local(NEOX, tmp_path / "piece")
    jsonschema.validate(json.loads((tmp_path / "piece" / MANIFEST).read_text()), schema)


def test_parts_that_disagree_on_how_they_are_read(tmp_path: Path) -> None:
    hosts = divided(FIXTURES / "sharded/hf_sharded", tmp_path, 2)
    for host in hosts:
        said = {"model_max_length": 128, "_name_or_path": host.name}
        (host / "tokenizer_config.json").write_text(json.dumps(said))
    assert cli("merge", *hosts, tmp_path / "same").code == 0
    (hosts[1] / "tokenizer_config.json").write_text('{"model_max_length": 4}')
    for ran in (cli("merge", *hosts, tmp_path / "out"), cli("verify", *hosts)):
        assert ran.code == 1 and {f["code"] for f in ran.errors} == {"FS110"}, ran.out
        assert "host1/tokenizer_config.json" in ran.out and "--tokenizer" in ran.out
    given = ["--tokenizer", hosts[0]]
    assert cli("merge", *hosts, tmp_path / "out", *given).code == 0
    config = json.loads((hosts[1] / "config.json").read_text())
    (hosts[1] / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    for ran in (
        cli("merge", *hosts, tmp_path / "out2", *given),
        cli("convert", *hosts, tmp_path / "out2", "--to", "megatron:torch_dist", *given),
        cli("verify", *hosts),
        cli("inspect", *hosts),
    ):
        assert ran.code == 1 and "FS110" in ran.out and "--config" in ran.out, ran.out
    assert not (tmp_path / "out2").exists()
    assert cli("merge", *hosts, tmp_path / "out2", *given, "--config", hosts[0] / "config.json").code == 0


def test_a_part_in_which_another_host_decides_is_copied_whole(tmp_path: Path) -> None:
    """The index that says which of two sets of shards counts is on another host."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("model-00001-of-00002", "head-00001-of-00001"):
        save_file({name: torch.zeros(2)}, here / f"{name}.safetensors")
    assert cli("verify", here).having("FS106")
    ran = cli("copy-local", here, tmp_path / "part")
    assert ran.code == 0, ran.out
    assert {p.name for p in here.iterdir()} <= {p.name for p in (tmp_path / "part").iterdir()}
