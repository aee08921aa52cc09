"""verify covers every file that was published, not tensors alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import HF, NEOX, STEP, cli, copy, edit_pt

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("results")
    made = {}
    for name, command in {
        "hf": ("convert", NEOX, "--to", "hf", "--tokenizer", _tokenizer(root)),
        "merge": ("merge", HF, "--max-shard-size", "100KB"),
        "gpt_neox": ("convert", NEOX, "--to", "gpt_neox", "--tp", "2"),
        "dcp": ("convert", HF, "--to", "dcp", "--tp", "2"),
        "orbax": ("convert", HF, "--to", "orbax"),
    }.items():
        ran = cli(command[0], command[1], root / name, *command[2:])
        assert ran.code == 0, ran.out
        made[name] = root / name
    return made


def _tokenizer(root: Path) -> Path:
    folder = root / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return folder


def edit_header(path: Path, old: bytes, new: bytes) -> None:
    """Changes a safetensors header without moving a byte of its tensors."""
    assert len(old) == len(new)
    content = bytearray(path.read_bytes())
    (n,) = struct.unpack("<Q", content[:8])
    header = bytes(content[8 : 8 + n])
    assert old in header
    content[8 : 8 + n] = header.replace(old, new, 1)
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_bytes(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


CHANGES: dict[str, tuple[str, Damage, str, str]] = {
    "metadata of a header": (
        "hf",
        lambda f: edit_header(shard(f), b'"format":"pt"', b'"format":"tf"'),
        "FS308",
        "safetensors",
    ),
    "config": (
        "hf",
        lambda f: edit_json(f / "config.json", lambda c: c.update(rotary_emb_base=5)),
        "FS308",
        "config.json",
    ),
    "tokenizer": (
        "hf",
        lambda f: (f / "tokenizer.json").write_text('{"model": {"vocab": []}}'),
        "FS308",
        "tokenizer.json",
    ),
    "config gone": ("hf", lambda f: (f / "tokenizer.json").unlink(), "FS101", "tokenizer.json"),
    "index": (
        "merge",
        lambda f: edit_json(f / "model.safetensors.index.json", lambda c: c["metadata"].update(total_size=5)),
        "FS308",
        "index",
    ),
    "values in a pickle": (
        "gpt_neox",
        lambda f: edit_pt(next(f.rglob("mp_rank_00*")), lambda d: d.update(extra=5)),
        "FS308",
        "mp_rank_00",
    ),
    "yaml of a run": ("gpt_neox", lambda f: next(f.rglob("*.yml")).write_text("a: 1"), "FS308", ".yml"),
    "a record's value": (
        "dcp",
        lambda f: edit_bytes(f / ".metadata", b"checkpoint", b"checkPoint"),
        "FS308",
        ".metadata",
    ),
    "a key of a store": (
        "orbax",
        lambda f: edit_bytes(next(f.rglob("_METADATA")), b"{", b" {"),
        "FS308",
        "_METADATA",
    ),
    "a marker of a store": (
        "orbax",
        lambda f: next(f.rglob("_CHECKPOINT_METADATA")).unlink(),
        "FS101",
        "_CHECKPOINT_METADATA",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_any_published_file_is_found(what: str, results: dict[str, Path], tmp_path: Path) -> None:
    of, change, code, file = CHANGES[what]
    folder = copy(results[of], tmp_path / "copy")
    # A copy has other times; nothing else tells it from the original.
    ran = cli("verify", folder)
    assert ran.code == 0, ran.out
    change(folder)
    ran = cli("verify", folder)
    assert ran.code in (1, 3) and ran.having(code, file=file, severity="error"), ran.out


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "adapter_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_file_that_readers_would_load_is_an_error(
    name: str, results: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(results["hf"], tmp_path / "copy")
    (folder / name).write_text("{}")
    ran = cli("verify", folder)
    assert ran.code == 1 and ran.having("FS108", file=name, severity="error"), ran.out


def test_any_other_file_is_a_warning(results: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(results["hf"], tmp_path / "copy")
    (folder / "notes.txt").write_text("mine")
    ran = cli("verify", folder)
    assert ran.code == 0 and ran.having("FS108", file="notes.txt", severity="warning"), ran.out


def test_an_inventory_covers_companions(tmp_path: Path) -> None:
    folder = copy(NEOX, tmp_path / "ckpt")
    assert cli("manifest", folder).code == 0
    assert cli("verify", folder).code == 0
    # Other steps and logs lie beside what was hashed.
    (folder / "train.log").write_text("loss")
    assert cli("verify", folder).code == 0
    # The tracker moves on with the next step.
    (folder / "latest").write_text(f"{STEP}\n")
    assert cli("verify", folder).code == 0
    inventory = copy(HF, tmp_path / "hf")
    assert cli("manifest", inventory).code == 0
    edit_json(inventory / "config.json", lambda c: c.update(rope_theta=5.0))
    assert cli("verify", inventory).having("FS308", file="config.json", severity="error")


def test_a_manifest_of_an_older_version_says_nothing_of_other_files(
    results: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy(results["merge"], tmp_path / "copy")

    def older(document: dict) -> None:
        document["files"] = [
            {k: f[k] for k in ("name", "size", "identity")} for f in document["files"] if "identity" in f
        ]

    edit_json(folder / "fastshard.manifest.json", older)
    assert cli("verify", folder).code == 0
    assert cli("merge", folder, tmp_path / "out").code == 0


@pytest.mark.parametrize("of", ["hf", "merge", "gpt_neox", "dcp", "orbax"])
def test_a_manifest_that_is_kept_apart_holds_for_the_result(
    of: str, results: dict[str, Path], tmp_path: Path
) -> None:
    """Parts of tensors are compared in their files, whole ones by their names."""
    apart = tmp_path / "apart.json"
    copy(results[of], tmp_path / "copy")
    (tmp_path / "copy/fastshard.manifest.json").rename(apart)
    for command in (("verify", tmp_path / "copy"), ("merge", tmp_path / "copy", tmp_path / "out")):
        ran = cli(*command, "--expect", apart)
        assert ran.code == 0, ran.out


def test_names_in_a_manifest_stay_below_it(results: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(results["merge"], tmp_path / "copy")
    outside = {"name": "../../etc/hostname", "size": 1, "blake3": "0" * 64}
    edit_json(folder / "fastshard.manifest.json", lambda d: d["files"].append(outside))
    ran = cli("verify", folder)
    assert ran.code == 2 and ran.having("FS518"), ran.out


def test_a_tensor_that_the_manifest_does_not_name_is_an_error(
    results: dict[str, Path], tmp_path: Path
) -> None:
    for of in ("orbax", "hf"):
        folder = copy(results[of], tmp_path / of)
        edit_json(folder / "fastshard.manifest.json", lambda d: d["tensors"].pop(3))
        ran = cli("verify", folder)
        assert ran.code == 1 and ran.having("FS308", severity="error"), ran.out


def test_parts_of_a_store_are_verified_apart(results: dict[str, Path]) -> None:
    for part in (1, 2, 3):
        assert cli("verify", results["orbax"], "--subset", f"{part}/3").code == 0


def test_an_added_tokenizer_or_an_edited_config_is_no_hindrance(
    results: dict[str, Path], tmp_path: Path
) -> None:
    """Known from the manifest that lies there they warn; a manifest that is given is what is expected."""
    folder = copy(results["merge"], tmp_path / "copy")
    (folder / "tokenizer.json").write_text("{}")
    edit_json(folder / "config.json", lambda c: c.update(_name_or_path="mine"))
    ran = cli("merge", folder, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert ran.having("FS108", file="tokenizer.json", severity="warning")
    assert ran.having("FS308", file="config.json", severity="warning")
    assert cli("verify", folder).code == 1
    manifest = folder / "fastshard.manifest.json"
    assert cli("merge", folder, tmp_path / "two", "--expect", manifest).code == 1


def test_parts_of_a_result_in_several_folders(results: dict[str, Path], tmp_path: Path) -> None:
    one, two = copy(results["dcp"], tmp_path / "one"), tmp_path / "two"
    two.mkdir()
    (one / ".metadata").rename(two / ".metadata")
    assert cli("verify", one, two).code == 0
    assert cli("merge", one, two, tmp_path / "out").code == 0
    (two / ".metadata").unlink()
    assert cli("verify", one, two).code != 0
