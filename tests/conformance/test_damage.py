"""Of every source one file of each kind is taken away, and of every result one byte of each file is
another."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from cells import ALL, MANIFEST, hashes, made
from helpers import cli
from origins import ORIGINS

#: Kinds of files that a merge does without, in these sources: it gives the same tensors.
#: (kind, why) -> sources; "*" for all that have such a file
SPARE: dict[tuple[str, str], tuple[str, ...]] = {
    ("config.json", "names and shapes tell what a merge needs, or layout.json"): (
        "hf_safetensors",
        "hf_bin",
        "tp_safetensors",
        "zero1",
        "zero2",
        "zero3",
        "universal",
        "dcp",
        "colossalai",
        "fsdp_ranks",
        "levanter",
        "easylm",
        "torchtitan",
        "olmo_core",
        "torch_checkpointing",
        "dcp_stages",
    ),
    ("model.yaml", "a merge keeps names and values; a conversion reads the settings"): ("nemo",),
    ("io.json", "NeMo's objects for a resume"): ("nemo",),
    ("metadata.pkl", "DTensors state what it does"): ("torch_checkpointing",),
    ("optimizer_#.pt", "the model alone is read"): ("torch_checkpointing",),
    ("step_#.pt", "the model alone is read"): ("torch_checkpointing",),
    ("config.json", "the other ranks' shards, which it tells of, are all there"): ("hf_rank_shards",),
    ("optimizer_state.pt", "hyperparameters, which a conversion with the optimizer asks for"): ("universal",),
    ("generation_config.json", "nothing of it is in a tensor"): ("*",),
    ("layout.json", "config.json tells the shapes too"): ("tp_safetensors",),
    ("model.safetensors.index.json", "the files' names say how many there are"): ("hf_safetensors",),
    ("pytorch_model.bin.index.json", "the files' names say how many there are"): ("hf_bin",),
    ("config.yml", "the tensors of a Llama tell how it is computed"): ("neox_llama",),
    ("mp_rank_#_model_states.pt", "a pipeline checkpoint's tensors are in its layer files; it warns"): (
        "neox_pipeline",
        "neox_llama",
    ),
    ("mp_rank_#_model_states.pt", "fp32.pt of each parameter is what is read"): ("universal",),
    ("step.pt", "the optimizer's step is not merged"): ("universal",),
    ("latest", "there is one step"): ("*",),
    ("latest_universal", "there is one step"): ("*",),
    ("latest_checkpointed_iteration.txt", "there is one step"): ("*",),
    ("metadata.json", ".metadata says what it is"): ("megatron_torch_dist", "nemo"),
    ("_CHECKPOINT_METADATA", "its store tells all arrays"): ("*",),
    ("_METADATA", "the store tells all arrays"): ("*",),
    ("_sharding", "how devices held the arrays"): ("*",),
    ("process_#", "how processes held the arrays"): ("*",),
    ("commit_success.txt", "the step has its final name"): ("*",),
    ("process's manifest", "the item's own store names all that the processes wrote"): ("*",),
    ("maxtext_model.yml", "a merge keeps values as they are"): ("*",),
}


def kind_of(path: Path) -> str:
    """The name without its numbers; files of OCDBT, which have none, by what store they are of."""
    name = path.name
    if re.fullmatch("[0-9a-f]{32}", name):
        name = "process's data" if path.parent.parent.name.startswith("ocdbt.process") else "data"
    elif name == "manifest.ocdbt" and path.parent.name.startswith("ocdbt.process"):
        name = "process's manifest"
    return re.sub(r"\d+", "#", name)


def kinds(folder: Path) -> dict[str, Path]:
    """One file of each kind: the largest, the last of them."""
    files = sorted(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.stat().st_size, path)
    )
    return {kind_of(path): path for path in files}


def content(out: Path, path: Path) -> int:
    """A place in a tensor, where the file has one; else in the value of a torch file; else the middle."""
    document = json.loads((out / MANIFEST).read_text())
    name = str(path.relative_to(out))
    held = [tensor["offset"] for tensor in document["tensors"] if tensor.get("file") == name]
    if held:
        return int(held[len(held) // 2]) + 1
    if not zipfile.is_zipfile(path):
        return path.stat().st_size // 2
    with zipfile.ZipFile(path) as archive:
        (value,) = (info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
        return path.read_bytes().index(archive.read(value)) + value.file_size // 2


def spare(name: str, kind: str) -> bool:
    return any(kind == of and (name in sources or "*" in sources) for (of, _), sources in SPARE.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ORIGINS)
def test_each_kind_of_file_is_missed_or_can_be_spared(name: str, tmp_path: Path) -> None:
    root, out = tmp_path / "ckpt", tmp_path / "out"
    ORIGINS[name].make(root)
    for kind, path in kinds(root).items():
        aside = path.rename(tmp_path / "aside")
        ran = cli("merge", root, out)
        if spare(name, kind):
            assert ran.code == 0, f"{kind}: {ran.out}"
            assert hashes(out) == ORIGINS[name].merged(), kind
            out.rename(tmp_path / f"merged without {kind}")
        else:
            assert ran.code in (1, 2, 3) and ran.errors, f"{kind} was not missed"
            assert not out.exists()
        aside.rename(path)


@pytest.mark.parametrize("to", ALL)
def test_a_byte_of_any_file_of_a_result_is_seen(to: str, tmp_path: Path) -> None:
    # One target holds an optimizer always.
    origin = ORIGINS["zero1" if to == "universal" else "hf_safetensors"]
    origin.make(tmp_path / "ckpt")
    out = tmp_path / "out"
    assert made(tmp_path / "ckpt", out, to, origin).code == 0
    # Nobody vouches for the manifest; of an empty file there is nothing to change.
    chosen = {
        kind: path for kind, path in kinds(out).items() if path.name != MANIFEST and path.stat().st_size
    }
    for kind, path in chosen.items():
        whole = path.read_bytes()
        # Of a small file every byte is hashed, padding and records of an archive too.
        everywhere = range(0, len(whole), len(whole) // 6 + 1) if len(whole) <= 256 << 10 else ()
        for place in (content(out, path), *everywhere):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            ran = cli("verify", out)
            # A model card is written on after the conversion: a note.
            seen = (
                ran.having("FS308", file=path.name) if path.name == "README.md" else ran.code and ran.errors
            )
            assert seen, f"{kind}: byte {place} was changed and verify did not see it"
        path.write_bytes(whole)
    assert chosen


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ORIGINS)
def test_a_byte_of_any_merge_is_seen(name: str, tmp_path: Path) -> None:
    ORIGINS[name].make(tmp_path / "ckpt")
    assert cli("merge", tmp_path / "ckpt", tmp_path / "out").code == 0
    path = max((tmp_path / "out").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 4
    path.write_bytes(whole)
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 1 and ran.having("FS308", file=path.name), ran.out
