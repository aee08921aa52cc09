"""Paxml checkpoints against the MaxText ones that MaxText's own converter makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jax_maker import converted
from test_maxtext_fixtures import assert_hashes, form_of, tensors


@pytest.mark.parametrize(
    ("paxml", "maxtext", "options"),
    [
        ("paxml_gpt3_tiny", "gpt3_tiny_scan_f32", {}),
        ("paxml_gpt3_tiny", "gpt3_tiny_unscan_bf16", {"dtype": "bf16"}),
        ("paxml_gpt3_micro_opt", "gpt3_micro_scan_f32_opt", {"optimizer": True}),
        ("paxml_gpt3_micro_opt", "gpt3_micro_scan_bf16_zarr2", {"dtype": "bf16", "zarr2": True}),
        ("paxml_gpt3_micro_opt", "gpt3_micro_unscan_f32_zarr2", {"zarr2": True}),
    ],
)
def test_paxml_to_maxtext(
    paxml: str, maxtext: str, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root: Path = request.config.getoption("--fixtures-dir") / "orbax"
    have, _ = converted(root / paxml, tmp_path / "maxtext", form_of(root / maxtext), **options)
    assert (have["step"].dtype, have["step"]) == ("int32", 4000)
    assert_hashes(have, tensors(root / maxtext))
    # The folder of the step is that of the source.
    assert (tmp_path / "maxtext/4000/items").is_dir()
