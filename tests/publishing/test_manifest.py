"""Manifests: what was hashed before shows what was damaged since."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import fastshard
import pytest
import torch
from helpers import (
    FIXTURES,
    HF,
    NEOX,
    STEP,
    TP4,
    assert_refused,
    cli,
    copy,
    edit_pt,
    edit_safetensors,
    flip_bit,
    flip_payload,
    layer_file,
    load_file,
    state_of,
)

FILE = "tp_rank_02.safetensors"
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return copy(TP4, tmp_path / "ckpt")


def damage(ckpt: Path) -> None:
    flip_payload(ckpt / FILE, load_file(ckpt / FILE)[TENSOR])


@pytest.mark.parametrize("command", [("merge",), ("convert", "--to", "hf")], ids=["merge", "convert"])
def test_flipped_bit_is_found_by_a_manifest_given(
    ckpt: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert cli("manifest", TP4, "-o", tmp_path / "m.json").code == 0
    assert not (TP4 / "fastshard.manifest.json").exists()
    damage(ckpt)
    out = tmp_path / "out"
    assert cli(command[0], ckpt, tmp_path / "without", *command[1:]).code == 0, "only a manifest can see this"
    assert_refused(ckpt, out, "FS308", command=command, options=("--expect", tmp_path / "m.json"), file=FILE)


def test_verify_names_file_and_tensor(ckpt: Path, tmp_path: Path) -> None:
    assert cli("manifest", ckpt, "-o", tmp_path / "m.json").code == 0
    assert cli("verify", ckpt, "--expect", tmp_path / "m.json").code == 0
    damage(ckpt)
    ran = cli("verify", ckpt, "--expect", tmp_path / "m.json")
    assert ran.code == 1
    assert ran.having("FS308", file=FILE, tensor=TENSOR), ran.findings


def test_manifest_beside_the_source_is_used_by_itself(ckpt: Path, tmp_path: Path) -> None:
    assert cli("manifest", ckpt).code == 0
    assert cli("merge", ckpt, tmp_path / "good").code == 0
    damage(ckpt)
    assert_refused(ckpt, tmp_path / "out", "FS308", file=FILE)
    assert_refused(ckpt, tmp_path / "out", "FS308", command=("convert", "--to", "hf"), file=FILE)
    assert cli("verify", ckpt).having("FS308", file=FILE)


def test_file_that_came_later_or_went_is_said(ckpt: Path, tmp_path: Path) -> None:
    assert cli("manifest", ckpt, "-o", tmp_path / "m.json").code == 0
    (ckpt / FILE).unlink()
    ran = cli("verify", ckpt, "--expect", tmp_path / "m.json")
    assert ran.code in (1, 3)
    assert [f for f in ran.errors if FILE in f["file"]]


def test_values_saved_anew_are_found_in_a_torch_file(tmp_path: Path) -> None:
    """Its checksum fits, since it was written in good order: only the manifest knows."""
    ckpt = copy(NEOX, tmp_path / "ckpt")
    assert cli("manifest", ckpt).code == 0
    edit_pt(ckpt / STEP / layer_file(3, 1), lambda layer: layer["mlp.linear1.weight"].mul_(2))
    ran = assert_refused(ckpt, tmp_path / "out", "FS308", file=layer_file(3, 1))
    assert "mlp.linear1.weight" in json.dumps(ran.findings)


def test_manifest_of_a_result_holds_for_other_shardings(tmp_path: Path) -> None:
    assert cli("convert", NEOX, tmp_path / "hf", "--to", "hf").code == 0
    manifest = tmp_path / "hf/fastshard.manifest.json"
    assert (
        cli(
            "convert", NEOX.parent / "neox_seq_tp2", tmp_path / "two", "--to", "hf", "--expect", manifest
        ).code
        == 0
    )
    other = copy(NEOX, tmp_path / "ckpt")
    edit_pt(other / STEP / layer_file(3, 1), lambda layer: layer["mlp.linear1.weight"].mul_(2))
    assert_refused(
        other,
        tmp_path / "out",
        "FS308",
        command=("convert", "--to", "hf"),
        options=("--expect", manifest),
        tensor="gpt_neox.layers.1.mlp.dense_h_to_4h.weight",
    )


def test_a_results_manifest_holds_for_its_source_of_the_same_file_names(tmp_path: Path) -> None:
    """Both are `model.safetensors`; their headers, configs and other files are each their own."""
    source, result = tmp_path / "source", tmp_path / "result"
    assert cli("convert", NEOX, source, "--to", "hf").code == 0
    (source / "fastshard.manifest.json").unlink()
    # Another order of the tensors, and other metadata.
    edit_safetensors(source / "model.safetensors", lambda tensors: None)
    (source / "generation_config.json").write_text("{}")
    assert cli("merge", source, result).code == 0
    names = [{f.name for f in folder.glob("*.safetensors")} for folder in (source, result)]
    assert names == [{"model.safetensors"}] * 2
    assert (source / "model.safetensors").read_bytes() != (result / "model.safetensors").read_bytes()
    manifest = result / "fastshard.manifest.json"
    apart = tmp_path / "apart.json"
    shutil.copy(manifest, apart)
    edit = {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | edit))
    for expect in (manifest, apart):
        ran = cli("verify", source, "--expect", expect)
        assert ran.code == 0, ran.out
        assert cli("verify", source / "model.safetensors", "--expect", expect).code == 0
        assert cli("verify", result, "--expect", expect).code == 0
    for number, command in enumerate(
        (
            ("merge",),
            ("convert", "--to", "hf"),
            ("merge", "--dtype", "f16"),
            ("merge", "--include", "*norm*"),
            ("convert", "--to", "gpt_neox"),
        )
    ):
        for checkpoint in (source, result):
            out = tmp_path / f"out{number}_{checkpoint.name}"
            ran = cli(command[0], checkpoint, out, *command[1:], "--expect", apart)
            assert ran.code == 0, ran.out
    # Its tensors are compared all the same.
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    flip_payload(source / "model.safetensors", load_file(source / "model.safetensors")[name])
    assert cli("verify", source, "--expect", manifest).having("FS308", tensor=name, severity="error")
    assert_refused(source, tmp_path / "out", "FS308", options=("--expect", manifest), tensor=name)
    # In its own folder it is about the files.
    (result / "config.json").write_text("{}")
    assert cli("verify", result, "--expect", manifest).having("FS308", file="config.json", severity="error")


def test_damaged_result_is_found_by_its_own_manifest(tmp_path: Path) -> None:
    assert cli("merge", TP4, tmp_path / "out").code == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    flip_payload(file, load_file(file)[TENSOR])
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 1
    assert ran.having("FS308", tensor=TENSOR)


def test_no_manifest_is_written_for_what_is_damaged(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    before = state_of(ckpt)
    assert cli("manifest", ckpt).code == 3
    assert state_of(ckpt) == before


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"format": "fastshard.manifest"}',
        '{"format": "fastshard.manifest", "ten',
        '{"format": "fastshard.manifest", "version": 1, "files": 3, "tensors": []}',
    ],
)
def test_bad_manifest_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(content)
    ran = cli("merge", TP4, tmp_path / "out", "--expect", tmp_path / "m.json")
    assert ran.code == 2, ran.out
    assert not (tmp_path / "out").exists()


def test_truncated_manifest_beside_the_source_is_not_ignored(ckpt: Path, tmp_path: Path) -> None:
    assert cli("manifest", ckpt).code == 0
    path = ckpt / "fastshard.manifest.json"
    path.write_text(path.read_text()[:-50])
    assert_refused(ckpt, tmp_path / "out", "FS518", exit=2)


def test_expect_config_makes_completeness_provable(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    config = tmp_path / "config.json"
    shutil.move(ckpt / "config.json", config)
    assert cli("verify", ckpt, "--expect", config).code == 0
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"num_hidden_layers": content["num_hidden_layers"] + 1}))
    ran = cli("verify", ckpt, "--expect", config)
    assert ran.code in (1, 3)
    assert ran.having("FS102") or ran.having("FS103")


def test_expect_config_counts_in_merge_and_convert_too(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    content = json.loads((ckpt / "config.json").read_text())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(content | {"num_hidden_layers": content["num_hidden_layers"] + 1}))
    for command in (("merge",), ("convert", "--to", "hf")):
        assert_refused(ckpt, tmp_path / "out", "FS103", exit=3, command=command, options=("--expect", config))
    both = ("--expect", config, "--config", config)
    assert_refused(ckpt, tmp_path / "out", "FS515", exit=2, options=both)


def test_options_of_an_open_checkpoint_are_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError, match="is already open"):
        fastshard.merge(fastshard.open(HF), tmp_path / "out", expect=HF / "config.json")


def test_manifest_says_what_was_written(tmp_path: Path) -> None:
    made = fastshard.merge(TP4, tmp_path / "out", memory="2GiB")
    document = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert document == made.document
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert set(made) == set(tensors)
    assert all(tuple(made[n]["shape"]) == tuple(t.shape) for n, t in tensors.items())
    assert made["lm_head.weight"]["dtype"] == "BF16" and tensors["lm_head.weight"].dtype == torch.bfloat16


def test_of_some_tensors_those_are_compared(ckpt: Path, tmp_path: Path) -> None:
    """A manifest of a result, against the shards that it was made of."""
    assert cli("merge", ckpt, tmp_path / "out").code == 0
    expect = ("--expect", tmp_path / "out/fastshard.manifest.json")
    damage(ckpt)
    assert cli("verify", ckpt, *expect).having("FS308", tensor=TENSOR)
    for chosen in (
        ("--exclude", TENSOR),
        ("--include", "*norm*"),
        ("--include", "*.1.*", "--exclude", "*down*"),
    ):
        ran = cli("verify", ckpt, *expect, *chosen)
        assert ran.code == 0 and not ran.having("FS308") and not ran.having("FS102"), ran.findings
    assert cli("verify", ckpt, *expect, "--include", "*.1.*").having("FS308", tensor=TENSOR)
    assert cli("diff", ckpt, TP4).code == 1
    assert cli("diff", ckpt, TP4, "--exclude", TENSOR).code == 0
    assert fastshard.diff(ckpt, TP4, include=["*norm*"]) == []


def test_what_a_merge_does_not_read_must_be_sound_too(tmp_path: Path) -> None:
    """A manifest of damaged moments would call the damage right ever after."""
    good = FIXTURES / "deepspeed/zero1_fp16_dp2"
    name = sorted(good.rglob("*optim_states.pt"))[0].relative_to(good)
    with zipfile.ZipFile(good / name) as archive:
        members = [archive.read(m) for m in archive.infolist() if "/data/" in m.filename and m.file_size > 64]
    passed = 0
    for number, content in enumerate(members):
        root = copy(good, tmp_path / f"ckpt{number}")
        flip_bit(root / name, (root / name).read_bytes().find(content) + len(content) // 2)
        passed += cli("merge", root, tmp_path / f"out{number}").code == 0
        manifest = tmp_path / "m.json"
        ran = cli("manifest", root, "-o", manifest)
        assert ran.code == 1 and ran.having("FS301", file=name.name), ran.findings
        with pytest.raises(fastshard.FastshardError, match="FS301"):
            fastshard.manifest(root, manifest)
        assert not manifest.exists()
    assert passed, "all is read by a merge"


def test_a_manifest_that_is_kept_elsewhere_holds_for_the_whole_result(tmp_path: Path) -> None:
    assert cli("merge", HF, tmp_path / "out").code == 0
    kept = shutil.copyfile(tmp_path / "out/fastshard.manifest.json", tmp_path / "kept.json")
    (tmp_path / "out/fastshard.manifest.json").unlink()
    assert cli("verify", tmp_path / "out", "--expect", kept).code == 0
    config = tmp_path / "out/config.json"
    config.write_text(config.read_text().replace("1000", "1001"))
    assert cli("verify", tmp_path / "out", "--expect", kept).having(
        "FS308", file="config.json", severity="error"
    )
