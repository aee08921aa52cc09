"""Writing from a script: checked, and published whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from fastshard import _core
from helpers import HF, cli, read_result
from safetensors import safe_open


def test_clean_exit_publishes(tmp_path: Path) -> None:
    arrays = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.float64(2.5),
        "empty": np.zeros((0, 3), np.int16),
        "bool": np.array([True, False]),
        "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
    }
    with fastshard.Writer(tmp_path / "out", expected=set(arrays), config={"model_type": "mine"}) as writer:
        for name, array in arrays.items():
            writer[name] = array
        assert not (tmp_path / "out").exists()
    have = fastshard.open(tmp_path / "out")
    assert set(have) == set(arrays)
    for name, array in arrays.items():
        assert have[name].shape == np.shape(array)
        assert have[name].numpy().tobytes() == np.asarray(array).tobytes()
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"model_type": "mine"}
    assert writer.manifest is not None and set(writer.manifest) == set(arrays)
    assert fastshard.verify(tmp_path / "out", memory="2GiB") == [] or not [
        f for f in fastshard.verify(tmp_path / "out", memory="2GiB") if f.severity == "error"
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_torch_tensors_of_any_stride_and_dtype(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(4, 6).bfloat16().t(),
        "slice": torch.arange(20).reshape(4, 5)[:, 1:3],
        "grad": torch.nn.Parameter(torch.randn(3)),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "expanded": torch.tensor([1.0]).expand(5),
        "scalar": torch.tensor(1, dtype=torch.int8),
    }
    with fastshard.Writer(tmp_path / "out") as writer:
        for name, tensor in tensors.items():
            writer[name] = tensor
    have = read_result(tmp_path / "out")
    for name, tensor in tensors.items():
        want = tensor.detach().contiguous()
        assert (have[name].dtype, have[name].shape) == (want.dtype, want.shape)
        assert torch.equal(have[name].reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", "<f4", ">c8"])
def test_bytes_are_little_endian_whatever_the_array(dtype: str, tmp_path: Path) -> None:
    values = np.array([1, 2, 258]).astype(dtype)
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["x"] = values
        writer["strided"] = np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype))
    ckpt = fastshard.open(tmp_path / "out")
    assert np.array_equal(ckpt["x"].numpy(), [1, 2, 258])
    assert np.array_equal(ckpt["strided"].numpy(), np.arange(6).reshape(2, 3))


def test_tensors_of_an_open_checkpoint_are_written(tmp_path: Path) -> None:
    source = fastshard.open(HF)
    with fastshard.Writer(tmp_path / "out", expected=source, max_shard_size="100KB") as writer:
        for name, tensor in source.items():
            writer[name] = tensor
    assert fastshard.diff(HF, tmp_path / "out", memory="2GiB") == []


def test_large_results_are_divided_and_indexed(tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out", max_shard_size=1000) as writer:
        for i in range(10):
            writer[f"w{i}"] = np.full(100, i, np.float32)
    have = read_result(tmp_path / "out")
    assert len(have) == 10 and all(bool((have[f"w{i}"] == i).all()) for i in range(10))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 5
    assert files[0].name == "model-00001-of-00005.safetensors"
    with safe_open(files[0], framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_transformers_loads_what_was_written(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.GPTNeoXForCausalLM(config).eval()
    state = {k: v for k, v in model.state_dict().items() if "rotary" not in k}
    with fastshard.Writer(tmp_path / "out", config=config.to_dict(), max_shard_size="4KB") as writer:
        for name, tensor in state.items():
            writer[name] = tensor
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_block_that_raises_publishes_nothing(failure: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(failure), fastshard.Writer(tmp_path / "out") as writer:
        writer["a"] = np.zeros(1000)
        raise failure
    assert list(tmp_path.iterdir()) == []


def test_missing_tensors_are_all_named_and_nothing_is_published(tmp_path: Path) -> None:
    with (
        pytest.raises(fastshard.IncompleteError) as caught,
        fastshard.Writer(tmp_path / "out", expected=["a", "b", "c"]) as writer,
    ):
        writer["b"] = np.zeros(3)
    assert [f.tensor for f in caught.value.findings] == ["a", "c"]
    assert caught.value.code == "FS102"
    assert list(tmp_path.iterdir()) == []


CASES = {
    "other_name": ("b", np.zeros((2, 3), np.float32), "FS207"),
    "other_shape": ("a", np.zeros((3, 2), np.float32), "FS201"),
    "other_rank": ("a", np.zeros(6, np.float32), "FS201"),
    "other_dtype": ("a", np.zeros((2, 3), np.float16), "FS202"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_expected_is_refused_at_once(case: str, tmp_path: Path) -> None:
    name, array, code = CASES[case]
    with (
        pytest.raises(fastshard.ProblemError) as caught,
        fastshard.Writer(tmp_path / "out", expected={"a": ("F32", (2, 3))}) as writer,
    ):
        writer[name] = array
    assert (caught.value.code, caught.value.tensor) == (code, name)
    assert list(tmp_path.iterdir()) == []


WANTS = [
    (2, 3),
    tuple(np.array([2, 3])),
    None,
    {"dtype": "F32", "shape": [2, 3]},
    ("F32", (2, 3)),
    ("float32", [2, 3]),
    (torch.float32, (2, 3)),
    torch.ones(2, 3),
    np.ones((2, 3), np.float32),
]


@pytest.mark.parametrize("want", WANTS, ids=str)
def test_expectations_may_be_shapes_or_entries(want: object, tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out", expected={"a": want}) as writer:
        writer["a"] = np.zeros((2, 3), np.float32)
    assert set(read_result(tmp_path / "out")) == {"a"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("expected", value) for value in ("w", b"w", 5, [5], {5: None})),
        *(
            ("expected", {"w": value})
            for value in (5, "F32", ("F3", (2,)), ("F32", "2"), (2.5, 1), {"dtype": "F32"})
        ),
        *(("overwrite", value) for value in ("no", None)),
        *(("fsync", value) for value in ("no", 1)),
        *(("config", value) for value in ("config.json", ["a"], 5)),
        *(("max_shard_size", value) for value in ("5 files", None, 0)),
    ],
    ids=str,
)
def test_odd_values_are_refused_by_the_name_of_their_option(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.Writer(tmp_path / "out", **{option: value})
    assert caught.value.code == "FS515" and caught.value.findings[0].message.startswith(option)
    with pytest.raises(TypeError, match="did you mean overwrite"):
        fastshard.Writer(tmp_path / "out", overwite=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Writer\(\) does not take it"):
        fastshard.Writer(tmp_path / "out", vocab_size=3)  # type: ignore[call-arg]
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_of_a_models_tensors_is_what_is_expected(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    with fastshard.Writer(tmp_path / "out", expected=model.state_dict()) as writer:
        for name, tensor in model.state_dict().items():
            writer[name] = tensor
    with (
        pytest.raises(fastshard.ProblemError) as caught,
        fastshard.Writer(tmp_path / "not", expected=model.state_dict()) as writer,
    ):
        writer["weight"] = model.weight.detach().float()
    assert caught.value.code == "FS202"


def test_name_written_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fastshard.FastshardError) as caught, fastshard.Writer(tmp_path / "out") as writer:
        writer["a"] = np.zeros(3)
        writer["a"] = np.ones(3)
    assert caught.value.tensor == "a"
    assert list(tmp_path.iterdir()) == []


def test_array_of_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as caught, fastshard.Writer(tmp_path / "out") as writer:
        writer["a"] = np.array([object()])
    assert (caught.value.code, caught.value.tensor) == ("FS514", "a")


def test_destination_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(fastshard.CannotRunError) as caught, fastshard.Writer(tmp_path / "out"):
        raise AssertionError("the block must not run")
    assert caught.value.code == "FS504"
    with (
        pytest.raises(fastshard.CannotRunError, match="mine"),
        fastshard.Writer(tmp_path / "out", overwrite=True),
    ):
        raise AssertionError("the block must not run")
    assert (tmp_path / "out/mine").read_text() == "mine"


def test_nothing_written_is_no_checkpoint(tmp_path: Path) -> None:
    """An empty block publishes a result without tensors or refuses; it must not crash later."""
    try:
        with fastshard.Writer(tmp_path / "out"):
            pass
    except fastshard.FastshardError:
        assert not (tmp_path / "out").exists()
        return
    assert cli("verify", tmp_path / "out").code in (0, 2)


def test_use_after_the_end_is_refused(tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["a"] = np.zeros(3)
    with pytest.raises(fastshard.FastshardError):
        writer["b"] = np.zeros(3)
    assert set(read_result(tmp_path / "out")) == {"a"}


def test_what_cannot_be_removed_does_not_hide_why_it_should_be(tmp_path: Path) -> None:
    """The storage fails at the end, and fails again when what was written is to be removed."""

    class Failing:
        """A core whose calls fail as they do where every system call gives EIO."""

        def _fail(self, what: str) -> None:
            raise _core.CoreError([fastshard.Finding("FS507", "error", f"cannot {what}", file="data")])

        def add(self, *arguments: object) -> None:
            pass

        def finish(self, *arguments: object) -> None:
            self._fail("write")

        def abort(self) -> None:
            self._fail("remove")

    writer = fastshard.Writer(tmp_path / "out")
    with pytest.raises(fastshard.FastshardError) as raised, writer:
        writer._core.abort()
        writer._core = Failing()  # type: ignore[assignment]
        writer["a"] = np.zeros(3)
    assert [f.message for f in raised.value.findings] == ["cannot write", "cannot remove"]
    mine = KeyError("mine")
    with pytest.raises(KeyError) as user, fastshard.Writer(tmp_path / "out") as writer:
        writer._core.abort()
        writer._core = Failing()  # type: ignore[assignment]
        raise mine
    assert user.value is mine and [f.message for f in mine.findings] == ["cannot remove"]  # type: ignore[attr-defined]


def test_a_disk_without_room_for_what_is_expected_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.Writer(tmp_path / "out", expected={"w": ("F32", (1 << 40, 1 << 10)), "any": None})
    assert caught.value.code == "FS503" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_no_numbers_are_refused_unless_accepted(
    dtype: str, bad: float, tmp_path: Path
) -> None:
    values = np.ones((4, 300), dtype=dtype)
    values[2, 7] = bad
    with pytest.raises(fastshard.FastshardError) as caught, fastshard.Writer(tmp_path / "out") as writer:
        writer["a.weight"], writer["b.weight"] = np.ones((2, 2), np.float32), values
    assert [(f.code, f.tensor, f.got) for f in caught.value.findings] == [("FS306", "b.weight", "1")]
    assert list(tmp_path.iterdir()) == []
    with fastshard.Writer(tmp_path / "out", accept=["non-finite"]) as writer:
        writer["b.weight"] = values
    assert writer.manifest is not None
    assert [(f.code, f.severity) for f in writer.manifest.findings] == [("FS306", "warning")]
    document = json.loads((tmp_path / "out/fastshard.manifest.json").read_text())
    assert document["values"] == {"accept": ["non-finite"]}
    with pytest.raises(fastshard.FastshardError) as caught:
        fastshard.Writer(tmp_path / "other", accept=["copies"])
    assert caught.value.code == "FS515" and not (tmp_path / "other").exists()


def test_infinite_values_of_a_mask_are_no_error(tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["h.0.attn.masked_bias"] = np.full((1,), -np.inf, np.float32)
        writer["h.0.attn.weight"] = np.ones((2, 2), np.float32)
    assert writer.manifest is not None
    assert [(f.code, f.severity) for f in writer.manifest.findings] == [("FS306", "note")]


def test_matrices_of_zeros_warn_where_those_of_other_layers_are_not(tmp_path: Path) -> None:
    with fastshard.Writer(tmp_path / "out") as writer:
        for layer in range(3):
            writer[f"layers.{layer}.proj.weight"] = np.full((8, 8), float(layer != 1), np.float32)
            writer[f"layers.{layer}.proj.bias"] = np.zeros(8, np.float32)
            writer[f"layers.{layer}.ids"] = np.zeros((8, 8), np.int64)
    assert writer.manifest is not None
    found = [(f.code, f.severity, f.tensor) for f in writer.manifest.findings]
    assert found == [("FS313", "warning", "layers.1.proj.weight")]


def test_an_expected_checkpoint_gives_its_companion_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for file in HF.iterdir():
        if file.is_file():
            (tmp_path / "in" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "in/generation_config.json").write_text('{"eos_token_id": 1}')
    source = fastshard.open(tmp_path / "in")
    with fastshard.Writer(tmp_path / "out", expected=source) as writer:
        for name, tensor in source.items():
            writer[name] = tensor
    merged = fastshard.merge(tmp_path / "in", tmp_path / "merged", memory="2GiB")
    assert merged is not None
    names = {p.name for p in (tmp_path / "merged").iterdir() if p.suffix != ".safetensors"}
    assert {"config.json", "generation_config.json"} <= names
    for name in names - {"fastshard.manifest.json", "model.safetensors.index.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes(), name
    assert fastshard.verify(tmp_path / "out", memory="2GiB").ok
    # A config of one's own takes the place of that.
    own = {**json.loads((tmp_path / "in/config.json").read_text()), "mine": 1}
    with fastshard.Writer(tmp_path / "own", expected=source, config=own) as writer:
        for name, tensor in source.items():
            writer[name] = tensor
    assert json.loads((tmp_path / "own/config.json").read_text()) == own
    assert (tmp_path / "own/generation_config.json").exists()


def test_a_resized_tensor_needs_a_config_of_its_size(tmp_path: Path) -> None:
    source = fastshard.open(HF)
    table = max(source, key=lambda name: source[name].shape[0])
    wide = np.concatenate([source[table].numpy()] * 2)
    with (
        pytest.raises(fastshard.FastshardError) as caught,
        fastshard.Writer(tmp_path / "out", expected=source) as w,
    ):
        w[table] = wide
    (found,) = caught.value.findings
    assert (found.code, found.tensor) == ("FS201", table) and "config" in (found.help or "")
    assert list(tmp_path.iterdir()) == []


def test_a_block_of_zeros_warns_as_it_does_in_a_conversion(tmp_path: Path) -> None:
    """Rows of a shard that was never gathered; the last rows of a vocabulary are padding."""
    rng = np.random.default_rng(7)
    torn, table = (rng.standard_normal((rows, 32), dtype=np.float32) for rows in (64, 100))
    torn[16:32], table[97:] = 0, 0
    with fastshard.Writer(tmp_path / "out") as writer:
        writer["model.layers.0.mlp.up_proj.weight"] = torn
        writer["model.layers.1.mlp.up_proj.weight"] = rng.standard_normal((64, 32), dtype=np.float32)
        writer["model.embed_tokens.weight"] = table
    assert writer.manifest is not None
    found = [(f.code, f.severity, f.tensor, f.got) for f in writer.manifest.findings]
    verified = cli("verify", tmp_path / "out").having("FS313")
    assert found == [("FS313", "warning", verified[0]["tensor"], verified[0]["got"])] and len(verified) == 1
    assert found[0][3] == "zeros in rows 16-31"
