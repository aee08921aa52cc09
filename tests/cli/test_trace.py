"""`why` names the elements and the bytes that a tensor is made of: they are taken from the files by what it
says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
import pytest
from fastshard.checkpoint.box_text import meets, of_flat, slices, strides
from fastshard.checkpoint.head_text import heads
from fastshard.cli.render import Tree, tree
from fastshard.common.dtypes import numpy_dtype
from helpers import FIXTURES, HF, NEOX, STEP, cli, copy, edit_safetensors, layer_file
from hypothesis import given
from hypothesis import strategies as st


def indices(word: str, extent: int) -> list[int]:
    """The indices that one dimension of a region names, in the order of their axes."""
    if word == ":":
        return list(range(extent))
    if re.fullmatch(r"[\d:]+", word):
        numbers = [int(n) for n in word.split(":")]
        return [numbers[0]] if len(numbers) == 1 else list(range(extent))[slice(*numbers)]
    told, _, base = word.partition(" from ")
    found = re.match(r"((?:\d+ )?)(.*)$", told)
    assert found
    counts = [int(n) for n in re.findall(r"(\d+) (?=(?:\d+ )*runs)", told)]
    size, step = re.search(r"runs of (\d+)(?: with step (\d+))?", told).groups()  # type: ignore[union-attr]
    every = [int(n) for n in re.findall(r"every (\d+)", told)]
    run = [i * int(step or 1) for i in range(int(size))]
    for count, apart in zip(counts[::-1], every, strict=True):
        run = [i * apart + j for i in range(count) for j in run]
    return [int(base) + i for i in run]


def taken(array: Any, region: str) -> Any:
    words = region[1:-1].split(", ") if array.ndim else []
    return np.ix_(*(indices(word, n) for word, n in zip(words, array.shape, strict=True)))


def stored(root: Path, source: dict[str, Any], ranges: bool) -> Any:
    """A stored tensor from the bytes that `why` names, if they are all of it: one run, or ``ranges`` of its
    elements."""
    dtype = numpy_dtype(source["dtype"])
    parts = []
    for place in source["places"]:
        data = (root / place["file"]).read_bytes()[place["offset"] :][: place["bytes"]]
        assert len(data) == place["bytes"] and "decoded" not in place
        parts.append(data)
    if len(parts) != 1 and not ranges:
        return None
    flat = np.frombuffer(b"".join(parts), dtype)
    return flat.reshape(source["shape"]) if flat.size == np.prod(source["shape"], dtype=int) else None


CASES = [
    ("gpt_neox/neox_pp_tp2", "hf"),
    ("gpt_neox/neox_pp_tp2", None),
    ("gpt_neox/llama_gqa_pp_tp2", "hf"),
    ("sharded/megatron_legacy_tp2_pp2", "hf"),
    ("sharded/moe_megatron_legacy_tp2_ep2", "hf"),
    ("sharded/tp4_vocabpad", None),
    ("sharded/dcp_tp_micro", None),
    ("deepspeed/zero3_bf16_dp2", None),
    ("sharded/megatron_torch_dist_tp2_pp2", "hf"),
    ("sharded/hf_sharded", "megatron"),
    ("sharded/moe_hf_mixtral", "hf"),
]


@pytest.mark.parametrize("source, to", CASES, ids=lambda v: str(v).rpartition("/")[2])
def test_what_it_names_makes_the_tensor(source: str, to: str | None) -> None:
    root = FIXTURES / source
    plan = fastshard.plan(fastshard.open(root), to=to)
    proven = 0
    for name in plan.index:
        told = plan.trace(name)
        json.dumps(told)
        whole = fastshard.Tensor(plan, plan.index[name]).numpy()
        made = np.zeros_like(whole)
        seen = np.zeros(whole.shape, bool)
        parts = told["parts"]
        for part in parts:
            at = taken(whole, part["region"])
            assert not seen[at].any(), "parts overlap"
            seen[at] = True
            assert seen[at].size == part["elements"]
            values = stored(root, part["sources"][0], "zero" in source)
            if (
                values is None
                or part["ops"]
                or part["made_by"] not in ("copy", "copy, bit-equal on all ranks")
            ):
                made[at] = whole[at]
                continue
            box = values[taken(values, part["sources"][0]["region"])].astype(made.dtype)
            if box.shape == whole[at].shape:
                made[at] = box
            else:
                # Dimensions are split or turned: these elements, in some order.
                assert sorted(box.ravel().tolist()) == sorted(whole[at].ravel().tolist())
                made[at] = whole[at]
            proven += 1
        assert told["padding"] or seen.all()
        assert (made.view(np.uint8) == whole.view(np.uint8)).all(), name
    # Of what DCP keeps in boxes only tensors of one box are looked at.
    least = 0 if "torch_dist" in source else 3 if "dcp" in source else len(plan.index) // 2
    assert proven >= least, "hardly any was plain enough to be looked at"


def test_the_command_tells_it_as_a_tree() -> None:
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    text = cli("trace", NEOX, name, "--to", "hf", "--hash", json_output=False)
    lines = text.out.splitlines()
    assert text.code == 0 and lines[0] == f"{name}  BF16 [96, 32]"
    at = lines.index("│  └─ tp 0: 3.attention.query_key_value.weight of BF16 [48, 32]")
    assert lines[at + 1] == "│     ├─ q in each of 2 heads: rows 0-7 of each 24"
    document = cli("trace", NEOX, name, "--to", "hf", "--hash").doc
    assert f"BLAKE3 {document['blake3']}" in text.out


@pytest.mark.parametrize(
    ("source", "part", "stored", "words"),
    [
        (
            "legacy",
            "q",
            "weight of BF16 [64, 64]",
            "heads 0-1 of q in each of 2 groups: rows 0-15 of each 32",
        ),
        ("legacy", "k", "weight of BF16 [64, 64]", "k in each of 2 groups: rows 16-23 of each 32"),
        ("legacy", "v", "weight of BF16 [64, 64]", "v in each of 2 groups: rows 24-31 of each 32"),
        (
            "torch_dist",
            "v",
            "weight[1, 4 runs of 8 every 32 from 24, :] of BF16 [4, 128, 64]",
            "v in each of 4 groups: rows 24-31 of each 32",
        ),
    ],
)
def test_heads_of_a_fused_tensor_are_in_words(source: str, part: str, stored: str, words: str) -> None:
    ckpt = FIXTURES / f"sharded/megatron_{source}_tp2_pp2"
    name = f"model.layers.1.self_attn.{part}_proj.weight"
    lines = cli("trace", ckpt, name, "--to", "hf", json_output=False).out.splitlines()
    titles = [at for at, line in enumerate(lines) if line.endswith(f"linear_qkv.{stored}")]
    assert titles and all(lines[at + 1].endswith(f"─ {words}") for at in titles), lines
    # JSON has the region alone.
    document = cli("trace", ckpt, name, "--to", "hf").doc
    assert " every 32 from " in document["parts"][0]["sources"][0]["region"] and "heads" not in document


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from("qkv"),
    st.integers(0, 2),
    st.data(),
)
def test_words_name_the_rows_that_are_taken(
    groups: int, q: int, rows: int, part: str, first_group: int, data: st.DataObject
) -> None:
    """The words are read again, and name the same rows of the tensor."""
    axes = {"g": groups, "r": q, "d": rows}
    sizes = {"q": q, "k": 1, "v": 1}
    every = (q + 2) * rows
    start, count = first_group % groups, data.draw(st.integers(1, groups - first_group % groups))
    head = data.draw(st.integers(0, sizes[part] - 1))
    taken = data.draw(st.integers(1, sizes[part] - head))
    at = {"q": 0, "k": q, "v": q + 1}[part] * rows + head * rows
    runs = [(count, every), (taken, rows), (rows, 1)]
    text = heads("g*(q:r|k:1|v:1)*d", groups * every, start * every + at, runs, axes)
    found = re.fullmatch(
        r"(?:heads? (\d+)(?:-(\d+))? of )?(\w) in "
        r"(?:each of (\d+) (?:head|group)s|(?:head|group)s? (\d+)(?:-(\d+))?)"
        r": rows (\d+)-(\d+) of each (\d+)",
        str(text),
    )
    assert found, text
    h0, h1, named, every_group, g0, g1, r0, r1, of = found.groups()
    assert named == part and (int(r0), int(r1) + 1, int(of)) == (at, at + taken * rows, every)
    assert h0 is None or (int(h0), int(h1 or h0) + 1) == (head, head + taken)
    assert (
        (int(every_group) == groups == count)
        if every_group
        else (int(g0), int(g1 or g0) + 1)
        == (
            start,
            start + count,
        )
    )


@pytest.mark.parametrize(
    ("dimension", "extent", "first", "runs", "axes"),
    [
        ("(gate:F|up:F)", 96, 48, [(48, 1)], {"F": 48}),
        ("g*(q:r|k:1|v:1)*d", 64, 0, [(20, 1)], {"g": 2, "r": 2, "d": 8}),  # q and a part of k
        ("g*(q:r|k:1|v:1)*d", 64, 0, [(4, 1)], {"g": 2, "r": 2, "d": 8}),  # half of a head
        ("g*(q:r|k:1|v:1)*d", 64, 0, [(4, 2)], {"g": 2, "r": 2, "d": 8}),  # every other row
        ("g*(q:r|k:1|v:1)*d", 16, 0, [(8, 1)], {"g": 1, "r": 2, "d": 8}),  # half of a group
        ("g*(q:r|k:1|v:1)*d", 64, 0, [(16, 1)], {"g": 2, "r": 2}),
    ],
)
def test_rows_that_are_not_heads_of_one_part_have_no_words(
    dimension: str, extent: int, first: int, runs: list[tuple[int, int]], axes: dict[str, int]
) -> None:
    assert heads(dimension, extent, first, runs, axes) is None


def test_a_wrapped_tree_breaks_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "global_step4/layer_03-model_00-model_states.pt, member data/2, bytes 2,112 to 5,184 (3.07 kB)"
    root: Tree = ("name", [("one", [(long, [])]), (long, [("below", [])])])
    lines = tree(root, wraps=True).splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) == 7
    words = [word for line in lines for word in re.sub("[├└│─]", " ", line).split()]
    assert words == ["name", "one", *long.split(), *long.split(), "below"]
    assert len(tree(root).splitlines()) == 5


def test_its_hash_is_that_of_the_result(tmp_path: Path) -> None:
    manifest = fastshard.convert(NEOX, tmp_path / "out", to="hf")
    for name in list(manifest)[:3]:
        assert cli("trace", NEOX, name, "--to", "hf", "--hash").doc["blake3"] == manifest[name]["blake3"]
        # The result's own manifest states it, and nothing is read for that.
        told = cli("trace", tmp_path / "out", name, json_output=False).out
        assert f"BLAKE3 {manifest[name]['blake3']}, from the manifest" in told


def test_a_hash_of_a_shard_is_never_said_to_be_that_of_the_whole(tmp_path: Path) -> None:
    """Ranks' shards have the whole's name, in the inventory too."""
    from fastshard import examples

    examples.make("llama", tmp_path / "ranks", to="tp-safetensors", tp=2)
    fastshard.manifest(tmp_path / "ranks")
    for name in ("model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        assert "BLAKE3" not in cli("trace", tmp_path / "ranks", name, json_output=False).out


def test_a_tensor_that_is_not_whole_says_what_it_lacks(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    ran = cli("trace", ckpt, "3.attention.dense.weight")
    assert ran.code == 3 and ran.having("FS101", file=layer_file(3, 1))
    (told,) = ran.having("FS101", tensor="3.attention.dense.weight", message="not in the result")
    assert told["severity"] == "warning" and told["file"].endswith(layer_file(3, 1))


def test_a_tensor_that_no_other_finding_accounts_for_is_said_once(tmp_path: Path) -> None:
    ckpt = copy(HF, tmp_path / "ckpt")
    (ckpt / "model.safetensors.index.json").unlink()
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_safetensors(ckpt / "model-00001-of-00004.safetensors", lambda tensors: tensors.__delitem__(name))
    ran = cli("trace", ckpt, name)
    (told,) = ran.errors
    assert (ran.code, told["code"], told["tensor"]) == (3, "FS102", name)
    assert (
        "not in the result" in told["message"] and "rank" not in told["help"] and "node" not in told["help"]
    )


def test_a_hash_of_damaged_bytes_says_that_they_are(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    place = fastshard.plan(ckpt, to="hf").trace(name)["parts"][1]["sources"][0]["places"][0]
    file = ckpt / place["file"]
    data = bytearray(file.read_bytes())
    data[place["offset"]] ^= 1
    file.write_bytes(data)
    ran = cli("trace", ckpt, name, "--to", "hf", "--hash")
    assert any("CRC32" in finding["message"] for finding in ran.errors)


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    for argv, words in (
        (
            ["gpt_neox.layers.1.attention.query_key_value.weigth", "--to", "hf"],
            "did you mean gpt_neox.layers.1.attention.query_key_value.weight?",
        ),
        (["3.attention.query_key_value.weight", "--to", "hf"], "the source's own name"),
        (["nothing like it"], "fastshard ls"),
    ):
        ran = cli("trace", NEOX, *argv)
        (finding,) = ran.findings
        assert (ran.code, finding["code"]) == (2, "FS515")
        assert words in f"{finding['message']} {finding['help']} {finding.get('run')}"


def test_many_branches_are_counted_and_v_shows_them() -> None:
    argv = (
        "trace",
        FIXTURES / "sharded/tp4_vocabpad",
        "decoder.layers.3.self_attention.linear_qkv.weight",
        "--to",
        "megatron",
    )
    assert len(cli(*argv).doc["parts"]) == 12
    short, whole = (cli(*argv, *more, json_output=False).out for more in ((), ("-v",)))
    assert short.count(" = copy") == 8 and "\n└─ ... and 4 more parts (-v shows all)\n" in short
    assert whole.count(" = copy") == 12 and "more parts" not in whole


def test_a_chunk_of_a_store_is_named_by_its_key() -> None:
    """Where its bytes lie is its store's affair: nothing is said of that."""
    plan = fastshard.plan(fastshard.open(FIXTURES / "orbax/paxml_gpt3_micro_weights"))
    sources = [s for name in plan.index for part in plan.trace(name)["parts"] for s in part["sources"]]
    places = [place for source in sources for place in source["places"]]
    assert places and all(p["member"] and "decoded" in p and "offset" not in p for p in places)


# --- the words of regions, against sets of indices


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[tuple[int, int]]]]:
    """A shape, and a box of it: the first index in each dimension, and runs of indices."""
    shape, base, runs = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        inner = (draw(st.integers(1, 4)), draw(st.integers(1, 3)))
        outer = (draw(st.integers(1, 3)), inner[0] * inner[1] + draw(st.integers(0, 3)))
        used = [run for run in (inner, outer) if run[0] > 1]
        first = draw(st.integers(0, 3))
        last = first + sum((n - 1) * step for n, step in used)
        shape.append(last + 1 + draw(st.integers(0, 3)))
        base.append(first)
        runs.append(draw(st.permutations(used)))
    return shape, base, runs


def elements(shape: list[int], base: list[int], runs: list[list[tuple[int, int]]]) -> set[int]:
    """C-ordered elements of a box, one by one."""
    found = {0}
    for n, first, run, stride in zip(shape, base, runs, strides(shape), strict=True):
        at = {first}
        for count, step in run:
            at = {i + k * step for i in at for k in range(count)}
        assert max(at) < n
        found = {f + i * stride for f in found for i in at}
    return found


@given(boxes())
def test_regions_name_their_elements(box: tuple[list[int], list[int], list[list[tuple[int, int]]]]) -> None:
    shape, base, runs = box
    flat = np.arange(np.prod(shape)).reshape(shape)
    expected = elements(shape, base, runs)
    text = slices(shape, base, runs)
    assert set(flat[taken(flat, text)].ravel().tolist()) == expected
    steps = strides(shape)
    axes = [(n, step * stride) for run, stride in zip(runs, steps, strict=True) for n, step in run]
    start = sum(b * s for b, s in zip(base, steps, strict=True))
    told = of_flat(shape, start, axes)
    assert set(flat[taken(flat, told)].ravel().tolist()) == expected


@given(boxes(), st.integers(0, 400), st.integers(0, 40))
def test_a_range_meets_a_box_where_an_element_lies_in_both(
    box: tuple[list[int], list[int], list[list[tuple[int, int]]]], lo: int, length: int
) -> None:
    shape, base, runs = box
    steps = strides(shape)
    axes = [(n, step * stride) for run, stride in zip(runs, steps, strict=True) for n, step in run]
    start = sum(b * s for b, s in zip(base, steps, strict=True))
    expected = any(lo <= element < lo + length for element in elements(shape, base, runs))
    assert meets(start, axes, lo, lo + length) == expected


def test_an_axis_that_runs_over_dimensions_is_divided() -> None:
    assert of_flat([4, 6], 0, [(24, 1)]) == "[:, :]"
    assert of_flat([4, 6], 6, [(12, 1)]) == "[1:3, :]"
    assert of_flat([4, 6], 0, [(5, 5)]) == "5 elements every 5 from element 0"
