"""What people type first: verbs and flags of other tools, paths in the wrong place, other formats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers import HF, NEOX, cli


def read_usage_error(*words: object) -> tuple[str, str]:
    """The error and the help of a command line that cannot be parsed."""
    ran = cli(*words, json_output=False)
    assert ran.code == 2
    error, help_ = ran.err.splitlines()[:2]
    return error, help_.strip().removeprefix("help").strip()


@pytest.mark.parametrize(
    ("word", "verb"),
    [
        ("check", "verify"),
        ("validate", "verify"),
        ("doctor", "verify"),
        ("status", "inspect"),
        ("info", "inspect"),
        ("show", "inspect"),
        ("list", "ls"),
        ("repair", "find"),
        ("compare", "diff"),
        ("CHECK", "verify"),
    ],
)
def test_verbs_of_other_tools_lead_to_ours(word: str, verb: str) -> None:
    error, help_ = read_usage_error(word, "run", "--step", 3)
    assert error == f"fastshard: error: there is no command {word}; {verb} does that"
    assert help_ == f"fastshard {verb} run --step 3"
    ran = cli(word, "run")
    assert ran.code == 2 and ran.errors[0]["run"] == [f"fastshard {verb} run --json"]


def test_version_is_an_option() -> None:
    error, help_ = read_usage_error("version")
    assert error == "fastshard: error: there is no command version; --version prints it"
    assert help_ == "fastshard --version"


@pytest.mark.parametrize("path", ["here", "s3://bucket/run"])
def test_a_path_in_the_place_of_the_command(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    error, help_ = read_usage_error(path, "--no-color")
    assert "comes first" in error and help_ == f"fastshard inspect {path} --no-color"


@pytest.mark.parametrize("out", [["-o", "out"], ["--out", "out"], ["--output=out"]])
@pytest.mark.parametrize("verb", [["merge"], ["convert", "--to", "hf"]])
def test_the_destination_with_a_flag(verb: list[str], out: list[str]) -> None:
    error, help_ = read_usage_error(*verb, "node0", "node 1", *out)
    assert error == f"fastshard {verb[0]}: error: OUT is the last path and has no flag"
    assert help_ == f"fastshard {' '.join(verb)} node0 'node 1' --memory 2GiB out"
    # Without a value, or twice, nothing is proposed.
    assert "lists all options" in read_usage_error(*verb, "node0", "out", "-o")[1]
    assert "lists all options" in read_usage_error(*verb, "node0", *out, *out)[1]


def test_a_forgotten_destination_is_no_destination(tmp_path: Path) -> None:
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        shutil.copytree(HF, node)
    ran = cli("merge", *nodes)
    (finding,) = ran.having("FS504")
    assert ran.code == 2 and finding["got"] == "a checkpoint of Hugging Face"
    assert finding["run"] == [f"fastshard merge {nodes[0]} {nodes[1]} OUT"]
    # What is no checkpoint is refused as before, and an older result may be replaced.
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").write_text("x")
    assert cli("merge", nodes[0], tmp_path / "notes").having("FS504", message="not empty")
    assert cli("merge", nodes[0], tmp_path / "out").code == 0
    assert cli("merge", nodes[0], tmp_path / "out", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gguf", "llama.cpp"),
        ("vllm", "vLLM"),
        ("pytorch", "torch.save"),
        ("torch", "--to dcp"),
        ("bin", "safetensors"),
    ],
)
def test_formats_to_which_another_tool_leads(name: str, says: str, tmp_path: Path) -> None:
    ran = cli("convert", HF, tmp_path / "out", "--to", name)
    (finding,) = ran.having("FS515")
    assert ran.code == 2 and says in finding["help"]
    (command,) = finding["run"]
    assert command.startswith(f"fastshard convert {HF} {tmp_path / 'out'} ") and command.endswith(" --to hf")


def test_a_size_with_one_letter_and_the_latest_step(tmp_path: Path) -> None:
    assert cli("merge", NEOX, tmp_path / "out", "--memory", "4g", "--step", "latest").code == 0
    assert cli("inspect", tmp_path / "out", "--step", "latest").code == 0
    assert cli("inspect", HF / "config.json", "--step", "newest").code == 2
    steps = tmp_path / "run"
    for number in (1, 2):
        shutil.copytree(HF, steps / f"checkpoint-{number}")
    assert cli("inspect", steps, "--step", "latest").doc["step"] == cli("inspect", steps).doc["step"]
    # A folder of that name is meant first.
    (steps / "checkpoint-1").rename(steps / "latest")
    assert cli("inspect", steps, "--step", "latest").doc["step"] != "checkpoint-2"


@pytest.mark.parametrize("path", ["host1:/data/run", "me@host1:/data/run/", "host1:data/run"])
def test_a_path_on_another_host(path: str) -> None:
    (finding,) = cli("verify", path).having("FS501")
    host, _, there = path.rstrip("/").partition(":")
    assert finding["run"] == [f"rsync -a {host}:{there}/ run/"]


def test_words_and_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = cli("explain", "nan")
    assert ran.code == 0 and [row["code"] for row in ran.doc["codes"]] == ["FS306"]
    assert cli("explain", "qqq").having("FS515", message="no finding has the code qqq")
    assert cli("explain", "FS999").code == cli("explain", "na").code == 2
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert cli("completion").doc["shell"] == "fish"
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert cli("completion").having("FS515", got="tcsh")


def test_the_version_has_a_short_flag() -> None:
    assert cli("-V", json_output=False).out == cli("--version", json_output=False).out != ""
