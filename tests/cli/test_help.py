"""Help: short and long pages, examples that run, verdicts and colour."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.cli.help_text import overview, short
from fastshard.cli.parser import build, subparsers
from fastshard.cli.render import print_findings
from fastshard.cli.verbs import VERBS
from fastshard.cli.verdict import verdict
from helpers import FIXTURES, HF, NEOX, STEP, cli, copy, layer_file
from holding import HANG

NAMES = [verb.name for verb in VERBS]


def shown(*words: str) -> str:
    return cli(*words, json_output=False).out


@pytest.mark.parametrize("name", NAMES)
def test_the_short_page_is_short_and_says_how_to_begin(name: str) -> None:
    page, verb = shown(name, "-h"), VERBS[name]
    lines = page.splitlines()
    assert all(len(line) < 80 for line in lines) and len(lines) < 60
    assert any(line.startswith(f"Usage: fastshard {name} ") for line in lines)
    assert verb.examples and all(f"  {example}" in lines for example in verb.examples)
    own = subparsers(build())[name]
    more = re.search(r"^(\d+) more options: ", page, re.M)
    options = [
        a for a in own._actions if a.option_strings and a.dest != "help" and "-h" not in a.option_strings
    ]
    listed = [a for a in options if a.help != "==SUPPRESS=="]
    assert (int(more[1]) if more else 0) == len(listed) - sum(
        a.required or any(flag in verb.often for flag in a.option_strings) for a in listed
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_long_page_lists_every_option_and_the_examples(name: str) -> None:
    page, own = shown(name, "--help"), subparsers(build())[name]
    flags = [f for a in own._actions if a.help != "==SUPPRESS==" for f in a.option_strings]
    assert all(flag in page for flag in flags)
    assert all(example in page for example in VERBS[name].examples)


@pytest.mark.parametrize("name", NAMES)
def test_the_long_page_is_as_wide_as_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for examples, which are copied as they are."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(name, "--help").splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("  fastshard ")] == []


def test_the_overview_has_every_command_once() -> None:
    page = shown("--help")
    assert page == overview(VERBS) == shown("-h")
    assert re.findall(r"^  ([a-z0-9-]+)  +\S", page.partition("Examples")[0], re.M) == NAMES
    assert [line for line in page.splitlines() if len(line) > 80] == []
    done = subprocess.run([sys.executable, "-m", "fastshard"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", page)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    words = [sys.executable, "-m", "fastshard.examples", "gpt_neox", "run", "--to", "gpt_neox", "--tp", "2"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=HANG)
    shutil.copytree(FIXTURES / "deepspeed/zero1_bf16_dp2", folder / "zero_run")
    shutil.copytree(FIXTURES / "sharded/dcp_tp_micro", folder / "dcp_run")
    (folder / "tokens.json").write_text(json.dumps(list(range(40))))
    return folder


def test_every_example_runs(place: Path) -> None:
    """In the order of a day's work, since some need what others make."""
    order = ["convert", "merge", "split", "make-part", "commit"]
    run_id, done = "", set()
    for name in [*order, *(name for name in NAMES if name not in order)]:
        for example in VERBS[name].examples:
            line = example.replace("--run ID", f"--run {run_id}").replace(
                "fastshard ", f"{sys.executable} -m fastshard "
            )
            if name == "commit":
                line = line.replace(" commit ", " make-part 1 ") + " && " + line
            ran = subprocess.run(
                ["bash", "-c", line], cwd=place, capture_output=True, text=True, check=False, timeout=HANG
            )
            # Merged, a checkpoint is the same; a stale one is found.
            assert ran.returncode == (1 if "master-weights zero_stale" in line else 0), (
                example,
                ran.stdout,
                ran.stderr,
            )
            done.add(name)
            if name == "split" and not run_id:
                run_id = re.search(r"--run ([0-9a-f]+)", ran.stdout)[1]  # type: ignore[index]
    assert done == set(NAMES)


# --- verdicts


def last(*words: object) -> str:
    ran = cli(*words, json_output=False)
    return (ran.out if VERBS[str(words[0])].finds and ran.code != 2 else ran.err).splitlines()[-1]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    root = copy(NEOX, tmp_path / "run")
    (root / STEP / layer_file(3, 1)).unlink()
    return root


def test_the_last_line_is_the_verdict(broken: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lost = f"{layer_file(3, 1)}: the file is missing (tp 1)"
    assert last("inspect", NEOX) == f"{NEOX}: OK, complete by headers (exit 0)"
    assert last("verify", broken) == f"{broken}: INCOMPLETE, {lost} (exit 3)"
    assert last("verify", broken, "--exit-zero") == f"{broken}: INCOMPLETE, {lost} (exit 0)"
    assert (
        last("merge", broken, out)
        == f"{broken}: INCOMPLETE, {lost}; this run wrote nothing to {out} (exit 3)"
    )
    assert last("diff", HF, HF) == f"{HF}, {HF}: EQUAL, every tensor has the same bytes (exit 0)"
    assert last("inspect", tmp_path / "nowhere").startswith(f"{tmp_path / 'nowhere'}: COULD NOT RUN, ")
    assert last("inspect", tmp_path / "nowhere").endswith(" (exit 2)")


RANK = "iter_0000010/mp_rank_01_001/model_optim_rng.pt"
LONG = "what is said of it is longer than a line of a terminal has room for, so that the title stands for it"


@pytest.mark.parametrize(
    ("code", "message", "fields", "reason"),
    [
        ("FS306", LONG, {"file": "a.safetensors", "tensor": "x"}, "NaN or infinite values: a.safetensors"),
        (
            "FS101",
            "the file is missing",
            {"file": RANK},
            "mp_rank_01_001/model_optim_rng.pt: the file is missing",
        ),
        ("FS113", LONG, {"files": ["s/x_01.pt", "s/x_02.pt"]}, "renamed or swapped file: x_{01,02}.pt"),
        ("FS102", LONG, {"tensor": "a.b"}, "missing tensor: a.b"),
        ("FS514", LONG, {"file": "s/x_01.pt"}, "not supported: x_01.pt"),
        ("FS209", "`a` is not stated", {"file": f"{LONG}.pt"}, "`a` is not stated"),
        ("FS111", LONG, {"file": "4000/items", "rank": "process 1"}, "missing chunks: process 1"),
    ],
)
def test_a_verdict_names_what_it_is_about(
    code: str, message: str, fields: dict[str, Any], reason: str
) -> None:
    finding = fastshard.Finding(code, "error", message, **fields)
    assert verdict("x", 1, [finding]).partition(", ")[2] == f"{reason} (exit 1)"


def test_a_verdict_counts_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        fastshard.Finding.of("FS312", "the file is truncated", file=f"{n}.pt", got=f"{n} bytes")
        for n in range(3)
    ]
    tensors = [fastshard.Finding.of("FS306", "NaN", tensor=f"t.{n}", file="0.pt") for n in range(4)]
    print_findings(files + tensors)
    assert capsys.readouterr().err.count("error FS") == 4
    assert (
        verdict("x", 1, files + tensors)
        == "x: BROKEN, 0.pt: the file is truncated, and 3 more problems (exit 1)"
    )
    assert verdict("x", 1, tensors) == "x: BROKEN, 4 tensors: NaN (exit 1)"


def help_of(*words: object) -> str:
    ran = cli(*words)
    (said,) = [": ".join([f.get("help", ""), *f.get("run", [])]) for f in ran.errors]
    return said


def test_help_about_a_path_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HF, tmp_path / "model")
    assert help_of("verify", "modle") == "check the path; did you mean model?"
    assert help_of("verify", "model", "--config", "nope.json").startswith("check the path")
    assert help_of("verify", "org/m").endswith("fastshard inspect hf://org/m")
    assert help_of("check-storage", "hf://org/m") == "download it: hf download org/m --local-dir m"
    assert help_of("steps", "s3://b/run", "--follow").endswith("aws s3 sync s3://b/run run")
    assert help_of("plan", "model", "out").startswith("leave out out if you meant it as OUT")
    assert help_of("report", "model", "a.html").endswith("fastshard report model -o a.html")
    (tmp_path / "model/config.json").write_text("{,}")
    assert help_of("verify", "model") == "copy config.json again from the original checkpoint"


def test_help_names_the_folder_of_a_step(tmp_path: Path) -> None:
    root = copy(FIXTURES / "sharded/megatron_legacy_tp2_pp2", tmp_path / "run")
    (root / "latest_checkpointed_iteration.txt").write_text("99")
    assert help_of("verify", root).startswith("copy iter_0000099 from ")
    shutil.rmtree(root / "iter_0000010")
    assert help_of("verify", root).startswith("copy iter_0000099 from ")


STALE = FIXTURES / "stale_masters_zero1_bf16_dp2"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("convert", HF, "OUT", "--to", "universal", "--weights", "params"), "FS402"),
        (("merge", STALE, "OUT", "--weights", "params"), "FS401"),
        (("merge", HF, "OUT", "--optimizer"), "FS402"),
    ],
)
def test_help_does_not_advise_what_was_passed(words: tuple[Any, ...], code: str, tmp_path: Path) -> None:
    ran = cli(*(tmp_path / "out" if word == "OUT" else word for word in words), json_output=False)
    (said,) = re.findall(rf"{code}: .*?^  help +(.*?)(?=^\S|\Z)", ran.err, re.S | re.M)
    assert "--weights params" not in said and "pass --optimizer" not in said


def test_what_was_not_checked_is_printed_by_what_judges_and_writes(tmp_path: Path) -> None:
    shutil.copy(HF / "model-00001-of-00004.safetensors", tmp_path / "model.safetensors")
    for words in (("verify", tmp_path), ("inspect", tmp_path), ("plan", tmp_path)):
        ran = cli(*words, json_output=False)
        assert ran.code == 0 and "not checked: " in ran.out + ran.err
    assert "not checked: " not in cli("inspect", NEOX, json_output=False).out


# --- colour


@pytest.mark.parametrize(
    ("words", "environment", "is_painted"),
    [
        ((), {}, False),
        (("--color", "always"), {}, True),
        (("--color", "always"), {"NO_COLOR": "1"}, True),
        (("--color", "never"), {"FORCE_COLOR": "1"}, False),
        ((), {"FORCE_COLOR": "1"}, True),
        ((), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_when_there_is_colour(
    words: tuple[str, ...],
    environment: dict[str, str],
    is_painted: bool,
    broken: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    painted = cli("verify", broken, *words, json_output=False).out
    assert ("\033[" in painted) == is_painted
    plain = cli("verify", broken, "--color", "never", json_output=False).out
    assert re.sub(r"\033\[[0-9;]*m", "", painted) == plain


def test_documents_are_the_same_with_colour(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cli("verify", broken).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    painted = cli("verify", broken).out
    assert painted == plain and json.loads(painted)["exit_code"] == 3


# --- slips


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("huggingface", "hf"),
        ("Megatron-LM", "megatron"),
        ("nemo", "megatron"),
        ("neox", "gpt_neox"),
        ("hff", "hf"),
    ],
)
def test_other_names_of_formats_lead_to_ours(name: str, meant: str, tmp_path: Path) -> None:
    ran = cli("convert", NEOX, tmp_path / "out", "--to", name)
    assert ran.code == 2 and ran.having("FS515", message=f"there is no format {name}; did you mean {meant}?")
    assert not (tmp_path / "out").exists()


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    ran = cli("verfy", NEOX, json_output=False)
    assert ran.code == 2 and ran.err == (
        "fastshard: error: there is no command verfy; did you mean verify?\n"
        f"  help      fastshard verify {NEOX}\n"
    )


def test_help_is_a_word_too() -> None:
    assert shown("help") == shown("--help")
    assert shown("help", "master-weights") == shown("master-weights", "--help")


def test_the_short_page_names_no_flag_twice() -> None:
    parsers = subparsers(build())
    for verb in VERBS:
        flags = re.findall(r"^  (--[a-z-]+)", short(parsers[verb.name], verb), re.M)
        assert len(flags) == len(set(flags))
