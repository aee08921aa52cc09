"""Models of transformers 5 that real FSDP2 saved under their names in memory, written under those on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from families_maker import WHOLE, WHOLE_CHOSEN, made, results, same_results
from fastshard.expected import transformers_process, transformers_worker
from helpers import at_once, cli
from safetensors import safe_open

Saved = Callable[..., Path]


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


@pytest.mark.parametrize("container", ["dcp", "ranks"])
@pytest.mark.parametrize("kind", at_once(WHOLE, WHOLE_CHOSEN))
def test_a_save_under_names_in_memory_is_written_as_save_pretrained_writes_it(
    kind: str, container: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTSHARD_TRANSFORMERS")
    monkeypatch.setattr(
        transformers_process, "answer_of", lambda asked, *_: transformers_worker.listed(asked)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = made(kind)
    state, want = model.state_dict(), results(model)
    model.config.architectures = [kind]
    model.save_pretrained(tmp_path / "own")
    ties = {"lm_head.weight", "proj_out.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    for number, spelling in enumerate(("flat", "app.model")):
        out = tmp_path / spelling
        # Once by the config, once by a checkpoint.
        like = tmp_path / "own" / ("" if number else "config.json")
        ran = cli("convert", saved(kind, 2) / f"{container} {spelling}", out, "--to", "hf", "--like", like)
        assert ran.code == 0, (spelling, ran.out)
        assert not [f for f in ran.findings if f["severity"] == "warning"], (spelling, ran.out)
        assert names(out) - ties == names(tmp_path / "own") - ties
        loaded, told = getattr(transformers, kind).from_pretrained(out, output_loading_info=True)
        assert not any(told[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")), told
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, state[name]), (spelling, name)
        assert same_results(loaded, want), spelling
