"""What counts as an error: exit codes of verbs that judge, --fail-on, --error, --ignore, --accept,
--exit-zero."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.common.errors import exit_code
from fastshard.common.gate import Gate
from fastshard.errors import Finding
from helpers import FIXTURES, HF, NEOX, STEP, TP4, Ran, cli, copy, layer_file
from safetensors.torch import load_file, save_file

ZERO = FIXTURES / "deepspeed/zero1_bf16_dp2"
TENSOR = "3.attention.dense.weight"
#: Verbs that judge a checkpoint of GPT-NeoX by its headers, and how they are called.
LOOK: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "inspect": lambda ckpt: ("inspect", ckpt),
    "ls": lambda ckpt: ("ls", ckpt),
    "trace": lambda ckpt: ("trace", ckpt, TENSOR),
    "verify": lambda ckpt: ("verify", ckpt),
    "stats": lambda ckpt: ("stats", ckpt),
    "plan": lambda ckpt: ("plan", ckpt),
    "diff": lambda ckpt: ("diff", ckpt, NEOX),
}


def lost(root: Path) -> Path:
    ckpt = copy(NEOX, root)
    (ckpt / STEP / layer_file(4, 1)).unlink()
    return ckpt


def copied(root: Path) -> Path:
    ckpt = copy(NEOX, root)
    shutil.copyfile(ckpt / STEP / layer_file(4, 0), ckpt / STEP / layer_file(4, 1))
    return ckpt


def with_padding(root: Path) -> Path:
    """A warning that is found by reading alone: padded rows that are not zero."""
    ckpt = copy(TP4, root)
    file = ckpt / "tp_rank_03.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][-6:] = 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return ckpt


def with_leftover(root: Path) -> Path:
    """A warning that names alone tell of."""
    ckpt = copy(HF, root)
    shutil.copyfile(min(ckpt.glob("*.safetensors")), ckpt / "model-00007-of-00007.safetensors")
    return ckpt


WARNS = {"FS307": with_padding, "FS108": with_leftover}


def decided(ran: Ran, code: str) -> set[tuple[str, str | None]]:
    return {(f["severity"], f.get("decided")) for f in ran.findings if f["code"] == code}


# --- verbs that judge


@pytest.mark.parametrize(("damage", "code"), [(lost, 3), (copied, 1)])
@pytest.mark.parametrize("verb", LOOK)
def test_a_broken_checkpoint_is_no_success(
    verb: str, damage: Callable[[Path], Path], code: int, tmp_path: Path
) -> None:
    words = LOOK[verb](damage(tmp_path / "ckpt"))
    ran = cli(*words)
    assert (ran.code, ran.doc["exit_code"]) == (code, code), ran.findings
    only_looked_at = cli(*words, "--exit-zero")
    assert (only_looked_at.code, only_looked_at.doc["exit_code"]) == (0, 0)
    assert only_looked_at.findings == ran.findings and ran.errors


@pytest.mark.parametrize("verb", ["inspect", "ls"])
def test_a_good_checkpoint_is_a_success(verb: str) -> None:
    assert cli(verb, NEOX).code == 0
    text = cli(verb, NEOX, json_output=False)
    assert (text.code, text.err) == (0, "")


def test_what_cannot_be_run_is_not_looked_at_either(tmp_path: Path) -> None:
    assert cli("inspect", tmp_path / "nowhere", "--exit-zero").code == 2
    for words in (
        ("split", NEOX, tmp_path / "out", "--parts", 1),
        ("master-weights", ZERO, "--repair", tmp_path / "out"),
    ):
        ran = cli(*words, "--exit-zero")
        assert ran.code == 2 and ran.having("FS515"), ran.findings
    assert cli("merge", NEOX, tmp_path / "out", "--exit-zero", json_output=False).code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lost, copied])
def test_a_manifest_of_a_broken_checkpoint_is_not_made(
    damage: Callable[[Path], Path], tmp_path: Path
) -> None:
    ran = cli("manifest", damage(tmp_path / "ckpt"))
    assert ran.code == (3 if damage is lost else 1)
    assert not list(tmp_path.rglob("fastshard.manifest.json"))


def test_masters_that_differ_are_no_success(tmp_path: Path) -> None:
    from damage import made

    stale = made("zero1_stale_masters", tmp_path / "ckpt")
    assert cli("master-weights", stale).code == 1
    assert cli("master-weights", stale, "--exit-zero").code == 0


def test_a_report_judges_where_it_is_told_to(tmp_path: Path) -> None:
    ckpt, page = lost(tmp_path / "ckpt"), tmp_path / "report.html"
    assert cli("report", ckpt, "-o", page).code == 0
    page.unlink()
    ran = cli("report", ckpt, "-o", page, "--fail-on", "error")
    assert ran.code == 3 and page.stat().st_size and ran.having("FS101")
    odd = with_leftover(tmp_path / "odd")
    assert cli("report", odd, "-o", page, "--fail-on", "error").code == 0
    assert cli("report", odd, "-o", page, "--fail-on", "warning").code == 1
    assert cli("report", odd, "-o", page, "--error", "FS108").code == 1


# --- a gate


@pytest.mark.parametrize(
    "option", [("--fail-on", "warning"), ("--error", "CODE")], ids=lambda option: option[0]
)
@pytest.mark.parametrize("warns", WARNS)
def test_a_warning_can_stop_what_writes(warns: str, option: tuple[str, str], tmp_path: Path) -> None:
    ckpt, out = WARNS[warns](tmp_path / "ckpt"), tmp_path / "out"
    words = [warns if word == "CODE" else word for word in option]
    by = f"error {warns}" if option[0] == "--error" else "fail_on warning"
    for command in (("merge", ckpt, out), ("convert", ckpt, out, "--to", "tp-safetensors", "--tp", "2")):
        assert cli(*command, "--json", *words, json_output=False).code == 1
        ran = cli(*command, *words)
        assert (ran.code, ran.doc["written"], decided(ran, warns)) == (1, False, {("error", by)})
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    ran = cli("verify", ckpt, *words)
    assert (ran.code, decided(ran, warns)) == (1, {("error", by)})
    text = cli("verify", ckpt, *words, json_output=False)
    assert f"error {warns} (by --{by.replace('_', '-')}): " in text.out
    assert cli("merge", ckpt, out).code == 0 and cli("verify", ckpt).code == 0


def test_a_gate_holds_for_a_run_in_parts(tmp_path: Path) -> None:
    """Given once, when it is begun: who commits need not know of it."""
    ckpt, out = with_padding(tmp_path / "ckpt"), tmp_path / "out"
    begun = cli("split", ckpt, out, "--parts", 1, "--error", "FS307")
    assert begun.code == 0
    run = begun.doc["run"]
    assert cli("make-part", 0, out, "--run", run).code == 0
    ran = cli("commit", out, "--run", run)
    assert (ran.code, decided(ran, "FS307")) == (1, {("error", "error FS307")})
    assert not out.exists()


@pytest.mark.parametrize("verb", ["zero-to-fp32", "consolidate"])
def test_a_gate_holds_for_drop_in_commands(verb: str, tmp_path: Path) -> None:
    """DeepSpeed's form of the command, and torch's, take it too."""
    ckpt = ZERO if verb == "zero-to-fp32" else with_padding(tmp_path / "ckpt")
    code = "FS403" if verb == "zero-to-fp32" else "FS307"
    ran = cli(verb, ckpt, tmp_path / "out", "--error", code, "--memory", "2GiB")
    assert (ran.code, decided(ran, code)) == (1, {("error", f"error {code}")})
    assert not (tmp_path / "out").exists()


def test_a_note_can_be_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    shutil.copyfile(min(HF.glob("*.safetensors")), file)
    assert cli("inspect", file).having("FS109")[0]["severity"] == "note"
    ran = cli("inspect", file, "--error", "fs109")
    assert (ran.code, decided(ran, "FS109")) == (1, {("error", "error FS109")})
    # A gate for warnings is none for notes.
    assert cli("inspect", file, "--fail-on", "warning").code == 0


def test_what_counts_as_an_error_hides_nothing(tmp_path: Path) -> None:
    """Echoes of what is broken are left out; what was made an error breaks nothing."""
    ckpt = with_leftover(tmp_path / "ckpt")
    config = json.loads((ckpt / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (ckpt / "config.json").write_text(json.dumps(config))
    before, after = cli("inspect", ckpt), cli("inspect", ckpt, "--error", "FS108")
    assert [f["code"] for f in before.errors]
    assert {f["code"] for f in after.errors} == {f["code"] for f in before.errors} | {"FS108"}


@pytest.mark.parametrize("warns", WARNS)
def test_what_is_ignored_is_recorded(warns: str, tmp_path: Path) -> None:
    ckpt, out = WARNS[warns](tmp_path / "ckpt"), tmp_path / "out"
    ignored = {("warning", f"ignore {warns}")}
    # It is no warning for a gate either.
    ran = cli("merge", ckpt, out, "--ignore", warns, "--fail-on", "warning")
    assert (ran.code, decided(ran, warns)) == (0, ignored)
    manifest = json.loads((out / "fastshard.manifest.json").read_text())
    assert {(f["severity"], f.get("decided")) for f in manifest["findings"] if f["code"] == warns} == ignored
    text = cli("verify", ckpt, "--ignore", warns, json_output=False)
    assert text.code == 0 and "warning" not in text.out
    assert f"ignored as requested: 1 of {warns}" in text.out
    assert f"warning {warns}" in cli("verify", ckpt, "--ignore", warns, "-v", json_output=False).out
    document = cli("verify", ckpt, "--ignore", warns).doc
    assert (document["ok"], document["warnings"]) == (True, 0)
    made = cli("manifest", ckpt, "--ignore", warns)
    assert (made.code, decided(made, warns)) == (0, ignored)
    inventory = json.loads((ckpt / "fastshard.manifest.json").read_text())
    assert {(f["severity"], f.get("decided")) for f in inventory["findings"] if f["code"] == warns} == ignored


@pytest.mark.parametrize("damage", [lost, copied])
@pytest.mark.parametrize("verb", LOOK)
def test_an_error_is_not_ignored(verb: str, damage: Callable[[Path], Path], tmp_path: Path) -> None:
    ckpt = damage(tmp_path / "ckpt")
    code = "FS101" if damage is lost else "FS303"
    ran = cli(*LOOK[verb](ckpt), "--ignore", code, *(() if verb == "stats" else ("--exit-zero",)))
    assert (ran.code, {f["code"] for f in ran.errors}) == (2, {"FS515"}), ran.findings
    assert f"ignore {code}" in ran.errors[0]["message"] and layer_file(4, 1) in ran.errors[0]["message"]
    ran = cli("merge", ckpt, tmp_path / "out", "--ignore", code)
    assert (ran.code, {f["code"] for f in ran.errors}) == (2, {"FS515"})
    assert not (tmp_path / "out").exists()


def test_an_error_that_is_found_by_reading_is_not_ignored(tmp_path: Path) -> None:
    ckpt = copy(FIXTURES / "sharded/tp4_micro", tmp_path / "ckpt")
    file = sorted(ckpt.glob("*.safetensors"))[1]
    shutil.copyfile(sorted(ckpt.glob("*.safetensors"))[0], file)
    assert cli("merge", ckpt, tmp_path / "out").having("FS303")
    ran = cli("merge", ckpt, tmp_path / "out", "--ignore", "FS303")
    assert (ran.code, {f["code"] for f in ran.errors}) == (2, {"FS515"})
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_checkpoint_that_is_not_opened_is_not_ignored(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    (ckpt / "latest").write_text("global_step9")
    assert cli("inspect", ckpt).having("FS105")
    ran = cli("inspect", ckpt, "--ignore", "FS105")
    assert (ran.code, {f["code"] for f in ran.errors}) == (2, {"FS515"})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ignore", "FS999"), "no finding has the code FS999"),
        (("--error", "warnings"), "no finding has the code warnings"),
        (("--error", "FS108", "--ignore", "108"), "FS108 is in both error and ignore"),
    ],
)
def test_codes_that_cannot_be_meant(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    for command in (("inspect", NEOX), ("merge", NEOX, tmp_path / "out"), ("diff", NEOX, NEOX)):
        ran = cli(*command, *words)
        assert ran.code == 2 and ran.having("FS515", message=told), ran.findings
    assert list(tmp_path.iterdir()) == []


# --- what was accepted


def test_what_was_accepted_is_a_warning_and_a_trusted_manifest_accepts_it(tmp_path: Path) -> None:
    ckpt, out = copied(tmp_path / "ckpt"), tmp_path / "out"
    accepted = {("warning", "accept copies")}
    ran = cli("convert", ckpt, out, "--to", "gpt_neox", "--tp", "2", "--accept", "copies")
    assert ran.code == 0 and decided(ran, "FS303") == accepted, ran.findings
    manifest = json.loads((out / "fastshard.manifest.json").read_text())
    recorded = {(f["severity"], f.get("decided")) for f in manifest["findings"] if f["code"] == "FS303"}
    assert recorded == accepted
    ran = cli("verify", out)
    assert ran.code == 0 and decided(ran, "FS303") == {("warning", None)}, ran.findings
    assert cli("verify", out, "--fail-on", "warning").code == 1
    # Whoever wrote the result wrote the manifest in it; a copy elsewhere is the user's.
    (tmp_path / "trusted.json").write_bytes((out / "fastshard.manifest.json").read_bytes())
    ran = cli("verify", out, "--expect", tmp_path / "trusted.json", "--fail-on", "warning")
    assert ran.code == 0 and decided(ran, "FS303") == accepted, ran.findings
    # What is made of it accepts nothing.
    ran = cli("merge", out, tmp_path / "again")
    assert ran.code == 1 and ran.having("FS303", severity="error"), ran.findings
    # Without the manifest nobody has accepted anything.
    (out / "fastshard.manifest.json").rename(tmp_path / "away")
    assert cli("verify", out).code == 1


@pytest.mark.parametrize("what", ["copies", f"copies=*{layer_file(4, 1)}"])
def test_an_inventory_keeps_what_was_accepted(what: str, tmp_path: Path) -> None:
    ckpt = copied(tmp_path / "ckpt")
    assert cli("manifest", ckpt).code == 1
    assert cli("manifest", ckpt, "--accept", what).code == 0
    ran = cli("verify", ckpt)
    assert ran.code == 0 and decided(ran, "FS303") == {("warning", None)}, ran.findings
    assert cli("verify", ckpt, "--fail-on", "warning").code == 1
    assert cli("verify", ckpt, "--fail-on", "warning", "--accept", what).code == 0
    # What is copied since was not accepted.
    shutil.copyfile(ckpt / STEP / layer_file(3, 0), ckpt / STEP / layer_file(3, 1))
    assert cli("verify", ckpt).code == 1


def test_renamed_files_are_accepted_as_they_were(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    one, two = (ckpt / STEP / layer_file(3, rank) for rank in (0, 1))
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    assert cli("verify", ckpt).code == 1
    assert cli("manifest", ckpt, "--accept", "renamed").code == 0
    ran = cli("verify", ckpt)
    assert ran.code == 0 and decided(ran, "FS113") == {("warning", None)}


def test_a_manifest_that_says_odd_things_accepts_nothing(tmp_path: Path) -> None:
    ckpt = copy(NEOX, tmp_path / "ckpt")
    assert cli("manifest", ckpt).code == 0
    path = ckpt / "fastshard.manifest.json"
    document = json.loads(path.read_text())
    document["findings"] = [
        {"code": "FS303", "severity": "warning", "message": "m", "decided": word}
        for word in ("accept all", "accept ", "error FS303")
    ]
    path.write_text(json.dumps(document))
    assert cli("verify", ckpt).code == 0
    shutil.copyfile(ckpt / STEP / layer_file(4, 0), ckpt / STEP / layer_file(4, 1))
    assert cli("verify", ckpt).code == 1


# --- formats and the library


def test_formats_tell_what_was_decided(tmp_path: Path) -> None:
    ckpt = with_leftover(tmp_path / "ckpt")
    log = cli("verify", ckpt, "--ignore", "FS108", "--output-format", "sarif", json_output=False).out
    (told,) = (r for r in json.loads(log)["runs"][0]["results"] if r["ruleId"] == "FS108")
    assert told["suppressions"] == [{"kind": "external", "justification": "ignore FS108"}]
    assert (
        "FS108"
        not in cli("verify", ckpt, "--ignore", "FS108", "--output-format", "github", json_output=False).out
    )
    assert (
        "FS108"
        not in cli(
            "verify", ckpt, "--ignore", "FS108", "--output-format", "junit", json_output=False
        ).out.split("<testcase", 2)[2:]
    )
    raised = cli("verify", ckpt, "--error", "FS108", "--output-format", "junit", json_output=False)
    assert raised.code == 1 and 'type="FS108"' in raised.out


def test_the_library_judges_alike(tmp_path: Path) -> None:
    ckpt, padded = with_leftover(tmp_path / "ckpt"), with_padding(tmp_path / "padded")
    assert [f.severity for f in fastshard.open(ckpt, error=["FS108"]).findings if f.code == "FS108"] == [
        "error"
    ]
    (told,) = (f for f in fastshard.verify(ckpt, ignore=["FS108"]) if f.code == "FS108")
    assert (told.severity, told.decided) == ("warning", "ignore FS108")
    for call in (
        lambda: fastshard.merge(ckpt, tmp_path / "out", fail_on="warning", memory="2GiB"),
        lambda: fastshard.merge(padded, tmp_path / "out", error=["FS307"], memory="2GiB"),
        lambda: fastshard.stats(padded, fail_on="warning", memory="2GiB"),
        lambda: fastshard.manifest(padded, fail_on="warning", memory="2GiB"),
        lambda: fastshard.diff(padded, padded, fail_on="warning", memory="2GiB"),
        lambda: fastshard.open(padded, to="tp-safetensors", tp=2, fail_on="warning").verify(memory="2GiB"),
    ):
        with pytest.raises(fastshard.ProblemError) as caught:
            call()  # type: ignore[no-untyped-call]
        assert caught.value.code in ("FS108", "FS307")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "padded"]
    assert any(f.severity == "error" for f in fastshard.plan(ckpt, error=["FS108"]).findings)
    for wrong in ({"fail_on": "note"}, {"fail_on": 1}, {"error": "FS108"}, {"ignore": ["FS000"]}):
        with pytest.raises(fastshard.CannotRunError):
            fastshard.open(ckpt, **wrong)  # type: ignore[call-overload]


def test_judged_twice_is_judged_once() -> None:
    found = [Finding.of("FS108", "w"), Finding.of("FS109", "n"), Finding.of("FS101", "e")]
    gate = Gate.of("warning", ["FS109"])
    once = gate.evaluate(found)
    assert gate.evaluate(once) == once
    assert [f.severity for f in once] == ["error", "error", "error"]
    assert [f.decided for f in once] == ["fail_on warning", "error FS109", None]
    assert Gate().evaluate(found) == found


def test_findings_keep_their_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema: Any = json.loads(
        (Path(fastshard.__file__).parent / "schemas/findings.v2.schema.json").read_text()
    )
    ckpt = with_leftover(tmp_path / "ckpt")
    for words in (("--error", "FS108"), ("--ignore", "FS108"), ("--fail-on", "warning")):
        jsonschema.validate(cli("verify", ckpt, *words).findings, schema)
    jsonschema.validate(cli("verify", copied(tmp_path / "copied"), "--accept", "copies").findings, schema)


def test_what_a_user_must_decide_is_not_waited_for() -> None:
    """A script waits while the exit code is 3: no file that comes answers a question."""
    missing, question = (Finding.of(code, "m") for code in ("FS101", "FS106"))
    assert [exit_code(found) for found in ([missing], [question], [missing, question])] == [3, 2, 2]
