"""The tokenizer decides what are words: a cut below its ids is refused, its special tokens are written."""

from __future__ import annotations

import base64
import json
import os
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
            NEOX,
            tmp_path / "out",
            "FS211",
            exit=2,
            command=(*cut, "300"),
            got="300",
            expected="509 of 512",
            help="keep them",
        )
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
        assert ran.having("FS215", severity="warning", expected="at most 199", got="202")
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


def ranks(path: Path, words: list[str]) -> Path:
    """A vocabulary as tiktoken keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(base64.b64encode(w.encode()) + b" %d\n" % i for i, w in enumerate(words)))
    return path


def tekken(path: Path, vocab: int, special: int, size: int, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = [{"rank": i, "token_bytes": "QQ==", "token_str": None} for i in range(vocab)]
    config = {"pattern": "x", "default_vocab_size": size, "default_num_special_tokens": special}
    path.write_text(json.dumps({"config": config, "vocab": listed, **more}))
    return path


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken"])
def test_ids_of_tiktokens_files_count(name: str, tmp_path: Path) -> None:
    file = ranks(tmp_path / "words" / name, list(vocabulary(500)))
    for given in (file, file.parent):
        assert_refused(
            NEOX,
            tmp_path / "out",
            "FS211",
            exit=2,
            expected="500 of 512",
            file=name,
            command=("convert", "--to", "hf", "--tokenizer", given, "--vocab-size", "300"),
        )
    # Special tokens stand in tokenizer_config.json: after those of the vocabulary.
    added = {"added_tokens_decoder": {"504": {"content": "<|im_end|>", "special": True}}}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(added))
    cut = ("convert", NEOX, tmp_path / "out", "--to", "hf", "--tokenizer", file.parent, "--vocab-size")
    assert cli(*cut, "504").having("FS211", expected="505 of 512")
    ran = cli(*cut, "505")
    assert ran.code == 0 and not ran.having("FS109", severity="warning")
    assert (tmp_path / "out" / name).read_bytes() == file.read_bytes()


def test_a_file_of_tiktoken_by_another_name_is_one(tmp_path: Path) -> None:
    file = ranks(tmp_path / "mine.model", list(vocabulary(500)))
    ran = cli("plan", NEOX, "--to", "hf", "--tokenizer", file, "--vocab-size", "300")
    assert ran.having("FS211", expected="500 of 512")


@pytest.mark.parametrize(
    ("vocab", "special", "size", "largest"), [(490, 10, 500, 499), (600, 10, 500, 499), (490, 10, 511, 499)]
)
def test_ids_of_tekken_count(vocab: int, special: int, size: int, largest: int, tmp_path: Path) -> None:
    """Special tokens come first; of a longer list as many words are used as the config says."""
    words = tekken(tmp_path / "words/tekken.json", vocab, special, size).parent
    cut = ("plan", NEOX, "--to", "hf", "--tokenizer", words, "--vocab-size")
    assert cli(*cut, largest).having("FS211", expected=f"{largest + 1} of 512", file="tekken.json")
    assert not cli(*cut, largest + 1).having("FS211")
    tekken(words / "tekken.json", vocab, special, size, special_tokens=[{"rank": 3, "token_str": "<s>"}])
    assert cli(*cut, largest).having("FS211", expected=f"{largest + 1} of 512")


def test_added_tokens_count_without_a_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    added = {"added_tokens_decoder": {"480": {"content": "<|end|>"}}}
    (tmp_path / "words/tokenizer_config.json").write_text(json.dumps(added))
    cut = ("plan", NEOX, "--to", "hf", "--tokenizer", tmp_path / "words", "--vocab-size")
    assert cli(*cut, "300").having("FS211", expected="481 of 512")
    # More words may stand in code: what the file tells is a part.
    ran = cli(*cut, "481")
    assert not ran.errors and ran.having("FS109", severity="warning", message="31 of 512 rows are dropped")
    (tmp_path / "words/tokenizer_config.json").unlink()
    (tmp_path / "words/added_tokens.json").write_text('{"<|end|>": 480}')
    assert cli(*cut, "300").having("FS211", expected="481 of 512")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("vocab.json", "[]"),
        ("tokenizer.model", "not base64\n"),
        ("tiktoken.model", "QQ== 0\nQQ== x\n"),
        ("tekken.json", '{"vocab": [{"rank": "1", "token_bytes": ""}], "config": {}}'),
        ("tekken.json", '{"vocab": 3}'),
        ("tekken.json", "[" * 100_000),
        ("tiktoken.model", "QQ== " + "9" * 5000),
        ("chat_template.jinja", "{{ x }}"),
    ],
)
def test_rows_cut_past_a_vocabulary_that_cannot_be_read_are_a_warning(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / name).write_text(content)
    for command in (("--to", "hf"), ()):
        plan = ("plan", NEOX, *command, "--tokenizer", tmp_path / "words")
        ran = cli(*plan, "--vocab-size", "300")
        assert ran.code == 0, ran.findings
        assert ran.having("FS109", severity="warning", file=name, message="212 of 512 rows are dropped")
        # Nothing is dropped, so nothing is to be said.
        assert not cli(*plan).having("FS109", severity="warning")


def test_another_file_of_the_vocabulary_is_read_where_the_first_cannot_be(tmp_path: Path) -> None:
    words = ranks(tmp_path / "words/tiktoken.model", list(vocabulary(400))).parent
    (words / "tokenizer.json").write_text("{}")
    ran = cli("plan", NEOX, "--to", "hf", "--tokenizer", words, "--vocab-size", "300")
    assert ran.having("FS211", expected="400 of 512")


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.txt", "tokenizer.json", "tekken.json", "added_tokens.json"]
)
def test_a_vocabulary_of_gigabytes_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    with (tmp_path / "words" / name).open("wb") as file:
        file.write(b"\n")
        os.truncate(file.fileno(), 40 << 30)

    def read() -> int:
        """Bytes that this process has asked the system for."""
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    ran = cli("plan", NEOX, "--to", "hf", "--tokenizer", tmp_path / "words", "--vocab-size", "300")
    assert read() - before < 64 << 20
    assert ran.code == 0 and ran.having("FS109", severity="warning", file=name)


def test_a_tokenizer_larger_than_the_rows_says_so(tmp_path: Path) -> None:
    file = bpe(tmp_path / "tokenizer.json", 520)
    ran = cli("plan", NEOX, "--to", "hf", "--tokenizer", file, "--vocab-size", "300")
    (found,) = ran.having("FS211")
    assert "more than the 512 stored rows" in found["message"]
    assert (
        found["expected"] == "all 512 rows stored"
        and "keep every row" in found["help"]
        and found["run"][0].endswith(" --vocab-size 512")
    )


def test_a_part_of_the_ids_is_no_size_of_the_vocabulary(tmp_path: Path) -> None:
    """Special tokens of tiktoken's files stand in code: what the file holds is not all that may be kept."""
    file = ranks(tmp_path / "words/tokenizer.model", list(vocabulary(500)))
    plan = ("plan", NEOX, "--to", "hf", "--tokenizer", file.parent)
    assert not cli(*plan).having("FS109", help="--vocab-size 500")
    ran = cli(*plan, "--vocab-size", "500")
    assert not ran.errors and ran.having(
        "FS109", severity="warning", message="special tokens that no file lists"
    )
    file.write_text("no vocabulary")
    (file.parent / "added_tokens.json").write_text('{"<|end|>": 480}')
    assert not cli(*plan).having("FS109", help="--vocab-size 481")
    bpe(file.parent / "tokenizer.json", 500)
    told = [f["help"] for f in cli(*plan).having("FS109", message="the true size of the vocabulary")]
    assert all("--vocab-size 500" in help for help in told)
