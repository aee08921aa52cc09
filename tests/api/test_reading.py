"""Opening a checkpoint from Python: a mapping of whole tensors, lazily merged."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import fastshard
import ml_dtypes
import numpy as np
import pytest
import torch
from fastshard.common.near_words import nearest
from helpers import (
    FIXTURES,
    HF,
    NEOX,
    STEP,
    TP4,
    assert_refused,
    cli,
    copy,
    edit_pt,
    layer_file,
    load_file,
    read_result,
)
from neox_forward import read_shards
from neox_maker import merge as merge_plainly
from safetensors.torch import save_file
from tiny_models import model

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def truth() -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(HF.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_checkpoint_is_a_mapping(truth: dict[str, torch.Tensor]) -> None:
    ckpt = fastshard.open(HF)
    assert isinstance(ckpt, Mapping)
    assert set(ckpt) == set(ckpt.keys()) == set(truth)
    assert len(ckpt) == len(truth) and NORM in ckpt and "nothing" not in ckpt
    with pytest.raises(KeyError):
        ckpt["nothing"]
    for name, tensor in ckpt.items():
        assert tensor.shape == tuple(truth[name].shape)
        assert (tensor.dtype, tensor.ndim, tensor.nbytes) == (
            "BF16",
            truth[name].ndim,
            2 * truth[name].numel(),
        )


def test_values_equal_those_of_the_library(truth: dict[str, torch.Tensor]) -> None:
    ckpt = fastshard.open(str(HF))
    for name, want in truth.items():
        assert torch.equal(ckpt[name].torch(), want)
        array = ckpt[name].numpy()
        assert array.dtype == ml_dtypes.bfloat16 and array.shape == tuple(want.shape)
        assert np.array_equal(array.astype(np.float32), want.float().numpy())


def test_whole_tensors_of_sharded_checkpoints() -> None:
    shards, _ = read_shards(NEOX)
    want = merge_plainly(shards, residual=True)
    ckpt = fastshard.open(NEOX)
    assert set(ckpt) == set(want)
    for name, tensor in want.items():
        assert torch.equal(ckpt[name].torch(), tensor.to(torch.bfloat16)), name
        assert torch.equal(
            torch.from_numpy(ckpt[name][1:9].astype(np.float32)), tensor.to(torch.bfloat16)[1:9].float()
        )


def test_contiguous_bytes_are_not_copied_and_cannot_be_written() -> None:
    array = fastshard.open(HF)[NORM].numpy()
    assert not array.flags.writeable and not array.flags.owndata
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj, mmap.mmap)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_gathered_values_belong_to_the_caller() -> None:
    tensor = fastshard.open(TP4)["model.layers.0.mlp.down_proj.weight"]
    assert len(tensor.pieces) == 4
    assert [rank for rank, _, _ in tensor.pieces] == [f"tp {i}" for i in range(4)]
    array = tensor.numpy()
    assert array.flags.writeable
    array[:] = 0
    assert tensor.numpy().any()


def test_writing_to_a_torch_tensor_changes_no_file() -> None:
    before = {p: p.read_bytes() for p in HF.glob("*.safetensors")}
    # In a process of its own: a write to a read-only map ends it.
    script = f"""
import fastshard, torch
t = fastshard.open({str(HF)!r})[{NORM!r}]
a, b = t.torch(), t.torch()
a.zero_()
assert not a.any() and b.any() and t.torch().any()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert {p: p.read_bytes() for p in HF.glob("*.safetensors")} == before


@pytest.mark.parametrize(
    "key",
    [
        slice(0, 10),
        slice(5, None),
        slice(-3, None),
        slice(7, 3),
        slice(None, None, 2),
        4,
        -1,
        (slice(2, 5), slice(1, 3)),
        (0, 1),
        Ellipsis,
        slice(0, 10**9),
    ],
)
@pytest.mark.parametrize(
    "name, root", [("model.embed_tokens.weight", HF), ("model.layers.0.mlp.down_proj.weight", TP4)]
)
def test_slices_are_those_of_numpy(name: str, root: Path, key: object) -> None:
    tensor = fastshard.open(root)[name]
    have, want = tensor[key], tensor.numpy()[key]
    assert have.shape == want.shape
    assert have.tobytes() == want.tobytes()


def test_scalars_empty_tensors_and_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "empty_bf16": torch.zeros(3, 0, dtype=torch.bfloat16),
        "odd": torch.tensor([True, False, True]),
        "i8": torch.arange(-3, 4, dtype=torch.int8),
        "i16": torch.arange(5, dtype=torch.int16),
        "i64": torch.tensor([[2**62, -1]]),
        "f16": torch.randn(3).half(),
        "f64": torch.randn(2, 2).double(),
        "u8": torch.arange(3, dtype=torch.uint8),
        "e4m3": torch.randn(5).to(torch.float8_e4m3fn),
        "e5m2": torch.randn(5).to(torch.float8_e5m2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt = fastshard.open(tmp_path / "model.safetensors")
    for name, want in tensors.items():
        have = ckpt[name].torch()
        assert (have.dtype, have.shape) == (want.dtype, want.shape), name
        assert torch.equal(have.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name
        array = ckpt[name].numpy()
        assert array.shape == tuple(want.shape)
        assert array.tobytes() == want.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert np.asarray(ckpt[name]).tobytes() == array.tobytes()
    assert ckpt["empty"][0:0].shape == (0, 4)
    assert ckpt["scalar"].numpy()[()] == 3.5
    fastshard.merge(tmp_path / "model.safetensors", tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in merged.items()} == {
        k: (v.dtype, v.shape) for k, v in tensors.items()
    }


def test_habits_of_safe_open_carry_over() -> None:
    with fastshard.open(HF) as ckpt:
        assert NORM in ckpt.keys()  # noqa: SIM118 - the habit itself
        assert np.array_equal(ckpt.get_tensor(NORM), ckpt[NORM].numpy())
        part = ckpt.get_slice("model.embed_tokens.weight")
        assert part.get_shape() == [1000, 64] and part.get_dtype() == "BF16"
        assert part[2:4].shape == (2, 64)
        metadata = ckpt.metadata
        assert isinstance(metadata() if callable(metadata) else metadata, Mapping)


def test_what_a_checkpoint_says_of_itself() -> None:
    ckpt = fastshard.open(NEOX)
    assert (ckpt.framework, ckpt.family, ckpt.step, ckpt.topology) == (
        "GPT-NeoX",
        "gpt_neox",
        STEP,
        {"tp": 2},
    )
    assert "GPT-NeoX" in repr(ckpt) and "40 tensors" in repr(ckpt)
    html = ckpt._repr_html_()
    assert "0.word_embeddings.weight" in html and "<table" in html
    assert ckpt.findings == []
    assert "BF16" in repr(ckpt["0.word_embeddings.weight"])


def test_html_escapes_names(tmp_path: Path) -> None:
    save_file({"<script>alert(1)</script>": torch.zeros(2)}, tmp_path / "model.safetensors")
    html = fastshard.open(tmp_path)._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_damage_comes_as_findings_and_reading_raises(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    opened = fastshard.open(ckpt)
    assert [f.code for f in opened.findings if f.severity == "error"] == ["FS101"]
    assert opened["2.mlp.linear1.weight"].numpy().shape == (128, 32)
    # What is not whole keeps its name, and is never read or passed over in silence.
    good = fastshard.open(NEOX)
    assert set(opened) == set(good) and len(opened) == len(good) and "3.mlp.linear1.weight" in opened
    lost = {name for name in good if name.startswith("3.") and good[name].shape != ()}
    assert set(opened.incomplete) < lost and opened.incomplete == sorted(opened.incomplete)
    assert repr(opened).endswith(", INCOMPLETE: 1 error>") and "COMPLETE" not in repr(good)
    for read in (
        lambda: opened["3.mlp.linear1.weight"],
        lambda: opened.get_tensor("3.mlp.linear1.weight"),
        lambda: opened.get_slice("3.mlp.linear1.weight"),
        lambda: opened.torch()["3.mlp.linear1.weight"],
        lambda: list(opened.items()),
        lambda: dict(opened.torch()),
    ):
        with pytest.raises(fastshard.IncompleteError) as caught:
            read()
        assert caught.value.tensor in opened.incomplete and "FS101" in str(caught.value)
    for name in set(opened) - set(opened.incomplete):
        assert np.array_equal(opened[name].numpy(), good[name].numpy()), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sum_without_the_term_of_one_rank_is_no_tensor(rank: int, tmp_path: Path) -> None:
    """Biases of row-parallel layers are sums over the ranks: what one rank holds is another bias."""
    ckpt = copy(NEOX, tmp_path / "ckpt")
    for file in (ckpt / STEP).glob(f"layer_*-model_{rank:02}-model_states.pt"):
        file.unlink()
    opened, good = fastshard.open(ckpt), fastshard.open(NEOX)
    whole = [name for name in opened if name not in opened.incomplete]
    summed = [n for n in good if n.endswith(("attention.dense.bias", "mlp.linear2.bias"))]
    assert len(summed) == 6 and set(summed) <= set(opened.incomplete)
    assert len(whole) == 14 and sum(opened[name].numpy().size for name in whole) == 448
    for name in whole:
        assert np.array_equal(opened[name].numpy(), good[name].numpy()), name


def broken(kind: str, tmp_path: Path) -> Path:
    """A checkpoint that lost a file, by its kind."""
    source, lost = {
        "neox": (NEOX, f"{STEP}/{layer_file(4, 0)}"),
        "dcp": (FIXTURES / "sharded/dcp_tp_micro", "__1_0.distcp"),
        "hf": (FIXTURES / "sharded/hf_sharded", "model-00002-of-00004.safetensors"),
        "tp": (FIXTURES / "sharded/tp4_micro", "tp_rank_02.safetensors"),
        "megatron": (
            FIXTURES / "sharded/megatron_legacy_tp2_pp2",
            "iter_0000010/mp_rank_01_001/model_optim_rng.pt",
        ),
    }[kind]
    folder = copy(source, tmp_path / "ckpt")
    (folder / lost).unlink()
    return folder


@pytest.mark.parametrize("kind", ["neox", "dcp", "hf", "tp", "megatron"])
def test_a_writer_does_not_take_a_broken_checkpoint_for_what_is_expected(kind: str, tmp_path: Path) -> None:
    opened = fastshard.open(broken(kind, tmp_path))
    assert opened.incomplete and "INCOMPLETE" in repr(opened)
    for expected in (opened, opened.torch()):
        with pytest.raises(fastshard.IncompleteError), fastshard.Writer(tmp_path / "out", expected=expected):
            raise AssertionError("the block runs")
        assert not (tmp_path / "out").exists()
    # The script that the README shows never comes to its end either.
    with pytest.raises(fastshard.IncompleteError), fastshard.Writer(tmp_path / "out") as writer:
        for name, tensor in opened.items():
            writer[name] = tensor.numpy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt"]


def test_replicas_that_differ_are_not_read_silently(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    edit_pt(ckpt / STEP / layer_file(3, 1), lambda layer: layer["input_layernorm.weight"].add_(1))
    with pytest.raises(fastshard.FastshardError):
        fastshard.open(ckpt)["3.input_layernorm.weight"].numpy()


@pytest.mark.parametrize("call", ["open", "inspect", "verify", "convert"])
def test_nothing_imports_a_framework(call: str, tmp_path: Path) -> None:
    action = {
        "open": f"fastshard.open({str(NEOX)!r})['0.word_embeddings.weight'].shape",
        "inspect": f"cli.main(['inspect', {str(NEOX)!r}])",
        "verify": f"cli.main(['verify', {str(NEOX)!r}])",
        "convert": f"cli.main(['convert', {str(NEOX)!r}, {str(tmp_path / 'out')!r}, '--to', 'hf'])",
    }[call]
    script = f"""
import sys, fastshard
from fastshard import cli
{action}
others = ("torch", "jax", "tensorstore", "transformers", "safetensors", "ml_dtypes")
loaded = [m for m in others if m in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_models_side_by_side_are_chosen_by_name(tmp_path: Path) -> None:
    for step in (100, 1100):
        copy(HF, tmp_path / f"run/model-{step}")
    assert_refused(tmp_path / "run", tmp_path / "out", "FS106", exit=2, got="model-100, model-1100")
    assert_refused(tmp_path / "run", tmp_path / "out", "FS501", exit=2, options=("--step", "10"))
    for step in ("100", "model-1100"):
        ran = cli("merge", tmp_path / "run", tmp_path / step, "--step", step)
        assert ran.code == 0, ran.out


def test_a_file_in_two_directories_is_ambiguous(tmp_path: Path) -> None:
    roots = [copy(HF, tmp_path / name) for name in ("one", "two")]
    assert_refused(roots, tmp_path / "out", "FS106", exit=2, got="one")


def test_a_tied_head_that_is_stored_too_is_compared(tmp_path: Path) -> None:
    made = model("llama_tied", tmp_path / "tied")
    root = tmp_path / "ckpt"
    root.mkdir()
    (root / "config.json").write_bytes((tmp_path / "tied/config.json").read_bytes())
    torch.save(made.state_dict(), root / "pytorch_model.bin")
    assert "lm_head.weight" in made.state_dict()
    ran = cli("convert", root, tmp_path / "out", "--to", "hf")
    assert ran.code == 0, ran.out
    have, want = read_result(tmp_path / "out"), read_result(tmp_path / "tied")
    assert set(have) == set(want)
    assert all(torch.equal(have[name], tensor) for name, tensor in want.items())
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    state["lm_head.weight"][1, 2] += 1
    torch.save(state, root / "pytorch_model.bin")
    command = ("convert", "--to", "hf")
    assert_refused(root, tmp_path / "differs", "FS311", command=command, tensor="lm_head.weight")


def test_numbers_beyond_any_model_are_refused(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    layout = json.loads((root / "layout.json").read_text())
    (root / "layout.json").write_text(json.dumps(layout | {"tp": 10**12}))
    assert_refused(root, tmp_path / "out", "FS211", exit=2, got="1000000000000")
    assert_refused(HF, tmp_path / "out", "FS211", exit=2, options=("--vocab-size", str(10**30)))


def test_two_sizes_of_the_vocabulary_are_a_finding(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    layout = json.loads((root / "layout.json").read_text())
    (root / "layout.json").write_text(json.dumps(layout | {"vocab_size": 240}))
    assert_refused(root, tmp_path / "out", "FS215", file="layout.json", expected="250", got="240")


def test_padding_that_is_taken_for_words_is_said(tmp_path: Path) -> None:
    ran = cli("convert", FIXTURES / "sharded/megatron_legacy_tp2_pp2", tmp_path / "out", "--to", "hf")
    assert ran.code == 0
    assert ran.having("FS109", message="all 1024 rows are kept")
    assert "all 1024 rows are kept" in ran.not_checked


def test_sets_of_shards_beside_each_other_are_ambiguous(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002", "head-00001-of-00001"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    assert_refused(tmp_path, tmp_path.parent / "out_of_shards", "FS106", exit=2, got="head-*-of-00001")


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_begins_like_a_pickle(length: int, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    content = length.to_bytes(8, "little") + header.ljust(length) + np.array([1, 2], np.float32).tobytes()
    assert content[0] == 0x80
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fastshard.open(tmp_path)["a"].numpy().tolist() == [1, 2]
    (tmp_path / "old").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "old/pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert fastshard.open(tmp_path / "old").findings[0].code == "FS514"


def test_a_misspelt_name_of_an_incomplete_tensor_leads_to_it(tmp_path: Path) -> None:
    run = copy(NEOX, tmp_path / "run")
    (run / STEP / "layer_02-model_01-model_states.pt").unlink()
    with pytest.raises(KeyError, match=r"did you mean 2\.attention\.dense\.weight\?"):
        fastshard.open(run)["2.attention.dense.weigth"]


def test_a_name_without_its_module_leads_to_the_same_parameter() -> None:
    known = ["decoder.layers.mlp.linear_fc2.weight", "decoder.layers.self_attention.linear_qkv.weight"]
    assert nearest("decoder.layers.0.linear_qkv.weight", known) == known[1]
