"""Steps of a run, missing files, statements and promised tensors by address: as on a disk."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard.stores.claims import Claim
from helpers import FIXTURES, cli

pytest.importorskip("obstore")
pytest.importorskip("moto")

from servers import ACCESS_KEY, REGION, SECRET_KEY, S3Server, moto_server, read_folder

MEGATRON = FIXTURES / "sharded/megatron_legacy_tp2_pp2"
LOST = "mp_rank_01_001/model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"


def make_run(folder: Path) -> Path:
    """Make a run of three steps: a complete one, one that lacks a rank, and one whose rank file is empty."""
    for step in (10, 20, 30):
        shutil.copytree(MEGATRON / "iter_0000010", folder / f"iter_{step:07d}")
    (folder / "iter_0000020" / LOST).unlink()
    (folder / "iter_0000030" / LOST).write_bytes(b"")
    (folder / TRACKER).write_text("20")
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(autouse=True)
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def test_steps_of_a_bucket_have_the_verdicts_of_a_disk(server: S3Server, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    server.make_bucket("steps", {f"run/{name}": content for name, content in read_folder(run).items()})
    there, here = cli("steps", "s3://steps/run"), cli("steps", run)
    assert there.code == here.code != 0
    assert there.doc["requests"]["count"] > 0

    def plain(doc: dict[str, object], root: str) -> object:
        text = json.dumps({key: doc[key] for key in ("folder", "steps", "trackers", "newest_complete")})
        return json.loads(text.replace(root, "RUN"))

    remote, local = plain(there.doc, "s3://steps/run"), plain(here.doc, str(run))
    for document in (remote, local):
        for step in document["steps"]:  # type: ignore[index]
            # A bucket states the time of the upload.
            del step["saved"]
            for finding in step["findings"]:
                finding.pop("id", None)
    assert remote == local
    assert there.doc["newest_complete"] == "iter_0000010"
    # Only a disk has a tracker file that can be repaired.
    assert "--fix-tracker" in here.out and "--fix-tracker" not in there.out
    refused = cli("steps", "s3://steps/run", "--fix-tracker")
    assert refused.code == 2 and "FS514" in refused.out
    assert f"printf %s 10 | aws s3 cp - s3://steps/run/{TRACKER}" in refused.out.replace("\\", "")
    assert server.client().get_object(Bucket="steps", Key=f"run/{TRACKER}")["Body"].read() == b"20"


@pytest.mark.parametrize(
    "options", [("s3://steps/run", "--follow"), (MEGATRON, "--verify", "--state", "s3://steps/state")]
)
def test_what_needs_a_disk_is_refused_by_name(options: tuple[object, ...]) -> None:
    refused = cli("steps", *options)
    assert refused.code == 2 and "FS514" in refused.out and "s3://steps/" in refused.out


def test_a_verified_step_of_a_bucket_is_not_read_again(server: S3Server, tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "step-10") as out:
        out["weight"] = np.random.default_rng(0).standard_normal((1024, 2048), "float32")
    content = (tmp_path / "step-10/model.safetensors").read_bytes()
    server.make_bucket("kept", {"run/step-10/model.safetensors": content})
    state = tmp_path / "state"

    def read_steps() -> int:
        """Return the number of bytes that a process of its own requests."""
        command = [sys.executable, "-m", "fastshard", "steps", "s3://kept/run", "--verify", "--state", state]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        document = json.loads(done.stdout)
        assert [step["verified"] for step in document["steps"]] == [True]
        return int(document["requests"]["bytes"])

    first = read_steps()
    assert first >= len(content)
    assert read_steps() < len(content) / 8
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 1
    server.client().put_object(Bucket="kept", Key="run/step-10/model.safetensors", Body=bytes(damaged))
    found = cli("steps", "s3://kept/run", "--verify", "--state", state)
    assert found.code == 1 and "weight" in found.out


def test_an_upload_that_has_not_finished_is_an_unfinished_step(server: S3Server) -> None:
    files = {f"run/iter_0000010/{name}": c for name, c in read_folder(MEGATRON / "iter_0000010").items()}
    server.make_bucket("claims", files)
    fastshard.convert("s3://claims/run", "s3://claims/results/step-10", to="dcp")
    client = server.client()
    client.copy_object(
        Bucket="claims",
        Key="results/step-20/__0_0.distcp",
        CopySource={"Bucket": "claims", "Key": "results/step-10/__0_0.distcp"},
    )
    claim = Claim("0" * 32, "plan", "process", ("__0_0.distcp", ".metadata"), ".metadata", 0)
    client.put_object(Bucket="claims", Key="results/step-20/.fastshard/claim", Body=claim.to_bytes())
    steps = fastshard.steps("s3://claims/results")
    assert [step.verdict for step in steps.steps] == ["complete", "unfinished"]
    assert steps.newest_complete is not None and steps.newest_complete.path == "s3://claims/results/step-10"


def test_a_missing_file_is_found_in_a_bucket_and_by_its_hash(server: S3Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(MEGATRON, run)
    fastshard.manifest(run, tmp_path / "manifest.json")
    lost = run / "iter_0000010" / LOST
    content = lost.read_bytes()
    lost.unlink()
    server.make_bucket("backup", {f"copies/iter_0000010/{LOST}": content, "other/model_optim_rng.pt": b"1"})
    found = cli("find", run, "--in", "s3://backup/copies", "s3://backup/other")
    assert found.code == 0, found.out
    assert found.doc["files"][0]["found"] == f"s3://backup/copies/iter_0000010/{LOST}"
    assert found.doc["commands"] == [f"aws s3 cp s3://backup/copies/iter_0000010/{LOST} {lost}"]
    # Without its folders only a hash proves what it is.
    server.make_bucket("loose", {"model_optim_rng.pt": content})
    assert cli("find", run, "--in", "s3://loose").code == 3
    by_hash = cli("find", run, "--in", "s3://loose", "--expect", tmp_path / "manifest.json")
    assert by_hash.code == 0 and "its hash matches the manifest" in by_hash.out
    # Two files that fit and differ: none is chosen.
    other = (MEGATRON / "iter_0000010" / LOST.replace("01_001", "00_001")).read_bytes()
    server.make_bucket("two", {f"a/iter_0000010/{LOST}": content, f"b/iter_0000010/{LOST}": other})
    several = cli("find", run, "--in", "s3://two")
    assert several.code == 3 and f"s3://two/b/iter_0000010/{LOST}" in several.out


def test_settings_reach_the_store_of_a_manifest(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without variables of the environment, the call alone has the credentials."""
    fastshard.manifest(MEGATRON, tmp_path / "manifest.json")
    server.make_bucket("manifests", {"run.json": (tmp_path / "manifest.json").read_bytes()})
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    settings = {
        "endpoint": server.url,
        "access_key_id": ACCESS_KEY,
        "secret_access_key": SECRET_KEY,
        "region": REGION,
    }
    verdict = fastshard.verify(MEGATRON, expect="s3://manifests/run.json", storage_options=settings)
    assert verdict.ok


def test_a_statement_about_a_result_in_a_bucket_is_that_of_a_disk(server: S3Server, tmp_path: Path) -> None:
    fastshard.convert(MEGATRON, tmp_path / "model", to="hf")
    here = fastshard.attest(tmp_path / "model", tmp_path / "here.json")
    server.make_bucket("results", {f"model/{n}": c for n, c in read_folder(tmp_path / "model").items()})
    refused = cli("attest", "s3://results/model")
    assert refused.code == 2 and "-o fastshard.intoto.json" in refused.out
    assert cli("attest", "s3://results/model", "-o", tmp_path / "there.json").code == 0
    assert json.loads((tmp_path / "there.json").read_text()) == here
    weights = tmp_path / "model/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    server.client().put_object(Bucket="results", Key="model/model.safetensors", Body=bytes(damaged))
    assert cli("attest", "s3://results/model", "-o", tmp_path / "other.json").code == 1
    assert not (tmp_path / "other.json").exists()


def test_the_tensors_that_a_config_in_a_bucket_promises_are_listed(server: S3Server) -> None:
    pytest.importorskip("transformers")
    config = (FIXTURES / "sharded/hf_sharded/config.json").read_bytes()
    server.make_bucket("configs", {"model/config.json": config})
    here = cli("expected", FIXTURES / "sharded/hf_sharded")
    for address in ("s3://configs/model", "s3://configs/model/config.json"):
        there = cli("expected", address)
        assert there.code == here.code == 0
        assert there.doc["tensors"] == here.doc["tensors"]
