"""Plans: drafted once, then placed; what ranks hold of fused tensors; runs of older plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from fastshard import layouts
from fastshard.checkpoint import drafting, plan_findings, planning, reference_sides
from fastshard.targets.registry import TARGETS
from helpers import HF, NEOX, cli
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from transformers import Phi3Config, Phi3ForCausalLM

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tensors are made of parts: queries, keys and values; gate and up."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("fused") / "in"
    Phi3ForCausalLM(Phi3Config(**_SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_of_fused_tensors_are_where_metadata_says(fused: Path, tp: int, tmp_path: Path) -> None:
    """torch's own reader is told where each chunk lies: a rank's shares of gate and up are no box of the
    whole."""
    fastshard.convert(fused, tmp_path / "out", "dcp", tp=tp)
    loaded: dict[str, Any] = _load_state_dict_from_keys(storage_reader=FileSystemReader(tmp_path / "out"))
    whole = load_file(fused / "model.safetensors")
    assert loaded.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor), name
    assert fastshard.diff(fused, tmp_path / "out") == []


@pytest.mark.parametrize("with_config", [True, False])
def test_files_of_ranks_say_what_fused_tensors_are_made_of(
    fused: Path, with_config: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fastshard.convert(fused, out, "tp-safetensors", tp=2)
    dims = json.loads((out / "layout.json").read_text())["tp_dim"]
    parts = {name: dim for name, dim in dims.items() if isinstance(dim, dict)}
    assert parts and all(len(dim["parts"]) > 1 for dim in parts.values())
    if not with_config:
        (out / "config.json").unlink()
    fastshard.merge(out, tmp_path / "back")
    assert fastshard.diff(fused, tmp_path / "back") == []
    # Ranks hold their share of each part, and nothing else.
    whole, rank = load_file(fused / "model.safetensors"), load_file(out / "tp_rank_01.safetensors")
    for name, dim in parts.items():
        of = dim["dim"]
        shares = [part.chunk(2, of)[1] for part in whole[name].split(dim["parts"], of)]
        assert torch.equal(rank[name], torch.cat(shares, of)), name


@pytest.mark.parametrize(
    "value",
    [
        {"dim": 0},
        {"dim": 0, "parts": [0, 96]},
        {"parts": [48, 48]},
        {"dim": None, "parts": [1]},
        True,
        -1,
        "0",
        {"dim": 0, "parts": [True]},
        {"dim": 0, "parts": "2"},
    ],
)
def test_parts_that_nothing_is_made_of_are_refused(value: Any, fused: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fastshard.convert(fused, out, "tp-safetensors", tp=2)
    layout = json.loads((out / "layout.json").read_text())
    name = next(name for name, dim in layout["tp_dim"].items() if isinstance(dim, dict))
    layout["tp_dim"][name] = value
    (out / "layout.json").write_text(json.dumps(layout))
    ran = cli("merge", out, tmp_path / "back")
    assert ran.code == 2 and ran.having("FS211", tensor=name), ran.findings
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("parts", [[48, 47], [48, 48, 2], [31, 65], [95, 1]])
def test_parts_of_other_sizes_are_told(parts: list[int], fused: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fastshard.convert(fused, out, "tp-safetensors", tp=2)
    (out / "config.json").unlink()
    layout = json.loads((out / "layout.json").read_text())
    name = "model.layers.0.mlp.gate_up_proj.weight"
    layout["tp_dim"][name]["parts"] = parts
    (out / "layout.json").write_text(json.dumps(layout))
    ran = cli("merge", out, tmp_path / "back")
    assert ran.code in (1, 2) and name in str(ran.errors), ran.findings
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("to", [None, *TARGETS])
def test_a_plan_is_composed_once(to: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts: list[Any] = []
    draft = drafting.draft_of
    for module in (planning, plan_findings, reference_sides):
        monkeypatch.setattr(module, "draft_of", lambda *given: drafts.append(given) or draft(*given))
    for source in (NEOX, HF):
        drafts.clear()
        try:
            plan = fastshard.plan(source, to)
        except fastshard.CannotRunError as error:
            assert error.findings[0].code == ("FS402" if to == "universal" else "FS514")
            continue
        assert len(drafts) == 1 and plan.outputs


def test_a_draft_is_placed_once() -> None:
    opened = fastshard.open(HF).opened
    draft = opened.catalog.draft({"source": opened.source})
    assert draft.axes() == {} and sum(draft.dtypes().values()) > 0
    draft.place({"max_shard_size": 1 << 30})
    with pytest.raises(ValueError, match="the draft was placed"):
        draft.tensors()
    with pytest.raises(ValueError, match="the draft was placed"):
        draft.place({"max_shard_size": 1 << 30})


def test_a_run_of_an_older_plan_is_named_and_not_resumed(tmp_path: Path) -> None:
    left = tmp_path / ".out.fastshard-0123456789abcdef"
    (left / "data").mkdir(parents=True, mode=0o700)
    (left / "lock").touch()
    (left / "plan").write_text(
        json.dumps({"plan": "0123456789abcdef", "target": "merge", "outputs": 3, "records": 2})
    )
    (left / "data/model.safetensors").write_bytes(b"somebody's hours")
    for flags in (["--resume"], []):
        ran = cli("merge", HF, tmp_path / "out", *flags)
        told = ran.having("FS508", message="made by version 1 of the plan; this is version 2")
        assert ran.code == 0 and told and str(left) in str(told), ran.findings
        assert (left / "data/model.safetensors").read_bytes() == b"somebody's hours"
        shutil.rmtree(tmp_path / "out")


def test_parts_of_a_vocabulary_are_put_together_as_they_say(tmp_path: Path) -> None:
    whole = torch.arange(16.0).view(8, 2)
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(2):
        shares = [part.chunk(2)[rank] for part in whole.split(4)]
        save_file({"embed_tokens.weight": torch.cat(shares)}, folder / f"tp_rank_{rank:02d}.safetensors")
    for more in ({}, {"vocab_size": 8, "padded_vocab_size": 8}):
        layout = {"tp": 2, "tp_dim": {"embed_tokens.weight": {"dim": 0, "parts": [4, 4]}}, **more}
        (folder / "layout.json").write_text(json.dumps(layout))
        fastshard.merge(folder, tmp_path / "out", overwrite=True)
        assert torch.equal(load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"], whole), more


def test_parts_without_end_are_refused_at_once(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 2)}, tmp_path / "tp_rank_00.safetensors")
    layout = {"tp": 1, "tp_dim": {"w": {"dim": 0, "parts": [(1 << 40) - 2] * 300_000}}}
    (tmp_path / "layout.json").write_text(json.dumps(layout))
    ran = cli("plan", tmp_path)
    assert ran.code == 2 and ran.having("FS211", tensor="w"), ran.findings


def test_padding_of_the_only_rank_goes_by_what_layout_json_says(tmp_path: Path) -> None:
    fastshard.convert(HF, tmp_path / "out", "tp-safetensors", make_vocab_size_divisible_by=64)
    layout = json.loads((tmp_path / "out/layout.json").read_text())
    assert layout["padded_vocab_size"] > layout["vocab_size"] and layout["tp"] == 1
    for name in ("config.json", "fastshard.manifest.json"):
        (tmp_path / "out" / name).unlink()
    fastshard.merge(tmp_path / "out", tmp_path / "back")
    assert fastshard.diff(HF, tmp_path / "back") == []


_OWN = """
layout = "{name}"
family = "mine"
extends = "hf.llama"
[config]
model_type = ["llama"]
"""


def test_a_table_given_for_one_call_counts_for_that_call(tmp_path: Path) -> None:
    before = fastshard.plan(HF, "hf").digest
    for name in ("mine", "mine.too"):
        (tmp_path / "own.toml").write_text(_OWN.format(name=name))
        assert fastshard.plan(HF, "hf", layout=tmp_path / "own.toml").source.binding.layout == name
        assert fastshard.plan(HF, "hf").digest == before


def test_a_table_of_one_s_own_stands_beside_a_layout_json(fused: Path, tmp_path: Path) -> None:
    fastshard.convert(fused, tmp_path / "ranks", "tp-safetensors", tp=2)
    (tmp_path / "own.toml").write_text(
        layouts.get("hf.phi3").replace('layout = "hf.phi3"', 'layout = "mine"')
    )
    fastshard.merge(tmp_path / "ranks", tmp_path / "back", layout=tmp_path / "own.toml")
    assert fastshard.diff(fused, tmp_path / "back") == []


def test_ranks_whose_shares_nothing_can_say_are_refused(tmp_path: Path) -> None:
    """A table that interleaves shares: more parts than a shape can have."""
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": torch.ones(1200, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "hidden_size": 2, "inner": 4}))
    (tmp_path / "own.toml").write_text(
        'layout = "toy"\nfamily = "toy"\n[shard]\ntp = ["F"]\n[config]\nmodel_type = ["toy"]\n[config.axes]\n'
        'H = "hidden_size"\nF = "inner"\n[[tensor]]\nname = "w"\nshape = "[r*F, H]"\nas = "w"\n'
    )
    ran = cli(
        "convert",
        folder,
        tmp_path / "out",
        "--to",
        "tp-safetensors",
        "--tp",
        "2",
        "--layout",
        tmp_path / "own.toml",
    )
    assert ran.code == 2 and ran.having("FS514", tensor="w"), ran.findings
    done = cli(
        "convert", folder, tmp_path / "dcp", "--to", "dcp", "--tp", "2", "--layout", tmp_path / "own.toml"
    )
    assert done.code == 0 and fastshard.diff(folder / "model.safetensors", tmp_path / "dcp") == []


def test_another_plan_s_run_within_the_destination_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    left = out / ".fastshard-0123456789abcdef"
    left.mkdir(parents=True, mode=0o700)
    (left / "lock").touch()
    (left / "plan").write_text("{}")
    monkeypatch.chdir(out)
    ran = cli("merge", HF, out)
    told = ran.having("FS504")
    assert ran.code == 2 and told and "an interrupted run of another plan" in str(told) and left.exists()
