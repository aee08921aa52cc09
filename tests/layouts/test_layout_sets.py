"""Sets of positions: rules for some layers only, completeness, stacking, and the numbering of pipeline
ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastshard import _core
from safetensors.numpy import save_file

APART = """
layout = "apart"
family = "toy"
[config.axes]
L = "layers + (more ?? 0)"
[sets]
mtp = { where = "L >= layers", optional = true }
moe = "L in list"
dense = "not moe"
[[tensor]]
name = "h.{L}.norm"
shape = "[H]"
as = "norm"
[[tensor]]
name = "h.{L in dense}.mlp"
shape = "[F, H]"
as = "mlp"
[[tensor]]
name = "h.{L in moe}.experts.{E}"
shape = "[M, H]"
as = "experts"
[[tensor]]
name = "h.{L in mtp}.join"
shape = "[H, H2]"
as = "join"
"""
STACKED = """
layout = "stacked"
family = "toy"
[sets]
mtp = { where = "L >= layers", optional = true }
moe = "L in list"
dense = "not moe"
[[tensor]]
name = "norms"
shape = "[H, L]"
as = "norm"
[[tensor]]
name = "mlps"
shape = "[L in dense, H, F]"
as = "mlp"
[[tensor]]
name = "experts"
shape = "[E, M, L in moe, H]"
as = "experts"
[[tensor]]
name = "mtp.{L of mtp}.join"
shape = "[H, H2]"
as = "join"
"""
EXTENTS = {"H": 3, "F": 2, "E": 2, "M": 4, "H2": 6}
CONFIG = {"layers": 5, "more": 1, "list": [1, 2, 4, 5]}
MOE, DENSE = [1, 2, 4, 5], [0, 3]


def model(layers: int = 6) -> dict[str, np.ndarray]:
    """Tensors of the model with its layers apart, every element another one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes[f"h.{layer}.norm"] = (3,)
        if layer in MOE:
            shapes |= {f"h.{layer}.experts.{e}": (4, 3) for e in range(2)}
        else:
            shapes[f"h.{layer}.mlp"] = (2, 3)
        if layer == 5:
            shapes[f"h.{layer}.join"] = (3, 6)
    made, at = {}, 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        made[name] = np.arange(at, at + n, dtype=np.float32).reshape(shape)
        at += n
    return made


def described(table: _core.Table, config: dict[str, Any] | None = CONFIG) -> dict[str, Any]:
    axes, facts, sets = table.describe(None if config is None else json.dumps(config), [])
    made = {name: {"axis": axis, "positions": positions} for name, (axis, positions) in sets.items()}
    return {"axes": axes, "facts": facts, "sets": made}


def plan(
    folder: Path,
    files: dict[str, dict[str, np.ndarray]],
    table: str = APART,
    target: str | None = None,
    config: dict[str, Any] | None = CONFIG,
    units: dict[str, Any] | None = None,
    **source: Any,
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """What is found, and what is made of the files."""
    folder.mkdir(exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    apart = _core.Table(table)
    catalog = _core.Catalog([folder], [(0, name) for name in files], 1)
    file_units = [{"file": i} | (units or {}).get(name, {}) for i, name in enumerate(files)]
    binding = {**(described(_core.Table(APART), config) if config is not None else {}), **source}
    request: dict[str, Any] = {"source": {"files": {"units": file_units}, "binding": binding}}
    to = None
    if target is not None:
        to = _core.Table(target)
        request["target"] = {"name": "toy"}
    core = catalog.draft(request, apart, to).place({"max_shard_size": 1 << 40})
    found = [f.to_dict() for f in core.findings()]
    made = {}
    if not any(f["severity"] == "error" for f in found):
        for i, (name, _, shape, _, _) in enumerate(core.outputs()):
            values = np.empty(int(np.prod(shape)), dtype=np.float32)
            core.read(i, 0, values.view(np.uint8))
            made[name] = values.reshape(shape)
    return found, made


def refused(found: list[dict[str, Any]], code: str, *words: str) -> None:
    errors = [f for f in found if f["severity"] == "error"]
    assert errors and {f["code"] for f in errors} == {code}, errors
    text = json.dumps(errors)
    assert all(word in text for word in words), errors


def same(made: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert sorted(made) == sorted(wanted)
    assert all(np.array_equal(made[name], wanted[name]) for name in wanted)


def stacked(tensors: dict[str, np.ndarray], layers: int = 6) -> dict[str, np.ndarray]:
    """The same model stacked, by numpy."""
    moe, dense = ([n for n in some if n < layers] for some in (MOE, DENSE))
    experts = [[tensors[f"h.{n}.experts.{e}"] for n in moe] for e in range(2)]
    made = {
        "norms": np.stack([tensors[f"h.{n}.norm"] for n in range(layers)], axis=1),
        "mlps": np.stack([tensors[f"h.{n}.mlp"].T for n in dense]),
        "experts": np.stack([np.stack(one, axis=1) for one in experts]),
    }
    return made | ({"mtp.0.join": tensors["h.5.join"]} if layers == 6 else {})


def test_what_is_whole_is_taken(tmp_path: Path) -> None:
    tensors = model()
    found, made = plan(tmp_path, {"a.safetensors": tensors})
    assert found == []
    same(made, tensors)


@pytest.mark.parametrize("layers", [6, 5])
def test_layers_are_stacked_and_taken_apart(tmp_path: Path, layers: int) -> None:
    """Both ways, with the optional layer and without it: sets and axis end before it."""
    tensors = model(layers)
    found, made = plan(tmp_path / "to", {"a.safetensors": tensors}, target=STACKED)
    assert found == []
    same(made, stacked(tensors, layers))
    found, back = plan(tmp_path / "back", {"b.safetensors": made}, STACKED, APART)
    assert found == []
    same(back, tensors)


@pytest.mark.parametrize("lost", sorted(model()))
def test_every_lost_tensor_is_named(tmp_path: Path, lost: str) -> None:
    tensors = model()
    del tensors[lost]
    refused(plan(tmp_path, {"a.safetensors": tensors})[0], "FS102", lost)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("h.1.mlp", (2, 3), ["dense", "0, 3", '"1"']),
        ("h.3.experts.0", (4, 3), ["moe", "1-2, 4-5", '"3"']),
        ("h.0.join", (3, 6), ["mtp", '"0"']),
    ],
)
@pytest.mark.parametrize("passing", [False, True])
def test_a_tensor_of_the_wrong_layer_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: list[str], passing: bool
) -> None:
    """Where unknown names pass, too: this one is known, and has no place there."""
    tensors = model() | {name: np.zeros(shape, np.float32)}
    found, _ = plan(tmp_path, {"a.safetensors": tensors}, pass_unknown=passing)
    refused(found, "FS207", name, *words)
    # A name that no rule has passes as ever.
    tensors = model() | {"other": np.zeros(shape, np.float32)}
    found, made = plan(tmp_path / "other", {"a.safetensors": tensors}, pass_unknown=passing)
    assert "other" in made if passing else found[0]["code"] == "FS207"


def test_an_optional_set_is_there_or_not(tmp_path: Path) -> None:
    tensors = model()
    some = {name: t for name, t in tensors.items() if not name.startswith("h.5.")}
    found, made = plan(tmp_path / "without", {"a.safetensors": some})
    assert found == []
    same(made, some)
    # A part of it is no whole.
    refused(
        plan(tmp_path / "part", {"a.safetensors": some | {"h.5.norm": tensors["h.5.norm"]}})[0],
        "FS102",
        "h.5.join",
    )
    # And the layers that are not optional are not.
    fewer = {name: t for name, t in tensors.items() if not name.startswith(("h.5.", "h.4."))}
    refused(
        plan(tmp_path / "fewer", {"a.safetensors": fewer})[0],
        "FS103",
        "layer 4 is missing: no file has any of its",
    )


def test_without_a_config_sets_are_what_is_seen(tmp_path: Path) -> None:
    tensors = model()
    found, made = plan(tmp_path / "whole", {"a.safetensors": tensors}, config=None)
    assert found == []
    same(made, tensors)
    lacking = {name: t for name, t in tensors.items() if name != "h.3.mlp"}
    found, _ = plan(tmp_path / "neither", {"a.safetensors": lacking}, config=None)
    refused(found, "FS102", "layer 3 has tensors neither of dense nor of moe")
    one = {name: t for name, t in tensors.items() if name != "h.2.experts.1"}
    refused(plan(tmp_path / "one", {"a.safetensors": one}, config=None)[0], "FS102", "h.2.experts.1")
    both = tensors | {"h.1.mlp": np.zeros((2, 3), np.float32)}
    found, _ = plan(tmp_path / "both", {"a.safetensors": both}, config=None)
    refused(found, "FS207", "layer 1 has tensors of dense and of moe")
    # Which positions a stack holds is told by no shape: it is not left out for that.
    for target in (None, APART):
        stack = {"a.safetensors": stacked(model(5), 5)}
        found, _ = plan(tmp_path / "stack", stack, STACKED, target, config=None)
        assert {"FS213"} == {
            f["code"] for f in found if "nothing states which layers the set" in f["message"]
        }
        assert {f["tensor"] for f in found if f["code"] == "FS213"} >= {"experts", "mlps"}
    # Nor is a place within a set a position, where the set is not known.
    found, _ = plan(tmp_path / "place", {"a.safetensors": stacked(tensors)}, STACKED, APART, config=None)
    assert [f["tensor"] for f in found if f["code"] == "FS209"] == ["mtp.0.join"]


def test_pipeline_ranks_number_their_own_layers(tmp_path: Path) -> None:
    """The base of a rank comes first, the set after it; places within a set are counted from the rank's first
    layer."""
    tensors = model()

    def part(first: int, last: int) -> dict[str, np.ndarray]:
        named = ((name.split("."), t) for name, t in tensors.items())
        return {
            ".".join(["h", str(int(n) - first), *rest]): t
            for (_, n, *rest), t in named
            if first <= int(n) < last
        }

    files = {"a.safetensors": part(0, 3), "b.safetensors": part(3, 6)}
    units = {"b.safetensors": {"bases": {"L": 3}}}
    found, made = plan(tmp_path / "apart", files, units=units)
    assert found == []
    same(made, tensors)
    ordinal = APART.replace("{L in moe}", "{L of moe}").replace("{L in dense}", "{L of dense}")
    numbered = ordinal.replace("h.{L of moe}", "moe.{L of moe}").replace(
        "h.{L of dense}", "dense.{L of dense}"
    )
    found, apart = plan(tmp_path / "to", {"a.safetensors": tensors}, target=numbered)
    assert found == []
    assert np.array_equal(apart["moe.3.experts.1"], tensors["h.5.experts.1"])
    assert np.array_equal(apart["dense.1.mlp"], tensors["h.3.mlp"])
    first = {n: t for n, t in apart.items() if n.startswith(("moe.0.", "moe.1.", "dense.0."))}
    first |= {f"h.{n}.norm": tensors[f"h.{n}.norm"] for n in range(3)}
    second = {
        "moe.0.experts.0": apart["moe.2.experts.0"],
        "moe.0.experts.1": apart["moe.2.experts.1"],
        "moe.1.experts.0": apart["moe.3.experts.0"],
        "moe.1.experts.1": apart["moe.3.experts.1"],
        "dense.0.mlp": apart["dense.1.mlp"],
        "h.2.join": apart["h.5.join"],
    }
    second |= {f"h.{n}.norm": tensors[f"h.{n + 3}.norm"] for n in range(3)}
    found, back = plan(
        tmp_path / "back", {"a.safetensors": first, "b.safetensors": second}, numbered, APART, units=units
    )
    assert found == []
    same(back, tensors)
    # A place beyond the set's end.
    found, _ = plan(
        tmp_path / "beyond",
        {"a.safetensors": apart | {"moe.4.experts.0": apart["moe.0.experts.0"]}},
        numbered,
    )
    refused(found, "FS207", "moe.4.experts.0")


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("{L in dense}", "{L in none}", "no set none"),
        ("{E}", "{E in moe}", "moe is a set of positions on L, not on E"),
        ('"[H]"', '"[H, L in moe]"', "both in the name and in the shape"),
        ('"[H, H2]"', '"[E in moe, H, H2]"', "not on E"),
        ("[sets]", '[shard]\npp = ["L"]\n[sets]', None),
    ],
)
def test_sets_that_fit_no_rule_are_refused(before: str, after: str, wanted: str | None) -> None:
    text = APART.replace(before, after)
    assert text != APART
    if wanted is None:
        _core.Table(text)
        text, wanted = text + '[[tensor]]\nname = "x"\nshape = "[L in moe]"\n', "axis L is divided"
    with pytest.raises(_core.CoreError, match=wanted):
        _core.Table(text)


def test_a_request_states_positions_in_their_order(tmp_path: Path) -> None:
    sets = {"moe": {"axis": "L", "positions": [2, 1]}}
    with pytest.raises(_core.CoreError, match="positions of the set moe"):
        plan(tmp_path, {"a.safetensors": model()}, sets=sets)
