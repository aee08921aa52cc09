"""The damaged checkpoints of `--fixtures-dir DIR`: each gets the verdict of its index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, sha256, state_of
from test_merge_sharded import assert_expected, read_result

#: Fixture -> (exit code, code, what the finding names).
REJECTED = {
    "neox_missing_tp_shard": (3, "FS101", {"file": "layer_03-model_01-model_states.pt", "rank": "1"}),
    "neox_missing_layer": (3, "FS103", {"file": "layer_04", "got": "02,03,_,06,07"}),
    "neox_truncated": (1, "FS312", {"file": "layer_02-model_01-model_states.pt"}),
    "neox_bitflip": (1, "FS301", {"file": "layer_"}),
    "neox_duplicated_shard": (1, "FS303", {"rank": "1"}),
    "neox_wrong_shape_shard": (1, "FS201", {"file": "layer_03-model_01-model_states.pt"}),
    "latest_points_nowhere": (3, "FS105", {"file": "latest", "got": "global_step9"}),
    "zero1_missing_rank": (3, "FS101", {"file": "zero_pp_rank_1_mp_rank_00", "rank": "dp 1"}),
    "zero1_missing_last_rank_dp4": (3, "FS101", {"file": "zero_pp_rank_3_mp_rank_00", "rank": "dp 3"}),
    "zero1_truncated": (1, "FS312", {"file": "zero_pp_rank_1_mp_rank_00"}),
    "zero1_duplicated_rank": (1, "FS303", {"file": "zero_pp_rank_1_mp_rank_00", "rank": "dp 1"}),
    "zero2_duplicated_rank": (1, "FS303", {"file": "zero_pp_rank_1_mp_rank_00", "rank": "dp 1"}),
    "stale_masters_zero1_bf16_dp2": (1, "FS401", {"file": "optim_states", "tensor": "embed.weight"}),
    "tp4_missing_rank2": (3, "FS101", {"file": "tp_rank_02.safetensors", "rank": "2"}),
    "tp4_replicated_disagree": (1, "FS302", {"tensor": "model.layers.1.input_layernorm.weight", "rank": "1"}),
    "tp4_duplicate_rank": (1, "FS303", {"message": "tp 0 and tp 1 hold the same"}),
    "tp4_truncated": (1, "FS312", {"file": "tp_rank_01.safetensors"}),
    "dcp_names_absent_file": (3, "FS101", {"file": "__1_0.distcp", "rank": "rank 1"}),
    "dcp_no_metadata": (3, "FS104", {"file": ".metadata"}),
    "dcp_hole": (1, "FS205", {"tensor": "model.embed_tokens.weight"}),
    "dcp_bitflip": (1, "FS301", {"file": "__0_0.distcp", "tensor": "mlp.down_proj.weight"}),
    "hf_rank_sharded_missing_shard2": (3, "FS101", {"file": "sharded/shard-00002", "rank": "rank 1"}),
    "hf_embed_is_rank0_slice": (1, "FS208", {"tensor": "model.embed_tokens.weight"}),
}


def test_damaged_checkpoint_gets_its_verdict(broken_case: dict[str, Any], tmp_path: Path) -> None:
    path, out = broken_case["path"], tmp_path / "out"
    before = state_of(path)
    ran = cli("merge", path, out)
    verdict = broken_case["verdict"]
    if verdict == "reject":
        exit_, code, parts = REJECTED[broken_case["name"]]
        assert ran.having(code, **parts), ran.out
        assert ran.code == exit_
        assert not out.exists()
    elif verdict == "accept-with-warning":
        assert ran.code == 0
        assert any(f["severity"] == "warning" for f in ran.findings)
        assert_expected(out, path)
    elif verdict == "warn-or-reject":
        assert any(f["severity"] in ("warning", "error") for f in ran.findings)
    else:
        assert verdict == "reject-by-hash"
        # No check but a hash of the right content can see it: see test_manifest.py.
        wanted = json.loads((path / "expected.json").read_text())["tensors"]
        assert ran.code == 0
        assert [n for n, t in read_result(out).items() if sha256(t) != wanted[n]["sha256"]]
    assert state_of(path) == before


def test_every_rejected_case_is_known(pytestconfig: pytest.Config) -> None:
    root = pytestconfig.getoption("--fixtures-dir")
    index = {case["name"] for case in json.loads((root / "broken/index.json").read_text())}
    assert set(REJECTED) <= index
