"""Plans: drafted once, then placed; what ranks hold of fused tensors; runs of older plans."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fastshard
import pytest
import torch
from fastshard import planning
from fastshard.targets.registry import TARGETS
from helpers import HF, NEOX, cli
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from transformers import Phi3Config, Phi3ForCausalLM

_SIZES = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tensors are made of parts: queries, keys and values; gate and up."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("fused") / "in"
    Phi3ForCausalLM(Phi3Config(**_SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_of_fused_tensors_are_where_metadata_says(fused: Path, tp: int, tmp_path: Path) -> None:
    """torch's own reader is told where each chunk lies: a rank's shares of gate and up are no box of the whole."""
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
    "value", [{"dim": 0}, {"dim": 0, "parts": [0, 96]}, {"parts": [48, 48]}, {"dim": None, "parts": [1]}, True, -1, "0", {"dim": 0, "parts": [True]}, {"dim": 0, "parts": "2"}]
)  # fmt: skip
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
    draft = planning._draft
    monkeypatch.setattr(planning, "_draft", lambda *given: drafts.append(given) or draft(*given))
    for source in (NEOX, HF):
        drafts.clear()
        try:
            plan = fastshard.plan(source, to)
        except fastshard.CannotRunError as error:
            assert error.findings[0].code == "FS514"
            continue
        assert len(drafts) == 1 and plan.outputs


def test_a_draft_is_placed_once() -> None:
    opened = fastshard.open(HF).opened
    draft = opened.catalog.draft(json.dumps({"source": {**opened.source.to_request(), "layout": None}}))
    assert draft.axes() == {} and sum(draft.dtypes().values()) > 0
    draft.place(json.dumps({"max_shard_size": 1 << 30}))
    with pytest.raises(ValueError, match="the draft was placed"):
        draft.tensors()
    with pytest.raises(ValueError, match="the draft was placed"):
        draft.place(json.dumps({"max_shard_size": 1 << 30}))


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
