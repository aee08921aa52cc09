"""Families that no table knows, divided by real FSDP2 and saved as trainers save: each is loaded again by
transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsdp_maker
import pytest
import torch
import transformers
from families_maker import CHOSEN, FAMILIES, made, results, same_results
from helpers import at_once, cli

Saved = Callable[..., Path]


@pytest.mark.parametrize("container", ["dcp", "ranks"])
@pytest.mark.parametrize("family", at_once(FAMILIES, CHOSEN))
def test_transformers_finds_every_tensor_of_what_ranks_saved(
    family: str, container: str, saved: Saved, tmp_path: Path
) -> None:
    model = made(family)
    state, want = model.state_dict(), results(model)
    for spelling in fsdp_maker.SPELLINGS:
        out = tmp_path / spelling
        ran = cli("merge", saved(family, 2) / f"{container} {spelling}", out)
        assert ran.code == 0, (spelling, ran.out)
        assert not [f for f in ran.findings if f["severity"] == "warning"], (spelling, ran.out)
        loaded, told = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
        assert not told["missing_keys"] and not told["mismatched_keys"], (spelling, told)
        assert not told["unexpected_keys"], (spelling, told)
        assert loaded.state_dict().keys() == state.keys()
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, state[name]), (spelling, name)
        assert same_results(loaded, want), spelling
