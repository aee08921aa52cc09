"""What follows from a finding is not said again, and nothing else is hidden by it: two damages are two findings."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import COLOSSAL, DCP, HF, LEGACY, NEOX, TP4, Damage, cut, lost, over
from fastshard.checkpoint.causes import Causes, LostFile, causes_of, ranks_of
from fastshard.errors import Finding
from fastshard.layouts.declaration import Source, Unit
from helpers import FIXTURES, cli, edit_safetensors, layer_file

NEOX_SEQ = "gpt_neox/neox_seq_tp2"


def _pop(tree: dict[str, Any], key: str) -> None:
    if key in tree:
        del tree[key]
        return
    for inner in tree.values():
        if isinstance(inner, dict):
            _pop(inner, key)


def without(file: str, *names: str) -> Damage:
    """A file of torch or safetensors without some of its tensors; an index, if there is one, no longer names them."""

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
        NEOX, f"{STEP}/{layer_file(3, 1)}", without(f"{STEP}/{layer_file(2, 1)}", "attention.dense.weight"),
        {"2.attention.dense.weight"},
    ),
    "neox, the same layer of another rank": (
        NEOX, f"{STEP}/{layer_file(3, 1)}", without(f"{STEP}/{layer_file(3, 0)}", "mlp.linear1.weight"),
        {"3.mlp.linear1.weight"},
    ),
    "neox, the embedding": (
        NEOX, f"{STEP}/{layer_file(3, 1)}", without(f"{STEP}/{layer_file(0, 1)}", "word_embeddings.weight"),
        {"0.word_embeddings.weight"},
    ),
    "neox in rank files": (
        NEOX_SEQ, f"{STEP}/mp_rank_01_model_states.pt",
        without(f"{STEP}/mp_rank_00_model_states.pt", "sequential.3.mlp.linear1.weight"), {"3.mlp.linear1.weight"},
    ),
    "megatron, the other stage of the same rank": (
        LEGACY, f"{ITER}/mp_rank_01_001/model_optim_rng.pt",
        without(f"{ITER}/mp_rank_01_000/model_optim_rng.pt", "decoder.layers.1.mlp.linear_fc1.weight"),
        {"decoder.layers.1.mlp.linear_fc1.weight"},
    ),
    "megatron, the embedding": (
        LEGACY, f"{ITER}/mp_rank_01_001/model_optim_rng.pt",
        without(f"{ITER}/mp_rank_01_000/model_optim_rng.pt", "embedding.word_embeddings.weight"),
        {"embedding.word_embeddings.weight"},
    ),
    "megatron, the other rank of the same stage": (
        LEGACY, f"{ITER}/mp_rank_01_001/model_optim_rng.pt",
        without(f"{ITER}/mp_rank_00_001/model_optim_rng.pt", "decoder.layers.1.mlp.linear_fc1.weight"),
        {"decoder.layers.3.mlp.linear_fc1.weight"},
    ),
    "tp, not by layout.json": (
        TP4, "tp_rank_02.safetensors", without("tp_rank_01.safetensors", "model.layers.1.mlp.up_proj.weight"),
        {"model.layers.1.mlp.up_proj.weight"},
    ),
    "hugging face, not in its file": (
        HF, "model-00003-of-00004.safetensors", without("model-00002-of-00004.safetensors", Q1),
        {Q1},
    ),
    "hugging face, not in the index either": (
        HF, "model-00003-of-00004.safetensors",
        both(without("model-00002-of-00004.safetensors", Q1), unnamed(Q1)),
        {Q1},
    ),
    "dcp, of the lost file": (DCP, "__1_0.distcp", unlisted(Q1, "__1_0.distcp"), {Q1}),
    "dcp, of the other file": (DCP, "__1_0.distcp", unlisted(Q1, "__0_0.distcp"), {Q1}),
    "colossalai": (
        COLOSSAL, "model-stage-00002-shard-00001.safetensors",
        without("model-stage-00001-shard-00001.safetensors", "model.layers.0.self_attn.q_proj.weight"),
        {"model.layers.0.self_attn.q_proj.weight"},
    ),
    "colossalai, not in the index either": (
        COLOSSAL, "model-stage-00002-shard-00001.safetensors",
        both(without("model-stage-00001-shard-00001.safetensors", "model.layers.0.self_attn.q_proj.weight"), unnamed("model.layers.0.self_attn.q_proj.weight")),
        {"model.layers.0.self_attn.q_proj.weight"},
    ),
}  # fmt: skip


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


def _missing(tensor: str, rank: str | None = None) -> Finding:
    return Finding("FS102", "error", "expected by the layout, in no file", tensor=tensor, rank=rank)


def _lost(file: str, rank: str | None = None, code: str = "FS101") -> Finding:
    return Finding(code, "error", "missing file", file=file, rank=rank)


def test_a_run_of_ranks_is_read() -> None:
    assert ranks_of("tp 3 to 5, pp 1") == {"tp": (3, 5), "pp": (1, 1)} and ranks_of(None) == {}


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
    ]  # fmt: skip
    source = Source("any", units)
    gone = _lost("a_01_001", "tp 1, pp 1")
    causes = causes_of([gone], source, paths, held.__getitem__)
    for name in ("layers.1.q", "layers.1.k", "head"):
        assert causes.of(_missing(name, "tp 1")) is gone
    for missing in (
        _missing("layers.0.q", "tp 1"),
        _missing("layers.1.q", "tp 0"),
        _missing("embed", "tp 1"),
    ):
        assert causes.of(missing) is None
    # Without a number of its own in a finding, the name tells the rank.
    cut_short = _lost("a_01_001", code="FS312")
    causes = causes_of([cut_short], source, paths, held.__getitem__)
    assert causes.of(_missing("layers.1.q", "tp 1")) is cut_short
    assert causes.of(_missing("layers.0.q", "tp 1")) is None


def test_a_stage_that_is_lost_accounts_for_layers_that_no_file_has() -> None:
    source = Source("any", [Unit(0, coords={"tp": 0, "pp": 0})], listed=False)
    gone = _lost("a_00_001", "tp 0, pp 1")
    causes = causes_of([gone], source, ["a_00_000"], lambda _: ["embed", "layers.0.k"])
    assert causes.of(_missing("layers.1.q")) is gone and causes.of(_missing("norm")) is gone
    assert causes.of(_missing("layers.0.q")) is None
    layer = Finding("FS103", "error", "none of its 2 tensors is there", axis="L", layers=range(1, 2), count=2)
    assert causes.of(layer) is gone


def test_by_an_index_a_lost_file_accounts_for_the_tensors_that_it_names() -> None:
    source = Source("any", [Unit(0)], lost={"layers.1.q"}, listed=True)
    gone = _lost("b")
    causes = causes_of([gone], source, ["a"], lambda _: ["layers.0.q"])
    assert causes.of(_missing("layers.1.q")) is gone and causes.of(_missing("layers.1.k")) is None


def test_what_is_wrong_with_all_of_it_hides_what_follows_of_that() -> None:
    config = Finding("FS215", "error", "the config says another size")
    causes = Causes(of_all=[config], broken=True)
    assert causes.of(_missing("a")) is config
    assert causes.of(Finding("FS203", "error", "shape", tensor="a")) is None


def test_a_warning_is_no_cause() -> None:
    gone = Finding("FS101", "warning", "missing file", file="b")
    assert causes_of([gone], Source("any", []), [], lambda _: []).of(_missing("a")) is None


def test_nothing_left_needs_no_words_where_there_is_an_error() -> None:
    nothing = Finding("FS515", "error", "nothing is left to write")
    assert Causes().left([nothing]) == [nothing]
    assert Causes(files=[LostFile(_lost("a"))], broken=True).left([nothing]) == []
