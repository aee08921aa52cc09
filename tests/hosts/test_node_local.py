"""Hosts that have a part of the checkpoint each, on a disk of their own, make what one process makes that
sees all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from harness import Host, can_have_hosts, card, content, ended, ended_by, hidden, hosts, phase

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benches"))

import fastshard
import neox
from helpers import FIXTURES, NEOX, cli
from holding import HANG, Clock, Held, Steps, needs_steps
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(
    can_have_hosts() is not None, reason=f"no namespaces can be made here: {can_have_hosts()}"
)

#: Where each host has its part: the same path, another disk.
DISK = Path("/mnt")


def by_turns(number: int, file: Path) -> set[int]:
    """One file to each host in turn."""
    return {number}


def texts_everywhere(number: int, file: Path) -> set[int]:
    """What says how the checkpoint was trained lies on all hosts, as frameworks leave it."""
    return {0, 1, 2, 3, 4, 5, 6, 7} if file.suffix in (".yml", ".json", "") else {number}


def divided(source: Path, folder: Path, n: int, where: Callable[[int, Path], set[int]]) -> list[Path]:
    """The files of a checkpoint, on `n` disks."""
    parts = [folder / f"disk{i}" for i in range(n)]
    for part in parts:
        part.mkdir(parents=True)
    files = sorted(p for p in source.rglob("*") if p.is_file() and p.name != "expected.json")
    for number, file in enumerate(files):
        for part in {i % n for i in where(number % n, file)}:
            to = parts[part] / file.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
    return parts


class OnDisks:
    """Hosts with a disk each, under one path, that holds their part."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self.parts = parts
        #: Where files lie that stand for others' as long as a run lasts.
        self.temporary = parts[0].parent / "tmp"
        self.temporary.mkdir(exist_ok=True)
        #: Stands still: nobody is silent because it is slow.
        self.clock = Clock(parts[0].parent / "clock")

    def start(
        self,
        verb: str,
        out: Path,
        *options: object,
        timeout: float = HANG,
        own_pids: bool = True,
        only: int | None = None,
        inside: Sequence[str] = (),
        steps: Mapping[int, Steps] = MappingProxyType({}),
        through: Sequence[str] = (),
        by_clock: bool = False,
    ) -> list[Host]:
        """`steps` hold ranks; who goes `by_clock` waits until a test moves that; `through` is a command that
        starts its words as they are."""
        environ, started = {"TMPDIR": str(self.temporary)}, []
        for i, (host, part) in enumerate(
            zip(hosts(len(self.parts), environ=environ, own_pids=own_pids), self.parts, strict=True)
        ):
            if only not in (None, i):
                continue
            ckpt = DISK / inside[i] if inside else DISK
            words = " ".join(f"'{word}'" for word in (verb, ckpt, out, *options, "--node-local"))
            host.steps, host.clock = steps.get(i), self.clock if by_clock else None
            rank = f"--rank {i} --world {len(self.parts)} --timeout {timeout}"
            exec_ = " ".join(["exec", *through, f"'{sys.executable}'"])
            line = f"mount --bind '{part}' {DISK} && {exec_} -m fastshard {words} {rank}"
            started.append(host.start(["sh", "-c", line]))
        return started

    def run(
        self, verb: str, out: Path, *options: object, inside: Sequence[str] = ()
    ) -> list[tuple[int, str, str]]:
        """Ranks of which nobody is disturbed: time stands still, so that none waits for anything but what is
        to be done."""
        return ended(self.start(verb, out, *options, inside=inside, by_clock=True))


def unnamed(files: dict[str, bytes]) -> dict[str, bytes]:
    """A result whose manifest says nothing of where the sources lay."""
    document = json.loads(files["fastshard.manifest.json"])
    document["findings"] = [
        {
            key: re.sub(r"[^ (]*/(?=[^/ ]+)", "", text) if isinstance(text, str) else text
            for key, text in f.items()
        }
        for f in document["findings"]
    ]
    document["not_checked"] = [re.sub(r"[^ (]*/(?=[^/ ]+)", "", line) for line in document["not_checked"]]
    return {**files, "fastshard.manifest.json": json.dumps(document).encode()}


CASES = {
    "neox_to_hf": (NEOX, texts_everywhere, ["convert", "--to", "hf"]),
    "neox_texts_on_one": (NEOX, by_turns, ["convert", "--to", "hf"]),
    "tied": (FIXTURES / "gpt_neox/neox_legacy_pp_tp2_tied", by_turns, ["convert", "--to", "hf"]),
    "zero3": (FIXTURES / "deepspeed/zero3_bf16_dp2", by_turns, ["merge"]),
    "fsdp": (FIXTURES / "sharded/dcp_fsdp2", by_turns, ["merge"]),
    "megatron": (FIXTURES / "sharded/megatron_torch_dist_tp2_pp2", by_turns, ["merge"]),
    # Companions go along as they are, from whoever has them.
    "hf": (FIXTURES / "sharded/hf_sharded", by_turns, ["merge"]),
    "hf_to_megatron": (
        FIXTURES / "sharded/hf_sharded",
        by_turns,
        ["convert", "--to", "megatron:torch_dist", "--tp", "2"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_checkpoint_on_three_disks(name: str, place: Path) -> None:
    source, where, verb = CASES[name]
    parts = divided(source, place, 3, where)
    alone, out = place / "alone", place / "out"
    ran = cli(verb[0], *parts, alone, *verb[1:])
    assert ran.code == 0, ran.err
    on = OnDisks(parts)
    for code, _, err in on.run(verb[0], out, *verb[1:]):
        assert code == 0, err
    assert list(on.temporary.iterdir()) == []
    assert unnamed(content(out)) == unnamed(content(alone))
    made = (out / "fastshard.manifest.json").read_text()
    assert "/tmp" not in made and "rank-" not in made
    assert hidden(place) == []
    assert cli("verify", out).code == 0


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-NeoX, half of whose matrices are cut along their columns: each of their tiles is made of all ranks'
    files."""
    folder = tmp_path_factory.mktemp("neox") / "in"
    neox.write(folder, hidden=512, layers=3, vocab=2048, tp=4)
    return folder


def bytes_told(out: str) -> int:
    found = re.search(r"was sent from host to host through the destination: (\d+) bytes", out)
    assert found, out
    return int(found.group(1))


def test_only_what_is_made_of_several_hosts_files_goes_from_host_to_host(split: Path, place: Path) -> None:
    parts = divided(split, place, 4, texts_everywhere)
    ran = OnDisks(parts).run("convert", place / "out", "--to", "hf", "--memory", "192MiB")
    assert [code for code, _, _ in ran] == [0] * 4, ran
    made = fastshard.open(place / "out")
    for name, content_of in neox.expected(hidden=512, layers=3, vocab=2048, tp=4).items():
        assert made[name].numpy().tobytes() == content_of, name
    whole = sum(file.stat().st_size for file in split.rglob("*.pt"))
    told = bytes_told(ran[0][1])
    # Of each matrix that is cut along its columns, 2 of 12 hidden x hidden parts dense and 8 mlp: three
    # quarters.
    columns = 3 * (512 * 512 + 4 * 512 * 512) * 2
    assert columns * 3 // 4 <= told < whole // 2, (told, whole)


def test_what_is_missing_is_missing_on_all(split: Path, place: Path) -> None:
    parts = divided(split, place, 3, texts_everywhere)
    [gone] = [file for part in parts for file in part.rglob("layer_03-model_02*")]
    gone.unlink()
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code == 3, err
        assert "FS101" in err and "layer_03-model_02" in err and "(tp 2)" in err, err
        assert "fastshard-" not in err.replace(str(place), ""), err
    assert not (place / "out").exists() and hidden(place) == []


@needs_steps
@pytest.mark.parametrize("at", ["met", "tile-0"])
def test_a_host_that_loses_its_power_is_named_and_all_go_on_later(
    at: str, split: Path, place: Path, held_at: Callable[..., Steps]
) -> None:
    parts = divided(split, place, 3, texts_everywhere)
    on, out, steps = OnDisks(parts), place / "out", held_at(at)
    started = on.start("merge", out, timeout=4, steps={2: steps}, by_clock=True)
    steps.wait(at, above=started[2].running)
    started[2].kill()
    # That it is dead is not to be seen from another host.
    on.clock.until(lambda: phase(out, 0) in ("stopped", None), card(out, 0), card(out, 1))
    [one] = ended(started[1:2])
    # It takes leave of all, of the one that is gone too.
    on.clock.until(lambda: started[0].has_ended)
    for code, _, err in (*ended(started[:1]), one):
        assert code == 3 and "FS523" in err and "node2" in err, err
        assert "rank 2 has shown no sign of life" in err, err
    assert not out.exists()
    met = held_at()
    again = on.start("merge", out, "--resume", timeout=4, steps={0: met}, by_clock=True)
    for code, _, err in ended_by(on.clock, out, again, met):
        assert code == 0, err
    alone = place / "alone"
    assert cli("merge", *parts, alone).code == 0
    assert unnamed(content(out)) == unnamed(content(alone))
    assert hidden(place) == []


def test_a_host_without_its_part_stops_all(split: Path, place: Path) -> None:
    part = divided(split, place, 1, texts_everywhere)[0]
    line = ["--world", 2, "--timeout", HANG, "--node-local"]
    one = Host("node0").fastshard("merge", part, place / "out", "--rank", 0, *line)
    two = Host("node1").fastshard("merge", place / "nowhere", place / "out", "--rank", 1, *line)
    for code, _, err in ended([one, two]):
        assert code == 2 and "FS501" in err and "node1" in err, err
    assert not (place / "out").exists() and hidden(place) == []


@needs_steps
@pytest.mark.parametrize("at", ["listed", "tile-0"])
def test_the_user_stops_one(at: str, split: Path, place: Path, held_at: Callable[..., Steps]) -> None:
    parts = divided(split, place, 3, texts_everywhere)
    on, steps = OnDisks(parts), held_at(at)
    started = on.start("merge", place / "out", steps={1: steps})
    held = steps.wait(at, above=started[1].running)
    os.killpg(started[1].running.pid, signal.SIGINT)  # type: ignore[union-attr]
    if at == "tile-0":
        steps.wait("cancelled", above=started[1].running)
    held.release()
    ran = ended(started)
    assert list(on.temporary.iterdir()) == []
    assert [code for code, _, _ in ran] == [3, 130, 3], ran
    assert not (place / "out").exists()


def test_a_rank_that_comes_late_finds_all_done(split: Path, place: Path) -> None:
    parts = divided(split, place, 2, texts_everywhere)
    assert [code for code, _, _ in OnDisks(parts).run("merge", place / "out")] == [0, 0]
    again = ["merge", parts[1], place / "out", "--node-local", "--rank", 1, "--world", 2, "--timeout", 0.1]
    ran = cli(*again)
    assert ran.code == 0, ran.err
    # What was asked for otherwise, or of something else, is not done: it waits for the others, who are not
    # there.
    assert cli("convert", *again[1:], "--to", "hf").code == 2
    assert cli(*again, "--dtype", "f32").code == 2
    later = parts[1] / "global_step11"
    shutil.copytree(next(parts[1].glob("global_step*")), later)
    assert cli(*again).code == 2
    shutil.rmtree(later)
    assert cli(*again).code == 0
    os.utime(next(parts[1].rglob("layer_*")))
    assert cli(*again).code == 2


def dies_once_it_was_read_from(
    on: OnDisks, out: Path, held_at: Callable[..., Steps]
) -> tuple[list[Host], list[Held]]:
    """Three ranks. Rank 2 has died; ranks 0 and 1, which have read of its files, wait at the next reading,
    and have not seen that it is dead."""
    steps = {rank: held_at("waits-2") for rank in (0, 1)}
    # Headers are read by as many threads as there are cores. With one all others are done with, and none
    # looks around.
    core = min(os.sched_getaffinity(0))
    started = on.start("merge", out, own_pids=False, steps=steps, through=["taskset", "-c", str(core)])
    held = []
    for rank, at in steps.items():
        at.wait("waits-2", started[rank].running).release()
        held.append(at.wait("waits-2", started[rank].running))
    started[2].kill()
    started[2].end()
    for at in steps.values():
        at.pass_by("waits-2")
    return started[:2], held


@needs_steps
def test_a_rank_that_is_started_again_lends_anew(
    split: Path, place: Path, held_at: Callable[..., Steps]
) -> None:
    """Its first process has gone without a word once the others have read from it."""
    parts = divided(split, place, 3, texts_everywhere)
    on, out, anew = OnDisks(parts), place / "out", held_at()
    others, held = dies_once_it_was_read_from(on, out, held_at)
    [again] = on.start("merge", out, own_pids=False, only=2, steps={2: anew})
    # Rank 0, which looks around still while it is held here, has seen it.
    anew.wait("listed", again.running)
    for one in held:
        one.release()
    ran = ended([*others, again])
    assert [code for code, _, _ in ran] == [0, 0, 0], ran
    assert cli("merge", *parts, place / "alone").code == 0
    assert unnamed(content(out)) == unnamed(content(place / "alone"))
    assert hidden(place) == []


@needs_steps
def test_a_rank_that_is_started_again_too_late_finds_nobody(
    split: Path, place: Path, held_at: Callable[..., Steps]
) -> None:
    """The others have seen its first process go."""
    parts = divided(split, place, 3, texts_everywhere)
    on, out = OnDisks(parts), place / "out"
    others, held = dies_once_it_was_read_from(on, out, held_at)
    for one in held:
        one.release()
    ran = ended(others)
    [late] = on.start("merge", out, own_pids=False, only=2, timeout=2, by_clock=True)
    on.clock.until(lambda: late.has_ended)
    ran += ended([late])
    assert [code for code, _, _ in ran] == [3, 3, 2], ran
    assert all("rank 2 has ended without a word" in err for _, _, err in ran[:2]), ran
    assert not out.exists()
    again = on.start("merge", out, "--resume", own_pids=False)
    assert [code for code, _, _ in ended(again)] == [0, 0, 0]
    assert cli("merge", *parts, place / "alone").code == 0
    assert unnamed(content(out)) == unnamed(content(place / "alone"))


def test_a_folder_and_files_of_one_host(place: Path) -> None:
    hf = FIXTURES / "sharded/hf_sharded"
    parts = divided(hf, place, 2, texts_everywhere)
    odd = place / "odd"
    odd.mkdir()
    moved = next(parts[0].glob("*.safetensors"))
    moved.rename(odd / moved.name)
    line = ["--world", 2, "--timeout", HANG, "--node-local"]
    one = Host("node0").fastshard("merge", parts[0], odd / moved.name, place / "out", "--rank", 0, *line)
    two = Host("node1").fastshard("merge", parts[1], place / "out", "--rank", 1, *line)
    whole = cli("merge", parts[0], odd / moved.name, parts[1], place / "alone")
    codes = [code for code, _, _ in ended([one, two])]
    assert codes == [whole.code] * 2
    if whole.code == 0:
        assert unnamed(content(place / "out")) == unnamed(content(place / "alone"))


def test_a_file_that_several_hosts_have_must_be_the_same(place: Path) -> None:
    everywhere = divided(NEOX, place / "same", 2, lambda number, file: {0, 1})
    assert [code for code, _, _ in OnDisks(everywhere).run("merge", place / "out")] == [0, 0]
    other = divided(NEOX, place / "other", 2, lambda number, file: {0, 1})
    changed = next(other[1].rglob("layer_02-model_00*"))
    state = torch.load(changed, weights_only=True)
    name = max(state, key=lambda name: state[name].numel())
    state[name].view(-1)[0] += 1
    torch.save(state, changed)
    for code, _, err in OnDisks(other).run("merge", place / "out2"):
        assert code == 1 and "node" in err, err
    assert not (place / "out2").exists()


def test_what_says_how_a_checkpoint_is_read_must_be_the_same_everywhere(place: Path) -> None:
    hf = FIXTURES / "sharded/hf_sharded"
    parts = divided(hf, place, 2, texts_everywhere)
    config = json.loads((parts[1] / "config.json").read_text())
    # Where it was loaded from is no difference.
    (parts[1] / "config.json").write_text(json.dumps({**config, "_name_or_path": "/scratch/1"}))
    assert [code for code, _, _ in OnDisks(parts).run("merge", place / "out")] == [0, 0]
    (parts[1] / "config.json").write_text(json.dumps({**config, "rope_theta": 17.0}))
    for code, _, err in OnDisks(parts).run("merge", place / "out2"):
        assert code == 1 and "FS110" in err and "node1" in err and "--config" in err, err
    given = ["--config", parts[0] / "config.json"]
    assert [code for code, _, _ in OnDisks(parts).run("merge", place / "out2", *given)] == [0, 0]
    assert (place / "out2/config.json").read_bytes() == (hf / "config.json").read_bytes()
    (parts[1] / "generation_config.json").write_text("{}")
    for code, _, err in OnDisks(parts).run("merge", place / "out3", *given):
        assert code == 1 and "FS110" in err and "generation_config.json" in err, err
    assert not (place / "out3").exists() and hidden(place) == []


#: Links the file named first elsewhere, once the checkpoint is planned and before any of it is made.
LINKED = """
import os, sys
from fastshard.conversion import convert as convert
from fastshard.cli import main
def linked(*arguments, prepared=convert.prepared):
    job = prepared(*arguments)
    os.link(sys.argv[1], sys.argv[2])
    return job
convert.prepared = linked
sys.exit(main(sys.argv[3:]))
"""


def test_a_file_whose_status_changes_meanwhile_stops_all(place: Path) -> None:
    """It is all that is seen of content whose time was set back, and nobody reads the files of all hosts
    again."""
    # Whole tensors on each host: nobody lends anything of them.
    parts = divided(FIXTURES / "sharded/hf_sharded", place, 2, texts_everywhere)
    for linked in (0, 1):
        line = ["--world", 2, "--timeout", HANG, "--node-local"]
        file = next(parts[linked].glob("*.safetensors"))
        started = []
        for rank, part in enumerate(parts):
            run = ["-c", LINKED, file, place / f"link{rank}"] if rank == linked else ["-m", "fastshard"]
            argv = [sys.executable, *run, "merge", part, place / "out", "--rank", rank, *line]
            started.append(Host(f"node{rank}").start(argv))
        for code, _, err in ended(started):
            assert code == 1 and "FS506" in err and file.name in err and f"node{linked}" in err, err
            assert "--resume to continue" not in err, err
        assert not (place / "out").exists()
        # What was made of it may be of other content: nobody goes on with it.
        for code, _, err in OnDisks(parts).run("merge", place / "out", "--resume"):
            assert code == 2 and "FS508" in err and "status" in err, err
        ran = cli("merge", *parts, place / "out", "--resume")
        assert ran.code == 2 and ran.errors[0]["code"] == "FS508", ran.out
        [left] = hidden(place)
        shutil.rmtree(place / left)
    assert [code for code, _, _ in OnDisks(parts).run("merge", place / "out")] == [0, 0]
    assert hidden(place) == []


def test_a_file_that_nobody_reads_may_change(place: Path) -> None:
    """A log that grows, somebody else's file: the run is of the checkpoint."""
    parts = divided(FIXTURES / "sharded/hf_sharded", place, 2, texts_everywhere)
    line = ["--world", 2, "--timeout", HANG, "--node-local"]
    started = []
    for rank, part in enumerate(parts):
        log = part / "train.log"
        log.write_text("loss 1.0")
        run = ["-c", LINKED, log, place / f"log{rank}"]
        argv = [sys.executable, *run, "merge", part, place / "out", "--rank", rank, *line]
        started.append(Host(f"node{rank}").start(argv))
    for code, _, err in ended(started):
        assert code == 0, err


def test_what_is_given_may_be_the_step(place: Path) -> None:
    for name, source in (("neox", NEOX), ("deepspeed", FIXTURES / "deepspeed/zero3_bf16_dp2")):
        parts = divided(source, place / name, 2, texts_everywhere)
        [step] = {p.name for part in parts for p in part.glob("global_step*")}
        alone, out = place / f"{name}-alone", place / f"{name}-out"
        ran = cli("merge", *(part / step for part in parts), alone)
        assert ran.code == 0, ran.out
        for code, _, err in OnDisks(parts).run("merge", out, inside=[step, step]):
            assert code == 0, err
        assert unnamed(content(out)) == unnamed(content(alone))


@pytest.mark.parametrize("deep", [1, 2])
def test_what_is_given_may_be_the_step_of_a_store(deep: int, place: Path) -> None:
    """One of them is a temporary directory: that is known by its name."""
    nodes = of_nodes("mp2_local_BROKEN_063_zarr3")(place)
    inside = []
    for node in nodes:
        [step] = (node / "checkpoints").iterdir()
        [item] = [p for p in step.iterdir() if p.name.startswith("items")]
        inside.append(str((step if deep == 1 else item).relative_to(node)))
    alone, out = place / "alone", place / "out"
    ran = cli("merge", *(node / name for node, name in zip(nodes, inside, strict=True)), alone)
    told = OnDisks(nodes).run("merge", out, inside=inside)
    assert [code for code, _, _ in told] == [ran.code] * 2, (told, ran.out)
    assert ran.code == 0, ran.out
    assert unnamed(content(out)) == unnamed(content(alone))


def test_a_chunk_that_changes_stops_all(place: Path) -> None:
    for linked in (0, 1):
        nodes = of_nodes("mp2_local_BROKEN_063_zarr3")(place / str(linked))
        data = max(nodes[linked].rglob("d/*"), key=lambda p: p.stat().st_size)
        line = ["--world", 2, "--timeout", HANG, "--node-local"]
        started = []
        for rank, part in enumerate(nodes):
            run = ["-c", LINKED, data, place / "link"] if rank == linked else ["-m", "fastshard"]
            argv = [sys.executable, *run, "merge", part, place / "out", "--rank", rank, *line]
            started.append(Host(f"node{rank}").start(argv))
        for code, _, err in ended(started):
            assert code == 1 and "FS506" in err and data.name in err, err
        assert not (place / "out").exists()
        (place / "link").unlink()
        for left in hidden(place):
            shutil.rmtree(place / left)


def test_pieces_are_compared_where_they_lie(place: Path) -> None:
    """Three pieces on two hosts: none of them is sent whole to be hashed elsewhere."""
    model = place / "model"
    model.mkdir()
    names = {f"layer{i}": f"model-{i:05}-of-00003.safetensors" for i in range(3)}
    for seed, (name, file) in enumerate(names.items()):
        values = torch.rand(1024, 512, generator=torch.Generator().manual_seed(seed))
        save_file({name: values}, model / file, metadata={"format": "pt"})
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    held = divided(model, place / "held", 3, texts_everywhere)
    disks = [place / "disk0", place / "disk1"]
    for disk in disks:
        disk.mkdir()
    for number, part in enumerate(held):
        ran = cli("copy-local", part, disks[number % 2] / f"piece{number}")
        assert ran.code == 0, ran.err
    line = ["--world", 2, "--timeout", HANG, "--node-local"]

    def run(out: Path) -> list[tuple[int, str, str]]:
        return ended(
            [
                Host(f"node{rank}").fastshard("merge", *sorted(disk.iterdir()), out, "--rank", rank, *line)
                for rank, disk in enumerate(disks)
            ]
        )

    ran = run(place / "out")
    assert [code for code, _, _ in ran] == [0, 0], ran
    whole = sum(file.stat().st_size for file in held[0].parent.rglob("*.safetensors"))
    assert bytes_told(ran[0][1]) < whole // 4, (ran, whole)
    damaged = next((disks[1] / "piece1").glob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    for code, _, err in run(place / "out2"):
        assert code == 1 and "FS308" in err and damaged.name in err and "node1" in err, err
    assert not (place / "out2").exists() and hidden(place) == []


def test_two_steps_are_no_checkpoint(place: Path) -> None:
    parts = divided(NEOX, place, 2, texts_everywhere)
    [step] = parts[1].glob("global_step*")
    step.rename(step.with_name("global_step99"))
    (parts[1] / "latest").write_text("global_step99")
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code in (1, 3), err
    assert not (place / "out").exists() and hidden(place) == []


ORBAX = FIXTURES / "orbax"


def of_nodes(name: str) -> Callable[[Path], list[Path]]:
    """What each process of a run that saved without a shared disk left on its own."""
    return lambda place: [
        Path(shutil.copytree(node, place / node.name)) for node in sorted((ORBAX / name).glob("node*"))
    ]


def of_files(name: str) -> Callable[[Path], list[Path]]:
    """A store of one process whose files lie on three disks: each has some of the chunks of each array."""
    return lambda place: divided(ORBAX / name, place, 3, texts_everywhere)


STORES: dict[str, tuple[Callable[[Path], list[Path]], list[str]]] = {
    # maxtext#887: process 0 has committed what it saw, the other's chunks lie in a temporary directory of its
    # own.
    "ocdbt": (of_nodes("mp2_local_BROKEN_063_zarr3"), ["merge"]),
    "ocdbt of the newest": (of_nodes("mp2_local_BROKEN_0128_zarr3_primarynone"), ["merge"]),
    "plain zarr": (of_files("paxml_gpt3_micro_weights"), ["merge"]),
    "to a store": (of_files("paxml_gpt3_micro_weights"), ["convert", "--to", "maxtext"]),
    "to orbax": (of_nodes("mp2_local_BROKEN_063_zarr3"), ["convert", "--to", "orbax"]),
}


@pytest.mark.parametrize("name", STORES)
def test_stores_on_several_disks(name: str, place: Path) -> None:
    disks, verb = STORES[name]
    parts = disks(place)
    alone, out = place / "alone", place / "out"
    ran = cli(verb[0], *parts, alone, *verb[1:])
    on = OnDisks(parts)
    told = on.run(verb[0], out, *verb[1:])
    assert [code for code, _, _ in told] == [ran.code] * len(parts), told
    assert ran.code == 0, ran.out
    assert list(on.temporary.iterdir()) == [] and hidden(place) == []
    if "--to" in verb:
        # How a store divides its bytes into files is its own affair.
        assert fastshard.diff(out, alone) == []
        made, expected = (json.loads((f / "fastshard.manifest.json").read_text()) for f in (out, alone))
        assert made["tensors"] == expected["tensors"] != []
    else:
        assert unnamed(content(out)) == unnamed(content(alone))


def test_a_chunk_that_no_host_has_is_missing_on_all(place: Path) -> None:
    parts = of_files("paxml_gpt3_micro_weights")(place)
    chunks = [p for part in parts for p in part.rglob("*") if p.is_file() and not p.name.startswith(".")]
    max(chunks, key=lambda p: p.stat().st_size).unlink()
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code == 3 and "FS111" in err, err
    assert not (place / "out").exists()


def test_a_damaged_chunk_is_never_taken_for_zeros(place: Path) -> None:
    """Of a store that lies elsewhere nothing is read but what was brought."""
    parts = of_nodes("mp2_local_BROKEN_063_zarr3")(place)
    [data] = [max(part.rglob("d/*"), key=lambda p: p.stat().st_size) for part in parts[1:]]
    held = bytearray(data.read_bytes())
    held[len(held) // 4 : len(held) // 2] = bytes(len(held) // 2 - len(held) // 4)
    data.write_bytes(held)
    alone = cli("merge", *parts, place / "alone")
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code == alone.code, err
    if alone.code == 0:
        assert unnamed(content(place / "out")) == unnamed(content(place / "alone"))


def test_one_process_has_nobody_to_borrow_from(tmp_path: Path) -> None:
    ran = cli("merge", NEOX, tmp_path / "out", "--node-local")
    assert ran.code == 2 and "FS515" in ran.out and "--rank" in ran.out
