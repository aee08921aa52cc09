"""Train states of Levanter and EasyLM in a bucket: as on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("obstore")
pytest.importorskip("moto")
pytest.importorskip("tensorstore")

from easylm_maker import as_easylm, write_stream
from easylm_maker import as_train_state as as_stream
from helpers import cli
from levanter_maker import as_levanter, as_train_state, save
from servers import S3Server, moto_server
from transformers import AutoModelForCausalLM, LlamaConfig

BUCKET = "train-states"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as server:
        server.make_bucket(BUCKET, {})
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path / "config")
    return AutoModelForCausalLM.from_config(config)


def describe(ran: Any) -> list[tuple[str, str, str | None, str | None]]:
    return [(f["code"], f["message"], f.get("file"), f.get("tensor")) for f in ran.findings]


def compare(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: Path, run: Path
) -> None:
    """The same findings and the same files of a conversion, of the address and of the path."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for path in (path for path in run.rglob("*") if path.is_file()):
        key = path.relative_to(tmp_path).as_posix()
        server.client().put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    address = f"s3://{BUCKET}/{given.relative_to(tmp_path).as_posix()}"
    config = ("--config", tmp_path / "config/config.json")
    for argv in (("inspect",), ("verify",), ("ls",), ("inspect", *config), ("verify", *config)):
        stored, local = (cli(argv[0], source, *argv[1:]) for source in (address, given))
        assert stored.code == local.code == 0, stored.out
        assert describe(stored) == describe(local)
        for key in ("framework", "step", "files", "file_bytes", "parameters"):
            assert stored.doc.get(key) == local.doc.get(key)
    for name, source in (("stored", address), ("local", given)):
        ran = cli("convert", source, tmp_path / name, "--to", "hf", *config)
        assert ran.code == 0, ran.errors
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stored" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("given", ["", "step-20"])
def test_steps_of_levanter(
    ocdbt: bool, given: str, model: Any, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / f"levanter{ocdbt}{given}"
    arrays = as_train_state(as_levanter(model))
    save(run / "step-20", arrays, ocdbt=ocdbt, chunks=2)
    compare(server, monkeypatch, tmp_path, run / given, run)


@pytest.mark.parametrize("name", ["streaming_train_state_80", "open_llama"])
def test_streams_of_easylm(
    name: str, model: Any, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / f"easylm_{name}"
    stream = write_stream(run / name, as_stream(as_easylm(model)).items(), most=1000)
    compare(server, monkeypatch, tmp_path, stream, run)


def test_the_models_folder_of_a_step(
    model: Any, server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The metadata beside it is not below the address: the step's has it."""
    run = tmp_path / "alone"
    save(run / "step-20", as_train_state(as_levanter(model)), ocdbt=False)
    compare(server, monkeypatch, tmp_path, run, run)
    ran = cli("inspect", f"s3://{BUCKET}/alone/step-20/model")
    assert ran.code == 3 and [f["code"] for f in ran.errors] == ["FS104"]
    assert "step's directory" in ran.errors[0]["help"]
