"""Plans, comparisons, errors and layouts from Python."""

from __future__ import annotations

import json
import pickle
from importlib import resources
from pathlib import Path
from typing import Any

import fastshard
import jsonschema
import numpy as np
import pytest
import torch
from fastshard import _core
from fastshard.common.byte_sizes import parse_size
from fastshard.common.option_checks import taken
from fastshard.common.options import Requested, WriteRequest, split_request, table
from fastshard.common.records import asdict
from fastshard.targets.registry import TARGETS
from helpers import FIXTURES, HF, NEOX, NEOX_SEQ, STEP, TP4, cli, copy, edit_pt, layer_file
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

MEMORY = "2GiB"
TP1 = FIXTURES / "gpt_neox/neox_pp_tp1"
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def schema(name: str) -> dict[str, object]:
    (file,) = (
        f for f in resources.files("fastshard").joinpath("schemas").iterdir() if f.name.startswith(f"{name}.")
    )
    return json.loads(file.read_text())


# --- plans


def test_plan_says_what_would_be_written_and_writes_nothing(tmp_path: Path) -> None:
    plan = fastshard.plan(NEOX, "hf", vocab_size=509)
    assert len(plan.outputs) == 40
    # Two values of config.json are GPT-NeoX's defaults, since the training config does not state them; the
    # tokens that begin and end a text are left out.
    defaults = [("FS216", "warning"), ("FS216", "warning")]
    assert [(f.code, f.severity) for f in plan.findings] == [*defaults, ("FS109", "note")]
    by_name = {name: (dtype, shape) for name, dtype, shape, _, _ in plan.outputs}
    assert by_name["embed_out.weight"] == ("BF16", [509, 32])
    assert plan.summary["outputs"] == 40
    assert "40 tensors" in repr(plan)
    assert list(tmp_path.iterdir()) == []


def test_digest_is_of_the_plan() -> None:
    one, again = fastshard.plan(NEOX, "hf"), fastshard.plan(NEOX, "hf")
    assert one.digest == again.digest
    others = [
        fastshard.plan(NEOX),
        fastshard.plan(NEOX, "hf", vocab_size=509),
        fastshard.plan(NEOX, "hf", dtype="f32"),
    ]
    assert len({one.digest, *(o.digest for o in others)}) == 4


@pytest.mark.parametrize(
    "source, to", [(NEOX, None), (NEOX, "hf"), (NEOX_SEQ, "hf"), (TP4, None), (HF, "hf")]
)
def test_documents_follow_their_schemas(source: Path, to: str | None, tmp_path: Path) -> None:
    jsonschema.validate(fastshard.plan(source, to).to_dict(), schema("plan"))
    made = fastshard.convert(source, tmp_path / "out", to, memory=MEMORY)
    jsonschema.validate(
        json.loads((tmp_path / "out/fastshard.manifest.json").read_text()), schema("manifest")
    )
    jsonschema.validate(made.document, schema("manifest"))
    jsonschema.validate(
        fastshard.manifest(source, tmp_path / "m.json", memory=MEMORY).document, schema("manifest")
    )


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", [NEOX, HF], ids=["gpt_neox", "hf"])
def test_the_plan_of_every_target_follows_its_schema(source: Path, to: str) -> None:
    try:
        plan = fastshard.plan(source, to)
    except fastshard.CannotRunError as error:
        assert error.findings[0].code == ("FS402" if to == "universal" else "FS514")
        return
    jsonschema.validate(plan.to_dict(), schema("plan"))
    # Readers start from what is there last, at the top of the result.
    document = plan.to_dict()
    names = {f["name"] for f in document["files"]} | set(document["texts"]) | {document.get("index")}
    assert document["pointers"]
    assert set(document["pointers"]) <= {name.split("/")[0] for name in names if name}


def test_findings_follow_their_schema(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    findings = [f.to_dict() for f in fastshard.verify(ckpt, memory=MEMORY)]
    assert findings
    jsonschema.validate(findings, schema("findings"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"code": "X1"}], schema("findings"))


@pytest.mark.parametrize(
    "options",
    [
        {"to": "nothing"},
        {"to": "megatron"},
        {"dtype": "f8"},
        {"replicas": "any"},
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"max_shard_size": "much"},
        {"tp": 2},
        {"max_shard_size": 0},
        {"include": ["nothing*"]},
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError):
        fastshard.convert(NEOX, tmp_path / "out", **{"to": "hf", **options}, memory=MEMORY)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path, code", [("nowhere", "FS501"), (".", "FS513")])
def test_what_is_no_checkpoint_cannot_be_opened(path: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.open(tmp_path / path)
    assert caught.value.code == code


def test_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    ran = cli("merge", __file__, tmp_path / "out")
    assert ran.code in (1, 2) and ran.errors[0]["file"].endswith("test_api.py")


def test_memory_below_the_baseline_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.merge(TP4, tmp_path / "out", memory="1MiB")
    assert caught.value.code == "FS512"
    assert "baseline" in str(caught.value.expected) and "1 MiB" in str(caught.value.got)


def test_default_memory_is_enough_beside_torch(tmp_path: Path) -> None:
    torch.zeros(1)
    fastshard.merge(TP4, tmp_path / "out")
    assert (tmp_path / "out").is_dir()


# --- comparisons


@pytest.mark.parametrize("other", [TP1, NEOX_SEQ], ids=["tp1", "sequential"])
def test_shardings_of_one_model_are_equal(other: Path) -> None:
    assert fastshard.diff(NEOX, other, memory=MEMORY) == []


def test_layouts_of_one_model_are_equal(tmp_path: Path) -> None:
    fastshard.convert(NEOX, tmp_path / "out", memory=MEMORY)
    assert fastshard.diff(NEOX, tmp_path / "out", memory=MEMORY) == []
    assert fastshard.diff(tmp_path / "out", NEOX_SEQ, memory=MEMORY) == []


def test_difference_is_measured(tmp_path: Path) -> None:
    other = copy(NEOX, tmp_path / "other")
    delta = torch.zeros(64, 32)
    delta[3, 4], delta[5, 6] = 1.0, -3.0
    name = "mlp.linear1.weight"

    def change(layer: dict[str, torch.Tensor]) -> None:
        layer[name][3, 4], layer[name][5, 6] = 0.0, 0.0

    edit_pt(other / STEP / layer_file(3, 1), change)
    base = torch.load(NEOX / STEP / layer_file(3, 1))[name].double()
    values = torch.stack((base[3, 4], base[5, 6]))
    (found,) = fastshard.diff(NEOX, other, memory=MEMORY)
    assert (found.tensor, found.kind, found.differing) == (f"3.{name}", "values", 2)
    assert found.largest == pytest.approx(float(values.abs().max()))
    count = 2 * base.numel()
    mean = float(values.sum()) / count
    assert found.mean == pytest.approx(mean)
    assert found.std == pytest.approx((float((values**2).sum()) / count - mean**2) ** 0.5)


@pytest.mark.parametrize(
    ("one", "two", "largest"),
    [
        (torch.tensor([2**60, 5]), torch.tensor([2**60 + 1, 5]), 1.0),
        (torch.tensor([-(2**63), 5]), torch.tensor([2**63 - 1, 5]), 2.0**64),
        (torch.tensor([3 + 4j, 1j]), torch.tensor([3 + 0j, 1j]), 4.0),
        (torch.tensor([1j, 1j]), torch.tensor([1j, 1 + 1j]), 1.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([2**63, 7], dtype=torch.uint64), torch.tensor([2**63 + 2, 7], dtype=torch.uint64), 2.0),
    ],
)
def test_differences_of_whole_and_complex_numbers_are_exact(
    one: torch.Tensor, two: torch.Tensor, largest: float, tmp_path: Path
) -> None:
    for name, tensor in (("one", one), ("two", two)):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    (found,) = fastshard.diff(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert (found.kind, found.differing, found.largest) == ("values", 1, largest)


def test_tensor_that_one_side_lacks(tmp_path: Path) -> None:
    fastshard.merge(HF, tmp_path / "out", exclude=["model.norm.weight"], memory=MEMORY)
    (tmp_path / "out/config.json").unlink()
    (found,) = fastshard.diff(HF, tmp_path / "out", memory=MEMORY)
    assert (found.tensor, found.kind) == ("model.norm.weight", "only_a")
    ran = cli("diff", HF, tmp_path / "out")
    assert ran.code == 1 and ran.having("FS309", tensor="model.norm.weight")


def test_tensors_chosen_that_one_side_lacks(tmp_path: Path) -> None:
    """Whatever is chosen, the two are compared as they are whole."""
    for name, extra in (("one", "only.one"), ("two", "only.two")):
        tensors = {"both.weight": torch.ones(3), f"{extra}.weight": torch.ones(2)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    pair = (tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    one, two = (("only.one.weight", "only_a"), ("only.two.weight", "only_b"))
    for include, wanted in (
        (["*.one.*"], [one]),
        (["*.two.*"], [two]),
        (["only.*"], [one, two]),
        (["both.*"], []),
    ):
        found = fastshard.diff(*pair, include=include, memory=MEMORY)
        assert [(f.tensor, f.kind) for f in found] == wanted
        assert fastshard.diff(*pair, include=iter(include), exclude=iter(()), memory=MEMORY) == found
        assert cli("diff", *pair, "--include", include[0]).code == bool(wanted)
    assert [(f.tensor, f.kind) for f in fastshard.diff(*pair, exclude=iter(["both*"]))] == [one, two]
    ran = cli("diff", *pair, "--include", "neither")
    assert ran.code == 2 and ran.having("FS515", message="nothing is left"), ran.out
    # Layouts without common names are seen as Hugging Face's, which is what the patterns are about.
    fastshard.convert(NEOX, tmp_path / "hf", memory=MEMORY)
    assert fastshard.diff(NEOX, tmp_path / "hf", include=["embed_out*"], memory=MEMORY) == []


def test_a_head_that_one_side_lacks(tmp_path: Path) -> None:
    """Of the head alone, nothing tells which model it belongs to; the whole does."""
    head = torch.zeros(8, 4)
    rest = {"model.embed_tokens.weight": torch.ones(8, 4), "model.norm.weight": torch.ones(4)}
    save_file(rest, tmp_path / "headless.safetensors")
    save_file({**rest, "lm_head.weight": head}, tmp_path / "whole.safetensors")
    pair = [tmp_path / "whole.safetensors", tmp_path / "headless.safetensors"]
    for sides, kind in ((pair, "only_a"), (pair[::-1], "only_b")):
        (found,) = fastshard.diff(*sides, include=["lm_head*"], memory=MEMORY)
        assert (found.tensor, found.kind) == ("lm_head.weight", kind)
        ran = cli("diff", *sides, "--include", "lm_head*")
        assert ran.code == 1 and ran.having("FS309", tensor="lm_head.weight"), ran.out


def test_damaged_side_is_refused(tmp_path: Path) -> None:
    other = copy(NEOX, tmp_path / "other")
    (other / STEP / layer_file(3, 1)).unlink()
    with pytest.raises(fastshard.IncompleteError):
        fastshard.diff(NEOX, other, memory=MEMORY)


# --- errors


def test_errors_survive_pickling(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    with pytest.raises(fastshard.IncompleteError) as caught:
        fastshard.merge(ckpt, tmp_path / "out", memory=MEMORY)
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is fastshard.IncompleteError
    assert error.findings == caught.value.findings and str(error) == str(caught.value)
    assert (error.code, error.rank, error.exit_code) == ("FS101", "tp 1", 3)
    assert error.path.endswith(layer_file(3, 1))
    assert (error.tensor, error.host, error.got) == (None, None, None)
    assert error.evidence == "num_layers 3 and model_parallel_size 2 in the checkpoint's arguments"
    assert "help: copy" in str(error)


def test_errors_are_one_tree() -> None:
    for kind in (fastshard.ProblemError, fastshard.CannotRunError, fastshard.IncompleteError):
        assert issubclass(kind, fastshard.FastshardError)


# --- layouts

TABLE = """
layout = "mine"
family = "mine"
[shard]
tp = ["F"]
[[tensor]]
name = "up.{L}"
shape = "[F, H]"
[[tensor]]
name = "down.{L}"
shape = "[H, F]"
[[tensor]]
name = "scratch"
ignore = "left over"
"""


def write_mine(root: Path) -> dict[str, torch.Tensor]:

    root.mkdir()
    full = {f"{n}.{i}": torch.randn(*s) for i in range(2) for n, s in (("up", (8, 4)), ("down", (4, 8)))}
    for rank in range(2):
        shard = {k: v.chunk(2, 0 if k.startswith("up") else 1)[rank].contiguous() for k, v in full.items()}
        save_file(shard | {"scratch": torch.zeros(3)}, root / f"tp_rank_{rank:02d}.safetensors")
    return full


def test_layout_of_the_user_is_used(tmp_path: Path) -> None:
    full = write_mine(tmp_path / "ckpt")
    (tmp_path / "rules.toml").write_text(TABLE)
    ran = cli("merge", tmp_path / "ckpt", tmp_path / "out", "--layout", tmp_path / "rules.toml")
    assert ran.code == 0, ran.out
    have = fastshard.open(tmp_path / "out")
    assert set(have) == set(full)
    assert all(torch.equal(have[k].torch(), v) for k, v in full.items())


def test_layout_can_be_registered() -> None:
    assert fastshard.layouts.register(TABLE) == "mine"
    assert "mine" in fastshard.layouts.names() and fastshard.layouts.get("mine") == TABLE
    assert {"hf.gpt_neox", "hf.llama", "gpt_neox.neox"} <= set(fastshard.layouts.names())


@pytest.mark.parametrize(
    "text",
    [
        "layout = 1\n",
        "\n",
        "layout = 'x'\nfamily = 'x'\n[[tensor]]\nname = '{'\nshape='[H]'\n",
        "layout = 'x'\nfamily = 'x'\n[[tensor]]\nname = 'a'\nshape='[H'\n",
    ],
)
def test_bad_layout_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.layouts.register(text)
    assert caught.value.code == "FS210"
    (tmp_path / "rules.toml").write_text(text)
    assert cli("merge", TP4, tmp_path / "out", "--layout", tmp_path / "rules.toml").code == 2


# --- sizes


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_sizes_are_parsed(number: int, unit: str, space: str, lower: bool) -> None:
    text = f"{number}{space}{unit.lower() if lower else unit}"
    assert parse_size(text) == number * UNITS[unit]


@given(st.integers(1, 2**62))
def test_sizes_in_bytes_are_exact(number: int) -> None:
    assert parse_size(str(number)) == parse_size(number) == number


@given(st.text())
def test_any_other_text_is_refused_and_never_crashes(text: str) -> None:
    try:
        assert parse_size(text) >= 1
    except fastshard.CannotRunError as error:
        assert error.code == "FS515"


@pytest.mark.parametrize(
    "bad", ["", "0", "0.1", "-5GB", "5 G B", "5XB", "GB", "1e9", "inf", "nan", True, None, 0, -1]
)
def test_sizes_that_are_none(bad: object) -> None:
    with pytest.raises(fastshard.CannotRunError):
        parse_size(bad)  # type: ignore[arg-type]


# --- options that cannot be meant

#: What is called, by the options that it takes besides those of opening.
CALLS = {
    "open": lambda p, **o: fastshard.open(p, to="hf", **o),
    "plan": lambda p, **o: fastshard.plan(p, **o),
    "convert": lambda p, **o: fastshard.convert(p, "nowhere/out", **o),
    "merge": lambda p, **o: fastshard.merge(p, "nowhere/out", **o),
    "verify": fastshard.verify,
    "diff": lambda p, **o: fastshard.diff(p, p, **o),
    "stats": fastshard.stats,
    "manifest": lambda p, **o: fastshard.manifest(p, "nowhere/m.json", **o),
    "master_weights": fastshard.master_weights,
    "repair_master_weights": lambda p, **o: fastshard.repair_master_weights(p, "nowhere/out", **o),
}
ODD = [
    *(("accept", value) for value in ([5], "copies", None, 5, {"copies": 1}, b"copies")),
    *(("include", value) for value in (None, "*.w", [5], 5)),
    *(("exclude", value) for value in (None, "*.w", [None], 5)),
    *(
        ("subset", value)
        for value in (5, "1/2", (1,), (1, 2, 3), ("1", "2"), (1.0, 2), (True, 2), (1, 1 << 70))
    ),
    *(("tp", value) for value in (None, "2", 2.0, True)),
    *(("expect_processes", value) for value in ("2", 2.0, True, [2])),
    *(("vocab_size", value) for value in ("300", 3.5, True, 1 << 70)),
    *(("make_vocab_size_divisible_by", value) for value in ("128", [1])),
    *(("param_scan_axis", value) for value in ("1", 1.5)),
    *(("dtype", value) for value in (["bf16"], None, 5, "bf61")),
    *(("replicas", value) for value in (["mean"], None)),
    *(("weights", value) for value in (["masters"], 5)),
    *(("rope_type", value) for value in (["default"], 5)),
    *(("overwrite", value) for value in ("no", None, 1)),
    *(("optimizer", value) for value in ("no", None)),
    *(("drop_optimizer", value) for value in ("no", None)),
    *(("fused_qkv", value) for value in ("no", 1)),
    *(("config", value) for value in (5, ["config.json"], "")),
    *(("expect", value) for value in (5, "")),
    *(("layout", value) for value in (5, "")),
    *(("tokenizer", value) for value in (5, "")),
    *(("step", value) for value in ("",)),
]


@pytest.mark.parametrize(("option", "value"), ODD, ids=[f"{option}={value!r}" for option, value in ODD])
def test_odd_values_are_refused_by_the_name_of_their_option(option: str, value: object) -> None:
    calls = {name: call for name, call in CALLS.items() if option in taken(getattr(fastshard, name))}
    assert calls
    for name, call in calls.items():
        with pytest.raises(fastshard.CannotRunError) as caught:
            call(TP4, **{option: value})
        found = caught.value.findings[0]
        assert found.code in ("FS515", "FS211") and found.message.startswith(option), (name, found)
        assert repr(value)[:20] in str(found.got), (name, found)


@pytest.mark.parametrize("path", [5, b"ckpt", None, 3.5, ""])
def test_paths_that_are_none_are_refused_by_name(path: object) -> None:
    for call in CALLS.values():
        with pytest.raises(fastshard.CannotRunError) as caught:
            call(path)
        assert caught.value.code == "FS515" and repr(path) in str(caught.value.got)
    for write in (fastshard.merge, fastshard.convert, fastshard.manifest, fastshard.repair_master_weights):
        if path is None and write is fastshard.manifest:
            continue
        for call in (lambda: write(TP4, path), lambda: write(TP4, out=path)):  # noqa: B023
            with pytest.raises(fastshard.CannotRunError) as caught:
                call()
            assert caught.value.findings[0].code == "FS515" and str(caught.value).startswith("out")


def test_a_pattern_that_can_be_read_once_holds_for_both_sides(tmp_path: Path) -> None:
    fastshard.merge(HF, tmp_path / "out", exclude=["model.norm.weight"], memory=MEMORY)
    (tmp_path / "out/config.json").unlink()
    left_out = (name for name in ["model.norm.weight"])
    assert fastshard.diff(HF, tmp_path / "out", exclude=left_out, memory=MEMORY) == []


def test_the_record_of_a_write_has_the_options_of_the_table() -> None:
    defaults = {name: option.default for name, option in table(Requested).items()}
    assert asdict(WriteRequest.of()) == defaults and asdict(split_request({"dtype": "f32"})[0]) == defaults
    assert split_request({"dtype": "f32", "stats": True})[1] == {"dtype": "f32"}
    with pytest.raises(TypeError, match="reflink"):
        WriteRequest.of(reflink=True)


def test_the_core_refuses_an_option_of_a_write_that_it_does_not_know(tmp_path: Path) -> None:
    """It would be taken and do nothing: a field that one side has and the other lacks is refused."""
    assert set(WriteRequest.of().to_dict()) == set(table(Requested))
    for publish, word in (({"reflink": True}, "reflink"), ({**WriteRequest.of().to_dict(), "sparse": 1}, "")):
        settings: Any = {"threads": 1, "memory": 1 << 28, "publish": publish}
        with pytest.raises(_core.CoreError) as caught:
            _core.write_piece([], [str(tmp_path)], str(tmp_path / "out"), settings, None, None)
        (finding,) = caught.value.args[0]
        assert finding.code == "FS515" and word in finding.message
    assert not (tmp_path / "out").exists()


def test_whole_numbers_of_numpy_are_numbers() -> None:
    plan = fastshard.plan(NEOX, "hf", vocab_size=np.int64(509))
    assert plan.digest == fastshard.plan(NEOX, "hf", vocab_size=509).digest


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("repair_master_weights", "drop_optimiser", "did you mean drop_optimizer?"),
        ("plan", "memory", r"plan\(\) does not take it"),
        ("plan", "memroy", None),
        ("manifest", "include", r"manifest\(\) does not take it"),
        ("merge", "to", r"merge\(\) does not take it"),
        ("open", "max_shard_size", r"open\(\) does not take it"),
        ("master_weights", "overwrite", r"master_weights\(\) does not take it"),
        ("verify", "subsets", "did you mean subset?"),
        ("manifest", "exlude", "did you mean exclude?"),
    ],
)
def test_options_of_the_function_that_is_called_are_suggested(
    name: str, option: str, told: str | None
) -> None:
    with pytest.raises(TypeError, match=told or "unknown option") as caught:
        CALLS[name](TP4, **{option: 1})
    suggested = str(caught.value).rpartition("did you mean ")[2].rstrip("?")
    assert "did you mean" not in str(caught.value) or suggested in taken(getattr(fastshard, name)) - {option}
