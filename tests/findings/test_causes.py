"""What follows from a finding is not said again, and nothing else is hidden by it: two damages are two
findings."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from damage import COLOSSAL, DCP, HF, LEGACY, NEOX, TP4, Damage, cut, lost, over
from fastshard.errors import Finding
from fastshard.findings.causes import Causes, LostFile, causes_of
from fastshard.layouts.declaration import Source, SourceFiles, TensorIndex, Unit
from helpers import FIXTURES, cli, edit_safetensors, layer_file
from safetensors.torch import load_file, save_file

NEOX_SEQ = "gpt_neox/neox_seq_tp2"


def _pop(tree: dict[str, Any], key: str) -> None:
    if key in tree:
        del tree[key]
        return
    for inner in tree.values():
        if isinstance(inner, dict):
            _pop(inner, key)


def without(file: str, *names: str) -> Damage:
    """A file of torch or safetensors without some of its tensors; an index, if there is one, no longer names
    them."""

    def apply(root: Path) -> None:
        path = root / file
        if path.suffix == ".safetensors":

            def drop(tensors: dict[str, torch.Tensor]) -> None:
                for name in names:
                    del tensors[name]

            edit_safetensors(path, drop)
        else:
            tree = torch.load(path, weights_only=False)
            before = str(tree.keys()) + str(tree)
            for name in names:
                _pop(tree, name)
            assert before != str(tree.keys()) + str(tree)
            torch.save(tree, path)

    return apply


def unnamed(*names: str) -> Damage:
    def apply(root: Path) -> None:
        for index in root.glob("*.index.json"):
            content = json.loads(index.read_text())
            for name in names:
                del content["weight_map"][name]
            index.write_text(json.dumps(content))

    return apply


def unlisted(name: str, file: str) -> Damage:
    """`.metadata` no longer names a chunk of a tensor that lies in a file."""

    def apply(root: Path) -> None:
        metadata = pickle.loads((root / ".metadata").read_bytes())
        (key,) = (k for k, at in metadata.storage_data.items() if k.fqn == name and at.relative_path == file)
        del metadata.storage_data[key]
        chunks = metadata.state_dict_metadata[name].chunks
        chunks[:] = [chunk for chunk in chunks if chunk.offsets != key.offset]
        (root / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def both(*damages: Damage) -> Damage:
    def apply(root: Path) -> None:
        for damage in damages:
            damage(root)

    return apply


STEP, ITER = "global_step4", "iter_0000010"
Q1 = "model.layers.1.self_attn.q_proj.weight"
#: name -> (fixture, the file that is lost, what else is lost, the tensors of the latter, its file or rank)
PAIRS: dict[str, tuple[str, str, Damage, set[str]]] = {
    "neox, another layer of the same rank": (
        NEOX,
        f"{STEP}/{layer_file(3, 1)}",
        without(f"{STEP}/{layer_file(2, 1)}", "attention.dense.weight"),
        {"2.attention.dense.weight"},
    ),
    "neox, the same layer of another rank": (
        NEOX,
        f"{STEP}/{layer_file(3, 1)}",
        without(f"{STEP}/{layer_file(3, 0)}", "mlp.linear1.weight"),
        {"3.mlp.linear1.weight"},
    ),
    "neox, the embedding": (
        NEOX,
        f"{STEP}/{layer_file(3, 1)}",
        without(f"{STEP}/{layer_file(0, 1)}", "word_embeddings.weight"),
        {"0.word_embeddings.weight"},
    ),
    "neox in rank files": (
        NEOX_SEQ,
        f"{STEP}/mp_rank_01_model_states.pt",
        without(f"{STEP}/mp_rank_00_model_states.pt", "sequential.3.mlp.linear1.weight"),
        {"3.mlp.linear1.weight"},
    ),
    "megatron, the other stage of the same rank": (
        LEGACY,
        f"{ITER}/mp_rank_01_001/model_optim_rng.pt",
        without(f"{ITER}/mp_rank_01_000/model_optim_rng.pt", "decoder.layers.1.mlp.linear_fc1.weight"),
        {"decoder.layers.1.mlp.linear_fc1.weight"},
    ),
    "megatron, the embedding": (
        LEGACY,
        f"{ITER}/mp_rank_01_001/model_optim_rng.pt",
        without(f"{ITER}/mp_rank_01_000/model_optim_rng.pt", "embedding.word_embeddings.weight"),
        {"embedding.word_embeddings.weight"},
    ),
    "megatron, the other rank of the same stage": (
        LEGACY,
        f"{ITER}/mp_rank_01_001/model_optim_rng.pt",
        without(f"{ITER}/mp_rank_00_001/model_optim_rng.pt", "decoder.layers.1.mlp.linear_fc1.weight"),
        {"decoder.layers.3.mlp.linear_fc1.weight"},
    ),
    "tp, not by layout.json": (
        TP4,
        "tp_rank_02.safetensors",
        without("tp_rank_01.safetensors", "model.layers.1.mlp.up_proj.weight"),
        {"model.layers.1.mlp.up_proj.weight"},
    ),
    "hugging face, not in its file": (
        HF,
        "model-00003-of-00004.safetensors",
        without("model-00002-of-00004.safetensors", Q1),
        {Q1},
    ),
    "hugging face, not in the index either": (
        HF,
        "model-00003-of-00004.safetensors",
        both(without("model-00002-of-00004.safetensors", Q1), unnamed(Q1)),
        {Q1},
    ),
    "dcp, of the lost file": (DCP, "__1_0.distcp", unlisted(Q1, "__1_0.distcp"), {Q1}),
    "dcp, of the other file": (DCP, "__1_0.distcp", unlisted(Q1, "__0_0.distcp"), {Q1}),
    "colossalai": (
        COLOSSAL,
        "model-stage-00002-shard-00001.safetensors",
        without("model-stage-00001-shard-00001.safetensors", "model.layers.0.self_attn.q_proj.weight"),
        {"model.layers.0.self_attn.q_proj.weight"},
    ),
    "colossalai, not in the index either": (
        COLOSSAL,
        "model-stage-00002-shard-00001.safetensors",
        both(
            without("model-stage-00001-shard-00001.safetensors", "model.layers.0.self_attn.q_proj.weight"),
            unnamed("model.layers.0.self_attn.q_proj.weight"),
        ),
        {"model.layers.0.self_attn.q_proj.weight"},
    ),
}


def _copy(fixture: str, root: Path, *damages: Damage) -> Path:
    shutil.copytree(FIXTURES / fixture, root, ignore=shutil.ignore_patterns("expected*.json", "holes.json"))
    for damage in damages:
        damage(root)
    return root


@pytest.mark.parametrize("how", [lost, cut])
@pytest.mark.parametrize("pair", PAIRS)
def test_two_damages_are_two_findings(pair: str, how: Callable[[str], Damage], tmp_path: Path) -> None:
    fixture, file, dropped, tensors = PAIRS[pair]
    alone = cli("inspect", _copy(fixture, tmp_path / "alone", how(file))).errors
    assert [(f["code"], f.get("file")) for f in alone] == [({lost: "FS101", cut: "FS312"}[how], file)]
    second = cli("inspect", _copy(fixture, tmp_path / "second", dropped)).errors
    assert {f["tensor"] for f in second} == tensors
    together = cli("inspect", _copy(fixture, tmp_path / "both", dropped, how(file))).errors
    key = "code", "file", "tensor", "rank"
    said = {tuple(f.get(k) for k in key) for f in together}
    assert said == {tuple(f.get(k) for k in key) for f in [*alone, *second]}


def test_a_layer_in_two_files_is_the_cause_of_what_either_lacks(tmp_path: Path) -> None:
    """Without an index nothing tells what a file held, and a layer may lie in two."""
    root = _copy(HF, tmp_path / "ckpt", lost("*.index.json"), lost("model-00003-of-00004.safetensors"))
    assert [f["code"] for f in cli("inspect", root).errors] == ["FS101"]


def test_an_error_that_loses_no_file_hides_no_missing_tensor(tmp_path: Path) -> None:
    """A file of another place, whose tensors are all there, is no cause of what another lacks."""
    fixture, _, dropped, tensors = PAIRS["neox, another layer of the same rank"]
    swap = over(f"{STEP}/{layer_file(4, 0)}", f"{STEP}/{layer_file(4, 1)}")
    said = cli("inspect", _copy(fixture, tmp_path / "ckpt", dropped, swap)).errors
    assert {f["code"] for f in said} > {"FS102"} and tensors <= {f.get("tensor") for f in said}


def as_bin(root: Path) -> None:
    """The files of a model as older versions of transformers save them."""

    def renamed(name: str) -> str:
        return f"pytorch_{name.removesuffix('.safetensors')}.bin"

    for path in root.glob("*.safetensors"):
        torch.save(load_file(path), root / renamed(path.name))
        path.unlink()
    (index,) = root.glob("*.index.json")
    content = json.loads(index.read_text())
    content["weight_map"] = {name: renamed(file) for name, file in content["weight_map"].items()}
    (root / "pytorch_model.bin.index.json").write_text(json.dumps(content))
    index.unlink()


def sends(*files: str, to: str) -> Damage:
    """An index that sends the tensors of some files to another."""

    def apply(root: Path) -> None:
        (index,) = root.glob("*.index.json")
        content = json.loads(index.read_text())
        weight_map = content["weight_map"]
        content["weight_map"] = {name: to if file in files else file for name, file in weight_map.items()}
        assert content["weight_map"] != weight_map
        index.write_text(json.dumps(content))

    return apply


def tensors_of(fixture: str, file: str) -> set[str]:
    (index,) = (FIXTURES / fixture).glob("*.index.json")
    return {name for name, held in json.loads(index.read_text())["weight_map"].items() if held == file}


S2, S3, S4 = (f"model-0000{n}-of-00004.safetensors" for n in (2, 3, 4))
B2, B3 = (f"pytorch_model-0000{n}-of-00004.bin" for n in (2, 3))
C1, C2 = "model-stage-00001-shard-00001.safetensors", "model-stage-00002-shard-00001.safetensors"
INDEX = "model.safetensors.index.json"
#: Form -> (fixture, what makes the form of it, two files, the names that they have in the fixture)
SHARDS: dict[str, tuple[str, list[Damage], tuple[str, str], tuple[str, str]]] = {
    "safetensors": (HF, [], (S2, S3), (S2, S3)),
    "bin": (HF, [as_bin], (B2, B3), (S2, S3)),
    "colossalai": (COLOSSAL, [], (C1, C2), (C1, C2)),
}


def _told(root: Path) -> list[tuple[str, str | None, str | None]]:
    """Code, file and tensor of all that is an error or a warning."""
    told = cli("verify", root).findings
    return [(f["code"], f.get("file"), f.get("tensor")) for f in told if f["severity"] != "note"]


@pytest.mark.parametrize("form", SHARDS)
def test_an_index_that_sends_tensors_elsewhere_is_one_finding(form: str, tmp_path: Path) -> None:
    fixture, make, (held, named), (original, _) = SHARDS[form]
    root = _copy(fixture, tmp_path / "ckpt", *make, sends(held, to=named))
    ran, tensors = cli("verify", root), tensors_of(fixture, original)
    (told,) = ran.errors
    index = next(root.glob("*.index.json"))
    # The index is wrong, and the file is not.
    assert _told(root) == [("FS115", index.name, None)] and held in told["evidence"]
    assert (ran.code, told["count"], told["got"], told["expected"]) == (1, len(tensors), named, held)
    move, write = told["run"]
    assert set(fastshard.open(root).incomplete) == tensors
    assert cli("merge", root, tmp_path / "out").code == 1 and not (tmp_path / "out").exists()
    if form != "colossalai":
        # What the help says.
        subprocess.run(shlex.split(move), check=True)
        assert not index.exists()
        assert cli("verify", root).code == 0
        assert cli(*shlex.split(write.replace("OUT", shlex.quote(str(tmp_path / "out"))))[1:]).code == 0


def test_files_that_an_index_does_not_name_are_told_of_each(tmp_path: Path) -> None:
    root = _copy(HF, tmp_path / "ckpt", sends(S2, S4, to=S3))
    (told,) = cli("verify", root).errors
    assert (told["code"], told["expected"]) == ("FS115", f"{S2}, {S4}")
    assert told["count"] == len(tensors_of(HF, S2)) + len(tensors_of(HF, S4))


def test_a_layer_beyond_the_config_names_the_key(tmp_path: Path) -> None:
    root = _copy(HF, tmp_path / "ckpt")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    beyond = [f for f in cli("verify", root).errors if f["code"] == "FS215"]
    assert beyond and {f["evidence"] for f in beyond} == {"config.json says num_hidden_layers 3"}
    assert "evidence  config.json says num_hidden_layers 3" in cli("verify", root, json_output=False).out


def test_an_index_that_sends_tensors_elsewhere_hides_no_other_loss(tmp_path: Path) -> None:
    """A tensor that is nowhere, and a file that the index does not name either and that is not there."""
    gone = "model.norm.weight"
    root = _copy(HF, tmp_path / "tensor", without(S3, gone), sends(S2, to=S3))
    assert set(_told(root)) == {("FS115", INDEX, None), ("FS102", S3, gone)}
    root = _copy(HF, tmp_path / "file", unnamed(*tensors_of(HF, S4)), lost(S4), sends(S2, to=S3))
    assert {("FS115", INDEX, None), ("FS101", S4, None)} <= set(_told(root))
    assert all(tensor in {None, *tensors_of(HF, S4)} for *_, tensor in _told(root))


def test_a_file_beside_that_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    root = _copy(HF, tmp_path / "ckpt", sends(S2, to=S3), lambda root: (root / S2).write_bytes(b"{" * 99))
    assert {tensor for code, _, tensor in _told(root) if code == "FS102"} == tensors_of(HF, S2)
    assert ("FS108", S2, None) in _told(root)


def test_a_leftover_of_another_division_is_not_what_an_index_means(tmp_path: Path) -> None:
    leftover = "model-00001-of-00007.safetensors"
    root = _copy(HF, tmp_path / "ckpt", over(S2, leftover), without(S2, Q1))
    assert set(_told(root)) == {("FS102", S2, Q1), ("FS108", leftover, None)}


@pytest.mark.parametrize("form", SHARDS)
def test_a_shard_that_was_copied_over_another_is_one_finding(form: str, tmp_path: Path) -> None:
    fixture, make, (original, copy), (_, replaced) = SHARDS[form]
    root = _copy(fixture, tmp_path / "ckpt", *make, over(original, copy))
    assert _told(root) == [("FS303", copy, None)]
    assert f"a copy of {original}" in cli("verify", root).errors[0]["message"]
    assert set(fastshard.open(root).incomplete) == tensors_of(fixture, replaced)
    # It lacks what is in no other file: no wish makes that whole.
    ran = cli("merge", root, tmp_path / "out", "--accept", "copies")
    assert ran.code == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_copied_shard_is_seen_without_an_index(form: str, tmp_path: Path) -> None:
    fixture, make, (original, copy), (_, replaced) = SHARDS[form]
    root = _copy(fixture, tmp_path / "ckpt", *make, lost("*.index.json"), over(original, copy))
    assert _told(root) == [("FS303", copy, None)]
    assert f"a copy of {original}" in cli("verify", root).errors[0]["message"]
    assert set(fastshard.open(root).incomplete) >= tensors_of(fixture, replaced) - {"model.norm.weight"}


def test_shards_that_are_alike_and_hold_nothing_are_no_copies(tmp_path: Path) -> None:
    names = [f"model-0000{n}-of-00006.safetensors" for n in range(1, 7)]
    root = _copy(HF, tmp_path / "ckpt", lost("*.index.json"))
    for path, name in zip(sorted(root.glob("*.safetensors")), names, strict=False):
        path.rename(root / name)
    for name in names[4:]:
        save_file({}, root / name, metadata={"format": "pt"})
    assert cli("verify", root).code == 0 and _told(root) == []


def _missing(tensor: str, **coords: int) -> Finding:
    return Finding("FS102", "error", "expected by the layout, but missing", tensor=tensor, coords=coords)


def _lost(file: str, code: str = "FS101", **coords: int) -> Finding:
    return Finding(code, "error", "the file is missing", file=file, coords=coords)


def test_a_rank_that_is_lost_accounts_for_its_own_tensors_alone() -> None:
    paths = ["a_00_000", "a_01_000", "a_00_001"]
    held = {
        0: ["embed", "layers.0.q", "layers.0.k"],
        1: ["embed", "layers.0.k"],
        2: ["layers.0.q", "layers.0.k", "head"],
    }
    units = [
        Unit(0, coords={"tp": 0, "pp": 0}),
        Unit(1, coords={"tp": 1, "pp": 0}),
        Unit(2, coords={"tp": 0, "pp": 1}, bases={"L": 1}),
    ]
    source = Source("any", SourceFiles(units))
    gone = _lost("a_01_001", tp=1, pp=1)
    causes = causes_of([gone], source, paths, held.__getitem__)
    for name in ("layers.1.q", "layers.1.k", "head"):
        assert causes.of(_missing(name, tp=1)) is gone
    for missing in (
        _missing("layers.0.q", tp=1),
        _missing("layers.1.q", tp=0),
        _missing("embed", tp=1),
    ):
        assert causes.of(missing) is None
    # A file that was found and cannot be read has no unit, but the rank that its name says.
    cut_short = _lost("a_01_001", code="FS312")
    source = Source("any", SourceFiles(units, ranks={3: {"tp": 1, "pp": 1}}))
    causes = causes_of([cut_short], source, [*paths, "a_01_001"], lambda file: held.get(file, []))
    assert causes.of(_missing("layers.1.q", tp=1)) is cut_short
    assert causes.of(_missing("layers.0.q", tp=1)) is None


def test_a_stage_that_is_lost_accounts_for_layers_that_no_file_has() -> None:
    source = Source("any", SourceFiles([Unit(0, coords={"tp": 0, "pp": 0})]))
    gone = _lost("a_00_001", tp=0, pp=1)
    causes = causes_of([gone], source, ["a_00_000"], lambda _: ["embed", "layers.0.k"])
    assert causes.of(_missing("layers.1.q")) is gone and causes.of(_missing("norm")) is gone
    assert causes.of(_missing("layers.0.q")) is None
    layer = Finding(
        "FS103", "error", "all of its 2 tensors are missing", axis="L", layers=range(1, 2), count=2
    )
    assert causes.of(layer) is gone


def test_by_an_index_a_lost_file_accounts_for_the_tensors_that_it_names() -> None:
    index = TensorIndex(lost={"layers.1.q": "b"}, is_listed=True)
    source = Source("any", SourceFiles([Unit(0)]), index=index)
    gone = _lost("b")
    causes = causes_of([gone], source, ["a"], lambda _: ["layers.0.q"])
    assert causes.of(_missing("layers.1.q")) is gone and causes.of(_missing("layers.1.k")) is None


def test_what_is_wrong_with_all_of_it_hides_what_follows_of_that() -> None:
    config = Finding("FS215", "error", "the config says another size")
    causes = Causes(of_all=[config], broken=True)
    assert causes.of(_missing("a")) is config
    assert causes.of(Finding("FS203", "error", "shape", tensor="a")) is None


def test_a_warning_is_no_cause() -> None:
    gone = Finding("FS101", "warning", "the file is missing", file="b")
    assert causes_of([gone], Source("any"), [], lambda _: []).of(_missing("a")) is None


def test_nothing_left_needs_no_words_where_there_is_an_error() -> None:
    nothing = Finding("FS515", "error", "nothing is left to write")
    assert Causes().left([nothing]) == [nothing]
    assert Causes(files=[LostFile(_lost("a"))], broken=True).left([nothing]) == []
