"""Commands on checkpoints in a bucket and on the hub, through the real clients: as on a disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastshard.stores import placeholders
from helpers import FIXTURES, cli
from hub_server import HubServer, Repo, serving_hub

pytest.importorskip("huggingface_hub")
pytest.importorskip("obstore")
pytest.importorskip("moto")

from servers import SECRET_KEY, S3Server, moto_server, read_folder

MEGATRON = FIXTURES / "sharded/megatron_legacy_tp2_pp2"
HF = FIXTURES / "sharded/hf_sharded"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as server:
        files = {f"run/{name}": content for name, content in read_folder(MEGATRON).items()}
        server.make_bucket("models", files | {f"hf/{name}": c for name, c in read_folder(HF).items()})
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return "s3://models"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving_hub() as hub:
        hub.repos["org/model"] = Repo()
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def forget_what_was_read() -> None:
    """Release what earlier commands of this process have kept."""
    for root in placeholders._roots.values():
        root.folder.forget()


def compare_results(address: str, disk: Path, folder: Path) -> dict[str, object]:
    """Convert an address and the same files of a disk; return the manifest of the first result."""
    found = {}
    for name, source in (("store", address), ("disk", disk)):
        ran = cli("convert", source, folder / name, "--to", "hf")
        assert ran.code == 0, ran.out
        found[name] = read_folder(folder / name)
    manifest: dict[str, object] = json.loads(found["store"].pop("fastshard.manifest.json"))
    found["disk"].pop("fastshard.manifest.json")
    # The card says where the model is from.
    for files in found.values():
        files.pop("README.md", None)
    assert found["store"] == found["disk"]
    return manifest


def test_a_bucket_is_converted_as_a_disk_is(bucket: str, tmp_path: Path) -> None:
    for argv in (("inspect", f"{bucket}/run"), ("verify", f"{bucket}/run"), ("ls", f"{bucket}/hf")):
        forget_what_was_read()
        ran = cli(*argv)
        assert ran.code == 0 and ran.doc["requests"]["count"] > 0, argv
    forget_what_was_read()
    ran = cli("inspect", f"{bucket}/run", "-v", json_output=False)
    assert "stores: " in ran.err and " requests, " in ran.err
    manifest = compare_results(f"{bucket}/run", MEGATRON, tmp_path)
    assert manifest["values"]["stores"] == [{"address": f"{bucket}/run", "revision": None}]  # type: ignore[index]
    assert cli("diff", f"{bucket}/hf", HF).code == 0


def test_a_missing_rank_in_a_bucket_is_named(bucket: str, server: S3Server) -> None:
    files = {f"run/{name}": content for name, content in read_folder(MEGATRON).items()}
    lost = next(name for name in files if "mp_rank_01_001" in name)
    server.make_bucket("lossy", {name: content for name, content in files.items() if name != lost})
    ran = cli("verify", "s3://lossy/run")
    assert ran.code == 3 and "mp_rank_01_001" in ran.out and SECRET_KEY not in ran.out + ran.err


def test_a_repository_is_converted_at_its_commit(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.repos["org/model"].commit(read_folder(HF))
    assert cli("inspect", "hf://org/model").code == cli("verify", "hf://org/model").code == 0
    manifest = compare_results("hf://org/model", HF, tmp_path)
    assert manifest["values"]["stores"] == [{"address": "hf://org/model", "revision": commit}]  # type: ignore[index]


def test_an_index_that_differs_from_the_files_of_a_repository_is_found(hub: HubServer) -> None:
    files = read_folder(HF)
    del files["model-00002-of-00004.safetensors"]
    hub.repos["org/model"].commit(files)
    ran = cli("inspect", "hf://org/model")
    assert ran.code == 3 and "model-00002-of-00004.safetensors" in ran.out


def test_a_private_repository_is_one_finding(hub: HubServer) -> None:
    hub.repos["org/model"].private = True
    ran = cli("inspect", "hf://org/model")
    assert ran.code == 2 and len(ran.findings) == 1
