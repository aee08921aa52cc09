"""`fastshard steps`: every step of a run, a verdict on each, and the tracker files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.common import safe_files
from fastshard.verification import run_steps, verified_steps
from helpers import HF, cli, state_of
from runs import RUNS, copy_steps, deepspeed, huggingface, megatron


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", RUNS)
def test_each_step_has_its_verdict_and_the_run_stays_as_it_is(name: str, tmp_path: Path) -> None:
    make, verdicts = RUNS[name]
    run = make(tmp_path)
    before = state_of(run)
    ran = cli("steps", run)
    assert {step["name"]: step["verdict"] for step in ran.doc["steps"]} == verdicts
    assert [step["name"] for step in ran.doc["steps"]] == list(verdicts)
    newest = next(step for step, verdict in reversed(verdicts.items()) if verdict == "complete")
    assert (ran.doc["newest_complete"], ran.doc["newest"]) == (newest, list(verdicts)[-1])
    # Of every run the newest step is not complete.
    assert ran.code == 3 and ran.errors
    assert state_of(run) == before
    for step in ran.doc["steps"]:
        folder = Path(ran.doc["folder"]) / step["name"]
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert (step["files"], step["bytes"]) == (len(files), sum(path.stat().st_size for path in files))
        assert (step["verdict"] == "complete") == (
            not [f for f in step["findings"] if f["severity"] == "error"]
        )


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_on_a_run_follows_its_newest_step(name: str, tmp_path: Path) -> None:
    make, verdicts = RUNS[name]
    ran = cli("steps", make(tmp_path))
    folder = Path(ran.doc["folder"])
    for step in reversed(verdicts):
        if verdicts[step] == "complete":
            break
        shutil.rmtree(folder / step)
    ran = cli("steps", tmp_path / name if name != "orbax" else folder)
    assert (ran.code, ran.errors) == (0, [])


def test_the_table_names_the_tracker_the_newest_and_the_first_finding(tmp_path: Path) -> None:
    run = megatron(tmp_path)
    os.utime(run / "iter_0000010/mp_rank_00_000/model_optim_rng.pt", (4e9, 4e9))
    ran = cli("steps", run, json_output=False)
    head, first, second, third, *_ = ran.out.splitlines()
    assert head.split()[:3] == ["STEP", "VERDICT", "SIZE"]
    assert first == "iter_0000010  complete    545 kB  2096-10-02 07:06  newest complete"
    assert "incomplete" in second and "in latest_checkpointed_iteration.txt, FS101: " in second
    assert "unfinished" in third and "FS104: iter_0000030: the step directory is empty" in third
    assert (
        "warning FS105: latest_checkpointed_iteration.txt: the tracker file names a step that is incomplete"
        in (ran.out.replace("\n", " "))
    )
    assert ran.out.splitlines()[-1].endswith("(exit 3)")


def test_files_of_findings_are_relative_to_the_run(tmp_path: Path) -> None:
    ran = cli("steps", deepspeed(tmp_path))
    assert ran.errors[0]["file"] == "global_step8/mp_rank_00_model_states.pt"
    assert ran.having("FS105", message="names a missing step", expected="global_step4")


def test_a_step_that_is_damaged_or_no_checkpoint_says_so(tmp_path: Path) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2", "checkpoint-3")
    file = run / "checkpoint-2/model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    shutil.rmtree(run / "checkpoint-3")
    (run / "checkpoint-3").mkdir()
    (run / "checkpoint-3/trainer_state.json").write_text("{}")
    steps = fastshard.steps(run)
    assert [step.verdict for step in steps.steps] == ["complete", "broken", "unreadable"]
    assert cli("steps", run).code == 2
    shutil.rmtree(run / "checkpoint-3")
    assert cli("steps", run).code == 1
    assert cli("steps", run, "--exit-zero").code == 0


def test_data_is_read_with_verify_alone(tmp_path: Path) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    fastshard.manifest(run / "checkpoint-2")
    file = run / "checkpoint-2/model-00002-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ran = cli("steps", run)
    assert ran.code == 0 and [step["verified"] for step in ran.doc["steps"]] == [False, False]
    ran = cli("steps", run, "--verify", "--memory", "2GiB")
    assert ran.code == 1 and [step["verdict"] for step in ran.doc["steps"]] == ["complete", "broken"]
    assert [step["verified"] for step in ran.doc["steps"]] == [True, False]


def test_links_to_steps_are_not_listed_twice(tmp_path: Path) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    (run / "best-checkpoint-1").symlink_to("checkpoint-1")
    (run / "latest").symlink_to("checkpoint-2")
    steps = fastshard.steps(run)
    assert [step.name for step in steps.steps] == ["checkpoint-1", "checkpoint-2"] and steps.trackers == {}


def test_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    assert cli("steps", HF).having("FS501", message="the directory holds no step")
    assert cli("steps", tmp_path / "nowhere").having("FS501", message="no such directory")
    for node in ("node0", "node1"):
        copy_steps(HF, tmp_path / node, "checkpoint-1")
    assert cli("steps", tmp_path).having("FS106", got="node0, node1")
    assert cli("steps", tmp_path / "node0", "--accept", "everything").having("FS515")


# --- tracker files


def test_a_tracker_of_megatron_names_the_newest_complete_step_again(tmp_path: Path) -> None:
    run = megatron(tmp_path)
    before = state_of(run)
    ran = cli("steps", run, "--fix-tracker")
    file = "latest_checkpointed_iteration.txt"
    assert ran.doc["tracker_changes"] == [{"file": file, "before": "20", "after": "10"}]
    assert (run / file).read_text() == "10\n"
    assert ran.doc["steps"][0]["trackers"] == [file] and not ran.having("FS105")
    after = state_of(run)
    assert {name for name in after if before.get(name) != after[name]} == {file}
    assert fastshard.inspect(run).step == "iter_0000010"
    text = cli("steps", run, "--fix-tracker", json_output=False).out
    assert f"{file} names 10 already" in text


def test_a_tracker_of_deepspeed_names_the_newest_complete_step_again(tmp_path: Path) -> None:
    run = deepspeed(tmp_path)
    text = cli("steps", run, "--fix-tracker", json_output=False).out
    assert "latest names global_step4 now; it was global_step12" in text
    assert (run / "latest").read_text() == "global_step4" and list_names(run)[-1] == "latest"
    assert fastshard.inspect(run).step == "global_step4"


@pytest.mark.parametrize("content", ["release", "step twenty", "", "../20", '{"step": 20}', "-1"])
def test_a_tracker_of_an_unknown_form_stays(content: str, tmp_path: Path) -> None:
    run = megatron(tmp_path)
    (run / "latest_checkpointed_iteration.txt").write_text(content)
    before = state_of(run)
    ran = cli("steps", run, "--fix-tracker")
    assert ran.code == 2 and ran.having("FS514", message="format of the tracker file is unknown")
    assert state_of(run) == before


@pytest.mark.parametrize("content", ["20", "global_step4_universal", "../global_step4", "epoch 1, step 2"])
def test_a_tracker_that_names_no_step_of_this_form_stays(content: str, tmp_path: Path) -> None:
    run = deepspeed(tmp_path)
    (run / "latest").write_text(content)
    ran = cli("steps", run, "--fix-tracker")
    assert ran.code == 2 and ran.having("FS514") and (run / "latest").read_text() == content


def test_one_tracker_of_an_unknown_form_keeps_the_others(tmp_path: Path) -> None:
    run = megatron(tmp_path)
    (run / "latest").write_text("global_step20")
    before = state_of(run)
    assert cli("steps", run, "--fix-tracker").code == 2 and state_of(run) == before


def test_a_run_without_a_complete_step_or_a_tracker_is_refused(tmp_path: Path) -> None:
    run = deepspeed(tmp_path)
    shutil.rmtree(run / "global_step4")
    ran = cli("steps", run, "--fix-tracker")
    assert ran.code == 3 and ran.having("FS105", message="no step is complete")
    (run / "latest").unlink()
    assert cli("steps", run, "--fix-tracker").having("FS501", message="no tracker file")
    (run / "latest").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_text("global_step8")
    assert cli("steps", run, "--fix-tracker").having("FS514", got="a link")
    assert (tmp_path / "outside").read_text() == "global_step8"


def test_a_tracker_that_cannot_be_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = deepspeed(tmp_path)

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safe_files.Path, "replace", fail)
    with pytest.raises(fastshard.FastshardError, match="cannot write"):
        fastshard.fix_trackers(fastshard.steps(run))
    assert (run / "latest").read_text() == "global_step12"
    assert list_names(run) == ["global_step4", "global_step8", "latest"]


def test_the_document_is_plain_data(tmp_path: Path) -> None:
    document = fastshard.steps(huggingface(tmp_path)).to_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["steps"][0]["saved"].endswith("Z")


# --- steps that were verified before


def flip(file: Path) -> None:
    """Change one bit of the last byte, and set the time of change back."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that are verified."""
    names: list[str] = []
    real = run_steps.verify_checkpoint

    def verify(path: Path, **options: Any) -> Any:
        names.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(run_steps, "verify_checkpoint", verify)
    return names


def test_a_step_that_did_not_change_is_read_once(tmp_path: Path, read: list[str]) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    before = state_of(run)
    words = ("steps", run, "--verify", "--state", tmp_path / "state", "--memory", "2GiB")
    ran = cli(*words)
    assert ran.code == 0 and read == ["checkpoint-1", "checkpoint-2"] and state_of(run) == before
    assert list_names(tmp_path / "state") == [
        f"checkpoint-{n}.{kind}.json" for n in (1, 2) for kind in ("files", "manifest")
    ]
    shutil.copytree(HF, run / "checkpoint-3")
    ran = cli(*words)
    assert ran.code == 0 and read[2:] == ["checkpoint-3"]
    assert [step["verified"] for step in ran.doc["steps"]] == [True, True, True]


def test_a_step_that_changed_is_compared_with_its_manifest(tmp_path: Path, read: list[str]) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    words = ("steps", run, "--verify", "--state", tmp_path / "state", "--memory", "2GiB")
    assert cli(*words).code == 0
    os.utime(run / "checkpoint-1/config.json")
    flip(run / "checkpoint-2/model-00002-of-00004.safetensors")
    del read[:]
    ran = cli(*words)
    assert read == ["checkpoint-1", "checkpoint-2"]
    assert [step["verdict"] for step in ran.doc["steps"]] == ["complete", "broken"]
    assert ran.code == 1 and ran.having("FS308")
    # Of the first step only the time was new; the other one stays broken.
    assert cli(*words).code == 1 and read[2:] == ["checkpoint-2"]
    (tmp_path / "state/checkpoint-2.files.json").unlink()
    assert cli(*words).code == 0


def test_nothing_is_kept_of_a_step_with_errors_or_one_that_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1", "checkpoint-2")
    (run / "checkpoint-1/model-00002-of-00004.safetensors").unlink()
    real = verified_steps.manifest

    def manifest(step: Path, *words: Any, **options: Any) -> Any:
        flip(step / "model-00002-of-00004.safetensors")
        return real(step, *words, **options)

    monkeypatch.setattr(verified_steps, "manifest", manifest)
    state = tmp_path / "state"
    fastshard.steps(run, verify=True, state=state, memory="2GiB")
    assert list_names(state) == ["checkpoint-2.manifest.json"]


def test_a_state_in_the_run_or_of_another_run_is_refused(tmp_path: Path) -> None:
    run = copy_steps(HF, tmp_path / "run", "checkpoint-1")
    before = state_of(run)
    (tmp_path / "link").symlink_to(run)
    for folder in (run / "state", tmp_path / "link/state", run):
        ran = cli("steps", run, "--verify", "--state", folder)
        assert ran.having("FS515", message="inside the run") and state_of(run) == before
    assert not (run / "state").exists()
    assert cli("steps", run, "--state", tmp_path / "state").having("FS515", message="needs --verify")
    other = copy_steps(HF, tmp_path / "other", "checkpoint-1")
    fastshard.steps(run, verify=True, state=tmp_path / "state", memory="2GiB")
    with pytest.raises(fastshard.FastshardError, match="from another run"):
        fastshard.steps(other, verify=True, state=tmp_path / "state", memory="2GiB")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("checkpoint-1.files.json", "[" * 10_000),
        ("checkpoint-1.files.json", "{"),
        ("checkpoint-1.manifest.json", "{"),
    ],
)
def test_a_damaged_state_says_nothing_about_a_step(name: str, content: str, tmp_path: Path) -> None:
    run, state = copy_steps(HF, tmp_path / "run", "checkpoint-1"), tmp_path / "state"
    fastshard.steps(run, verify=True, state=state, memory="2GiB")
    (state / name).write_text(content)
    # Its manifest is used when it has changed.
    (run / "checkpoint-1" / "more.txt").write_text("more")
    with pytest.raises(fastshard.FastshardError, match="state of a step is damaged") as error:
        fastshard.steps(run, verify=True, state=state, memory="2GiB")
    assert error.value.findings[0].code == "FS515" and error.value.findings[0].file == str(state / name)


def test_a_tracker_keeps_its_mode(tmp_path: Path) -> None:
    run = copy_steps(HF, tmp_path / "run", "step-1", "step-2")
    shutil.rmtree(run / "step-2")
    (run / "latest").write_text("step-2")
    (run / "latest").chmod(0o664)
    fastshard.fix_trackers(fastshard.steps(run))
    assert (run / "latest").read_text() == "step-1" and (run / "latest").stat().st_mode & 0o777 == 0o664
