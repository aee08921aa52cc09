"""Signals, full disks and closed pipes under the command line: what is said, and which exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
from fastshard.cli.verbs import VERBS
from fastshard.common.errors import Finding, error_for
from helpers import FIXTURES, HF, TP4, at_once, cli, spawn
from holding import HANG, Steps, needs_steps

COMMANDS = {
    "inspect": ["inspect", HF],
    "merge": ["merge", HF, "OUT"],
    "convert": ["convert", HF, "OUT", "--to", "hf"],
    "plan": ["plan", HF],
    "verify": ["verify", HF],
    "stats": ["stats", HF],
    "diff": ["diff", HF, HF],
    "manifest": ["manifest", HF, "-o", "OUT"],
    "masters": ["master-weights", FIXTURES / "deepspeed/zero1_bf16_dp2"],
    "explain": ["explain"],
    "help": ["--help"],
    "help_of_a_verb": ["convert", "--help"],
    "version": ["--version"],
    "usage": ["merge"],
}
WRITING = ("merge", "convert")
#: One that writes, one that reads, one that only prints, one that is wrong.
QUICK = ("merge", "inspect", "help", "usage")
#: What a shell can do to a stream.
BROKEN = {"full": "{n}>/dev/full", "closed": "{n}>&-"}


def shell(argv: list[object], redirection: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    words = [str(tmp_path / "out") if a == "OUT" else str(a) for a in argv]
    script = f'exec "$@" {redirection}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "fastshard", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)


def left_by_its_reader(argv: list[object], tmp_path: Path) -> tuple[int, str]:
    words = [str(tmp_path / "out") if a == "OUT" else str(a) for a in argv]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "fastshard", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG,
        check=False,
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", at_once(COMMANDS, QUICK))
def test_stdout_that_takes_nothing(name: str, broken: str, as_json: bool, tmp_path: Path) -> None:
    argv = [*COMMANDS[name], *(["--json"] if as_json else [])]
    done = shell(argv, BROKEN[broken].format(n=1), tmp_path)
    code, err = done.returncode, done.stderr
    assert code == 2, (code, err)
    assert "Traceback" not in err and "Exception ignored" not in err
    if name == "usage" and not as_json:
        assert "required: CKPT, OUT" in err
        return
    (said,) = [
        line for line in err.splitlines() if line.startswith("fastshard: stdout cannot be written to: ")
    ]
    if name in WRITING:
        assert f"the result at {tmp_path / 'out'} is complete" in said
        assert "this run wrote nothing to OUT" not in err
        assert not [f for f in fastshard.verify(tmp_path / "out", memory="2GiB") if f.severity == "error"]
    else:
        assert "complete" not in said


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", at_once(COMMANDS, QUICK))
def test_a_reader_that_has_left_changes_nothing(name: str, as_json: bool, tmp_path: Path) -> None:
    """It has what it wanted: the exit code is the run's own, nothing is said of it, and what is written is
    written."""
    argv = [*COMMANDS[name], *(["--json"] if as_json else [])]
    code, err = left_by_its_reader(argv, tmp_path)
    assert code == (2 if name == "usage" else 0), (code, err)
    assert "cannot be written to" not in err and "Broken pipe" not in err
    assert "Traceback" not in err and "Exception ignored" not in err
    if name in WRITING:
        assert not [f for f in fastshard.verify(tmp_path / "out", memory="2GiB") if f.severity == "error"]


def test_a_verdict_stands_though_its_reader_has_left(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(HF, ckpt)
    max(ckpt.glob("*.safetensors")).unlink()
    for verb in ("ls", "inspect", "verify"):
        code, err = left_by_its_reader([verb, ckpt], tmp_path)
        # What it found was for that reader; the exit code is for everybody.
        assert code == 3 and "Broken pipe" not in err and ("FS101" in err) != VERBS[verb].finds


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ""], ids=["closed", "open"])
@pytest.mark.parametrize("limit", [10, 12])
@pytest.mark.parametrize("verb", ["convert", "inspect", "verify"])
def test_exit_codes_are_documented_ones_where_no_descriptor_is_left(
    verb: str, limit: int, streams: str, tmp_path: Path
) -> None:
    words = [verb, str(FIXTURES / "gpt_neox/neox_pp_tp2")]
    words += [str(tmp_path / "out"), "--to", "hf"] if verb == "convert" else []
    script = f'ulimit -n {limit}; exec "$@" {streams}'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "fastshard", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 2, done
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["full", "closed"])
@pytest.mark.parametrize("name", at_once(COMMANDS, QUICK))
def test_stderr_that_takes_nothing(name: str, broken: str, tmp_path: Path) -> None:
    done = shell(COMMANDS[name], BROKEN[broken].format(n=2), tmp_path)
    assert done.returncode == (2 if name == "usage" else 0), done
    assert done.stdout or done.returncode


def test_closed_descriptors_do_not_become_files_of_the_result(tmp_path: Path) -> None:
    """What is printed would be written into them."""
    done = shell(["merge", HF, "OUT", "--max-shard-size", "100KB"], "<&- >&- 2>&-", tmp_path)
    assert done.returncode == 2
    assert fastshard.diff(HF, tmp_path / "out", memory="2GiB") == []


def test_problems_are_told_where_only_stderr_is_left(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = shell(["merge", tmp_path / "empty", "OUT"], ">/dev/full", tmp_path)
    assert (
        done.returncode == 2
        and "FS513" in done.stderr
        and f"this run wrote nothing to {tmp_path / 'out'}" in done.stderr
    )


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_progress_to_a_closed_stderr_does_not_stop_a_run(as_json: bool, tmp_path: Path) -> None:
    argv = ["merge", HF, "OUT", "--progress", "plain", *(["--json"] if as_json else [])]
    assert shell(argv, "2>&-", tmp_path).returncode == 0
    assert (tmp_path / "out").is_dir()


# --- signals

#: Runs the command line and sends signals to itself from the progress callback.
HARNESS = """
import os, signal, subprocess, sys, time
import fastshard.common.progress as progress
from fastshard.cli import main

def phase(self, title):
    def step(done, total):
        if title == "writing":
            {act}
    return step

progress.Progress.phase = phase
if __name__ == "__main__":
    sys.exit(main())
"""


def harness(act: str, *argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HARNESS.format(act=act), *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_after_publication_says_so(number: signal.Signals, tmp_path: Path) -> None:
    """The callback is called a last time when all is done."""
    act = f"os.path.exists({str(tmp_path / 'out')!r}) and os.kill(os.getpid(), {number.value})"
    done = harness(act, "merge", HF, tmp_path / "out", "--fsync", "none")
    assert done.returncode == 128 + number, done
    by = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    assert (
        f"{HF}: STOPPED by {by}; the result at {tmp_path / 'out'} is complete (exit {128 + number})"
        in done.stderr
    )
    assert "this run wrote nothing to OUT" not in done.stderr and "Traceback" not in done.stderr
    assert fastshard.diff(HF, tmp_path / "out", memory="2GiB") == []
    act = act.replace(repr(str(tmp_path / "out")), repr(str(tmp_path / "json")))
    done = harness(act, "merge", HF, tmp_path / "json", "--fsync", "none", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], document["written"]) == (
        128 + number,
        128 + number,
        True,
    )
    assert [f["file"] for f in document["findings"] if f["code"] == "FS519"] == [str(tmp_path / "json")]


@needs_steps
@pytest.mark.parametrize("at", ["cancelled", "tile-0"])
def test_second_signal_while_the_run_stops(at: str, tmp_path: Path) -> None:
    """While the main thread has told the others to stop, and while one of them ends its tile."""
    with Steps("cancelled", "tile-0") as steps:
        process = spawn("merge", HF, tmp_path / "out", "--json", env=steps.environment)
        tile = steps.wait("tile-0", process)
        process.send_signal(signal.SIGINT)
        cancelled = steps.wait("cancelled", process)
        for held in (cancelled, tile) if at == "tile-0" else (tile, cancelled):
            if held.place == at:
                process.send_signal(signal.SIGINT)
            held.release()
        out, err = process.communicate(timeout=HANG)
    assert process.returncode == 130 and "Traceback" not in err, (out, err)
    document = json.loads(out)
    assert (document["exit_code"], [f["code"] for f in document["findings"]]) == (130, ["FS510"])


#: Sends a further signal as soon as the first is being told of.
AGAIN = """
import os, signal
from fastshard.cli.run import Run
told = Run.{method}
def again(self, *arguments):
    os.kill(os.getpid(), signal.SIGINT)
    return told(self, *arguments)
Run.{method} = again
"""


@pytest.mark.parametrize("method", ["stopped", "_tell"])
def test_second_signal_while_the_first_is_told_of(method: str, tmp_path: Path) -> None:
    script = AGAIN.format(method=method) + HARNESS.format(act="os.kill(os.getpid(), signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-c", script, "merge", HF, tmp_path / "out", "--json"],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr, done
    document = json.loads(done.stdout)
    assert document["exit_code"] == 130 and document["findings"][0]["code"] in ("FS510", "FS519")
    assert document["written"] == (tmp_path / "out").exists()


#: Runs the command line with a signal at its N-th call of a function since it took signals over, or for -N
#: since all was done; says on stderr how many calls there were, and whether all was done by then.
AT_CALL = """
import importlib, os, sys
from fastshard.cli.signals import Stopping

number, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))
calls = after = 0

class Counted(Stopping):
    def __enter__(self):
        global stopping
        stopping = super().__enter__()
        sys.setprofile(count)
        return stopping

    def __exit__(self, *how):
        sys.setprofile(None)
        os.write(2, f"+{calls}+".encode())
        super().__exit__(*how)

def count(frame, event, arg):
    global calls, after, at
    if event in ("call", "c_call") and frame.f_code is not Counted.__exit__.__code__:
        calls += 1
        after += bool(stopping._count)
        if at in (calls, -after) and at:
            os.write(2, b"+done+" if after else b"+sent+")
            os.kill(os.getpid(), number)
            at = 0

# Its package has a function of that name.
command_line = importlib.import_module("fastshard.cli.main")
command_line.Stopping = Counted
sys.exit(command_line.main())
"""


def at_call(
    number: int, at: int, argv: list[object], tmp_path: Path
) -> tuple[int, str, subprocess.CompletedProcess[str]]:
    """Calls in all, ``sent`` or ``done`` at the chosen one, and how the process ended."""
    words = [str(tmp_path / f"out{at}") if a == "OUT" else str(a) for a in argv]
    done = subprocess.run(
        [sys.executable, "-c", AT_CALL, str(number), str(at), *words],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    told = done.stderr.split("+")[1::2]
    return int(told[-1]), "".join(told[:-1]), done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", at_once([n for n in COMMANDS if n != "usage"], ("merge", "help")))
def test_signals_at_any_time_leave_no_traceback(name: str, number: signal.Signals, tmp_path: Path) -> None:
    """At any call of a function, from the moment on which the command line has taken over until it gives
    back."""
    argv = [*COMMANDS[name], *(["--overwrite", "--resume"] if name in WRITING else [])]
    calls, _, undisturbed = at_call(number, 0, argv, tmp_path)
    assert calls > 20
    # What is a run is done once it is told of; what only prints can be stopped until it ends.
    prints = name in ("help", "help_of_a_verb", "version")
    instants = {1 + eighth * calls // 8: "sent" for eighth in range(8)} | (
        {} if prints else {-1: "done", -7: "done"}
    )
    for at, when in instants.items():
        _, met, done = at_call(number, at, argv, tmp_path)
        usual = undisturbed.returncode
        assert (met, done.returncode) == (when, 128 + number if when == "sent" else usual), (at, calls, done)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, (at, done)


def test_third_signal_ends_the_process(tmp_path: Path) -> None:
    script = """
import os, signal
from fastshard.cli.signals import Stopped, Stopping
with Stopping():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except Stopped as stopped:
        print(stopped.number, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("two", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("three", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "2\ntwo\n", "")


def test_signal_within_an_import_stops_the_run_after_it(tmp_path: Path) -> None:
    """Within, it can leave a lock of the import system held, and the next import waits for ever."""
    (tmp_path / "imported.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\ndone = True\n"
    )
    script = """
import sys
from fastshard.cli.signals import Stopped, Stopping
sys.path.insert(0, sys.argv[1])
def run():
    import imported
    print("went on")
with Stopping():
    try:
        run()
    except Stopped as stopped:
        print(stopped.number, sys.modules["imported"].done, sys.gettrace())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False, timeout=HANG
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 True None\n", "")


def test_ignored_signals_stay_ignored() -> None:
    script = """
import shutil
import signal
from fastshard.cli.signals import Stopping
signal.signal(signal.SIGINT, signal.SIG_IGN)
before = signal.getsignal(signal.SIGTERM)
with Stopping():
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is not before
assert signal.getsignal(signal.SIGTERM) is before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_tests_are_stopped_by_ctrl_c_where_it_was_ignored_on_entry() -> None:
    """As a shell starts what runs in its background."""
    script = "import conftest, signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", script]
    subprocess.run(words, check=True, cwd=Path(__file__).parents[1])


# --- what an exception carries


class Unusual(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Unusual, RuntimeError])
def test_callback_that_raises_at_the_end_does_not_hide_the_result(
    kind: type[BaseException], tmp_path: Path
) -> None:
    def last(done: int, total: int) -> None:
        if (tmp_path / "out").exists():
            raise kind("late")

    out = tmp_path / "out"
    with pytest.raises(kind) as caught:
        fastshard.merge(HF, out, memory="2GiB", progress=last)
    (first, *_) = caught.value.findings  # type: ignore[attr-defined]
    assert (first.code, first.file) == ("FS519", str(out))
    assert fastshard.diff(HF, out, memory="2GiB") == []


def test_fastshard_error_of_a_callback_keeps_its_findings(tmp_path: Path) -> None:
    def last(done: int, total: int) -> None:
        if (tmp_path / "out").exists():
            raise fastshard.FastshardError.of("FS503", "mine")

    out = tmp_path / "out"
    with pytest.raises(fastshard.CannotRunError) as caught:
        fastshard.merge(HF, out, memory="2GiB", progress=last)
    assert caught.value.code == "FS503"
    assert caught.value.published == str(out)


#: A callback that raises once a file is there.
RAISING = """
import json, sys
from pathlib import Path
import fastshard
ckpt, out, there = map(Path, sys.argv[1:])
def stop(done, total):
    if there.exists():
        raise KeyboardInterrupt
try:
    fastshard.merge(ckpt, out, memory="2GiB", progress=stop)
except KeyboardInterrupt as stopped:
    first = stopped.findings[0]
    print(json.dumps([first.code, first.file, first.help, first.run]))
"""


@needs_steps
@pytest.mark.parametrize("place", ["tile-0", "made", "published"])
def test_stopped_run_carries_where_it_goes_on(place: str, tmp_path: Path) -> None:
    out, there = tmp_path / "out", tmp_path / "there"
    with Steps(place) as steps:
        command = [sys.executable, "-c", RAISING, str(TP4), str(out), str(there)]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=steps.environment)
        held = steps.wait(place, run)
        there.touch()
        steps.wait("cancelled", run)
        held.release()
        code, file, advice, commands = json.loads(run.communicate(timeout=HANG)[0])
    if place == "published":
        assert (code, file) == ("FS519", str(out))
    else:
        (staging,) = tmp_path.glob(".out.fastshard-*")
        assert (code, commands) == ("FS510", ["--resume"]) and str(staging) in advice
        fastshard.merge(TP4, out, memory="2GiB", resume=True)
    assert fastshard.diff(TP4, out, memory="2GiB") == []


def test_published_is_said_by_the_error() -> None:
    failed, done = (
        Finding.of("FS507", "cannot sync"),
        Finding.of("FS519", "the result is complete here", file="o"),
    )
    error = error_for([done, failed])
    assert error.published == "o" and error.exit_code == 2 and error.code == "FS507"
    assert "o: the result is complete here [FS519]" in str(error)
    assert error_for([failed]).published is None


def test_error_after_publication_does_not_say_that_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastshard.cli.verbs import convert

    def fail(*argv: object, **options: object) -> None:
        raise error_for([Finding.of("FS507", "cannot sync"), Finding.of("FS519", "complete", file="there")])

    monkeypatch.setattr(convert, "convert_checkpoint", fail)
    ran = cli("merge", HF, tmp_path / "out", json_output=False)
    assert ran.code == 2 and "COULD NOT RUN, cannot sync; the result at there is complete" in ran.err
    assert "this run wrote nothing to OUT" not in ran.err
    assert cli("merge", HF, tmp_path / "out").doc["written"] is True


@pytest.mark.parametrize(
    "error, code",
    [
        (ValueError("odd\nlines"), "FS520"),
        (MemoryError(), "FS512"),
        (PermissionError(13, "Permission denied", "f"), "FS502"),
        (OSError(28, "No space left on device", "f"), "FS503"),
        (OSError(5, "Input/output error", "f"), "FS507"),
        (RecursionError(), "FS520"),
    ],
)
def test_what_nobody_expected_is_a_finding(
    error: Exception, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastshard.cli.verbs import convert

    def fail(*argv: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(convert, "convert_checkpoint", fail)
    ran = cli("merge", HF, tmp_path / "out")
    assert ran.code == 2 and [f["code"] for f in ran.errors] == [code]
    text = cli("merge", HF, tmp_path / "out", "-v", json_output=False)
    assert ("Traceback" in text.err) == (code == "FS520")
    assert (f"this run wrote nothing to {tmp_path / 'out'}" in text.err) == (code != "FS520")


@pytest.mark.parametrize("argv", [("merge",), ("nothing",), ("merge", "a", "b", "--dtype", "f8"), ()])
def test_usage_errors_are_one_json_object_too(argv: tuple[str, ...]) -> None:
    ran = cli(*argv, "--json", json_output=False)
    assert (ran.code, ran.doc["exit_code"], [f["code"] for f in ran.findings]) == (2, 2, ["FS515"])


def test_help_tells_the_exit_codes_of_signals() -> None:
    assert "130, 143" in cli("--help", json_output=False).out


@pytest.mark.parametrize(
    "options",
    [
        ("--memory", "99999999999999999999999TB"),
        ("--threads", "99999999999999999999"),
        ("--threads", "1000000"),
        ("--max-shard-size", "9223372036854775808"),
        ("--include", "\udcff"),
        ("--exclude", "\udcff"),
        ("--config", ""),
        ("--layout", "\0"),
        ("--expect", "/proc/self/mem"),
        ("--tokenizer", "\udcff"),
    ],
    ids=repr,
)
def test_odd_arguments_are_usage_errors(options: tuple[str, str], tmp_path: Path) -> None:
    ran = cli("merge", HF, tmp_path / "out", *options)
    assert ran.code == 2 and [f["code"] for f in ran.errors] != ["FS520"], ran.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("subset", ["1/99999999999999999999999", "²/3", "1", "/", "1/2/3"])
def test_odd_subsets_are_usage_errors(subset: str) -> None:
    ran = cli("verify", HF, "--subset", subset)
    assert ran.code == 2 and ran.having("FS515", got=subset)


def test_checkpoint_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """Names of files are bytes."""
    ckpt, out = tmp_path / "c\udcff", tmp_path / "o\udcff"
    shutil.copytree(HF, ckpt)
    (ckpt / "tokenizer.json").write_text("{}")
    ran = cli("merge", ckpt, out)
    assert ran.code == 0, ran.out
    assert (out / "tokenizer.json").read_text() == "{}"
    assert cli("merge", ckpt, ckpt / "inside").having("FS505")
    assert cli("merge", HF, tmp_path / "other", "--tokenizer", ckpt).code == 0


def test_current_directory_that_is_gone() -> None:
    for argv in (("plan", HF), ("merge", HF, "out"), ("inspect", ".")):
        script = 'd=$(mktemp -d); cd "$d"; rmdir "$d"; exec "$@"'
        done = subprocess.run(
            ["sh", "-c", script, "sh", sys.executable, "-P", "-m", "fastshard", *map(str, argv)]
            if sys.version_info >= (3, 11)
            else ["sh", "-c", script, "sh", sys.executable, "-m", "fastshard", *map(str, argv)],
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done
