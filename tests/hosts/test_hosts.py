"""Several hosts make one result: bit for bit that of one process, or nothing, with what keeps it from being
made."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from harness import Host, can_have_hosts, card, content, ended, ended_by, hidden, hosts, phase
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "conformance"))

from helpers import NEOX, at_once, cli
from holding import HANG, Clock, Steps, needs_steps

pytestmark = pytest.mark.skipif(
    can_have_hosts() is not None, reason=f"no namespaces can be made here: {can_have_hosts()}"
)


def megatron_config(folder: Path) -> Path:
    """A small Llama in safetensors."""
    from helpers import HF

    shutil.copytree(HF, folder, ignore=shutil.ignore_patterns("expected*"))
    return folder


def large(folder: Path, files: int = 6, rows: int = 2048) -> Path:
    """A checkpoint of some 100 MB in several files, so that hosts are at work for a while."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(3)
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        tensors = {
            f"block.{i}.{part}": rng.integers(0, 1 << 32, (rows, 1024), dtype=np.uint32).view(np.float32)
            for part in "ab"
        }
        for tensor in tensors.values():
            tensor[~np.isfinite(tensor)] = 1.0
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": files * 2 * rows * 4096}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


CONVERSIONS = {
    "neox_to_hf": (lambda folder: NEOX, ["convert", "--to", "hf"]),
    "hf_to_megatron": (megatron_config, ["convert", "--to", "megatron:torch_dist", "--tp", "2"]),
}


@pytest.mark.parametrize("name", at_once(CONVERSIONS, ["neox_to_hf"]))
def test_four_hosts_make_what_one_process_makes(name: str, place: Path) -> None:
    make, verb = CONVERSIONS[name]
    source = make(place / "in")
    alone, out = place / "alone", place / "out"
    ran = cli(verb[0], source, alone, *verb[1:])
    assert ran.code == 0, ran.err
    all_hosts = [
        host.fastshard(
            verb[0], source, out, *verb[1:], "--rank", i, "--world", 4, "--timeout", HANG, "--memory", "1GiB"
        )
        for i, host in enumerate(hosts(4))
    ]
    for code, _, err in ended(all_hosts):
        assert code == 0, err
    assert content(out) == content(alone)
    made = json.loads((out / "fastshard.manifest.json").read_text())["provenance"]["parts"]
    assert [part["host"] for part in made] == [f"node{i}" for i in range(4)]
    assert hidden(place) == []
    assert cli("verify", out).code == 0


@pytest.mark.slow
def test_stores_that_four_hosts_make_hold_what_one_process_makes(place: Path) -> None:
    from origins import ORIGINS

    source = place / "in"
    ORIGINS["paxml"].make(source)
    alone, out = place / "alone", place / "out"
    verb = ["--to", "maxtext"]
    assert cli("convert", source, alone, *verb).code == 0
    all_hosts = [
        host.fastshard(
            "convert", source, out, *verb, "--rank", i, "--world", 4, "--timeout", HANG, "--memory", "1GiB"
        )
        for i, host in enumerate(hosts(4))
    ]
    for code, _, err in ended(all_hosts):
        assert code == 0, err

    def tensors(folder: Path) -> Any:
        return json.loads((folder / "fastshard.manifest.json").read_text())["tensors"]

    assert tensors(out) == tensors(alone)
    compared = cli("diff", alone, out)
    assert compared.code == 0, compared.err


@needs_steps
@pytest.mark.parametrize("stray", at_once([0, 2], [2]))
def test_a_host_on_its_own_disk_stops_all_and_is_named(stray: int, place: Path, clock: Clock) -> None:
    dest = place / "dest"
    dest.mkdir()
    all_hosts, out, alone = hosts(4, clock=clock), dest / "out", Clock(place / "another clock")
    all_hosts[stray].own_disk, all_hosts[stray].clock = dest, alone
    for i, host in enumerate(all_hosts):
        host.fastshard(
            "convert", NEOX, out, "--to", "hf", "--rank", i, "--world", 4, "--timeout", 8, "--json"
        )
    others = [host for i, host in enumerate(all_hosts) if i != stray]
    if stray > 0:
        # All but one have come; then time goes by until rank 0 stops, and says it to those who wait.
        wait_for(lambda: len(seen(out)) == 2, others)
        clock.until(lambda: phase(out, 0) in ("stopped", None), card(out, 0))
        ended(others[1:])
    clock.until(lambda: all(host.has_ended for host in others))
    alone.until(lambda: all_hosts[stray].has_ended)
    results = ended(all_hosts)
    for i, (code, printed, err) in enumerate(results):
        assert code == 2, (printed, err)
        finding = json.loads(printed)["findings"][0]
        assert finding["code"] == "FS522"
        # No sooner than it was told to wait, and not because of anything else.
        assert "within 8 s" in finding["message"], finding
        if i == stray and stray > 0:
            assert (finding["rank"], finding["host"]) == (f"rank {stray}", f"node{stray}")
            assert f"tmpfs own mounted at {dest}" in finding["got"]
        elif stray > 0:
            assert finding["rank"] == f"rank {stray}", finding
            assert f"rank {stray} never appeared" in finding["message"]
    assert list(dest.iterdir()) == [], "nothing is left, on either disk"


def seen(out: Path) -> list[str]:
    """Ranks that rank 0 has seen."""
    try:
        return list(json.loads(card(out, 0).read_bytes())["seen"])
    except FileNotFoundError:
        return []


def wait_for(done: Callable[[], bool], alive: Sequence[Host]) -> None:
    """Waits for what these hosts come to before they end."""
    end = time.monotonic() + HANG
    while not done():
        assert not any(host.has_ended for host in alive), [host.end() for host in alive if host.has_ended]
        assert time.monotonic() < end
        time.sleep(0.002)


@needs_steps
def test_a_host_that_loses_its_power_publishes_nothing_and_three_finish(
    place: Path, held_at: Callable[..., Steps], clock: Clock
) -> None:
    source = large(place / "in")
    alone, out = place / "alone", place / "out"
    assert cli("merge", source, alone).code == 0
    verb = ["merge", source, out, "--timeout", 4, "--threads", 1]
    all_hosts, steps = hosts(4, clock=clock), held_at("tile-1")
    all_hosts[2].steps = steps
    for i, host in enumerate(all_hosts):
        host.fastshard(*verb, "--rank", i, "--world", 4)
    steps.wait("tile-1", above=all_hosts[2].running)
    all_hosts[2].kill()
    clock.until(lambda: phase(out, 0) in ("stopped", None), *(card(out, i) for i in (0, 1, 3)))
    told = {i: all_hosts[i].end() for i in (1, 2, 3)}
    # It takes leave of all, of the one that is gone too.
    clock.until(lambda: all_hosts[0].has_ended)
    told[0] = all_hosts[0].end()
    assert [told[i][0] for i in range(4)] == [3, 3, -signal.SIGKILL, 3], told
    for i in (0, 1, 3):
        assert "rank 2" in told[i][2] and "node2" in told[i][2], told[i]
        assert "--resume" in told[i][2]
    assert not out.exists()
    again, met = hosts(3, clock=clock), held_at()
    again[0].steps = met
    for i, host in enumerate(again):
        host.fastshard(*verb, "--resume", "--rank", i, "--world", 3)
    for code, _, err in ended_by(clock, out, again, met):
        assert code == 0, err
    assert content(out) == content(alone)
    assert hidden(place) == []


def test_a_private_disk_makes_no_part(place: Path) -> None:
    dest = place / "dest"
    dest.mkdir()
    script = cli("split", NEOX, dest / "out", "--to", "hf", "--parts", 2)
    run = script.doc["run"]
    good, stray = Host("node0"), Host("node1", own_disk=dest)
    good.fastshard("make-part", 0, dest / "out", "--run", run)
    stray.fastshard("make-part", 1, dest / "out", "--run", run)
    (code, _, _), (refused, _, err) = ended([good, stray])
    assert (code, refused) == (0, 2)
    assert "FS501" in err and "tmpfs own mounted at" in err, err
    missing = Host("node2").fastshard("commit", dest / "out", "--run", run)
    code, _, err = missing.end()
    assert code == 3 and "rank 1" in err
    assert not (dest / "out").exists()
    assert Host("node3").fastshard("make-part", 1, dest / "out", "--run", run).end()[0] == 0
    assert Host("node4").fastshard("commit", dest / "out", "--run", run).end()[0] == 0
    assert hidden(dest) == []


@pytest.mark.slow
def test_a_full_disk_on_one_host_stops_all(place: Path) -> None:
    """Each host has its own view of a disk's quota: here rank 1 may write no file of more than 64 KiB."""
    source, out = large(place / "in", files=2, rows=512), place / "out"
    words = ["merge", source, out, "--timeout", HANG, "--world", 2, "--json"]
    good = Host("node0").fastshard(*words, "--rank", 0)
    limited = 'ulimit -f 128; trap "" XFSZ; exec "$@"'
    full = Host("node1").start(
        ["bash", "-c", limited, "bash", sys.executable, "-m", "fastshard", *words, "--rank", 1]
    )
    results = ended([good, full])
    for code, printed, err in results:
        assert code == 2, (printed, err)
        finding = json.loads(printed)["findings"][0]
        assert finding["rank"] == "rank 1" and finding["host"] == "node1", finding
    assert not out.exists()


DIFFERENT = {
    "options": (["--dtype", "f32"], r"dtype"),
    "world": (["--world", "3"], r"3 ranks"),
    "source": ([], r"model-00001-of-00001.safetensors: [0-9]+ bytes there, [0-9]+ bytes here"),
}


@needs_steps
@pytest.mark.parametrize("what", at_once(DIFFERENT, ["source"]))
def test_ranks_that_were_not_started_alike_say_what_differs(what: str, place: Path, clock: Clock) -> None:
    extra, told = DIFFERENT[what]
    first, second = place / "a", place / "b"
    large(first, 1, 64)
    large(second, 1, 96 if what == "source" else 64)
    for path in first.iterdir():
        shutil.copystat(path, second / path.name)
    common = ["--timeout", 8, "--json"]
    # Time stands still: neither gives the other up before it has read what differs.
    zero, one = hosts(2, clock=clock)
    zero.fastshard("merge", first, place / "out", *common, "--rank", 0, "--world", 2)
    one.fastshard("merge", second, place / "out", *common, "--rank", 1, "--world", 2, *extra)
    results = ended([zero, one])
    for code, printed, err in results:
        assert code != 0, (printed, err)
        findings = json.loads(printed)["findings"]
        assert {f["code"] for f in findings} == {"FS524"}, findings
        assert all((f["rank"], f["host"]) == ("rank 1", "node1") for f in findings), findings
    assert re.search(told, results[1][1] + results[0][1]), results
    assert not (place / "out").exists()
    assert hidden(place) == []


@needs_steps
@pytest.mark.slow
def test_a_rank_given_twice_is_refused_while_the_first_lives(place: Path, clock: Clock) -> None:
    # Time goes by while the second one starts, however long that takes.
    words = ["check-storage", place / "out", "--world", 2, "--timeout", 10**6, "--json"]
    first, second, zero = Host("node1"), Host("node2"), Host("node0")
    for host in (first, second, zero):
        host.clock = clock
    first.fastshard(*words, "--rank", 1)
    wait_for(card(place / "out", 1).exists, [first])
    second.fastshard(*words, "--rank", 1)
    # The first one shows that it lives.
    clock.until(lambda: second.has_ended, card(place / "out", 1))
    code, printed, err = second.end()
    assert code == 2, (printed, err)
    finding = json.loads(printed)["findings"][0]
    assert finding["code"] == "FS509" and "node1" in finding["got"], finding
    assert not first.has_ended
    zero.fastshard(*words, "--rank", 0)
    for code, printed, err in ended([first, zero]):
        assert code == 0, (printed, err)
    assert hidden(place) == []


@needs_steps
@pytest.mark.slow
def test_a_host_without_the_destination_says_so(place: Path, clock: Clock) -> None:
    mount = place / "mount"
    (mount / "dest").mkdir(parents=True)
    words = ["--to", "hf", "--world", 2, "--timeout", 4, "--json"]
    zero, one = Host("node0", clock=clock), Host("node1", own_disk=mount)
    one.fastshard("convert", NEOX, mount / "dest/out", *words, "--rank", 1)
    code_one, told_one, _ = one.end()
    zero.fastshard("convert", NEOX, mount / "dest/out", *words, "--rank", 0)
    clock.until(lambda: zero.has_ended)
    code_zero, told_zero, _ = zero.end()
    assert (code_zero, code_one) == (2, 2)
    assert "rank 1 never appeared" in told_zero
    assert json.loads(told_one)["findings"][0]["code"] == "FS501"


@pytest.mark.slow
def test_a_slurm_step_starts_it(place: Path) -> None:
    """Slurm's own variables, as `srun` sets them on three hosts."""
    started = []
    for i, host in enumerate(hosts(3)):
        host.environ = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(i),
            "SLURM_NTASKS": "3",
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "node[0-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        }
        started.append(
            host.fastshard("convert", NEOX, place / "out", "--to", "hf", "--rank", "auto", "--timeout", HANG)
        )
    for i, (code, _, err) in enumerate(ended(started)):
        assert code == 0, err
        assert f"rank {i} of 3 (Slurm: SLURM_PROCID={i}, SLURM_STEP_NUM_TASKS=3)" in err
    assert cli("verify", place / "out").code == 0


@pytest.mark.slow
def test_torchrun_starts_it(place: Path) -> None:
    """The real torchrun, with three processes on one host."""
    pytest.importorskip("torch")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "3",
        "--master-addr",
        "127.0.0.1",
    ]
    words = [
        "-m",
        "fastshard",
        "convert",
        NEOX,
        place / "out",
        "--to",
        "hf",
        "--rank",
        "auto",
        "--timeout",
        f"{HANG:.0f}",
    ]
    ran = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=HANG, check=False)
    err = ran.stderr
    assert ran.returncode == 0, err
    assert "rank 2 of 3 (torchrun: RANK=2, WORLD_SIZE=3)" in err
    assert cli("verify", place / "out").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["shell", "slurm", "k8s"])
def test_what_is_printed_for_job_arrays_makes_the_result(emit: str, place: Path) -> None:
    """The printed script as it stands; for Slurm `sbatch` is a stand-in that runs an array's tasks in
    disorder, for Kubernetes the containers' commands are run with the indices that the job controller would
    set."""
    out, bin_folder = place / "out", place / "bin"
    script = cli("split", NEOX, out, "--to", "hf", "--parts", 3, "--emit", emit).doc["emitted"]
    bin_folder.mkdir()
    wrapper = bin_folder / "fastshard"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -m fastshard "$@"\n')
    sbatch = bin_folder / "sbatch"
    sbatch.write_text("""#!/bin/sh
for word in "$@"; do
  case "$word" in
  --array=0-2) for i in 2 0 1; do SLURM_ARRAY_TASK_ID=$i sh "$3" >&2 || exit; done; echo 17; exit ;;
  esac
done
[ "$1" = --dependency=afterok:17 ] || exit 1
while [ "$1" != --wrap ]; do shift || exit 1; done
exec sh -c "$2"
""")
    for program in (wrapper, sbatch):
        program.chmod(0o755)
    environ = {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    runs: list[tuple[list[object], dict[str, str]]]
    if emit == "k8s":
        jobs = list(yaml.safe_load_all(script))
        assert [job["spec"].get("completions") for job in jobs] == [3, None]
        commands = [job["spec"]["template"]["spec"]["containers"][0] for job in jobs]
        each = [[*command["command"], *command["args"]] for command in commands]
        runs = [(each[0], {"JOB_COMPLETION_INDEX": str(i)}) for i in range(3)] + [(each[1], {})]
    else:
        (place / "job.sh").write_text(script)
        runs = [(["sh", place / "job.sh"], {})]
    for command, more in runs:
        code, _, err = Host("node0", environ=environ | more).start(command).end()
        assert code == 0, err
    assert cli("verify", out).code == 0
    assert hidden(place) == []
