"""Layouts of MaxText and Paxml against what MaxText's own converters wrote; TensorStore decodes the arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fastshard.adapters import maxtext_model, paxml_model
from jax_maker import Tree, converted, opened, saved, sha

tensorstore = pytest.importorskip("tensorstore")

#: The twins are runs of a model_name of Llama 3.1, its scaling of frequencies off.
LLAMA31 = {"rope_type": "llama3.1", "rope_use_scale": False}


def described(fixture: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((fixture / "expected.json").read_text())
    return document


def tensors(fixture: Path) -> dict[str, Any]:
    document = described(fixture)
    wanted: dict[str, Any] = document.get("maxtext_tensors") or document["tensors"]
    return wanted


def decoded(fixture: Path) -> Tree:
    """The arrays of a fixture, checked against its own hashes."""
    document = described(fixture)
    item, form = fixture / document["item_dir"], document.get("format") or {}
    tree = {}
    for name, wanted in tensors(fixture).items():
        store: dict[str, Any] = {"driver": "file", "path": f"{item}/{name}/"}
        if form.get("ocdbt"):
            store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
        spec = {"driver": "zarr3" if form.get("zarr3") else "zarr", "kvstore": store}
        tree[name] = np.asarray(tensorstore.open(spec).result().read().result())
        assert sha(tree[name]) == wanted["sha256"]
    return tree


def assert_hashes(have: Tree, want: dict[str, Any], besides: tuple[str, ...] = ()) -> None:
    want = {name: entry for name, entry in want.items() if name not in besides}
    assert set(have) == set(want)
    for name, entry in want.items():
        assert list(have[name].shape) == entry["shape"]
        assert sha(have[name]) == entry["sha256"], name


def form_of(fixture: Path) -> str:
    return "maxtext:unscan" if "unscan" in fixture.name else "maxtext:scan"


def test_twins_to_hugging_face(twin_fixture: Path, tmp_path: Path) -> None:
    source = opened(saved(decoded(twin_fixture), tmp_path / "maxtext"), maxtext_model.describe, LLAMA31)
    have, _ = converted(source, tmp_path / "hf", "hf")
    assert_hashes(have, described(twin_fixture)["hf_tensors"])


def test_twins_from_hugging_face(twin_fixture: Path, tmp_path: Path) -> None:
    hf = twin_fixture / described(twin_fixture)["hf_source"]
    have, _ = converted(hf.resolve(), tmp_path / "maxtext", form_of(twin_fixture), rope_type="llama3.1")
    assert_hashes(have, tensors(twin_fixture), besides=("step",))


def test_twins_in_the_other_form_and_back(twin_fixture: Path, tmp_path: Path) -> None:
    source = opened(saved(decoded(twin_fixture), tmp_path / "maxtext"), maxtext_model.describe)
    other = "maxtext:scan" if form_of(twin_fixture) == "maxtext:unscan" else "maxtext:unscan"
    converted(source, tmp_path / "other", other)
    back = opened(tmp_path / "other", maxtext_model.describe)
    have, _ = converted(back, tmp_path / "back", form_of(twin_fixture))
    assert_hashes(have, tensors(twin_fixture))


def test_gpt3_in_the_other_form_and_back(maxtext_fixture: Path, tmp_path: Path) -> None:
    tree = decoded(maxtext_fixture)
    source = opened(saved(tree, tmp_path / "maxtext"), maxtext_model.describe)
    with_state = {"optimizer": any(name.startswith("opt_state.mu.") for name in tree)}
    other = "maxtext:scan" if form_of(maxtext_fixture) == "maxtext:unscan" else "maxtext:unscan"
    converted(source, tmp_path / "other", other, fused_qkv=False, **with_state)
    back = opened(tmp_path / "other", maxtext_model.describe)
    have, _ = converted(back, tmp_path / "back", form_of(maxtext_fixture), fused_qkv=True, **with_state)
    assert_hashes(have, tensors(maxtext_fixture))


@pytest.mark.parametrize(
    ("paxml", "maxtext", "options"),
    [
        ("paxml_gpt3_tiny", "gpt3_tiny_scan_f32", {}),
        ("paxml_gpt3_tiny", "gpt3_tiny_unscan_bf16", {"dtype": "bf16"}),
        ("paxml_gpt3_micro_opt", "gpt3_micro_scan_f32_opt", {"optimizer": True}),
        ("paxml_gpt3_micro_opt", "gpt3_micro_scan_bf16_zarr2", {"dtype": "bf16"}),
        ("paxml_gpt3_micro_opt", "gpt3_micro_unscan_f32_zarr2", {}),
    ],
)
def test_paxml_to_maxtext(
    paxml: str, maxtext: str, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    root: Path = request.config.getoption("--fixtures-dir") / "orbax"
    source = opened(saved(decoded(root / paxml), tmp_path / "paxml"), paxml_model.describe)
    have, _ = converted(source, tmp_path / "maxtext", form_of(root / maxtext), **options)
    want = tensors(root / maxtext)
    assert (set(have), "step" in have) == (set(want), True)
    assert_hashes(have, want)


def test_a_cast_is_to_the_nearest_even(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    root: Path = request.config.getoption("--fixtures-dir") / "maxtext_twins"
    tree = decoded(root / "a_mt_f32_scan")
    source = opened(saved(tree, tmp_path / "f32"), maxtext_model.describe)
    have, _ = converted(source, tmp_path / "bf16", "maxtext", dtype="bf16")
    for name, array in tree.items():
        want = array if name == "step" else array.astype(ml_dtypes.bfloat16)
        assert sha(have[name]) == sha(want), name
