"""Damaged and hostile safetensors, indexes and pickles: refused, named, never executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import HF, NEOX, STEP, TP4, assert_refused, cli, copy, edit_safetensors, layer_file, spawn
from holding import HANG

FILE = "tp_rank_01.safetensors"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return copy(TP4, tmp_path / "ckpt")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("rank", range(4))
def test_missing_rank(ckpt: Path, out: Path, rank: int) -> None:
    (ckpt / f"tp_rank_{rank:02d}.safetensors").unlink()
    assert_refused(ckpt, out, "FS101", exit=3, file=f"tp_rank_{rank:02d}.safetensors", rank=str(rank))


def test_rank_copied_over_another(ckpt: Path, out: Path) -> None:
    (ckpt / FILE).write_bytes((ckpt / "tp_rank_00.safetensors").read_bytes())
    for options in ((), ("--replicas", "mean")):
        assert_refused(ckpt, out, "FS303", options=options, file=FILE, message="tp 0 and tp 1")


def test_one_copy_of_a_norm_that_differs(ckpt: Path, out: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.input_layernorm.weight"][5] += 0.5

    edit_safetensors(ckpt / FILE, change)
    assert_refused(ckpt, out, "FS302", tensor="model.layers.1.input_layernorm.weight", rank="1", file=FILE)


def test_tensor_that_a_rank_lacks(ckpt: Path, out: Path) -> None:
    edit_safetensors(ckpt / FILE, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    ran = cli("merge", ckpt, out)
    assert ran.code in (1, 3) and not out.exists()
    assert [
        f for f in ran.errors if f.get("tensor") == "model.layers.0.mlp.up_proj.weight" and "1" in f["rank"]
    ]


def test_shape_of_another_degree(ckpt: Path, out: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name][: tensors[name].shape[0] // 2]

    edit_safetensors(ckpt / FILE, halve)
    assert_refused(ckpt, out, "FS201", file=FILE, tensor="model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 0.5, -100, -1])
def test_truncated_safetensors(ckpt: Path, out: Path, kept: float) -> None:
    size = (ckpt / FILE).stat().st_size
    os.truncate(
        ckpt / FILE, size + int(kept) if kept < 0 else int(kept * size) if isinstance(kept, float) else kept
    )
    ran = cli("merge", ckpt, out)
    assert ran.code == 1 and not out.exists()
    found = {f["code"] for f in ran.errors}
    assert found == {"FS316"} if kept == 0 else found <= {"FS312", "FS601"}
    assert ran.errors and all(f["file"] == FILE for f in ran.errors)


def header(content: object, data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(begin: int, end: int, shape: list[object] | None = None, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [16] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "length_beyond_the_file": header({"a": entry(0, 64)}, length=1 << 62),
    "length_that_wraps": header({"a": entry(0, 64)}, length=(1 << 64) - 8),
    "no_json": header(b"{" * 40),
    "deep_json": header(b"[" * 200_000),
    "no_object": header([1, 2, 3]),
    "overlapping_tensors": header({"a": entry(0, 64), "b": entry(0, 64)}),
    "hole": header({"a": entry(4, 68)}, data=b"\0" * 68),
    "offsets_reversed": header({"a": entry(64, 0)}),
    "offsets_beyond_the_end": header({"a": entry(0, 1 << 40, [1 << 38])}),
    "size_that_does_not_fit_the_shape": header({"a": entry(0, 64, [3])}),
    "shape_whose_product_wraps": header({"a": entry(0, 0, [1 << 32, 1 << 32])}, data=b""),
    "negative_extent": header({"a": entry(0, 64, [-16])}),
    "fractional_extent": header({"a": entry(0, 64, [16.5])}),
    "unknown_dtype": header({"a": entry(0, 64, dtype="F33")}),
    "same_name_twice": header(
        b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},'
        b'"a":{"dtype":"F32","shape":[8],"data_offsets":[32,64]}}'
    ),
    "no_offsets": header({"a": {"dtype": "F32", "shape": [16]}}),
    "invalid_utf8": header(b'{"\xff\xfe":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header(name: str, tmp_path: Path, out: Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    (ckpt / "model.safetensors").write_bytes(HOSTILE[name])
    for command in (("merge", ckpt, out), ("verify", ckpt), ("manifest", ckpt)):
        ran = cli(*command)
        codes = {"FS514"} if name == "unknown_dtype" else {"FS312", "FS601"}
        assert ran.code == (2 if name == "unknown_dtype" else 1), ran.out
        assert ran.errors and {f["code"] for f in ran.errors} <= codes
        assert all(f["file"] == "model.safetensors" for f in ran.errors)
    assert not out.exists() and not (ckpt / "fastshard.manifest.json").exists()


BAD_NAMES = [
    "../secret.safetensors",
    "a/../../secret.safetensors",
    "/etc/hostname",
    "a\0b",
    "..\\secret",
    "a\x1b[2J",
    "",
    "C:secret",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=[repr(n)[1:-1] or "empty" for n in BAD_NAMES])
def test_index_that_points_elsewhere(name: str, tmp_path: Path, out: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (tmp_path / "secret.safetensors").write_bytes((ckpt / "model-00001-of-00004.safetensors").read_bytes())
    index = ckpt / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    ran = assert_refused(ckpt, out, "FS603", tensor="model.norm.weight")
    assert "\x1b" not in ran.out


def test_link_out_of_the_checkpoint(tmp_path: Path, out: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (ckpt / "model-00002-of-00004.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (ckpt / "model-00002-of-00004.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert_refused(ckpt, out, "FS603", file="model-00002-of-00004.safetensors")


def test_link_that_dangles(tmp_path: Path, out: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (ckpt / "model-00002-of-00004.safetensors").unlink()
    (ckpt / "model-00002-of-00004.safetensors").symlink_to("nowhere")
    assert_refused(ckpt, out, "FS101", exit=3, file="model-00002-of-00004.safetensors")


def test_links_of_a_hub_cache_are_followed(tmp_path: Path, out: Path) -> None:
    snapshot = tmp_path / "models--x/snapshots/abc"
    blobs = tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(p for p in sorted(HF.iterdir()) if p.name != "expected.json"):
        (blobs / f"{i}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert cli("merge", snapshot, out).code == 0


def test_index_names_a_missing_file(tmp_path: Path, out: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (ckpt / "model-00003-of-00004.safetensors").unlink()
    assert_refused(ckpt, out, "FS101", exit=3, file="model-00003-of-00004.safetensors")


def test_index_names_a_tensor_that_its_file_lacks(tmp_path: Path, out: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    index = json.loads((ckpt / "model.safetensors.index.json").read_text())
    file = ckpt / index["weight_map"]["model.norm.weight"]
    edit_safetensors(file, lambda tensors: tensors.pop("model.norm.weight"))
    assert_refused(ckpt, out, "FS102", exit=3, tensor="model.norm.weight")


def test_one_ranks_slice_saved_as_the_whole_embedding(tmp_path: Path, out: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    index = json.loads((ckpt / "model.safetensors.index.json").read_text())
    name = "model.embed_tokens.weight"

    def slice_it(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:256]

    edit_safetensors(ckpt / index["weight_map"][name], slice_it)
    for command in (("merge",), ("convert", "--to", "hf")):
        assert_refused(ckpt, out, "FS208", command=command, tensor=name)


class Evil:
    """Unpickling this would run a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def test_pickle_that_runs_a_command_does_not(tmp_path: Path, out: Path) -> None:
    ckpt, marker = copy(NEOX, tmp_path / "ckpt"), tmp_path / "ran"
    file = ckpt / STEP / layer_file(3, 1)
    content = torch.load(file) | {"extra": Evil(marker)}
    torch.save(content, file)
    ran = cli("merge", ckpt, out)
    assert ran.code in (0, 1, 2)
    assert not marker.exists()
    torch.load(file, weights_only=False)
    assert marker.exists(), "the pickle is harmless: the test shows nothing"


@pytest.mark.parametrize("payload", ["bare_pickle", "legacy", "garbage_pickle", "memo_bomb"])
def test_what_is_no_zip_of_torch_is_refused(payload: str, tmp_path: Path, out: Path) -> None:
    ckpt, marker = copy(NEOX, tmp_path / "ckpt"), tmp_path / "ran"
    file = ckpt / STEP / layer_file(3, 1)
    if payload == "bare_pickle":
        file.write_bytes(pickle.dumps(Evil(marker)))
    elif payload == "legacy":
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    else:
        pkl = b"\x80\x02" + (b"\xff" * 64 if payload == "garbage_pickle" else b"]" + b"(" * 5_000_000)
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pkl)
            archive.writestr("archive/version", "3\n")
    old = payload in ("bare_pickle", "legacy")
    ran = assert_refused(ckpt, out, "FS514" if old else "FS602", exit=2 if old else 1, file=layer_file(3, 1))
    assert len(ran.errors) == 1
    assert not marker.exists()


def test_names_with_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    ckpt.mkdir()
    name = "evil\x1b]0;owned\x07\n\x1b[2Jname\u202e"
    raw = json.dumps({name: {"dtype": "F32", "shape": [15], "data_offsets": [0, 64]}}).encode()
    (ckpt / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * 64)
    good = json.dumps({name: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    (tmp_path / "good").mkdir()
    (tmp_path / "good/model.safetensors").write_bytes(struct.pack("<Q", len(good)) + good + b"\0" * 64)
    for command in (
        ("verify", ckpt),
        ("inspect", "-v", tmp_path / "good"),
        ("verify", "-v", tmp_path / "good"),
        ("plan", "-v", tmp_path / "good"),
    ):
        ran = cli(*command, json_output=False)
        for stream in (ran.out, ran.err):
            assert not set(stream) & {"\x1b", "\x07", "\u202e"}, (command, stream)


def test_file_names_that_are_no_utf8_do_not_crash(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    strange = os.fsencode(ckpt) + b"/model-\xff\xfe\x1b[31m.safetensors"
    Path(os.fsdecode(strange)).write_bytes(b"x")
    process = spawn("verify", ckpt)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode in (0, 1, 2), err
    assert "Traceback" not in err and "\x1b" not in out + err
