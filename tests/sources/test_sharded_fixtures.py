"""Every sharded fixture, by the framework that wrote it: merged, it is what its index of hashes says."""

from __future__ import annotations

from pathlib import Path

from helpers import cli
from test_merge_sharded import assert_expected

#: Fixtures whose checkpoint is a folder inside.
INSIDE = {"colossalai_049_tp2_pp2": "modeling", "dcp_hf_rank_sharded_micro": "sharded"}


def test_a_fixture_is_merged_to_its_hashes(sharded_fixture: Path, tmp_path: Path) -> None:
    root = sharded_fixture / INSIDE.get(sharded_fixture.name, ".")
    ran = cli("verify", root)
    assert ran.code == 0, ran.out
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert_expected(tmp_path / "out", sharded_fixture)
