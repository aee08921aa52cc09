"""Which of a run's steps is taken: one rule for every framework that has steps."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastshard.sources.step_names import is_step, matching, newer, number, plain
from helpers import FIXTURES, HF, assert_refused, cli, copy, read_result
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Framework:
    """A good checkpoint, and how its framework names steps."""

    source: Path
    #: Name of a step's folder.
    name: str
    #: Where in it the checkpoint lies.
    inside: str = ""
    tracker: str | None = None
    #: What the tracker holds.
    tracked: str = "{name}"
    temporary: str = "{name}.tmp"


FRAMEWORKS = {
    "hf": Framework(HF, "checkpoint-{n}", temporary="tmp-{name}"),
    "deepspeed": Framework(
        FIXTURES / "deepspeed/zero1_bf16_dp2/global_step4", "global_step{n}", tracker="latest"
    ),
    "universal": Framework(
        FIXTURES / "universal/zero1_bf16_dp2/global_step4", "global_step{n}", tracker="latest_universal"
    ),
    "megatron": Framework(
        FIXTURES / "sharded/megatron_legacy_tp2_pp2/iter_0000010",
        "iter_{n:07d}",
        tracker="latest_checkpointed_iteration.txt",
        tracked="{n}",
    ),
    "torch_dist": Framework(
        FIXTURES / "sharded/megatron_torch_dist_tp2_pp2/iter_0000010",
        "iter_{n:07d}",
        tracker="latest_checkpointed_iteration.txt",
        tracked="{n}",
    ),
    "dcp": Framework(FIXTURES / "sharded/dcp_fsdp2", "step-{n}"),
    "colossalai": Framework(
        FIXTURES / "sharded/colossalai_049_tp2_pp2", "epoch-0_step-{n}", temporary="{name}-tmp"
    ),
    "orbax": Framework(
        FIXTURES / "orbax/gpt3_micro_scan_bf16_zarr2/ckpt",
        "{n}",
        inside="items",
        temporary="{name}.orbax-checkpoint-tmp-0",
    ),
    "paxml": Framework(
        FIXTURES / "orbax/paxml_gpt3_micro_weights", "checkpoint_{n:08d}", temporary="{name}.tmp_1"
    ),
}


def source_of(framework: Framework) -> Path:
    """Paxml's fixture has the step's folder in it."""
    held = framework.source
    while not any(
        p.is_file() for p in held.iterdir() if p.suffix != ".json" or len(list(held.iterdir())) > 3
    ):
        inner = [p for p in held.iterdir() if p.is_dir()]
        if len(inner) != 1 or inner[0].name == "state":
            break
        held = inner[0]
    return held


def run_of(framework: Framework, root: Path, *numbers: int, tracked: int | None = None) -> Path:
    for n in numbers:
        folder = root / framework.name.format(n=n) / framework.inside
        shutil.copytree(source_of(framework), folder)
        (folder / "expected.json").unlink(missing_ok=True)
    if tracked is not None:
        assert framework.tracker
        (root / framework.tracker).write_text(tracked_text(framework, tracked))
    return root


def tracked_text(framework: Framework, n: int) -> str:
    return framework.tracked.format(n=n, name=framework.name.format(n=n))


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


def taken(ran: object) -> str:
    assert ran.code == 0, ran.findings  # type: ignore[attr-defined]
    return str(ran.doc["step"])  # type: ignore[attr-defined]


def test_the_newest_by_number_is_taken_and_said_first(framework: Framework, tmp_path: Path) -> None:
    run = run_of(framework, tmp_path / "run", 9, 10, 2)
    name = framework.name.format(n=10)
    ran = cli("inspect", run)
    assert taken(ran) == name and ran.doc["complete"], ran.findings
    assert ran.having("FS112")[0]["message"].startswith(f"step {name} is used, the newest by number; 2 more")
    first = cli("inspect", run, json_output=False).out.splitlines()[0]
    assert first.startswith(f"step {name} is used")
    ran = cli("merge", run, tmp_path / "out", json_output=False)
    assert ran.code == 0 and ran.out.splitlines()[0].startswith(f"step {name} is used")
    for wanted in ("9", framework.name.format(n=9)):
        ran = cli("inspect", run, "--step", wanted)
        assert taken(ran) == framework.name.format(n=9) and not ran.having("FS112")
    assert_refused(run, tmp_path / "other", "FS501", exit=2, options=("--step", "11"))


@pytest.mark.parametrize("held", ["empty", "texts"])
def test_a_newer_one_that_cannot_be_used_is_not_passed_over(
    held: str, framework: Framework, tmp_path: Path
) -> None:
    run = run_of(framework, tmp_path / "run", 9, 10)
    later = run / framework.name.format(n=30)
    later.mkdir()
    if held == "texts":
        # A bare number is a step where it holds what steps hold.
        inside = framework.inside or next(p.name for p in (run / framework.name.format(n=9)).iterdir())
        (later / inside).mkdir() if framework.inside else (later / inside).write_bytes(b"")
        if framework.name != "{n}":
            (later / inside).unlink()
            (later / "notes.md").write_text("nothing else was written")
    name = framework.name.format(n=10)
    assert_refused(run, tmp_path / "out", "FS104", exit=3, file=later.name)
    ran = cli("merge", run, tmp_path / "accepted", "--accept", "older-step")
    assert ran.code == 0 and ran.having("FS104")[0]["severity"] == "warning", ran.findings
    ran = cli("merge", run, tmp_path / "asked", "--step", name)
    assert ran.code == 0 and not ran.having("FS104"), ran.findings
    # An older one that is broken is nobody's business.
    later.rename(run / framework.name.format(n=1))
    ran = cli("inspect", run)
    assert taken(ran) == name and not ran.having("FS104")


def test_a_newer_one_that_is_being_written_is_a_warning(framework: Framework, tmp_path: Path) -> None:
    run = run_of(framework, tmp_path / "run", 9, 10)
    name = framework.name.format(n=10)
    later = run / framework.temporary.format(name=framework.name.format(n=30))
    later.mkdir()
    for content in ("nothing", "a text", "all of it"):
        if content == "a text":
            (later / "notes.md").write_text("begun")
        if content == "all of it":
            shutil.rmtree(later)
            shutil.copytree(run / name, later)
        ran = cli("inspect", run)
        assert taken(ran) == name
        (told,) = ran.having("FS104")
        assert told["severity"] == "warning" and told["file"] == later.name


TRACKED = {key: f for key, f in FRAMEWORKS.items() if f.tracker}


@pytest.mark.parametrize("key", TRACKED)
def test_the_tracker_is_followed_and_what_is_newer_is_named(key: str, tmp_path: Path) -> None:
    framework = TRACKED[key]
    run = run_of(framework, tmp_path / "run", 2, 9, tracked=2)
    name = framework.name.format(n=2)
    (run / framework.name.format(n=30)).mkdir()
    ran = cli("merge", run, tmp_path / "out")
    assert ran.code == 0, ran.findings
    assert ran.having("FS112")[0]["message"].startswith(f"step {name} is used, {framework.tracker} names it")
    told = {f["file"]: f["severity"] for f in ran.having("FS104")}
    assert told == {framework.name.format(n=n): "warning" for n in (9, 30)}


@pytest.mark.parametrize("key", TRACKED)
@pytest.mark.parametrize(("there", "code"), [(False, "FS105"), (True, "FS104")])
def test_a_tracker_that_names_what_cannot_be_used(there: bool, code: str, key: str, tmp_path: Path) -> None:
    framework = TRACKED[key]
    run = run_of(framework, tmp_path / "run", 2, 9, tracked=12)
    if there:
        (run / framework.name.format(n=12)).mkdir()
    assert_refused(run, tmp_path / "out", code, exit=3)
    ran = cli("merge", run, tmp_path / "out", "--accept", "older-step")
    assert ran.code == 0 and ran.having(code)[0]["severity"] == "warning", ran.findings
    assert framework.name.format(n=9) in ran.having("FS112")[0]["message"]


@pytest.mark.parametrize("key", TRACKED)
def test_a_tracker_and_no_step_at_all(key: str, tmp_path: Path) -> None:
    framework = TRACKED[key]
    run = run_of(framework, tmp_path / "run", 2, tracked=2)
    shutil.rmtree(run / framework.name.format(n=2))
    for options in ((), ("--accept", "older-step")):
        assert_refused(run, tmp_path / "out", "FS105", exit=3, options=options, file=framework.tracker)


def test_trackers_of_hosts_that_name_different_steps(tmp_path: Path) -> None:
    framework = FRAMEWORKS["deepspeed"]
    one = run_of(framework, tmp_path / "one", 2, 9, tracked=2)
    two = run_of(framework, tmp_path / "two", 2, 9, tracked=9)
    assert_refused([one, two], tmp_path / "out", "FS107")


def test_steps_of_a_framework_in_those_of_the_trainer(tmp_path: Path) -> None:
    framework = FRAMEWORKS["deepspeed"]
    for n in (500, 1000):
        run_of(framework, tmp_path / f"run/checkpoint-{n}", n, tracked=n)
    for options, n in (((), 1000), (("--step", "500"), 500), (("--step", "checkpoint-500"), 500)):
        assert taken(cli("inspect", tmp_path / "run", *options)) == f"global_step{n}"
    (tmp_path / "run/checkpoint-1500").mkdir()
    assert_refused(tmp_path / "run", tmp_path / "out", "FS104", exit=3, file="checkpoint-1500")


def test_steps_of_the_trainer_on_several_hosts(tmp_path: Path) -> None:
    """Each host has written its rank's file of the optimizer, the first one the model."""
    framework = FRAMEWORKS["deepspeed"]
    hosts = [tmp_path / f"run/node{rank}" for rank in (0, 1)]
    for rank, host in enumerate(hosts):
        for n in (500, 1000):
            step = run_of(framework, host / f"checkpoint-{n}", n, tracked=n) / f"global_step{n}"
            next(step.glob(f"*zero_pp_rank_{1 - rank}_*_optim_states.pt")).unlink()
            if rank:
                (step / "mp_rank_00_model_states.pt").unlink()
    for named in ([tmp_path / "run"], hosts):
        for options, n in (((), 1000), (("--step", "500"), 500)):
            ran = cli("merge", *named, tmp_path / f"out-{len(named)}-{n}", "--optimizer", *options)
            assert ran.code == 0, (named, ran.errors)
            assert (
                f"global_step{n}" in (tmp_path / f"out-{len(named)}-{n}/fastshard.manifest.json").read_text()
            )
    # What hosts do not share are runs.
    (hosts[0] / "checkpoint-500").rename(hosts[0] / "checkpoint-700")
    ran = cli("merge", tmp_path / "run", tmp_path / "out")
    assert ran.code and not (tmp_path / "out").exists(), ran.findings


def test_numbered_folders_that_are_no_steps_say_nothing(tmp_path: Path) -> None:
    shutil.copytree(HF, tmp_path / "run/llama-7")
    (tmp_path / "run/llama-70").mkdir()
    (tmp_path / "run/checkpoint-9").mkdir()
    assert cli("merge", tmp_path / "run", tmp_path / "out").code == 0


def test_the_step_asked_for_is_taken_where_a_model_lies_beside_steps(tmp_path: Path) -> None:
    """The Trainer saves its last model in the run's own folder."""
    run = tmp_path / "run"
    shutil.copytree(HF, run)
    shutil.copytree(HF, run / "checkpoint-500")
    shutil.copytree(HF, run / "checkpoint-1000")
    assert taken(cli("inspect", run)) == "None"
    assert taken(cli("inspect", run, "--step", "500")) == "checkpoint-500"
    assert_refused(run, tmp_path / "out", "FS501", exit=2, options=("--step", "700"))
    model = FRAMEWORKS["colossalai"]
    run = tmp_path / "colossalai"
    shutil.copytree(model.source, run)
    assert_refused(run, tmp_path / "out", "FS501", exit=2, options=("--step", "10"))


def test_one_step_of_the_trainer_is_as_several(tmp_path: Path) -> None:
    framework = FRAMEWORKS["deepspeed"]
    run_of(framework, tmp_path / "run/checkpoint-500", 500, tracked=500)
    for step in ("500", "checkpoint-500", "global_step500"):
        assert taken(cli("inspect", tmp_path / "run", "--step", step)) == "global_step500"
    (tmp_path / "run/checkpoint-1000").mkdir()
    (tmp_path / "run/checkpoint-1000/rng_state_0.pth").write_bytes(b"")
    assert_refused(tmp_path / "run", tmp_path / "out", "FS104", exit=3, file="checkpoint-1000")


@pytest.mark.parametrize("hosts", [("node0", "node1"), ("ckpt-node0", "ckpt-node1"), ("0", "1")])
def test_folders_of_hosts_are_no_steps(hosts: tuple[str, str], tmp_path: Path) -> None:
    source = FIXTURES / "deepspeed/zero1_bf16_dp2/global_step4"
    for rank, host in enumerate(hosts):
        folder = tmp_path / "run" / host / "global_step20"
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if f"zero_pp_rank_{1 - rank}_" not in file.name and (rank == 0 or "model" not in file.name):
                shutil.copy(file, folder)
    assert taken(cli("inspect", tmp_path / "run")) == "global_step20"
    ran = cli("merge", tmp_path / "run", tmp_path / "out")
    assert ran.code == 0, ran.findings


@pytest.mark.parametrize("key", ["megatron", "torch_dist"])
def test_a_tracker_may_name_what_has_no_number(key: str, tmp_path: Path) -> None:
    framework = FRAMEWORKS[key]
    run = run_of(framework, tmp_path / "run", 10)
    shutil.copytree(source_of(framework), run / "release")
    for text, name in (("release", "release"), ("10", "iter_0000010")):
        (run / "latest_checkpointed_iteration.txt").write_text(text)
        assert taken(cli("inspect", run)) == name
        assert taken(cli("inspect", run, "--step", "release")) == "release"


def test_optimizer_state_beside_a_model_of_fsdp_is_no_step(tmp_path: Path) -> None:
    """As accelerate and the Trainer save with SHARDED_STATE_DICT."""
    source = FRAMEWORKS["dcp"].source
    for n in (500, 1000):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            shutil.copytree(source, tmp_path / f"run/checkpoint-{n}/{part}")
    assert taken(cli("inspect", tmp_path / "run")) == "checkpoint-1000"
    assert taken(cli("inspect", tmp_path / "run", "--step", "500")) == "checkpoint-500"
    ran = cli("merge", tmp_path / "run/checkpoint-500", tmp_path / "out")
    assert ran.code == 0 and ran.having("FS108", file="optimizer_0"), ran.findings


def test_shards_that_were_consolidated_are_no_step_of_their_own(tmp_path: Path) -> None:
    source = FIXTURES / "sharded/dcp_hf_rank_sharded_micro"
    shutil.copytree(HF, tmp_path / "run/step-100")
    shutil.copytree(source, tmp_path / "run/step-100/sharded")
    shutil.copytree(HF, tmp_path / "run/step-200")
    assert taken(cli("inspect", tmp_path / "run")) == "step-200"
    assert taken(cli("inspect", tmp_path / "run", "--step", "100")) == "step-100"


def test_a_year_beside_steps_is_no_step(tmp_path: Path) -> None:
    run = run_of(FRAMEWORKS["orbax"], tmp_path / "run", 9)
    (run / "2024").mkdir()
    (run / "2024/notes.md").write_text("logs")
    assert taken(cli("inspect", run)) == "9"


names = st.sampled_from(["{}", "checkpoint-{}", "global_step{}", "iter_{:07d}", "ckpt_{}", "epoch1-step{}"])


@given(names, st.integers(0, 10**9), st.integers(0, 10**9))
def test_names_are_ordered_by_their_numbers(name: str, a: int, b: int) -> None:
    one, two = name.format(a), name.format(b)
    assert newer(one, two) == (a > b)
    assert is_step(one) and number(one) == a
    assert matching([one], str(a)) == [one] and matching([one], one) == [one]
    assert matching([one], two) == ([one] if a == b else [])


@given(names, st.integers(0, 10**9))
def test_marks_of_temporary_names_are_no_part_of_them(name: str, n: int) -> None:
    whole = name.format(n)
    for mark in ("{}.tmp", "{}.tmp_2", "{}.orbax-checkpoint-tmp-123", "tmp-{}", "{}-tmp", "{}_tmp.3"):
        assert plain(mark.format(whole)) == whole
        assert number(mark.format(whole)) == n
    assert plain(whole) == whole


@pytest.mark.parametrize("tracker", ["latest", "latest_universal", "latest_checkpointed_iteration.txt"])
def test_a_left_over_tracker_beside_a_model_is_a_warning(tracker: str, tmp_path: Path) -> None:
    """The Trainer's folder after its `global_step` was deleted: the model in it depends on no step."""
    model = copy(HF, tmp_path / "model")
    (model / tracker).write_text("global_step9" if tracker != TRACKED["megatron"].tracker else "9")
    for verb in ("inspect", "verify"):
        ran = cli(verb, model)
        assert ran.code == 0 and not ran.errors, ran.findings
    ran = cli("merge", model, tmp_path / "out")
    assert ran.code == 0, ran.findings
    found = ran.having("FS105")
    assert [(f["severity"], f["file"]) for f in found] == [("warning", tracker)]
    assert read_result(tmp_path / "out").keys() == read_result(model).keys()
    (model / "global_step9").mkdir()
    assert cli("verify", model).code == 0


def test_a_tracker_above_another_model_is_no_leave_to_take_it(tmp_path: Path) -> None:
    copy(HF, tmp_path / "run/export")
    (tmp_path / "run/latest").write_text("global_step9")
    assert_refused(tmp_path / "run", tmp_path / "out", "FS105", exit=3, file="latest")


def test_a_tracker_chooses_among_models_of_hugging_face(tmp_path: Path) -> None:
    run = run_of(FRAMEWORKS["hf"], tmp_path / "run", 2, 9)
    (run / "latest").write_text("checkpoint-2")
    ran = cli("inspect", run)
    assert taken(ran) == "checkpoint-2", ran.findings
    (run / "latest").write_text("checkpoint-12")
    assert_refused(run, tmp_path / "out", "FS105", exit=3, file="latest")
