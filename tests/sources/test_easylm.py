"""Streams of EasyLM: LLaMA to Hugging Face, damaged ones, and what stays refused."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from easylm_maker import (
    Raw,
    as_easylm,
    as_train_state,
    below,
    pack_array,
    pack_bytes,
    pack_list,
    pack_map,
    pack_number,
    pack_record,
    pack_text,
    to_bytes,
    write_stream,
)
from fastshard.sources.easylm import adapter
from helpers import cli, read_result
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

# Six heads of three groups, and sizes that differ: an exchange of axes shows.
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
}
WQ = ("transformer", "h", "1", "attention", "wq", "kernel")


def made(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A model with random values in all tensors."""
    torch.manual_seed(7)
    config = LlamaConfig(**(SIZES | sizes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The frequencies of the rotary embedding are no parameters, and stay as they are.
            parameter.data = torch.randn_like(parameter).to(dtype)
    return model


def config_of(model: Any, folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return config_of(made(), tmp_path / "config")


def assert_same_model(out: Path, model: Any) -> None:
    """Bit-equal tensors, and the same logits of transformers."""
    tensors, expected = read_result(out), model.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    loaded = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype=model.dtype).eval()
    ids = torch.arange(12)[None] * 7 % 50
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


FORMS = {
    "streaming_train_state_80": as_train_state,
    "streaming_params": lambda arrays: below(("params",), arrays),
    "streaming_params_80": dict,
    "open_llama_7b_easylm": lambda arrays: below(("params",), arrays),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_a_llama_to_hugging_face(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Of a train state the parameters are taken, never the moments beside them."""
    model = made(dtype)
    stream = write_stream(tmp_path / "run" / name, FORMS[name](as_easylm(model)).items())
    config = config_of(model, tmp_path / "config")
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", model)


def test_heads_without_groups(tmp_path: Path) -> None:
    """As the first LLaMA has them, and all that the released streams hold."""
    model = made(num_key_value_heads=6)
    stream = write_stream(tmp_path / "streaming_params", below(("params",), as_easylm(model)).items())
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", config_of(model, tmp_path / "c"))
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", model)


@pytest.mark.parametrize("most", [128, 1000])
def test_arrays_that_flax_divides(
    tmp_path: Path, config: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts end within rows, and within what is read at once."""
    monkeypatch.setattr(adapter, "_BLOCK", 500)
    stream = write_stream(tmp_path / "streaming_params", as_easylm(made()).items(), most=most)
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())


def test_what_a_stream_says(tmp_path: Path, config: Path) -> None:
    """A folder as the trainer leaves it, with its pickles beside the stream."""
    arrays = as_train_state(as_easylm(made()))
    write_stream(tmp_path / "run/streaming_train_state_80", arrays.items())
    for name in ("metadata_80.pkl", "metadata.pkl", "dataset.pkl"):
        (tmp_path / "run" / name).write_bytes(b"\x80\x04}.")
    ran = cli("inspect", tmp_path / "run", "--config", config)
    assert ran.code == 0 and ran.doc["framework"] == "EasyLM" and ran.doc["step"] == "80"
    size = (tmp_path / "run/streaming_train_state_80").stat().st_size
    assert (ran.doc["files"], ran.doc["file_bytes"]) == (1, size)
    assert cli("ls", tmp_path / "run").code == 0
    assert cli("verify", tmp_path / "run", "--config", config).code == 0
    assert cli("verify", tmp_path / "run").code == 0
    assert cli("merge", tmp_path / "run", tmp_path / "out").code == 0
    merged = read_result(tmp_path / "out")
    assert merged.keys() == {".".join(keys) for keys in arrays}
    assert all(torch.equal(merged[".".join(keys)], tensor) for keys, tensor in arrays.items())


def test_a_value_that_is_no_array_is_passed_over(tmp_path: Path, config: Path) -> None:
    """A step as a number of Python, and an empty node of the tree."""
    arrays = [*below(("params", "params"), as_easylm(made())).items()]
    marks = [(("step",), Raw(b"\x50")), (("opt_state",), Raw(b"\x80")), (("done",), Raw(b"\xc2"))]
    stream = write_stream(tmp_path / "streaming_train_state", [*marks, *arrays])
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())


def test_the_newest_of_several_is_taken(tmp_path: Path, config: Path) -> None:
    arrays = as_easylm(made())
    for step in (9, 80):
        scaled = {keys: tensor * (1 if step == 80 else 2) for keys, tensor in arrays.items()}
        write_stream(tmp_path / f"run/streaming_params_{step}", scaled.items())
    ran = cli("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0 and ran.having("FS112"), ran.out
    assert_same_model(tmp_path / "out", made())
    assert cli("inspect", tmp_path / "run", "--step", "9").doc["step"] == "9"
    assert [f["code"] for f in cli("inspect", tmp_path / "run", "--step", "7").errors] == ["FS501"]
    # Which step the one without a number is of, a pickle says.
    write_stream(tmp_path / "run/streaming_params", arrays.items())
    ran = cli("verify", tmp_path / "run")
    assert [f["code"] for f in ran.errors] == ["FS106"] and "streaming_params" in ran.errors[0]["got"]
    assert cli("inspect", tmp_path / "run", "--step", "streaming_params").code == 0


def test_the_steps_of_a_run_are_named_one_by_one(tmp_path: Path) -> None:
    """A milestone may be saved with its optimizer and without: neither stands for the other."""
    names = [f"streaming_{what}_{step}" for step in (900, 1000) for what in ("params", "train_state")]
    for name in names:
        write_stream(tmp_path / "run" / name, as_easylm(made()).items())
    ran = cli("steps", tmp_path / "run")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS514"]
    assert ran.errors[0]["got"] == ", ".join(names)
    assert ran.errors[0]["run"] == [f"fastshard verify {tmp_path / 'run' / name}" for name in names]
    for argv in (("inspect",), ("verify",), ("inspect", "--step", "1000")):
        ran = cli(argv[0], tmp_path / "run", *argv[1:])
        assert ran.code == 2 and [f["code"] for f in ran.errors] == ["FS106"]
        assert all(name in str(ran.errors[0]["run"]) for name in names[2:])
    assert cli("verify", tmp_path / "run", "--step", names[0]).code == 0


@pytest.mark.parametrize(
    "name", ["open_llama", "koala 7b", "streaming_params.bak", "llama.easylm", "a.msgpack"]
)
def test_a_stream_that_was_renamed(tmp_path: Path, config: Path, name: str) -> None:
    stream = write_stream(tmp_path / name, as_easylm(made()).items())
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", config)
    assert ran.code == 0, ran.errors
    assert_same_model(tmp_path / "out", made())
    # Named as a file of another format, it is none.
    stream.rename(tmp_path / "model.safetensors")
    assert [f["code"] for f in cli("verify", tmp_path / "model.safetensors").errors] == ["FS601"]


@pytest.mark.parametrize("content", [None, b"", b"junk"])
def test_a_stream_beside_weights_of_hugging_face_is_none_of_them(
    content: bytes | None, tmp_path: Path
) -> None:
    """The model in the folder is what it was without the stream, which may be another's or a log's."""
    model = made()
    model.save_pretrained(tmp_path / "hf")
    stream = tmp_path / "hf/logs/streaming_params"
    other = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    write_stream(stream, as_easylm(other).items())
    if content is not None:
        stream.write_bytes(content)
    assert cli("convert", tmp_path / "hf", tmp_path / "out", "--to", "hf").code == 0
    assert_same_model(tmp_path / "out", model)


def refuse(stream: Path, config: Path, out: Path, code: str) -> dict[str, Any]:
    """One error of a conversion, soon, and nothing is left behind."""
    began = time.monotonic()
    ran = cli("convert", stream, out, "--to", "hf", "--config", config)
    assert [f["code"] for f in ran.errors] == [code], ran.out
    assert ran.code not in (0, 4) and time.monotonic() - began < 20 and not out.exists()
    error: dict[str, Any] = ran.errors[0]
    return error


@pytest.mark.parametrize("place", [1, 3, 40, 0.2, 0.5, 0.9, -1])
def test_a_stream_that_was_cut(tmp_path: Path, config: Path, place: float) -> None:
    stream = write_stream(tmp_path / "streaming_params", as_easylm(made()).items())
    whole = stream.read_bytes()
    stream.write_bytes(whole[: place if isinstance(place, int) else int(len(whole) * place)])
    error = refuse(stream, config, tmp_path / "out", "FS312")
    assert error["file"] == "streaming_params"
    assert [f["code"] for f in cli("verify", stream).errors] == ["FS312"]


@pytest.mark.parametrize("keys", [WQ, ("lm_head", "kernel"), ("transformer", "wte", "embedding")])
def test_a_tensor_that_is_missing(tmp_path: Path, config: Path, keys: tuple[str, ...]) -> None:
    """As of a stream that was cut between two records."""
    arrays = as_easylm(made())
    del arrays[keys]
    stream = write_stream(tmp_path / "streaming_params", arrays.items())
    assert refuse(stream, config, tmp_path / "out", "FS102")["tensor"] == ".".join(keys)


def test_a_name_that_occurs_twice(tmp_path: Path, config: Path) -> None:
    arrays = as_easylm(made())
    stream = write_stream(tmp_path / "streaming_params", [*arrays.items(), (WQ, arrays[WQ])])
    assert refuse(stream, config, tmp_path / "out", "FS206")["tensor"] == ".".join(WQ)


def test_keys_that_hold_dots(tmp_path: Path, config: Path) -> None:
    """Names join the keys by dots: one of the model is read, two that become the same are refused."""
    arrays = as_easylm(made())
    dotted = (".".join(WQ[:-1]), WQ[-1])
    stream = write_stream(tmp_path / "streaming_params", [*arrays.items(), (dotted, arrays[WQ] * 2)])
    error = refuse(stream, config, tmp_path / "out", "FS206")
    assert error["tensor"] == ".".join(WQ) and error["got"] == f"{'/'.join(WQ)} and {'/'.join(dotted)}"
    arrays[dotted] = arrays.pop(WQ)
    write_stream(stream, arrays.items())
    assert cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", config).code == 0
    assert_same_model(tmp_path / "out", made())


def test_a_shape_that_is_another(tmp_path: Path, config: Path) -> None:
    arrays = as_easylm(made())
    arrays[WQ] = arrays[WQ][:, :-2].contiguous()
    stream = write_stream(tmp_path / "streaming_params", arrays.items())
    assert refuse(stream, config, tmp_path / "out", "FS201")["tensor"] == ".".join(WQ)


FLOATS = bytes(24 * 24 * 4)
WRONG = {
    "shape that the bytes do not fill": (pack_array((24, 25), "float32", FLOATS), "FS601"),
    "no such type": (pack_array((24, 24), "float33", FLOATS), "FS514"),
    "object": (pack_array((24, 24), "object", FLOATS), "FS514"),
    "type that is no text": (
        pack_array((24, 24), "float32", FLOATS).replace(b"float32", b"\xff" * 7),
        "FS601",
    ),
    "extent of 2**63": (pack_array((1 << 63, 24), "float32", FLOATS), "FS601"),
    "32 extents of 2**63": (pack_array([1 << 63] * 32, "float32", FLOATS), "FS601"),
    "too many dimensions": (pack_array([1] * 33, "float32", FLOATS), "FS601"),
    "a list of 2**32": (b"\xc9\x00\x00\x00\x06\x01\xdd\xff\xff\xff\xff\x00", "FS601"),
    "bytes beyond the record": (b"\xc9\xff\xff\xff\xff\x01\x93", "FS601"),
    "another object": (pack_array((24, 24), "float32", FLOATS, kind=2), "FS601"),
    "nesting": (b"\x91" * 100_000, "FS601"),
    "nested maps": (b"\x81\xa6chunks" * 10_000, "FS601"),
    "a tree": (pack_map({"a": pack_number(1)}), "FS601"),
    "rest": (to_bytes(torch.zeros(24, 24)) + b"\0", "FS601"),
    "nothing": (b"", "FS601"),
    "text": (pack_text("a" * 9), "FS601"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_value_that_is_damaged(tmp_path: Path, config: Path, what: str) -> None:
    content, code = WRONG[what]
    arrays: dict[tuple[str, ...], Any] = {**as_easylm(made()), WQ: Raw(content)}
    stream = write_stream(tmp_path / "streaming_params", arrays.items())
    error = refuse(stream, config, tmp_path / "out", code)
    assert error["tensor"] == ".".join(WQ) and error["help"]


PART = to_bytes(torch.zeros(288))
PARTS = {
    "shape": pack_map({"0": pack_number(24), "1": pack_number(24)}),
    "chunks": pack_map({"0": PART, "1": PART}),
}
MARK = {"__msgpack_chunked_array__": b"\xc3"}


@pytest.mark.parametrize(
    "tree",
    [
        PARTS,
        MARK | {"shape": PARTS["shape"]},
        MARK | PARTS | {"chunks": pack_map({"0": PART})},
        MARK | PARTS | {"chunks": pack_map({"1": PART, "0": PART})},
        MARK | PARTS | {"chunks": pack_map({"0": PART, "1": to_bytes(torch.zeros(288).half())})},
        MARK | PARTS | {"chunks": pack_map({"0": PART, "1": to_bytes(torch.zeros(12, 24))})},
        MARK | PARTS | {"shape": pack_map({"0": pack_number(1 << 63), "1": pack_number(24)})},
        MARK | PARTS | {"chunks": b"\xdf\xff\xff\xff\xff"},
        MARK | {"shape": PARTS["shape"], "chunks": b"\x80"},
    ],
)
def test_divided_arrays_that_are_damaged(tmp_path: Path, config: Path, tree: dict[str, bytes]) -> None:
    arrays: dict[tuple[str, ...], Any] = {**as_easylm(made()), WQ: Raw(pack_map(tree))}
    stream = write_stream(tmp_path / "streaming_params", arrays.items())
    assert refuse(stream, config, tmp_path / "out", "FS601")["tensor"] == ".".join(WQ)


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (b"\0" * 4096, "FS601"),
        (b"trailing garbage", "FS601"),
        (b"\x93", "FS601"),
        (b"\x92", "FS312"),
        (b"\x92\xdd\xff\xff\xff\xff", "FS601"),
        (b"\x92\x91\xdb\xff\xff\xff\xff", "FS601"),
        (b"\x92\x91\xa1a\xc6\xff\xff\xff\xff", "FS312"),
        (b"\x92\x91\xa1a\xc1", "FS601"),
        (b"\x92" * 100_000, "FS601"),
        (pack_list([pack_list([]), pack_bytes(PART)]), "FS601"),
        (pack_list([pack_list([pack_text("")]), pack_bytes(PART)]), "FS601"),
        (pack_list([pack_list([pack_text("a" * 600)]), pack_bytes(PART)]), "FS601"),
        (pack_list([pack_list([pack_number(1)]), pack_bytes(PART)]), "FS601"),
    ],
)
def test_what_follows_the_last_record(tmp_path: Path, config: Path, record: bytes, code: str) -> None:
    stream = write_stream(tmp_path / "streaming_params", as_easylm(made()).items())
    stream.write_bytes(stream.read_bytes() + record)
    refuse(stream, config, tmp_path / "out", code)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "FS316"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "FS316"),
        (b"\x80\x04}.", "FS601"),
        (pack_record(("step",), Raw(b"\x50")), "FS513"),
    ],
)
def test_no_stream(tmp_path: Path, config: Path, content: bytes, code: str) -> None:
    stream = tmp_path / "streaming_params"
    stream.write_bytes(content)
    refuse(stream, config, tmp_path / "out", code)


def test_headers_take_no_memory_of_what_they_declare(tmp_path: Path, config: Path) -> None:
    """A hole is an array of zeros as far as headers go: nothing of it is read to find it."""
    size = 1 << 30
    head = b"\x92" + pack_list(map(pack_text, ("params", "a")))
    inner = (
        b"\x93"
        + pack_list([pack_number(size // 4)])
        + pack_text("float32")
        + b"\xc6"
        + struct.pack(">I", size)
    )
    ext = b"\xc9" + struct.pack(">I", len(inner) + size) + b"\x01"
    content = head + b"\xc6" + struct.pack(">I", len(ext) + len(inner) + size) + ext + inner
    stream = tmp_path / "streaming_params"
    with stream.open("wb") as file:
        file.write(content)
        file.truncate(len(content) + size)
    ran = cli("ls", stream)
    assert ran.code == 0 and "268435456" in ran.out, ran.out


def test_without_a_config(tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "streaming_params", as_easylm(made()).items())
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf")
    assert [f["code"] for f in ran.errors] == ["FS209"] and "--config" in str(ran.errors[0]["run"])


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (LlamaConfig(**SIZES, tie_word_embeddings=True), "FS215"),
        (LlamaConfig(**SIZES | {"intermediate_size": 44}), "FS201"),
        (GPTNeoXConfig(), "FS514"),
    ],
)
def test_a_config_of_another_model(tmp_path: Path, other: Any, code: str) -> None:
    stream = write_stream(tmp_path / "streaming_params", as_easylm(made()).items())
    other.save_pretrained(tmp_path / "c")
    ran = cli("convert", stream, tmp_path / "out", "--to", "hf", "--config", tmp_path / "c/config.json")
    assert ran.code != 0 and ran.having(code, severity="error"), ran.out
    assert not (tmp_path / "out").exists()


def test_other_models_are_refused_by_name(tmp_path: Path, config: Path) -> None:
    """EasyLM's GPT-J: a merge keeps its names, a conversion says whose tool exports it."""
    arrays = {("params", "transformer", "h", "0", "attn", "q_proj", "kernel"): torch.randn(8, 8)}
    stream = write_stream(tmp_path / "streaming_params", arrays.items())
    assert cli("merge", stream, tmp_path / "merged").code == 0
    error = refuse(stream, config, tmp_path / "out", "FS514")
    assert "EasyLM" in error["message"] and "EasyLM" in error["help"]
