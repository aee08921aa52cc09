"""Names in stores: what lies beside a file counts, and messages have addresses, not paths of placeholders."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fastshard
import numpy as np
import pytest
from fastshard import FastshardError
from fastshard.common import codes
from fastshard.common.addresses import find_scheme, make_upload_command
from fastshard.conversion.distributed import split_runs
from folder_store import find_address, folders_served
from helpers import FIXTURES
from safetensors.numpy import save_file


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    with folders_served():
        yield


def find_codes(path: str | Path) -> list[str]:
    try:
        return sorted(finding.code for finding in fastshard.verify(path).findings)
    except FastshardError as error:
        return sorted(finding.code for finding in error.findings)


@pytest.mark.parametrize(
    "name",
    [
        "sharded/tp4_micro/tp_rank_00.safetensors",
        "maxtext_twins/a_hf_f32_single/model.safetensors",
        "sharded/colossalai_049_tp2_pp2/modeling/model-stage-00001-shard-00001.safetensors",
        "universal/zero1_bf16_dp2/global_step4/zero/down.bias/fp32.pt",
    ],
)
def test_a_file_of_a_store_is_judged_by_what_lies_beside_it(name: str) -> None:
    assert find_codes(find_address(FIXTURES / name)) == find_codes(FIXTURES / name) != [codes.NO_SUCH_PATH]


def test_a_rank_of_a_store_is_not_merged_by_itself(tmp_path: Path) -> None:
    with pytest.raises(FastshardError) as caught:
        fastshard.merge(find_address(FIXTURES / "sharded/tp4_micro/tp_rank_01.safetensors"), tmp_path / "out")
    assert caught.value.code == codes.PART
    assert find_address(FIXTURES / "sharded/tp4_micro") in " ".join(caught.value.findings[0].run)


def test_a_folder_with_one_file_of_its_name_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model.safetensors"
    folder.mkdir()
    save_file({"a": np.zeros(3, np.float32)}, folder / "model.safetensors")
    checkpoint = fastshard.open(find_address(folder))
    assert not checkpoint.listing.single and list(checkpoint) == ["a"]


def divide(name: str, tmp_path: Path) -> list[Path]:
    """Copy a checkpoint to two folders, of which each has some of the weights and all other files."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for number, file in enumerate(sorted((FIXTURES / name).iterdir())):
        for index, folder in enumerate(folders):
            if file.suffix != ".safetensors" or number % 2 == index:
                shutil.copy(file, folder)
    return folders


@pytest.mark.parametrize("stored", [(True, True), (True, False), (False, True)])
def test_parts_in_stores_whose_configs_differ_are_refused(stored: tuple[bool, bool], tmp_path: Path) -> None:
    folders = divide("sharded/tp4_micro", tmp_path)
    config = json.loads((folders[1] / "config.json").read_text())
    paths = [find_address(f) if s else f for f, s in zip(folders, stored, strict=True)]
    fastshard.merge(paths, tmp_path / "good")
    (folders[1] / "config.json").write_text(json.dumps({**config, "rope_theta": 7}))
    with pytest.raises(FastshardError) as caught:
        fastshard.merge(paths, tmp_path / "out")
    assert caught.value.code == codes.RANKS_DISAGREE


LAYERS = "gpt_neox/llama_gqa_pp_tp2"
LOST = "global_step4/layer_03-model_01-model_states.pt"


def lose_rank(tmp_path: Path) -> Path:
    """Copy a checkpoint without a file."""
    folder = tmp_path / "lost"
    shutil.copytree(FIXTURES / LAYERS, folder)
    (folder / LOST).unlink()
    return folder


def test_no_text_has_the_path_of_a_placeholder(tmp_path: Path) -> None:
    broken = find_address(lose_rank(tmp_path))
    like = find_address(FIXTURES / "sharded/hf_sharded")
    texts = []
    pytest.importorskip("jinja2")
    texts.append(fastshard.report(broken))
    assert "rsync" not in texts[0] and broken in texts[0]
    verdict = fastshard.verify(find_address(FIXTURES / "gpt_neox/llama_gqa_pp_tp2"), like=like)
    texts += [str(finding.to_dict()) for finding in verdict.findings]
    layer = "gpt_neox/llama_gqa_pp_tp2/global_step4/layer_02-model_00-model_states.pt"
    texts += [str(finding.to_dict()) for finding in fastshard.open(find_address(FIXTURES / layer)).findings]
    with pytest.raises(FastshardError) as caught:
        fastshard.open(f"{like}/config.json")
    texts += [str(finding.to_dict()) for finding in caught.value.findings]
    assert len(texts) > 4 and like in " ".join(texts)
    for text in texts:
        assert f"{tempfile.gettempdir()}/fastshard-" not in text


def test_a_manifest_in_a_store_is_what_a_checkpoint_is_compared_with(tmp_path: Path) -> None:
    source = FIXTURES / "sharded/tp4_micro"
    fastshard.merge(source, tmp_path / "out")
    assert fastshard.verify(source, expect=find_address(tmp_path / "out")).ok
    (file,) = (tmp_path / "out").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert not fastshard.verify(find_address(tmp_path / "out")).ok


def test_parts_of_a_run_read_the_store_by_its_address(tmp_path: Path) -> None:
    source = FIXTURES / "sharded/tp4_micro"
    run = split_runs.split(find_address(source), tmp_path / "parts", None, parts=2)
    for part in range(2):
        split_runs.make_part(tmp_path / "parts", part, run.id)
    split_runs.commit(tmp_path / "parts", run.id)
    fastshard.merge(source, tmp_path / "out")
    (one,), (other,) = ((tmp_path / name).glob("*.safetensors") for name in ("parts", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_a_missing_file_is_copied_to_its_address(tmp_path: Path) -> None:
    broken = find_address(lose_rank(tmp_path))
    search = fastshard.find(broken, [FIXTURES / LAYERS])
    (file,) = search.files
    assert file.path == f"{broken}/{LOST}"
    assert file.command is not None and file.command.endswith(file.path)


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("s3://bucket/run/a b.pt", "aws s3 cp /x/a.pt 's3://bucket/run/a b.pt'"),
        ("gs://bucket/a.pt", "gcloud storage cp /x/a.pt gs://bucket/a.pt"),
        ("hf://org/model@dev/sub/a.pt", "hf upload org/model /x/a.pt sub/a.pt --revision dev"),
    ],
)
def test_a_command_that_copies_to_a_store_is_the_stores_own(address: str, command: str) -> None:
    assert make_upload_command("/x/a.pt", address) == command


def test_commands_without_stores_refuse_addresses_as_such() -> None:
    address = find_address(FIXTURES / "sharded/hf_sharded")
    with pytest.raises(FastshardError) as caught:
        fastshard.check_storage(address)
    assert caught.value.code == codes.UNSUPPORTED and caught.value.path == address


def test_a_scheme_in_capitals_is_one() -> None:
    assert find_scheme("S3://bucket/run") == "s3" and find_scheme("bucket") is None
    address = "FOLDER" + find_address(FIXTURES / "sharded/hf_sharded").removeprefix("folder")
    assert len(fastshard.open(address)) > 0


def test_an_address_that_pathlib_has_changed_is_told_from_a_path() -> None:
    with pytest.raises(FastshardError) as caught:
        fastshard.open(Path("s3://bucket/run"))
    assert caught.value.code == codes.NO_SUCH_PATH and "s3://" in (caught.value.findings[0].help or "")


def test_the_manifest_of_a_store_is_written_where_the_user_says(tmp_path: Path) -> None:
    address = find_address(FIXTURES / "sharded/tp4_micro")
    with pytest.raises(FastshardError) as caught:
        fastshard.manifest(address)
    assert list(caught.value.findings[0].run) == [f"fastshard manifest {address} -o FILE"]
    fastshard.manifest(address, tmp_path / "manifest.json")
    assert fastshard.verify(FIXTURES / "sharded/tp4_micro", expect=tmp_path / "manifest.json").ok
