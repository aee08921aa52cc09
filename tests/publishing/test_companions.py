"""What goes along with a model comes from the folders that were named, by the rule that holds for weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import fastshard
import pytest
from fastshard import FastshardError
from helpers import HF, NEOX, assert_refused, cli, copy, spawn
from holding import HANG, Steps, needs_steps

WORDS = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
#: What nobody must find in a result.
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir(mode=0o755)
    (tmp_path / "key").write_text(KEY)
    return copy(HF, tmp_path / "in/ckpt")


def with_code(ckpt: Path) -> None:
    config = json.loads((ckpt / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.Model"}
    (ckpt / "config.json").write_text(json.dumps(config))


#: Those whose names the listing passes over.
WORDS_OF = ["tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja", "qwen.tiktoken"]
MERGE, TO_HF, TO_RANKS = (
    ("merge",),
    ("convert", "--to", "hf"),
    ("convert", "--to", "tp-safetensors", "--tp", "2"),
)
#: Code goes along with the model's own names alone.
LINKED = [
    *((name, command) for name in WORDS_OF for command in (MERGE, TO_HF, TO_RANKS)),
    ("modeling_own.py", MERGE),
    ("modeling_own.py", TO_HF),
]


@pytest.mark.parametrize("name, command", LINKED, ids=[f"{name} {command[-1]}" for name, command in LINKED])
def test_a_companion_that_is_a_link_out_of_the_checkpoint(
    name: str, command: tuple[str, ...], ckpt: Path, tmp_path: Path
) -> None:
    with_code(ckpt)
    (ckpt / name).symlink_to("../../key")
    ran = assert_refused(ckpt, tmp_path / "out", "FS603", command=command, file=name, got="key")
    assert "Hugging Face cache" in ran.having("FS603")[0]["expected"]
    assert KEY.strip() not in ran.out


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "config.json"])
def test_a_text_that_is_a_link_out_of_the_checkpoint(name: str, ckpt: Path, tmp_path: Path) -> None:
    (ckpt / name).unlink(missing_ok=True)
    (tmp_path / "key").write_text("{}")
    (ckpt / name).symlink_to("../../key")
    assert_refused(ckpt, tmp_path / "out", "FS603", file=name)


def test_a_folder_of_companions_that_is_a_link(ckpt: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/tokenizer.model").write_text(KEY)
    (ckpt / "huggingface").symlink_to("../../secret")
    assert_refused(ckpt, tmp_path / "out", "FS603", file="huggingface/tokenizer.model")
    (ckpt / "huggingface").unlink()
    (tmp_path / "secret").rename(ckpt / "kept")
    (ckpt / "huggingface").symlink_to("kept")
    assert cli("merge", ckpt, tmp_path / "out").code == 0
    assert (tmp_path / "out/tokenizer.model").read_text() == KEY


def test_links_within_the_checkpoint_are_followed(ckpt: Path, tmp_path: Path) -> None:
    (ckpt / "words").mkdir()
    (ckpt / "words/any").write_text(KEY)
    (ckpt / "merges.txt").symlink_to("words/any")
    assert cli("merge", ckpt, tmp_path / "out").code == 0
    assert (tmp_path / "out/merges.txt").read_text() == KEY


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_link_out_of_a_tokenizers_folder(name: str, ckpt: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / name).symlink_to("../key")
    given = ("--tokenizer", tmp_path / "words")
    assert_refused(ckpt, tmp_path / "out", "FS603", command=("merge", *given), file=name)
    # A file that is named is the user's choice, if it can be what its name says.
    (tmp_path / "key").write_text(WORDS)
    assert cli("merge", ckpt, tmp_path / "out", "--tokenizer", tmp_path / "words" / name).code == 0


def test_code_beside_a_config_that_was_given(ckpt: Path, tmp_path: Path) -> None:
    with_code(ckpt)
    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    (ckpt / "config.json").rename(own / "config.json")
    (own / "modeling_own.py").write_text("class Model: ...\n")
    (own / "other.py").symlink_to("../key")
    assert cli("merge", ckpt, tmp_path / "out", "--config", own / "config.json").code == 0
    assert (tmp_path / "out/modeling_own.py").exists() and not (tmp_path / "out/other.py").exists()


def snapshot_of(root: Path, revision: str) -> Path:
    """A checkpoint as huggingface_hub keeps it: links into the blobs beside the snapshots."""
    snapshot, blobs = root / "models--x/snapshots" / revision, root / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    held = [p for p in sorted(HF.iterdir()) if p.name != "expected.json"]
    contents = {p.name: p.read_bytes() for p in held} | {
        "tokenizer.json": WORDS.encode(),
        "tokenizer.model": b"words",
        "merges.txt": b"a b\n",
        "modeling_own.py": b"class Model: ...\n",
    }
    config = {**json.loads(contents["config.json"]), "auto_map": {"AutoModel": "modeling_own.Model"}}
    contents["config.json"] = json.dumps(config).encode()
    for i, (name, content) in enumerate(contents.items()):
        (blobs / f"{i}").write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blobs / f"{i}", snapshot))
    return snapshot


@pytest.mark.parametrize("revision", ["abc", "abc/part"], ids=["revision", "folder of it"])
def test_a_hub_cache_with_its_companions(revision: str, tmp_path: Path) -> None:
    snapshot = snapshot_of(tmp_path, revision)
    assert cli("merge", snapshot, tmp_path / "out").code == 0
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "modeling_own.py"):
        assert (tmp_path / "out" / name).read_bytes() == (snapshot / name).read_bytes(), name
    assert cli("verify", tmp_path / "out").code == 0
    # A tokenizer's folder and a model's config may lie there as well.
    given = ("--tokenizer", snapshot, "--config", snapshot / "config.json")
    assert cli("merge", copy(HF, tmp_path / "other"), tmp_path / "more", *given).code == 0
    assert (tmp_path / "more/tokenizer.model").read_bytes() == b"words"
    assert (tmp_path / "more/modeling_own.py").exists()
    # Blobs of another model are none of its own.
    (tmp_path / "models--y/blobs").mkdir(parents=True)
    (tmp_path / "models--y/blobs/0").write_text(KEY)
    (snapshot / "vocab.txt").symlink_to(tmp_path / "models--y/blobs/0")
    assert_refused(snapshot, tmp_path / "not", "FS603", file="vocab.txt")


#: What the files of :func:`swap` hold when they are chosen.
CHOSEN = {
    "tokenizer.json": WORDS,
    "merges.txt": "a b\n",
    "tokenizer.model": "words",
    "chat_template.jinja": "{{ x }}",
    "modeling_own.py": "class Model: ...\n",
    "generation_config.json": "{}",
    "README.md": "about it",
    "modules.json": json.dumps([{"path": "1_Pooling", "type": "x.Pooling"}]),
    "1_Pooling/config.json": "{}",
}


def swap(path: Path, key: Path, how: str) -> None:
    """Puts another file in the place of one."""
    if how == "link":
        path.unlink()
        path.symlink_to(key)
    elif how == "hard link":
        path.unlink()
        path.hardlink_to(key)
    elif how == "replaced":
        key.rename(path)
    elif how == "folder":
        path.parent.rename(path.parent.with_name("moved"))
        (key.parent / "other").mkdir()
        key.rename(key.parent / "other" / path.name)
        path.parent.symlink_to(key.parent / "other")
    else:
        path.write_text(KEY)


SWAPPED = [
    *((name, "link", MERGE) for name in CHOSEN),
    *((name, "link", TO_HF) for name in ("merges.txt", "modeling_own.py")),
    *(("tokenizer.model", "link", ("convert", "--to", to)) for to in ("dcp", "tp-safetensors")),
    *(("merges.txt", how, MERGE) for how in ("hard link", "replaced", "written")),
    ("1_Pooling/config.json", "folder", MERGE),
]


@needs_steps
@pytest.mark.parametrize("name, how, command", SWAPPED, ids=[f"{n} {h} {c[-1]}" for n, h, c in SWAPPED])
def test_a_companion_that_is_exchanged_while_the_run_writes_is_not_published(
    name: str, how: str, command: tuple[str, ...], ckpt: Path, tmp_path: Path
) -> None:
    with_code(ckpt)
    (ckpt / "1_Pooling").mkdir()
    for file, content in CHOSEN.items():
        (ckpt / file).write_text(content)
    out = tmp_path / "place/out"
    out.parent.mkdir()
    with Steps("opened") as steps:
        process = spawn(*command, ckpt, out, "--json", env=steps.environment)
        moment = steps.wait("opened", process)
        swap(ckpt / name, tmp_path / "key", how)
        moment.release()
        stdout, stderr = process.communicate(timeout=HANG)
    findings = json.loads(stdout)["findings"]
    errors = [(f["code"], f["file"]) for f in findings if f["severity"] == "error"]
    assert process.returncode == 1 and errors == [("FS506", str(ckpt / name))], stdout + stderr
    assert not out.exists() and KEY.strip() not in stdout + stderr
    # It is not in what is kept for --resume either.
    for path in out.parent.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


@needs_steps
def test_a_tokenizer_that_is_exchanged_by_one_of_the_same_bytes_is_taken(ckpt: Path, tmp_path: Path) -> None:
    """As rsync does, and file systems whose inodes have other numbers each time that they are looked up."""
    (ckpt / "merges.txt").write_text("a b\n")
    (tmp_path / "key").write_text("a b\n")
    with Steps("opened") as steps:
        process = spawn("merge", ckpt, tmp_path / "out", "--json", env=steps.environment)
        moment = steps.wait("opened", process)
        swap(ckpt / "merges.txt", tmp_path / "key", "replaced")
        (ckpt / "merges.txt").chmod(0o600)
        moment.release()
        stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stdout + stderr
    assert (tmp_path / "out/merges.txt").read_text() == "a b\n"


def test_the_config_that_an_open_checkpoint_was_judged_by_is_copied(ckpt: Path, tmp_path: Path) -> None:
    checkpoint = fastshard.open(ckpt)
    fastshard.convert(checkpoint, tmp_path / "out", to=None)
    (ckpt / "config.json").write_text((ckpt / "config.json").read_text() + " ")
    with pytest.raises(FastshardError) as refused:
        fastshard.convert(checkpoint, tmp_path / "again", to=None)
    assert refused.value.code == "FS506" and not (tmp_path / "again").exists()
    fastshard.convert(ckpt, tmp_path / "afresh", to=None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint of GPT-NeoX with a tokenizer in the folder above."""
    (tmp_path / "jobs").mkdir(mode=0o755)
    (tmp_path / "jobs/tokenizer.json").write_text(WORDS)
    return copy(NEOX, tmp_path / "jobs/run")


def converted(run: Path, out: Path, *more: object) -> list[dict]:
    """Findings about what was not taken; the conversion is done all the same."""
    ran = cli("convert", run, out, "--to", "hf", *more)
    assert ran.code == 0, ran.out
    assert cli("verify", out).code == 0
    return ran.having("FS108")


def from_above(out: Path) -> dict[str, str]:
    files = json.loads((out / "fastshard.manifest.json").read_text())["files"]
    return {file["name"]: file["from"] for file in files if "from" in file}


def test_a_tokenizer_from_above_is_recorded(run: Path, tmp_path: Path) -> None:
    assert converted(run, tmp_path / "out") == []
    assert (tmp_path / "out/tokenizer.json").read_text() == WORDS
    assert from_above(tmp_path / "out") == {"tokenizer.json": "../tokenizer.json"}
    # One of the checkpoint's own comes from nowhere else.
    (run / "tokenizer.json").write_text(WORDS)
    assert converted(run, tmp_path / "own") == [] and from_above(tmp_path / "own") == {}
    (run / "tokenizer.json").unlink()
    (run.parent / "huggingface").mkdir(mode=0o755)
    (run.parent / "tokenizer.json").rename(run.parent / "huggingface/tokenizer.json")
    assert converted(run, tmp_path / "below") == []
    assert from_above(tmp_path / "below") == {"tokenizer.json": "../huggingface/tokenizer.json"}


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_nothing_is_taken_from_a_folder_that_everybody_may_write_to(
    mode: int, run: Path, tmp_path: Path
) -> None:
    (run.parent / "generation_config.json").write_text("{}")
    run.parent.chmod(mode)
    (told,) = converted(run, tmp_path / "out")
    assert told["severity"] == "warning" and told["file"].endswith("generation_config.json")
    assert told["got"] == "generation_config.json, tokenizer.json"
    assert "every user may write to" in told["message"] and f"--tokenizer {run.parent}" in told["help"]
    assert not {"tokenizer.json", "generation_config.json"} & {p.name for p in (tmp_path / "out").iterdir()}
    # What the warning advises.
    (other,) = converted(run, tmp_path / "given", "--tokenizer", run.parent)
    assert other["got"] == "generation_config.json"
    assert (tmp_path / "given/tokenizer.json").read_text() == WORDS
    assert from_above(tmp_path / "given") == {}
    # `plan` says it before.
    assert cli("plan", run, "--to", "hf").having("FS108", got="tokenizer.json")


def test_a_folder_below_one_above_is_no_better(run: Path, tmp_path: Path) -> None:
    (run.parent / "huggingface").mkdir()
    (run.parent / "tokenizer.json").rename(run.parent / "huggingface/tokenizer.json")
    (run.parent / "huggingface").chmod(0o777)
    (told,) = converted(run, tmp_path / "out")
    assert (
        told["file"].endswith("huggingface/tokenizer.json") and not (tmp_path / "out/tokenizer.json").exists()
    )


def test_a_link_that_leaves_the_folder_above_is_not_followed(run: Path, tmp_path: Path) -> None:
    (run.parent / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (run.parent / "tokenizer.json").symlink_to("../tokenizer.json")
    (told,) = converted(run, tmp_path / "out")
    assert "a link" in told["message"] and not (tmp_path / "out/tokenizer.json").exists()
    # Within that folder, and into the checkpoint, links are as good as files.
    for name, place in (("kept", run.parent), ("words", run)):
        (place / name).mkdir(mode=0o755)
        (place / name / "any.json").write_text(WORDS)
        (run.parent / "tokenizer.json").unlink()
        (run.parent / "tokenizer.json").symlink_to(place / name / "any.json")
        assert converted(run, tmp_path / name) == []
        assert (tmp_path / name / "tokenizer.json").read_text() == WORDS


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_nothing_is_taken_from_a_strangers_folder(run: Path, tmp_path: Path) -> None:
    os.chown(run.parent, 12345, 12345)
    (told,) = converted(run, tmp_path / "out")
    assert "is owned by another user" in told["message"] and not (tmp_path / "out/tokenizer.json").exists()
    # Whoever owns the checkpoint may say what its tokenizer is.
    os.chown(run, 12345, 12345)
    assert converted(run, tmp_path / "owners") == []
    assert (tmp_path / "owners/tokenizer.json").read_text() == WORDS


def test_folders_that_are_further_away_have_no_say(run: Path, tmp_path: Path) -> None:
    (run / "tokenizer.json").write_text(WORDS)
    (run.parent / "tokenizer.json").unlink()
    (run.parent / "tokenizer.json").mkdir()
    run.parent.chmod(0o777)
    assert converted(run, tmp_path / "out") == []


def test_beside_a_file_that_was_named_lies_what_may_be_anybodys(ckpt: Path, tmp_path: Path) -> None:
    assert cli("merge", ckpt, tmp_path / "whole").code == 0
    file = ckpt.parent / "model.safetensors"
    (tmp_path / "whole/model.safetensors").rename(file)
    (ckpt.parent / "tokenizer.json").write_text(WORDS)
    for mode, taken in ((0o755, True), (0o1777, False)):
        file.parent.chmod(mode)
        out = tmp_path / oct(mode)
        ran = cli("convert", file, out, "--to", "hf", "--config", ckpt / "config.json")
        assert ran.code == 0, ran.out
        assert (out / "tokenizer.json").exists() == taken
        assert bool(ran.having("FS108", got="tokenizer.json")) != taken


def test_a_merge_that_takes_no_tokenizer_along_is_not_refused_for_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (run / "tokenizer.model").symlink_to("../../key")
    assert cli("merge", run, tmp_path / "out").code == 0
    # Here it decides, or goes along.
    for command in (("merge", "--vocab-size", "509"), ("convert", "--to", "hf")):
        assert_refused(run, tmp_path / "not", "FS603", command=command, file="tokenizer.model")


def test_an_adapter_whose_files_are_links_out_of_its_folder(tmp_path: Path, ckpt: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
        (adapter / name).symlink_to(f"../{name}")
    assert_refused(ckpt, tmp_path / "out", "FS603", command=("merge", "--adapter", adapter))
    assert_refused(
        ckpt,
        tmp_path / "out",
        "FS603",
        command=("merge", "--adapter", tmp_path / "adapter/adapter_model.safetensors"),
        file="adapter_config.json",
    )


def test_a_config_that_a_reference_lends_is_no_link_out_of_it(tmp_path: Path, ckpt: Path) -> None:
    good = copy(HF, tmp_path / "good")
    (good / "config.json").rename(tmp_path / "config.json")
    (good / "config.json").symlink_to("../config.json")
    (ckpt / "config.json").unlink()
    assert_refused(ckpt, tmp_path / "out", "FS603", command=("merge", "--like", good), file="config.json")
    for file in good.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert_refused(ckpt, tmp_path / "out", "FS603", command=("merge", "--like", good), file="config.json")


# --- documents


@pytest.mark.parametrize("command", [MERGE, TO_HF])
def test_card_and_licence_go_along(command: tuple[str, ...], ckpt: Path, tmp_path: Path) -> None:
    documents = {name: f"{name} of the model\n" for name in ("README.md", "LICENSE", "NOTICE.txt")}
    for name, text in documents.items():
        (ckpt / name).write_text(text)
    # About something else.
    (ckpt.parent / "LICENSE.txt").write_text("of the project\n")
    assert cli(command[0], ckpt, tmp_path / "out", *command[1:]).code == 0
    assert {name: (tmp_path / "out" / name).read_text() for name in documents} == documents
    assert not (tmp_path / "out/LICENSE.txt").exists()
    assert cli("verify", tmp_path / "out").findings == []


def test_a_card_that_is_written_on_is_a_note_and_is_kept(ckpt: Path, tmp_path: Path) -> None:
    (ckpt / "README.md").write_text("draft\n")
    (ckpt / "LICENSE").write_text("licence\n")
    out = tmp_path / "out"
    assert cli("merge", ckpt, out).code == 0
    (out / "README.md").write_text("much more\n")
    (out / ".gitattributes").write_text("* text\n")
    ran = cli("verify", out)
    assert (ran.code, [(f["code"], f["severity"]) for f in ran.findings]) == (0, [("FS308", "note")])
    # What somebody has written is not replaced.
    assert (
        cli("merge", ckpt, out, "--overwrite").code == 2 and (out / "README.md").read_text() == "much more\n"
    )
    (out / "LICENSE").write_text("another\n")
    assert cli("verify", out).code == 1


def test_a_card_that_is_a_link_out_of_the_checkpoint(ckpt: Path, tmp_path: Path) -> None:
    (ckpt / "README.md").symlink_to("../../key")
    assert_refused(ckpt, tmp_path / "out", "FS603", command=TO_HF, file="README.md")


def test_files_that_are_not_taken_are_listed(tmp_path: Path) -> None:
    """In JSON, and with -v: what lies below the model too, but no file of tensors that was read."""
    source = copy(HF, tmp_path / "in")
    (source / "training_args.bin").write_bytes(b"args")
    (source / "onnx").mkdir()
    (source / "onnx/model.onnx").write_bytes(b"onnx")
    (source / "generation_config.json").write_text("{}")
    ran = cli("merge", source, tmp_path / "out")
    assert ran.code == 0
    assert {"training_args.bin", "onnx/model.onnx"} <= set(ran.doc["left_out"])
    assert not [path for path in ran.doc["left_out"] if (tmp_path / "out" / path).exists()]
    assert not [path for path in ran.doc["left_out"] if path.endswith(".safetensors")]
    printed = cli("merge", source, tmp_path / "more", "-v", json_output=False).out
    assert "not carried over from the source:" in printed and "  onnx/model.onnx" in printed
    (tmp_path / "alone").mkdir()
    for path in (tmp_path / "out").iterdir():
        shutil.copy(path, tmp_path / "alone")
    assert "left_out" not in cli("merge", tmp_path / "alone", tmp_path / "again").doc


@pytest.mark.parametrize("command", [MERGE, TO_HF], ids=["merge", "hf"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_truncated_companion_is_named(
    name: str, command: tuple[str, ...], ckpt: Path, tmp_path: Path
) -> None:
    """transformers cannot load a result with half of it. The tensors are right all the same."""
    texts = {"tokenizer.json": WORDS, "tokenizer_config.json": '{"model_max_length": 1e30, "pad_token": "a"}'}
    (ckpt / name).write_text(text := texts.get(name, '{"eos_token_id": 2, "do_sample": false}'))
    assert cli("verify", ckpt).code == 0
    (ckpt / name).write_text(text[: len(text) // 2])
    ran = cli(*command, ckpt, tmp_path / "out")
    assert ran.code == 0 and ran.having("FS211", severity="warning", file=name), ran.out
    assert cli("verify", ckpt).having("FS211", severity="warning", file=name)
    assert_refused(ckpt, tmp_path / "no", "FS211", command=(*command, "--error", "FS211"), file=name)
