"""MaxText and Paxml against what MaxText's own converters wrote, bit for bit, with default options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import ml_dtypes
import pytest
from helpers import FIXTURES
from jax_maker import LLAMA31, Tree, converted, read, sha


def described(fixture: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((fixture / "expected.json").read_text())
    return document


def tensors(fixture: Path) -> dict[str, Any]:
    document = described(fixture)
    wanted: dict[str, Any] = document.get("maxtext_tensors") or document["tensors"]
    return wanted


def assert_hashes(have: Tree, want: dict[str, Any]) -> None:
    """Names, dtypes, shapes and bits."""
    assert set(have) == set(want), set(have) ^ set(want)
    for name, entry in want.items():
        assert str(have[name].dtype) == entry["dtype"], name
        assert list(have[name].shape) == entry["shape"], name
        assert sha(have[name]) == entry["sha256"], name


def form_of(fixture: Path) -> str:
    return "maxtext:unscan" if "unscan" in fixture.name else "maxtext:scan"


def other_form_of(fixture: Path) -> str:
    return "maxtext:scan" if "unscan" in fixture.name else "maxtext:unscan"


def assert_form(out: Path, fixture: Path) -> None:
    """The store is of the kind of the fixture's, and says so."""
    (item,) = out.glob("*/items")
    kept = fixture / described(fixture)["item_dir"]
    plain = "zarr2" in fixture.name
    assert (item / "manifest.ocdbt").exists() is not plain
    assert len(list(item.glob("*/.zarray"))) == (len(tensors(fixture)) if plain else 0)
    told, wanted = (json.loads((path / "_METADATA").read_text()) for path in (item, kept))
    for key in ("use_ocdbt", "use_zarr3"):
        assert told[key] is not plain
        assert told[key] is wanted.get(key, told[key])
    assert set(told["tree_metadata"]) == set(wanted["tree_metadata"])


def test_fixtures_are_read(twin_fixture: Path) -> None:
    source = fastshard.open(twin_fixture)
    assert (source.framework, source.family) == ("MaxText", "llama")
    assert not [f for f in source.findings if f.severity in ("error", "warning")]
    assert source.metadata()["completeness"]["verdict"] == "COMPLETE"
    assert source.metadata()["scan_layers"] is (form_of(twin_fixture) == "maxtext:scan")


@pytest.mark.parametrize("config", [None, LLAMA31], ids=["no config", "yml"])
def test_twins_to_hugging_face(twin_fixture: Path, config: Any, tmp_path: Path) -> None:
    have, findings = converted(twin_fixture, tmp_path / "hf", "hf", config=config)
    assert_hashes(have, described(twin_fixture)["hf_tensors"])
    warned = [f.code for f in findings if f.severity == "warning" and "rope_type" in f.message]
    assert warned == (["FS216"] if config is None else [])


def test_twins_from_hugging_face(twin_fixture: Path, tmp_path: Path) -> None:
    hf = (twin_fixture / described(twin_fixture)["hf_source"]).resolve()
    zarr2 = "zarr2" in twin_fixture.name
    have, _ = converted(hf, tmp_path / "maxtext", form_of(twin_fixture), zarr2=zarr2)
    assert have["step"] == 0
    assert_hashes(have, tensors(twin_fixture))
    assert_form(tmp_path / "maxtext", twin_fixture)


def test_twins_in_the_other_form_and_back(twin_fixture: Path, tmp_path: Path) -> None:
    converted(twin_fixture, tmp_path / "other", other_form_of(twin_fixture))
    have, _ = converted(tmp_path / "other", tmp_path / "back", form_of(twin_fixture))
    assert_hashes(have, tensors(twin_fixture))


def test_gpt3_in_the_other_form_and_back(maxtext_fixture: Path, tmp_path: Path) -> None:
    state = any(name.startswith("opt_state.mu.") for name in tensors(maxtext_fixture))
    options = {"optimizer": state, "zarr2": "zarr2" in maxtext_fixture.name}
    other = other_form_of(maxtext_fixture)
    converted(maxtext_fixture, tmp_path / "other", other, fused_qkv=False, **options)
    have, _ = converted(
        tmp_path / "other", tmp_path / "back", form_of(maxtext_fixture), fused_qkv=True, **options
    )
    assert_hashes(have, tensors(maxtext_fixture))


def test_paxml_to_maxtext(tmp_path: Path) -> None:
    maxtext = FIXTURES / "orbax/gpt3_micro_scan_bf16_zarr2"
    paxml = FIXTURES / "orbax/paxml_gpt3_micro_weights"
    have, _ = converted(paxml, tmp_path / "maxtext", "maxtext", dtype="bf16", zarr2=True)
    assert (have["step"].dtype, have["step"]) == ("int32", 4000)
    assert_hashes(have, tensors(maxtext))


def test_a_cast_is_to_the_nearest_even(tmp_path: Path) -> None:
    source = FIXTURES / "maxtext_twins/a_mt_f32_scan"
    have, _ = converted(source, tmp_path / "bf16", "maxtext", dtype="bf16")
    tree = read(source)
    assert_hashes(tree, tensors(source))
    assert set(have) == set(tree)
    for name, array in tree.items():
        want = array if name == "step" else array.astype(ml_dtypes.bfloat16)
        assert sha(have[name]) == sha(want), name
