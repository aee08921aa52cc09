"""A few trials of each series, and proof that the judge sees what it is there to see."""

from __future__ import annotations

import errno
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastshard import _core
from holding import HANG

TRIALS = Path(__file__).parents[1] / "trials"
#: Seconds that a series of families may take on a busy machine; a minute on a free one.
LONG = 850.0
sys.path.append(str(TRIALS))

import trees  # noqa: E402
from intercept import Call, Fail, unavailable  # noqa: E402
from judge import Before, Trial, judge  # noqa: E402
from runner import Ended, Run, Zygote, default_program  # noqa: E402
from torn import choose_cut  # noqa: E402
from trees import Foreign  # noqa: E402
from writes import Cut, Record  # noqa: E402

OLD = {
    "config.json": b'{"old": 1}',
    "model.safetensors": b"older weights",
    trees.MANIFEST: b'{"kind": "old"}',
}
NEW = {
    "config.json": b'{"new": 1}',
    "model.safetensors": b"newer weights",
    trees.MANIFEST: b'{"kind": "new"}',
}


def run_series(name: str, *options: object, timeout: float = HANG) -> str:
    """What a series prints, which finds no violation."""
    if not default_program().is_file():
        pytest.skip(f"{default_program()}: the program is not installed")
    command = [sys.executable, TRIALS / f"{name}.py", "--seed", "1", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)
    if done.returncode == 2 and "nothing can be tried" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    if not default_program().is_file() or unavailable():
        pytest.skip("calls of the program cannot be intercepted here")
    (tmp_path / "streams").mkdir()
    started = Zygote(default_program(), tmp_path / "streams")
    yield started
    started.close()


SOURCE = Path(__file__).parents[1] / "fixtures/sharded/hf_sharded"


def failing(code: int, chosen: Callable[[Call], bool], met: list[Call]) -> Callable[[Run, Call], Fail | None]:
    """Lets the first call that ``chosen`` takes fail, and notes it."""

    def hook(run: Run, call: Call) -> Fail | None:
        if met or not chosen(call):
            return None
        met.append(call)
        return Fail(code)

    return hook


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("removed", ["lock", "sealed", ""])
def test_a_clean_up_that_failed_is_finished_with_resume(
    removed: str, code: int, zygote: Zygote, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    met: list[Call] = []
    last = re.compile(rf"/\.out\.fastshard-[0-9a-f]{{16}}{removed and '/' + removed}$")
    hook = failing(code, lambda call: call.kind == "unlinkat" and bool(last.search(call.path)), met)
    ended = zygote.run("merge", SOURCE, place / "out", watch=[place], hook=hook)
    assert met and ended.code == 0 and "complete, but not cleaned up" in ended.err, ended.said
    made = trees.raw(place / "out")
    assert len(list(place.iterdir())) == 2
    ended = zygote.run("merge", SOURCE, place / "out", "--resume")
    assert ended.code == 0, ended.said
    assert [path.name for path in place.iterdir()] == ["out"]
    assert trees.raw(place / "out") == made


def test_a_status_that_cannot_be_had_of_an_older_result_is_told_as_that(
    zygote: Zygote, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    assert zygote.run("merge", SOURCE, place / "out").code == 0
    met: list[Call] = []
    aside = re.compile(r"/\.out\.fastshard-[0-9a-f]{16}/data/fastshard\.manifest\.json$")

    older = (place / "out").stat().st_ino

    def chosen(call: Call) -> bool:
        # The older result lies there once it was exchanged.
        exchanged = (place / "out").stat().st_ino != older
        return exchanged and call.kind == "statx" and bool(aside.search(call.path))

    options = ("--overwrite", "--max-shard-size", "600KB")
    hook = failing(errno.EIO, chosen, met)
    ended = zygote.run("merge", SOURCE, place / "out", *options, watch=[place], hook=hook)
    assert met and ended.code == 0, ended.said
    assert "complete, but not cleaned up" in ended.err and "Input/output error" in ended.err, ended.said
    assert "fastshard.manifest.json" in ended.err and "not there before" not in ended.said
    ended = zygote.run("merge", SOURCE, place / "out", *options, "--resume")
    assert ended.code == 0, ended.said
    assert [path.name for path in place.iterdir()] == ["out"]


def test_kills() -> None:
    run_series("kills", "--count", 5, "--at-calls")


def test_faults() -> None:
    run_series("faults", "--count", 18, "--cases", "overwrite", "inside", "writer")


def test_torn() -> None:
    run_series("torn", "--count", 12, "--cases", "overwrite", "resume", "inside", "dcp", "writer", "parts")


@pytest.mark.skipif(not _core.STEPS, reason="this build has no steps")
def test_allocations() -> None:
    lines = run_series("allocations", "--count", 6, "--cases", "overwrite", "gather").splitlines()
    names = next(line.split() for line in lines if "violations" in line)
    assert int(lines[-3].split()[1 + names.index("aborted")]) > 0, lines


@pytest.mark.skipif(not _core.STEPS, reason="this build has no steps")
def test_no_large_allocation_aborts_a_run() -> None:
    cases = ("overwrite", "gather", "dcp", "repair")
    lines = run_series("allocations", "--count", 16, "--least", 65536, "--cases", *cases).splitlines()
    names = next(line.split() for line in lines if "violations" in line)
    # Some of them did fail.
    assert int(lines[-3].split()[2 + names.index("exit")]) > 0, lines


@pytest.fixture
def recorded(zygote: Zygote, tmp_path: Path) -> Record:
    """The record of a merge to a new destination."""
    place = tmp_path / "place"
    place.mkdir()
    record = Record(place)
    options = ("--max-shard-size", "600KB", "--threads", "1")
    ended = zygote.run("merge", SOURCE, place / "out", *options, watch=[place], hook=record)
    assert ended.code == 0, ended.said
    record.check()
    return record


def cut_often(record: Record) -> set[str]:
    """What 80 power cuts leave at OUT, and ``lost`` if that is not the result though the run had ended."""
    new = trees.meaning(record.area / "out", trees.raw(record.area / "out") or {})
    left = set()
    for seed in range(80):
        cut = choose_cut(record, random.Random(seed))
        shutil.rmtree(record.area)
        record.area.mkdir()
        cut.make()
        kind = trees.state(record.area / "out", {"new": new}, []).kind
        left.add("lost" if cut.instant == len(record.events) and kind != "new" else kind)
    return left


def test_a_power_cut_leaves_all_of_a_result_or_nothing(recorded: Record) -> None:
    assert cut_often(recorded) == {"absent", "new"}


@pytest.mark.parametrize(
    ("sync", "left"),
    [(r"sync .*/data/", "mixed"), (r"fsync .*/data$", "partial"), (r"fsync \.$", "lost")],
    ids=["files", "directory", "destination"],
)
def test_a_power_cut_shows_that_a_sync_is_missing(sync: str, left: str, recorded: Record) -> None:
    assert recorded.forget(re.compile(sync)) > 0
    assert left in cut_often(recorded)


def test_a_power_cut_leaves_no_plan_without_the_seal_of_a_published_result(recorded: Record) -> None:
    """``--resume`` would take it for a run that has made nothing yet, and the result for somebody's."""
    for seed in range(80):
        cut = Cut(recorded, len(recorded.events), random.Random(seed), ordered=False)
        left = {path.rpartition("/")[2] for path, _ in cut.walk()}
        assert "plan" not in left or "sealed" in left


def test_changes() -> None:
    said = run_series("changes", "--count", 10, "--size", 24, "--at-calls").splitlines()
    names = next(re.split(r"  +", line.strip()) for line in said if "violations" in line)
    # Each change came while the run was at work.
    assert dict(zip(["", *names], re.split(r"  +", said[-3].strip()), strict=True))["hit"] == "10", said


@pytest.mark.slow
def test_ranks() -> None:
    run_series("ranks", "--count", 16, "--jobs", 8)


def test_families_from_dcp(tmp_path: Path) -> None:
    """Eight families: what is published is loaded with none missing, and what is good is not refused."""
    assert "8 families, wrong: 0" in run_series(
        "from_dcp", "--count", 8, "--folder", tmp_path / "dcp", timeout=LONG
    )


def test_families(tmp_path: Path) -> None:
    """Thirty families as save_pretrained writes them: none is accused."""
    printed = run_series("families", "--count", 30, "--few", "--folder", tmp_path / "families", timeout=LONG)
    assert "30 families, 30 models, accused: 0" in printed


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--count", 300], ["--count", 100, "--commands"]], ids=["read", "commands"])
def test_mutations(how: list[object], tmp_path: Path) -> None:
    argv = [sys.executable, TRIALS / "mutations.py", "--seed", 1, "--folder", tmp_path / "trials", *how]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"changes: {how[1]}" in done.stdout and "'same'" in done.stdout and "'refused'" in done.stdout


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A destination with the old result, which may be replaced."""
    known = {}
    for kind, files in (("old", OLD), ("new", NEW)):
        put(tmp_path / kind, files)
        known[kind] = trees.meaning(tmp_path / kind, trees.raw(tmp_path / kind) or {})
    made = Trial(tmp_path / "area", known, overwrite=True)
    put(made.out, OLD)
    return made


def ended(code: int, out: str = "", err: str = "", *argv: str) -> Ended:
    return Ended(argv, code, out, err, 0.1)


def kinds(trial: Trial, run: Ended, before: Before) -> set[str]:
    judge(trial, run, before)
    return {v.kind for v in trial.found}


REFUSED = "error FS504: /t/out: the destination holds more than a result: notes.txt\n"


def test_judge_is_content_with_a_replaced_result(trial: Trial) -> None:
    before = Before(trial.look(), 0)
    put(trial.out, NEW)
    assert kinds(trial, ended(0, "out: done"), before) == set()


def test_judge_is_content_with_a_kill_that_changes_nothing(trial: Trial) -> None:
    before = Before(trial.look(), 0, sent=signal.SIGKILL, begun=True)
    assert kinds(trial, ended(-9), before) == set()


@pytest.mark.parametrize("lost", [b"", b"\0" * 13, b"newer weight", None])
def test_judge_sees_a_result_that_is_not_entire(trial: Trial, lost: bytes | None) -> None:
    before = Before(trial.look(), 0)
    put(trial.out, NEW)
    (trial.out / "model.safetensors").unlink()
    if lost is not None:
        (trial.out / "model.safetensors").write_bytes(lost)
    assert {"a-mixed", "c-exit0"} <= kinds(trial, ended(0), before)


def test_judge_sees_that_the_old_result_is_gone(trial: Trial) -> None:
    before = Before(trial.look(), 0, sent=signal.SIGKILL, begun=True)
    for file in trial.out.iterdir():
        file.unlink()
    assert kinds(trial, ended(-9), before) == {"a-lost"}


def test_judge_sees_foreign_files_that_are_lost_or_hidden(trial: Trial, tmp_path: Path) -> None:
    before = Before(trial.look(), 0)
    trial.foreign = [
        Foreign("notes.txt", b"precious"),
        Foreign("config.json", b"edited"),
        Foreign("src", None),
    ]
    aside = trial.area / ".out.fastshard-0/old"
    put(aside, {**OLD, "config.json": b"edited", "notes.txt": b"precious"})
    (aside / "src").mkdir()
    put(trial.out, NEW)
    named = f"warning FS508: {aside.parent}: published; what was not ours is kept in {aside}"
    assert kinds(trial, ended(0, err=named), before) == set()
    trial.said = ""
    assert kinds(trial, ended(0), before) == {"b-unnamed", "e-litter"}
    (aside / "notes.txt").unlink()
    assert "b-lost" in kinds(trial, ended(0), before)


def test_judge_sees_a_folder_replaced_that_held_foreign_files(trial: Trial) -> None:
    put(trial.out, {"notes.txt": b"precious"})
    trial.foreign = [Foreign("notes.txt", b"precious")]
    before = Before(trial.look(), 1)
    assert before.state.kind == "old"
    assert kinds(trial, ended(2, err=REFUSED), before) == set()
    assert kinds(trial, ended(2, err="error FS504: /t/out: not empty\n"), before) == {"c-list"}
    put(trial.out, NEW)
    assert "b-replaced" in kinds(trial, ended(0), before)


@pytest.mark.parametrize(
    ("published", "run", "kind"),
    [
        (True, ended(2, err="error FS510: stopped by the user\nthis run wrote nothing to OUT"), "c-nothing"),
        (True, ended(2, err="error FS507: /t/out: cannot sync"), "c-silent"),
        (False, ended(1, err="error FS519: /t/out: the result is published"), "c-published"),
        (False, ended(0, "out: done"), "c-exit0"),
        (False, ended(1, err="error FS506: /t/a.bin: changed"), "x-refused"),
        (True, ended(-11), "f-code"),
        (True, ended(0, err="Traceback (most recent call last):\n  x\nValueError"), "f-traceback"),
        (False, ended(2, err="error FS507: Input/output error"), "f-path"),
        (True, ended(0, "{}", "", "--json"), "c-json"),
    ],
)
def test_judge_hears_words_and_codes_that_do_not_fit(
    trial: Trial, published: bool, run: Ended, kind: str
) -> None:
    before = Before(trial.look(), 0)
    if published:
        put(trial.out, NEW)
    assert kind in kinds(trial, run, before)


def test_judge_knows_the_codes_of_signals(trial: Trial) -> None:
    before = Before(trial.look(), 0, sent=signal.SIGTERM, begun=True)
    words = (
        "error FS510: stopped; this run wrote nothing to OUT\n  help: run the same command with --resume to "
        "continue\n"
    )
    assert kinds(trial, ended(143, err=words), before) == set()
    assert kinds(trial, ended(-15), before) == {"old-code"}
    trial.found.clear()
    before.sent = signal.SIGINT
    assert kinds(trial, ended(2, err=words), before) == {"old-code"}
    trial.found.clear()
    (trial.area / ".out.fastshard-0").mkdir()
    assert kinds(trial, ended(130, err="error FS510: stopped"), before) == {"c-resume"}
