"""Torch files saved without checksums (`torch.serialization.set_crc32_options(False)`): zeros where CRC32s
are."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import (
    FIXTURES,
    NEOX,
    STEP,
    Ran,
    assert_refused,
    cli,
    copy,
    flip_payload,
    layer_file,
    load_pt,
    read_result,
)

NOTE = "saved without checksums"


@contextmanager
def without_checksums() -> Iterator[None]:
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(computed)


def saved_without(root: Path) -> Path:
    """The same checkpoint, all its torch files as torch saves them without checksums."""
    files = [*root.rglob("*.pt")]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        with zipfile.ZipFile(file) as archive:
            members, central = archive.infolist(), archive.start_dir
        for member in members:
            assert data[central : central + 4] == b"PK\x01\x02"
            data[central + 16 : central + 20] = bytes(4)
            central += 46 + sum(struct.unpack_from("<3H", data, central + 28))
            local = member.header_offset
            data[local + 14 : local + 18] = bytes(4)
            end = local + 30 + sum(struct.unpack_from("<2H", data, local + 26)) + member.compress_size
            if data[end : end + 4] == b"PK\x07\x08":
                data[end + 4 : end + 8] = bytes(4)
        file.write_bytes(data)
    return root


def assert_told(ran: Ran) -> None:
    assert ran.code == 0, ran.err[:2000]
    assert ran.having("FS314", severity="note", message=NOTE) and NOTE in ran.not_checked


def test_it_is_what_torch_leaves(tmp_path: Path) -> None:
    content = {"a": torch.randn(30), "b": torch.arange(9)}
    with without_checksums():
        torch.save(content, tmp_path / "model.pt")
    (tmp_path / "other").mkdir()
    torch.save(content, tmp_path / "other/model.pt")
    assert any(member.CRC for member in zipfile.ZipFile(tmp_path / "other/model.pt").infolist())
    saved_without(tmp_path / "other")
    assert checksums(tmp_path / "model.pt") == checksums(tmp_path / "other/model.pt") == {0}


def checksums(file: Path) -> set[int]:
    with zipfile.ZipFile(file) as archive:
        return {member.CRC for member in archive.infolist()}


def test_a_checkpoint_without_checksums_is_taken_and_named(tmp_path: Path) -> None:
    root = saved_without(copy(NEOX, tmp_path / "ckpt"))
    assert_told(cli("merge", root, tmp_path / "out"))
    assert cli("merge", NEOX, tmp_path / "good").code == 0
    got, want = read_result(tmp_path / "out"), read_result(tmp_path / "good")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert_told(cli("verify", root))
    assert NOTE in (tmp_path / "out/fastshard.manifest.json").read_text()
    assert not cli("plan", NEOX).having("FS314")


def test_a_manifest_settles_it(tmp_path: Path) -> None:
    root = saved_without(copy(NEOX, tmp_path / "ckpt"))
    manifest = tmp_path / "good.json"
    assert cli("manifest", root, "-o", manifest).code == 0
    ran = cli("merge", root, tmp_path / "out", "--expect", manifest)
    assert ran.code == 0 and not ran.having("FS314") and NOTE not in ran.not_checked
    assert NOTE not in (tmp_path / "out/fastshard.manifest.json").read_text()
    file = root / STEP / layer_file(2, 0)
    flip_payload(file, max(load_pt(file).values(), key=torch.Tensor.numel))
    assert_refused(root, tmp_path / "not", "FS308", options=("--expect", manifest))


def test_a_copy_is_found_without_checksums(tmp_path: Path) -> None:
    root = saved_without(copy(NEOX, tmp_path / "ckpt"))
    content = load_pt(root / STEP / layer_file(2, 1))
    with without_checksums():
        torch.save(content, root / STEP / layer_file(2, 0))
    assert_refused(root, tmp_path / "out", "FS303")


@pytest.mark.parametrize("which", [0, -1])
def test_one_checksum_lost_among_others_is_damage(which: int, tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "ckpt")
    file = root / STEP / layer_file(2, 0)
    data = bytearray(file.read_bytes())
    members = [m for m in zipfile.ZipFile(file).infolist() if "/data/" in m.filename]
    crc = struct.pack("<I", members[which].CRC)
    assert members[which].CRC
    file.write_bytes(bytes(data).replace(crc, bytes(4)))
    assert_refused(root, tmp_path / "out", "FS301")


def test_distributed_checkpoints_without_checksums(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(40, 30), "b.weight": torch.randn(7)}
    with without_checksums():
        dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert_told(cli("merge", tmp_path / "ckpt", tmp_path / "out"))
    got = read_result(tmp_path / "out")
    assert got.keys() == state.keys() and all(torch.equal(got[name], state[name]) for name in state)


def test_repaired_masters_stay_without_checksums(tmp_path: Path) -> None:
    stale = FIXTURES / "stale_masters_zero1_bf16_dp2"
    assert cli("master-weights", stale, "--repair", tmp_path / "good").code == 0
    root = saved_without(copy(stale, tmp_path / "ckpt"))
    assert cli("master-weights", root, "--repair", tmp_path / "out").code == 0
    assert cli("master-weights", tmp_path / "out").code == 0
    optimizers = sorted(tmp_path.glob("out/**/*optim_states.pt"))
    assert optimizers
    for file in optimizers:
        assert checksums(file) == {0}
        good = saved_without(copy(tmp_path / "good", tmp_path / f"good {file.stem}"))
        assert file.read_bytes() == (good / file.relative_to(tmp_path / "out")).read_bytes()
