"""The tokenizer decides what are words: a cut below its ids is refused, its special tokens are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fastshard
import pytest
from helpers import NEOX, assert_refused, cli, copy
from tiny_models import model
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast


def vocabulary(size: int) -> dict[str, int]:
    return {"<|endoftext|>": 0, "<pad>": 1, **{f"w{i}": i for i in range(2, size)}}


def bpe(path: Path, size: int) -> Path:
    """tokenizer.json, as the library tokenizers writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.BPE(vocab=vocabulary(size), merges=[])).save(str(path))
    return path


def saved(folder: Path, size: int, **special: str) -> Path:
    """As transformers saves it."""
    made = Tokenizer(models.WordLevel(vocab=vocabulary(size), unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder


def write(kind: str, folder: Path, size: int) -> Path:
    folder.mkdir(parents=True)
    words = list(vocabulary(size))
    if kind == "tokenizer.json":
        bpe(folder / kind, size)
    elif kind == "unigram":
        made = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=1))
        made.save(str(folder / "tokenizer.json"))
    elif kind == "added":
        made = Tokenizer(models.BPE(vocab=vocabulary(size - 3), merges=[]))
        made.add_special_tokens(["<a>", "<b>", "<c>"])
        made.save(str(folder / "tokenizer.json"))
    elif kind == "vocab.json":
        (folder / kind).write_text(json.dumps({w: i for w, i in vocabulary(size).items() if i < size - 1}))
        (folder / "added_tokens.json").write_text(json.dumps({"<last>": size - 1}))
    elif kind == "vocab.txt":
        (folder / kind).write_text("\n".join(words) + "\n")
    else:
        piece = [b"\x0a" + bytes([len(word)]) + word.encode() for word in words]
        (folder / kind).write_bytes(b"".join(b"\x0a" + bytes([len(p)]) + p for p in piece))
    return folder


KINDS = ("tokenizer.json", "unigram", "added", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_below_the_tokenizers_ids_is_refused(kind: str, tmp_path: Path) -> None:
    words = write(kind, tmp_path / "words", 509)
    for command in (["convert", "--to", "hf"], ["merge"], ["convert", "--to", "gpt_neox", "--tp", "2"]):
        cut = [*command, "--tokenizer", words, "--vocab-size"]
        assert_refused(
            NEOX, tmp_path / "out", "FS211", exit=2, command=(*cut, "300"), got="300", expected="509 of 512",
            help="--vocab-size 509",
        )  # fmt: skip
    assert (
        cli("convert", NEOX, tmp_path / "out", "--to", "hf", "--tokenizer", words, "--vocab-size", "509").code
        == 0
    )
    # Rows beyond the words may go, and stay.
    assert (
        cli(
            "convert", NEOX, tmp_path / "more", "--to", "hf", "--tokenizer", words, "--vocab-size", "511"
        ).code
        == 0
    )


def test_a_tokenizer_that_is_found_decides_too(tmp_path: Path) -> None:
    root = copy(NEOX, tmp_path / "run")
    bpe(root / "tokenizer.json", 509)
    assert_refused(
        root,
        tmp_path / "out",
        "FS211",
        exit=2,
        command=("convert", "--to", "hf", "--vocab-size", "300"),
        file="tokenizer.json",
    )
    ran = cli("convert", root, tmp_path / "whole", "--to", "hf")
    assert ran.code == 0
    if unknown := ran.having("FS109", message="the true size of the vocabulary"):
        assert "--vocab-size 509" in unknown[0]["help"]
    # Beside the step, where the step itself is named.
    assert_refused(
        root / "global_step4",
        tmp_path / "out",
        "FS211",
        exit=2,
        command=("convert", "--to", "hf", "--vocab-size", "300"),
    )
    # And for a model of Hugging Face.
    model("llama", tmp_path / "hf")
    bpe(tmp_path / "hf/tokenizer.json", 200)
    assert_refused(
        tmp_path / "hf", tmp_path / "out", "FS211", exit=2, command=("merge", "--vocab-size", "150")
    )


def test_a_larger_tokenizer_warns(tmp_path: Path) -> None:
    model("llama", tmp_path / "hf")
    bpe(tmp_path / "hf/tokenizer.json", 203)
    for command in (["merge"], ["convert", "--to", "hf"]):
        ran = cli(*command, tmp_path / "hf", tmp_path / command[0])
        assert ran.code == 0
        assert ran.having("FS215", severity="warning", expected="199 at most", got="202")
    # A smaller one is padding's business.
    bpe(tmp_path / "hf/tokenizer.json", 190)
    assert not cli("merge", tmp_path / "hf", tmp_path / "smaller").having("FS215")


def test_special_tokens_are_the_tokenizers_where_the_config_is_ours(tmp_path: Path) -> None:
    words = saved(tmp_path / "words", 509, eos_token="w7", bos_token="w8", pad_token="<pad>")
    assert (
        cli("convert", NEOX, tmp_path / "out", "--to", "hf", "--tokenizer", words, "--vocab-size", "509").code
        == 0
    )
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (7, 8, 1)
    # GPT-NeoX's own file names no special tokens: a document ends with this one.
    file = bpe(tmp_path / "20B_tokenizer.json", 509)
    assert (
        cli("convert", NEOX, tmp_path / "own", "--to", "hf", "--tokenizer", file, "--vocab-size", "509").code
        == 0
    )
    assert AutoConfig.from_pretrained(tmp_path / "own").eos_token_id == 0
    assert (tmp_path / "own/tokenizer.json").read_bytes() == file.read_bytes()
    # A config that somebody else wrote stays.
    model("llama", tmp_path / "hf")
    saved(tmp_path / "hf", 200, eos_token="w7")
    fastshard.merge(tmp_path / "hf", tmp_path / "merged")
    assert (tmp_path / "merged/config.json").read_bytes() == (tmp_path / "hf/config.json").read_bytes()
    fastshard.convert(tmp_path / "hf", tmp_path / "converted")
    before, after = (AutoConfig.from_pretrained(tmp_path / f) for f in ("hf", "converted"))
    assert before.eos_token_id == after.eos_token_id != 7


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt.md").write_text("words")
    (tmp_path / "settings.json").write_text('{"a": "b"}')
    for given in ("empty", "notes.txt.md", "settings.json", "nowhere"):
        ran = cli("convert", NEOX, tmp_path / "out", "--to", "hf", "--tokenizer", tmp_path / given)
        assert ran.code == 2 and ran.having("FS501", file=given), given
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content",
    ["{}", "not json", "[]", '{"model": {"vocab": 3}}', "\x00\xff", '{"model": {"vocab": {"a": 1e99}}}'],
)
def test_a_tokenizer_that_cannot_be_read_goes_along(content: str, tmp_path: Path) -> None:
    model("llama", tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text(content)
    assert cli("merge", tmp_path / "hf", tmp_path / "out").code == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == content


def test_plan_says_it_before_anything_is_written(tmp_path: Path) -> None:
    words: Any = bpe(tmp_path / "t/tokenizer.json", 509)
    plan = fastshard.plan(NEOX, "hf", vocab_size=300, tokenizer=words)
    assert [f.code for f in plan.findings if f.severity == "error"] == ["FS211"]
