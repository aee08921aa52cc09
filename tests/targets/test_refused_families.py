"""Families that a framework has no table for are refused by what their layers have besides."""

from __future__ import annotations

from pathlib import Path

import gpt_oss_maker
import pytest
from helpers import assert_refused


@pytest.mark.parametrize("to", ["gpt_neox"])
def test_gpt_oss_is_refused_by_its_features(to: str, tmp_path: Path) -> None:
    gpt_oss_maker.model().save_pretrained(tmp_path / "in")
    command = ("convert", "--to", to)
    ran = assert_refused(tmp_path / "in", tmp_path / "out", "FS514", exit=2, command=command)
    (finding,) = ran.errors
    assert finding["message"].endswith("layout for the family 'gpt_oss'")
    for feature in ("sinks of attention", "hidden_act"):
        assert feature in finding["got"], finding


def test_olmo_core_has_no_gpt_oss(tmp_path: Path) -> None:
    gpt_oss_maker.model().save_pretrained(tmp_path / "in")
    command = ("convert", "--to", "dcp:olmo_core")
    ran = assert_refused(tmp_path / "in", tmp_path / "out", "FS514", exit=2, command=command)
    assert "OLMo-core has no model of the type 'gpt_oss'" in ran.errors[0]["message"]
