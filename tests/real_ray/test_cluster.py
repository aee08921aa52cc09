"""Real Ray: nodes of a cluster on this host make the parts of a run, and what comes of it is what one process
makes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastshard
import fastshard.ray
import numpy as np
import pytest
from fastshard.conversion.distributed.ray.storage_check import look
from holding import HANG, Held, Steps, needs_steps

ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
psutil = pytest.importorskip("psutil", reason="pip install '.[ray]' psutil")
from ray.cluster_utils import Cluster  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

FIXTURES = Path(__file__).parents[1] / "fixtures"
NEOX = FIXTURES / "gpt_neox/neox_pp_tp2"

pytestmark = needs_steps

#: Files of a source, tensors of each, and MiB of all.
FILES, TENSORS, SIZE = 3, 8, 192
#: Nodes are found dead in a second or two.
QUICKLY = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


def started(*cpus: float, **system: Any) -> Any:
    """A cluster with nodes of so many CPUs, the head first."""
    head: dict[str, Any] = {
        "num_cpus": cpus[0],
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
    }
    if system:
        head["_system_config"] = system
    for left in (2, 1, 0):
        cluster = Cluster()
        try:
            # Nodes keep it, and so do the processes that they start.
            os.environ["FASTSHARD_STEPS"] = STEPS.socket
            cluster.add_node(**head)
            for count in cpus[1:]:
                cluster.add_node(num_cpus=count, object_store_memory=80 << 20)
            cluster.wait_for_nodes()
            return cluster
        except Exception:
            # Ray gives a node 30 seconds to start, whatever else the host does.
            cluster.shutdown()
            if not left:
                raise
        finally:
            del os.environ["FASTSHARD_STEPS"]
    raise AssertionError


@contextlib.contextmanager
def running(*cpus: float, **system: Any) -> Iterator[Any]:
    cluster = started(*cpus, **system)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _steps() -> Iterator[None]:
    with STEPS:
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with running(1, 1, 1) as made:
        yield made


@pytest.fixture
def connected(cluster: Any) -> Iterator[Any]:
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fastshard-ray-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def source(memory: Path) -> Path:
    """A checkpoint of random bytes in several files."""
    folder, random, index = memory / "source", np.random.default_rng(5), {}
    folder.mkdir()
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        rows = (SIZE << 20) // FILES // TENSORS // 4 // 256
        tensors = {
            f"layers.{number}.{i}.weight": random.standard_normal((rows, 256), dtype=np.float32)
            for i in range(TENSORS)
        }
        save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


@pytest.fixture(scope="module")
def alone(source: Path, memory: Path) -> Path:
    """What one process makes of it."""
    fastshard.merge(source, memory / "alone")
    return memory / "alone"


@pytest.fixture
def out(memory: Path) -> Iterator[Path]:
    folder = memory / "made"
    folder.mkdir()
    yield folder / "out"
    shutil.rmtree(folder)


def settled(document: dict[str, Any]) -> dict[str, Any]:
    """A manifest without who made it, and when."""
    kept = {key: value for key, value in document.items() if key != "provenance"}
    times = ("mtime_ns",)
    kept["files"] = [{k: v for k, v in file.items() if k not in times} for file in document["files"]]
    return kept


def assert_equal(made: Path, expected: Path) -> None:
    """Two results are equal to the bit, and nothing is left beside the first."""
    document = json.loads((made / "fastshard.manifest.json").read_text())
    assert settled(document) == settled(json.loads((expected / "fastshard.manifest.json").read_text()))
    names = sorted(p.name for p in expected.iterdir())
    assert sorted(p.name for p in made.iterdir()) == names
    for name in set(names) - {"fastshard.manifest.json"}:
        assert (made / name).read_bytes() == (expected / name).read_bytes(), name
    assert [p.name for p in made.parent.iterdir()] == [made.name]


def parts_of(manifest: Any) -> list[int]:
    return sorted(part["part"] for part in manifest.document["provenance"]["parts"])


# --- what is made


def test_each_node_makes_a_part(connected: Any, source: Path, alone: Path, out: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = fastshard.ray.merge(source, out, progress=lambda done, total: seen.append((done, total)))
    assert parts_of(manifest) == [0, 1, 2]
    assert_equal(out, alone)
    assert fastshard.verify(out, expect=out / "fastshard.manifest.json") == []
    assert seen[-1] == (SIZE << 20, SIZE << 20)
    assert all(0 <= done <= total for done, total in seen)
    assert ray.is_initialized(), "what was connected before stays so"


def test_another_layout_by_the_address(cluster: Any, memory: Path, out: Path) -> None:
    """Connected for the time of the call; more parts than nodes, and than tensors are worth."""
    expected = memory / "hf"
    fastshard.convert(NEOX, expected, "hf")
    manifest = fastshard.ray.convert(NEOX, out, "hf", address=cluster.address, parts=7, threads=2)
    assert not ray.is_initialized()
    assert len(parts_of(manifest)) <= 7
    assert_equal(out, expected)


def test_a_ray_of_its_own(source: Path, alone: Path, out: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manifest = fastshard.ray.merge(source, out, parts=2, cpus=1)
    assert (parts_of(manifest), ray.is_initialized()) == ([0, 1], False)
    assert signal.getsignal(signal.SIGTERM) is before, "Ray took SIGTERM over"
    assert_equal(out, alone)


# --- what goes wrong


#: Every process that makes a part waits before its first tile, if a test holds that place. The driver and
#: commands are no nodes.
STEPS = Steps()


class Midway:
    """Holds the processes that make parts before their first tile; once so many wait there, the test has all
    time to look.

    ``then`` is called with them; those that it does not take go on.
    """

    def __init__(self, parts: int, then: Callable[[list[Held]], None]) -> None:
        self._parts, self._then = parts, then
        self.error: BaseException | None = None
        self.met = False

    def __enter__(self) -> Midway:
        STEPS.hold("tile-0")
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _watch(self) -> None:
        try:
            making = [STEPS.wait("tile-0") for _ in range(self._parts)]
            self.met = True
            self._then(making)
        except BaseException as error:
            self.error = error
        finally:
            STEPS.pass_by("tile-0")


def command(*words: object, told: Callable[[Any], None] = lambda _: None) -> subprocess.CompletedProcess[str]:
    """Runs `fastshard` in a process of its own, which `told` is given."""
    argv = [sys.executable, "-m", "fastshard", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(Path(fastshard.__file__).parents[1])}
    run = subprocess.Popen(argv, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told(run)
    out, err = run.communicate(timeout=HANG)
    return subprocess.CompletedProcess(argv, run.returncode, out, err)


def go_on(making: list[Held]) -> None:
    for held in making:
        held.release()


def kill_one(making: list[Held]) -> None:
    """Kills a process that makes a part; the others go on."""
    os.kill(making[0].process, signal.SIGKILL)
    go_on(making)


def kills_nodes(cluster: Any, cpus: float, count: int, asleep: list[int]) -> Callable[[list[Held]], None]:
    """Kills nodes of so many CPUs that make parts; the processes that made them stay stopped."""
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}

    def kill(making: list[Held]) -> None:
        for held in making:
            node = raylets[psutil.Process(held.process).ppid()]
            if len(asleep) < count and node._ray_params.num_cpus == cpus:
                asleep.append(held.process)
                os.kill(held.process, signal.SIGSTOP)
                cluster.remove_node(node, allow_graceful=False)
        go_on(making)

    return kill


def wakes(asleep: list[int]) -> None:
    """Lets processes of dead nodes go on, to their ends; Ray may have ended them by now."""
    for pid in asleep:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.send_signal(signal.SIGCONT)
            process.wait(HANG)
        assert not psutil.pid_exists(pid)


def assert_alive(cpus: list[int]) -> None:
    """The nodes that are left, by their CPUs; Ray may find a node dead after the run that its death
    disturbed."""
    until = time.monotonic() + 60
    while sorted(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]) != cpus:
        assert time.monotonic() < until, ray.nodes()
        time.sleep(0.2)


@pytest.mark.slow
def test_a_node_dies_midway(source: Path, alone: Path, out: Path) -> None:
    """Its part is made on another node. The process that made it is stopped all the while, and wakes up at
    the end: it holds no file that is published."""
    with running(0, 1, 1, 1, **QUICKLY) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        asleep: list[int] = []
        with Midway(3, kills_nodes(cluster, 1, 1, asleep)) as midway:
            manifest = fastshard.ray.merge(source, out, threads=1)
        assert midway.met and len(asleep) == 1
        # What two processes have worked on is looked at once more, and is neither's.
        assert len(parts_of(manifest)) >= 2
        assert_alive([0, 1, 1])
        wakes(asleep)
    assert_equal(out, alone)


@pytest.mark.slow
def test_a_smaller_node_takes_over(source: Path, alone: Path, out: Path) -> None:
    """All nodes that have the CPUs that the tasks reserved die: who is left reserves what it has."""
    with running(0, 2, 2, 1, **QUICKLY) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        asleep: list[int] = []
        kill, rest = kills_nodes(cluster, 2, 2, asleep), list(cluster.worker_nodes)

        def kill_all(making: list[Held]) -> None:
            kill(making)
            for node in [node for node in rest if node in cluster.worker_nodes]:
                if node._ray_params.num_cpus == 2:
                    cluster.remove_node(node, allow_graceful=False)

        with Midway(3, kill_all) as midway:
            fastshard.ray.merge(source, out, threads=1)
        assert midway.met and len(asleep) == 2
        assert_alive([0, 1])
        wakes(asleep)
    assert_equal(out, alone)


def test_a_worker_dies_midway(cluster: Any, source: Path, alone: Path, out: Path) -> None:
    """Ray says so on stdout, and means it well: there the command line has its one JSON object."""
    with Midway(3, kill_one) as midway:
        done = command("merge", source, out, "--ray", cluster.address, "--threads", "1", "--json")
    assert midway.met
    document = json.loads(done.stdout)
    told = [finding["code"] for finding in document["findings"]]
    # A model without a config is known to be whole by nothing but its index.
    assert (document["written"], document["exit_code"], told) == (True, 0, ["FS109"])
    assert_equal(out, alone)


def test_a_worker_that_always_dies_is_named_and_the_run_goes_on(
    connected: Any, source: Path, alone: Path, out: Path
) -> None:
    with Midway(3, kill_one) as midway, pytest.raises(fastshard.IncompleteError) as raised:
        fastshard.ray.merge(source, out, threads=1, retries=0)
    assert midway.met
    error = raised.value
    assert (error.code, error.exit_code) == ("FS523", 3)
    assert error.rank in ("part 0", "part 1", "part 2")
    assert "--resume" in (error.findings[0].run or ())
    assert not out.exists()
    fastshard.ray.merge(source, out, parts=2, resume=True)
    assert_equal(out, alone)


def test_a_damaged_source(
    connected: Any, memory: Path, source: Path, alone: Path, out: Path, tmp_path: Path
) -> None:
    """One part finds it, once, and is not made again: what is told is what one process tells, and where."""
    damaged, expect = memory / "damaged", tmp_path / "expect.json"
    shutil.copytree(source, damaged)
    expect.write_text(json.dumps(fastshard.manifest(source).document))
    file = damaged / "model-00002-of-00003.safetensors"
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 8
    file.write_bytes(held)
    with pytest.raises(fastshard.ProblemError) as raised:
        fastshard.ray.merge(damaged, out, expect=expect)
    with pytest.raises(fastshard.ProblemError) as single:
        fastshard.merge(damaged, tmp_path / "out", expect=expect)
    told, expected = (
        [(f.code, f.tensor, f.message, f.file) for f in error.value.findings if f.severity == "error"]
        for error in (raised, single)
    )
    assert told == expected
    assert "Ray node" in (raised.value.host or "")
    assert not out.exists()
    shutil.copyfile(source / file.name, file)
    fastshard.ray.merge(damaged, out, expect=expect, resume=True)
    assert (out / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    shutil.rmtree(damaged)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_by_the_user(
    cluster: Any, source: Path, alone: Path, out: Path, number: signal.Signals
) -> None:
    words = ("merge", source, out, "--ray", cluster.address, "--threads", "1")
    started: list[subprocess.Popen[str]] = []

    def stop(making: list[Held]) -> None:
        """Those who make parts go on once the command has told them to stop."""
        started[0].send_signal(number)
        for held in making:
            STEPS.wait("cancelled", number=held.process)
        go_on(making)

    with Midway(3, stop) as midway:
        done = command(*words, told=started.append)
    assert midway.met
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert "FS510" in done.stderr and "--resume" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert not out.exists()
    done = command(*words, "--resume")
    assert done.returncode == 0, done.stderr
    assert_equal(out, alone)


# --- whether nodes see the destination


@contextlib.contextmanager
def with_a_disk_of_its_own(cluster: Any, folder: Path, holds: Path | None = None) -> Iterator[None]:
    """A node more, which has another filesystem at a folder: an empty one, or what lies elsewhere."""
    mount = "-t tmpfs none" if holds is None else '--bind "$2"'
    script = f'mount {mount} "$1"; shift 2; exec "$@"'
    own = ["unshare", "--mount", "sh", "-euc", script, "sh", str(folder), str(holds or "")]
    if os.geteuid() != 0:
        own[1:1] = ["--user", "--map-root-user"]
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    start = [
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        "--address",
        cluster.address,
        "--num-cpus",
        "1",
        "--object-store-memory",
        str(80 << 20),
        "--block",
        "--disable-usage-stats",
    ]
    node = subprocess.Popen(
        [*own, *start], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=STEPS.environment
    )
    try:
        until, wanted = time.monotonic() + HANG, sum(n["Alive"] for n in ray.nodes()) + 1
        while sum(n["Alive"] for n in ray.nodes()) < wanted:
            assert time.monotonic() < until and node.poll() is None, "the node did not start"
            time.sleep(0.1)
        yield
    finally:
        node.terminate()
        node.wait(HANG)


def test_a_node_with_a_disk_of_its_own_is_named(connected: Any, source: Path, out: Path) -> None:
    """In a mount namespace of its own, that node has an empty tmpfs where the others have the destination."""
    before = STEPS.reached()
    with (
        with_a_disk_of_its_own(connected, out.parent),
        pytest.raises(fastshard.CannotRunError) as raised,
    ):
        fastshard.ray.merge(source, out)
    error = raised.value
    assert [f.code for f in error.findings] == ["FS522"]
    assert STEPS.reached() == before, "a part was begun"
    assert "Ray node" in (error.host or "")
    assert f"mounted at {out.parent}" in (error.got or "")
    assert "the storage of" in (error.expected or "")
    assert list(out.parent.iterdir()) == [], "something of the run was made"


def test_a_source_that_a_node_does_not_see(connected: Any, source: Path, out: Path, tmp_path: Path) -> None:
    """The destination is everybody's, the source is not: the node says so."""
    moved = tmp_path / "source"
    shutil.copytree(source, moved)
    with (
        with_a_disk_of_its_own(connected, moved),
        pytest.raises(fastshard.CannotRunError) as raised,
    ):
        fastshard.ray.merge(moved, out)
    (finding,) = (f for f in raised.value.findings if f.severity == "error")
    assert "Ray node" in (finding.host or "")
    assert str(moved) in (finding.file or "")
    assert "--resume" in (finding.run or ())
    assert not out.exists()


@pytest.fixture
def halves(source: Path, memory: Path, out: Path) -> tuple[Path, Path]:
    """The source's files on two disks."""
    here, there = out.parent.parent / "here", out.parent.parent / "there"
    for half in (here, there):
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(source, half)
    for i, file in enumerate(sorted(source.glob("*.safetensors"))):
        ((here, there)[i % 2] / file.name).unlink()
    return here, there


def test_each_node_has_a_part_of_the_source(halves: tuple[Path, Path], alone: Path, out: Path) -> None:
    here, there = halves
    with running(1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        with with_a_disk_of_its_own(cluster, here, there):
            seen: list[tuple[int, int]] = []
            manifest = fastshard.ray.merge(
                here, out, node_local=True, progress=lambda done, total: seen.append((done, total))
            )
            assert same_weights(out, alone)
            assert [f.code for f in manifest.findings if f.severity == "note"] == ["FS109", "FS525"]
            assert seen and seen[-1][0] <= seen[-1][1]
            # As a command, with a worker that dies: its node is there, so is its part.
            shutil.rmtree(out)

            # The first that has begun: the other one needs what it lends.
            with Midway(1, kill_one) as midway:
                done = command("merge", here, out, "--ray", cluster.address, "--node-local", "--threads", "1")
            assert midway.met and done.returncode == 0, done.stderr
            assert "was sent from host to host" in done.stdout
            assert same_weights(out, alone)
        shutil.rmtree(out)
        # Without the other node nobody has its files.
        with pytest.raises(fastshard.IncompleteError) as raised:
            fastshard.ray.merge(here, out, node_local=True)
        assert raised.value.code in ("FS101", "FS102")
    assert not out.exists()


def test_parts_of_a_source_are_no_parts_of_a_run(source: Path, out: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as raised:
        fastshard.ray.merge(source, out, node_local=True, parts=2)
    assert raised.value.code == "FS515"


def test_what_a_node_looks_at(tmp_path: Path) -> None:
    """What a node does, called here: with the driver's folder, with another one (as a disk of its own would
    be), and with a file of the same name and other contents."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "said").write_text("word")
    told = look(str(here / "said"), "word", "answer")
    assert (told["error"], told["version"]) == (None, fastshard.__version__)
    assert (here / "answer").read_text() == "answer"
    assert " mounted at /" in told["storage"]
    absent = look(str(there / "said"), "word", "answer")
    assert "No such file" in absent["error"]
    assert list(there.iterdir()) == [], "a node that does not see the file writes nothing"
    (there / "said").write_text("older")
    assert look(str(there / "said"), "word", "answer")["error"] == "it has another file"


def test_a_cluster_that_is_not_there(source: Path, out: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as raised:
        fastshard.ray.merge(source, out, address="127.0.0.1:9")
    assert (raised.value.code, raised.value.got) == ("FS515", "'127.0.0.1:9'")
    assert not ray.is_initialized() and list(out.parent.iterdir()) == []


def test_no_node_is_large_enough(connected: Any, source: Path, out: Path) -> None:
    with pytest.raises(fastshard.CannotRunError) as raised:
        fastshard.ray.merge(source, out, cpus=64)
    assert (raised.value.code, raised.value.got) == ("FS515", "the largest node has 1")
    assert list(out.parent.iterdir()) == []


# --- the guide


GUIDE = Path(__file__).parents[2] / "docs/guides/ray.md"


def block(name: str, folder: Path) -> str:
    """A block of the guide, with a folder in the place of ``/shared``."""
    fenced = GUIDE.read_text().partition(f"<!-- run: {name} -->\n```")[2].partition("```")[0]
    language, _, text = fenced.partition("\n")
    assert language in ("sh", "python") and "/shared/" in text
    return text.replace("/shared/", f"{folder}/")


@pytest.fixture
def shared(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the guide has it, and the command on the way to programs."""
    folder = out.parent
    (folder / "checkpoint").symlink_to(source)
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "fastshard"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fastshard "$@"\n')
    program.chmod(0o755)
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}:{beside}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(fastshard.__file__).parents[1]))
    return folder


def same_weights(made: Path, expected: Path) -> bool:
    return (made / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_the_guides_shell_and_python(
    cluster: Any, alone: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    done = subprocess.run(block("shell", shared), shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same_weights(shared / "whole", alone)
    script = [sys.executable, "-c", block("python", shared)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2"]
    assert same_weights(shared / "again", alone)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for_jobs(seconds: float) -> None:
    """Waits until the cluster takes jobs: its agent starts after the nodes, and Ray itself waits ten seconds
    only."""
    until = time.monotonic() + seconds
    while True:
        tried = subprocess.run(
            ["ray", "job", "submit", "--", "true"], capture_output=True, text=True, check=False
        )
        if tried.returncode == 0:
            return
        assert "please try again later" in tried.stderr, tried.stderr[-2000:]
        assert time.monotonic() < until, tried.stderr[-2000:]


@pytest.mark.slow
def test_the_guides_job(alone: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp_cors", reason="jobs need ray[default]")
    port = free_port()
    head = {
        "num_cpus": 1,
        "include_dashboard": True,
        "dashboard_port": port,
        "object_store_memory": 80 << 20,
        # Another cluster of this host has the usual one, and without it there is nobody who takes jobs.
        "dashboard_agent_listen_port": free_port(),
    }
    cluster = Cluster()
    try:
        cluster.add_node(**head)
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20, dashboard_agent_listen_port=free_port())
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{port}")
        wait_for_jobs(180)
        done = subprocess.run(block("job", shared), shell=True, capture_output=True, text=True, check=False)
    finally:
        cluster.shutdown()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "every byte hashed" in done.stdout
    assert same_weights(shared / "merged", alone)
