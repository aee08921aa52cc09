"""The command line: one JSON object per run, exit codes, flags, explanations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import fastshard
import jsonschema
import pytest
from fastshard.cli.verbs import VERBS
from fastshard.common.codes import CODES
from fastshard.findings.code_pages import PAGES
from helpers import FIXTURES, HF, NEOX, STEP, TP4, cli, copy, layer_file, spawn
from holding import HANG

COMMANDS = {
    "inspect": lambda tmp: ("inspect", NEOX),
    "merge": lambda tmp: ("merge", NEOX, tmp / "out"),
    "convert": lambda tmp: ("convert", NEOX, tmp / "out", "--to", "hf"),
    "plan": lambda tmp: ("plan", NEOX, "--to", "hf"),
    "verify": lambda tmp: ("verify", NEOX),
    "diff": lambda tmp: ("diff", NEOX, NEOX.parent / "neox_pp_tp1"),
    "manifest": lambda tmp: ("manifest", NEOX, "-o", tmp / "m.json"),
    "explain": lambda tmp: ("explain", "FS101"),
}


def run(*argv: object, **options: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, so that what is printed is what a shell sees."""
    command = [sys.executable, "-m", "fastshard", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_one_object_with_exit_code_and_findings(name: str, tmp_path: Path) -> None:
    done = run(*COMMANDS[name](tmp_path), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 0, done
    assert document["command"] == name
    jsonschema.validate(
        document["findings"],
        json.loads(resources.files("fastshard").joinpath("schemas/findings.v2.schema.json").read_text()),
    )


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "explain"])
def test_json_of_a_failure_is_one_object_too(name: str, tmp_path: Path) -> None:
    argv = [tmp_path / "nowhere" if a == NEOX else a for a in COMMANDS[name](tmp_path)]
    done = run(*argv, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"] == 2
    assert document["findings"][0]["code"] == "FS501"


@pytest.mark.parametrize("name", COMMANDS)
def test_text_goes_to_stdout_and_nothing_else_does(name: str, tmp_path: Path) -> None:
    done = run(*COMMANDS[name](tmp_path))
    assert done.returncode == 0
    assert done.stdout.strip() and "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["merge", "convert", "verify", "manifest"])
def test_findings_go_where_they_were_asked_for_with_help(name: str, tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    argv = [ckpt if a == NEOX else a for a in COMMANDS[name](tmp_path)]
    done = run(*argv)
    assert done.returncode == 3
    # Of a command that judges they are the result.
    told, other = (done.stdout, done.stderr) if VERBS[name].finds else (done.stderr, done.stdout)
    assert f"error FS101: {STEP}/{layer_file(3, 1)}" in told
    assert f"help      copy {layer_file(3, 1)} from the node" in told
    assert told.splitlines()[-1].startswith(f"{ckpt}: INCOMPLETE, ") and told.endswith("(exit 3)\n")
    assert "FS101" not in other


def test_inspect_judges_by_headers(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / STEP / layer_file(3, 1)).unlink()
    ran = cli("inspect", ckpt)
    assert ran.code == 3 and ran.doc["complete"] is False and ran.having("FS101")


def test_inspect_says_what_it_is() -> None:
    document = cli("inspect", NEOX).doc
    assert (
        document["framework"] == "GPT-NeoX" and document["topology"] == {"tp": 2} and document["step"] == STEP
    )
    assert document["tensors"] == 40 and document["complete"] is True
    assert document["dtypes"]["BF16"]["tensors"] == 40
    assert document["metadata"]["iteration"] == 4


@pytest.mark.parametrize("command", ["merge", "verify", "plan"])
def test_what_was_not_checked_is_printed(command: str, tmp_path: Path) -> None:
    """Without a config or an index nothing states what must exist."""
    (tmp_path / "ckpt").mkdir()
    file = HF / "model-00001-of-00004.safetensors"
    (tmp_path / "ckpt/model.safetensors").write_bytes(file.read_bytes())
    argv = (command, tmp_path / "ckpt", *((tmp_path / "out",) if command == "merge" else ()))
    assert cli(*argv).having("FS109")
    again = ("--overwrite",) if command == "merge" else ()
    text = cli(*argv, *again, json_output=False)
    assert "not checked: " in text.err + text.out


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("merge",),
        ("merge", TP4),
        ("convert", TP4, "out"),
        ("nothing",),
        ("merge", TP4, "out", "--nothing"),
        ("merge", TP4, "out", "--dtype", "f8"),
        ("merge", TP4, "out", "--replicas", "some"),
        ("verify",),
        ("merge", TP4, "out", "--vocab-size", "many"),
        ("merge", TP4, "out", "--fsync", "maybe"),
        ("explain", "FS999"),
        ("merge", TP4, "out", "--threads", "0"),
        ("merge", TP4, "out", "--threads", "-1"),
        ("merge", TP4, "out", "--vocab-size", "0"),
        ("merge", TP4, "out", "--memory", "lots"),
        ("merge", TP4, "out", "--max-shard-size", "0"),
        ("convert", TP4, "out", "--to", "nothing"),
        ("convert", TP4, "out", "--to", "hf", "--zarr2"),
        ("verify", TP4, "--subset", "3/2"),
        ("verify", TP4, "--subset", "0/2"),
        ("verify", TP4, "--subset", "x"),
        ("merge", TP4, "out", "--optimizer"),
        ("merge", TP4, "out", "--weights", "masters"),
        ("convert", TP4, "out", "--to", "hf", "--tp", "2"),
        ("merge", TP4, "out", "--tokenizer", "nowhere"),
        ("merge", TP4, "out", "--config", "nowhere.json"),
        ("merge", TP4, "out", "--expect", "nowhere.json"),
        ("merge", TP4, "out", "--layout", "nowhere.toml"),
        ("merge", TP4, "out", "--thread", "2"),
        ("inspect", ""),
        ("merge", TP4, ""),
        ("merge", TP4, "", "out"),
        ("diff", TP4, ""),
        ("manifest", TP4, "-o", ""),
        ("inspect", TP4, "--config", ""),
        ("inspect", TP4, "--layout", ""),
        ("verify", TP4, "--expect", ""),
        ("inspect", TP4, "--step", ""),
        ("merge", TP4, "out", "--tokenizer", ""),
        ("inspect", TP4, "--layout", "."),
    ],
    ids=lambda argv: " ".join(str(a) for a in argv if not isinstance(a, Path)) or "none",
)
def test_bad_usage_is_2(argv: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = cli(*argv, json_output=False) if argv else run()
    if argv:
        assert ran.code == 2, ran  # type: ignore[union-attr]
        assert ran.err.strip()  # type: ignore[union-attr]
    else:
        assert ran.returncode == 2  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_explained(code: str) -> None:
    text = cli("explain", code, json_output=False)
    told = " ".join(text.out.split())
    row = CODES[code]
    assert text.code == 0 and code in told and row.meaning in told and row.help in told
    page = PAGES.get(code)
    assert (page is not None) == (code < "FS500")
    if page is not None:
        assert page.why in told and page.confirm in told
        assert all(len(sentence.split()) <= 30 for sentence in [page.why, *page.confirm.split(". ")])
    document = cli("explain", code.lower().removeprefix("fs")).doc
    assert document["code"] == code and (document["meaning"], document["help"]) == (row.meaning, row.help)


def test_codes_are_listed() -> None:
    assert {row["code"] for row in cli("explain").doc["codes"]} == set(CODES)


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0 and fastshard.__version__ in done.stdout


def test_subsets_together_read_everything(tmp_path: Path) -> None:
    assert cli("manifest", TP4, "-o", tmp_path / "m.json").code == 0
    bad = copy(TP4, tmp_path / "bad")
    data = bytearray((bad / "tp_rank_02.safetensors").read_bytes())
    data[-40] ^= 1
    (bad / "tp_rank_02.safetensors").write_bytes(bytes(data))
    codes = [
        cli("verify", bad, "--expect", tmp_path / "m.json", "--subset", f"{n}/4").code for n in range(1, 5)
    ]
    assert sorted(codes) in ([0, 0, 0, 1], [1, 1, 1, 1])
    assert all(
        cli("verify", TP4, "--expect", tmp_path / "m.json", "--subset", f"{n}/4").code == 0
        for n in range(1, 5)
    )


def test_reader_of_stdout_that_leaves_is_no_crash() -> None:
    process = spawn("explain")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    assert process.wait(timeout=HANG) in (0, 2)
    process.stderr.close()


def test_quiet_prints_errors_only(tmp_path: Path) -> None:
    done = run("verify", TP4, "-q")
    assert done.returncode == 0 and done.stderr == ""


def test_a_quiet_diff_speaks_of_differences_only(tmp_path: Path) -> None:
    same = cli("diff", "-q", TP4, TP4, json_output=False)
    assert (same.code, same.out, same.err) == (0, "", "")
    fastshard.merge(HF, tmp_path / "out", exclude=["model.norm.weight"], memory="2GiB")
    (tmp_path / "out/config.json").unlink()
    other = cli("diff", "-q", HF, tmp_path / "out", json_output=False)
    assert other.code == 1 and other.err == "" and "model.norm.weight" in other.out


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (("merge", TP4), "merge"),
        (("manifest", TP4, "--include", "x"), "manifest"),
        (("diff", TP4), "diff"),
        (("inspect", TP4, "--threads", "many"), "inspect"),
        (("master-weights", TP4, "--resume"), "master-weights"),
        (("mrege", TP4), None),
        ((), None),
        (("master-weights", "--nothing"), "master-weights"),
    ],
)
def test_json_of_bad_usage_names_the_command(argv: tuple[object, ...], command: str | None) -> None:
    document = json.loads(run(*argv, "--json").stdout)
    assert (document["command"], document["exit_code"]) == (command, 2)
    assert document["findings"][0]["code"] == "FS515"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ("manifest", TP4, "--include", "x"),
            "it is an option of stats, trace, plan, merge, convert, consolidate, verify, diff, split",
        ),
        (("verify", TP4, "--tokenizer", "x"), "it is an option of plan, merge, convert, layers, loss, split"),
        (
            ("master-weights", TP4, "--max-shard-size", "1GB"),
            "it is an option of trace, plan, merge, convert, zero-to-fp32, consolidate, split",
        ),
        (
            ("clean", "out", "--memory", "1GiB"),
            "it is an option of inspect, ls, stats, trace, report, plan, merge, convert, zero-to-fp32, "
            "consolidate, master-weights, verify, find, steps, diff, layers, loss, manifest, attest, split, "
            "make-part, commit, copy-local",
        ),
        (("master-weights", TP4, "--drop-optimiser"), "did you mean --drop-optimizer?"),
        (("plan", TP4, "--tokeniser", "x"), "did you mean --tokenizer?"),
    ],
)
def test_flags_of_another_command_are_said_to_be(argv: tuple[object, ...], told: str) -> None:
    ran = cli(*argv, json_output=False)
    first, hint = ran.err.splitlines()
    assert ran.code == 2 and first.endswith(told), ran.err
    assert hint == f"  help      fastshard {argv[0]} --help lists all options"
    assert ran.err.count("did you mean") == told.count("did you mean")


def test_plan_takes_a_tokenizer(tmp_path: Path) -> None:
    ran = cli("plan", NEOX, "--to", "hf", "--tokenizer", tmp_path)
    assert ran.code == 2 and ran.having("FS501", message="the directory holds no tokenizer")


@pytest.mark.parametrize(
    "file",
    [
        HF / "config.json",
        HF / "model.safetensors.index.json",
        TP4 / "layout.json",
        NEOX / "latest",
        FIXTURES / "README.md",
        FIXTURES / "sharded/dcp_tp_micro/.metadata",
    ],
    ids=lambda file: file.name,
)
def test_a_file_that_only_tells_of_tensors_leads_to_its_folder(file: Path, tmp_path: Path) -> None:
    for argv in (("inspect", file), ("merge", file, tmp_path / "out"), ("verify", file), ("diff", HF, file)):
        ran = cli(*argv)
        assert ran.code == 2 and ran.having("FS513", message="holds no tensors", help=str(file.parent))
    assert [f["code"] for f in ran.errors] == ["FS513"]


@pytest.mark.parametrize(
    "ckpt",
    [
        "sharded/hf_sharded",
        "sharded/tp4_micro",
        "sharded/hf_sharded/model-00001-of-00004.safetensors",
        "sharded/dcp_tp_micro",
        "orbax/gpt3_micro_scan_bf16_zarr2",
    ],
)
def test_a_step_is_asked_of_what_has_none(ckpt: str) -> None:
    ran = cli("inspect", FIXTURES / ckpt, "--step", "77")
    assert ran.code == 2 and ran.having("FS501", message="no step '77': this checkpoint has no steps"), (
        ran.findings
    )
    other = cli("inspect", NEOX, "--step", "77")
    assert other.having("FS501", expected="one of global_step4")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("inspect", HF, "--config", HF), "FS211"),
        (("inspect", HF, "--layout", HF), "FS211"),
        (("manifest", HF, "-o", HF), "FS515"),
    ],
)
def test_a_folder_where_a_file_is_named_says_so(argv: tuple[object, ...], code: str) -> None:
    ran = cli(*argv)
    assert ran.code == 2 and ran.having(code, message="a directory, not a file", help="name a file")


@pytest.mark.parametrize("flag", [["--overwrite"], ["--resume"], ["--drop-optimizer"], ["--fsync", "none"]])
def test_flags_of_a_repair_need_one(flag: list[str]) -> None:
    ran = cli("master-weights", FIXTURES / "deepspeed/zero1_bf16_dp2", *flag)
    assert ran.code == 2 and ran.having("FS515", message=f"{flag[0]} needs --repair OUT")


def test_locale_without_utf8_is_no_crash(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import zeros

    save_file({"größe.重み": zeros(2)}, tmp_path / "model.safetensors")
    done = run(
        "inspect",
        "-v",
        tmp_path,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_names_every_change_of_values() -> None:
    plan = ("plan", FIXTURES / "maxtext_twins/a_mt_f32_scan", "--to", "hf")
    for options, ops in (((), {"scale 4"}), (("--dtype", "bf16"), {"scale 4", "cast F32 to BF16 (30)"})):
        ran = cli(*plan, *options, json_output=False)
        (row,) = [line for line in ran.out.splitlines() if line.startswith("changes")]
        assert {op for op in ("scale 4", "cast F32 to BF16 (30)", "add") if op in row} == ops, row
    assert "none: every bit is kept" in cli("plan", HF, "--dtype", "bf16", json_output=False).out


def test_a_plan_tells_how_often_bytes_are_read() -> None:
    """By the shapes: what one rank holds of a divided tensor is read once, a copy for each rank as often as
    there are ranks."""
    merge = cli("plan", HF).doc["read_amplification"]
    assert merge == 1.0 and "reads    1 x" in cli("plan", HF, json_output=False).out
    tensors = fastshard.open(HF)
    divided = cli("plan", HF, "--to", "tp-safetensors", "--tp", 2)
    again = sum(t.nbytes for name, t in tensors.items() if "norm" in name)
    whole = sum(t.nbytes for t in tensors.values())
    assert divided.code == 0 and divided.doc["read_amplification"] == pytest.approx((whole + again) / whole)


@pytest.mark.parametrize("command", [("merge", "out"), ("stats",), ("convert", "out", "--to", "hf")])
def test_a_pattern_that_matches_nothing_is_told_what_it_may_be_meant_for(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    verb, *rest = command
    name = "gpt_neox.embed_in.weight" if "hf" in rest else "0.word_embeddings.weight"
    argv = [tmp_path / word if word == "out" else word for word in rest]
    ran = cli(verb, NEOX, *argv, "--include", name.replace("embed", "embbed"))
    (finding,) = ran.having("FS515")
    assert ran.code == 2 and finding["help"] == f"did you mean {name}?"
