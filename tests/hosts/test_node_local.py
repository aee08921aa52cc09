"""Hosts that have a part of the checkpoint each, on a disk of their own, make what one process makes that sees all of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from harness import Host, can_have_hosts, content, ended, hidden, hosts

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benches"))

import fastshard
import neox
from helpers import FIXTURES, NEOX, cli

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

    def start(
        self,
        verb: str,
        out: Path,
        *options: object,
        timeout: float = 60,
        own_pids: bool = True,
        only: int | None = None,
    ) -> list[Host]:
        words = " ".join(f"'{word}'" for word in (verb, DISK, out, *options, "--node-local"))
        environ, started = {"TMPDIR": str(self.temporary)}, []
        for i, (host, part) in enumerate(
            zip(hosts(len(self.parts), environ=environ, own_pids=own_pids), self.parts, strict=True)
        ):
            if only not in (None, i):
                continue
            rank = f"--rank {i} --world {len(self.parts)} --timeout {timeout}"
            line = f"mount --bind '{part}' {DISK} && exec '{sys.executable}' -m fastshard {words} {rank}"
            started.append(host.start(["sh", "-c", line]))
        return started

    def run(self, verb: str, out: Path, *options: object, timeout: float = 60) -> list[tuple[int, str, str]]:
        return ended(self.start(verb, out, *options, timeout=timeout))


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
    document["not_proven"] = re.sub(r"[^ (]*/(?=[^/ ]+)", "", document["not_proven"])
    return {**files, "fastshard.manifest.json": json.dumps(document).encode()}


def wait_until_met(place: Path, n: int) -> None:
    until = time.monotonic() + 30
    while len(list((place / ".out.fastshard-ranks").glob("lent-*.journal"))) < n:
        assert time.monotonic() < until
        time.sleep(0.01)


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
    """GPT-NeoX, half of whose matrices are cut along their columns: each of their tiles is made of all ranks' files."""
    folder = tmp_path_factory.mktemp("neox") / "in"
    neox.write(folder, hidden=512, layers=3, vocab=2048, tp=4)
    return folder


def bytes_told(out: str) -> int:
    found = re.search(r"went from host to host by way of the destination: (\d+) bytes", out)
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
    # Of each matrix that is cut along its columns, 2 of 12 hidden x hidden parts dense and 8 mlp: three quarters.
    columns = 3 * (512 * 512 + 4 * 512 * 512) * 2
    assert columns * 3 // 4 <= told < whole // 2, (told, whole)


def test_what_is_missing_is_missing_on_all(split: Path, place: Path) -> None:
    parts = divided(split, place, 3, texts_everywhere)
    [gone] = [file for part in parts for file in part.rglob("layer_03-model_02*")]
    gone.unlink()
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code == 3, err
        assert "FS101" in err and "layer_03-model_02" in err and "(tp 2)" in err, err
        assert "fastshard-" not in err, err
    assert not (place / "out").exists() and hidden(place) == []


def test_a_host_that_loses_its_power_is_named_and_all_go_on_later(split: Path, place: Path) -> None:
    parts = divided(split, place, 3, texts_everywhere)
    on = OnDisks(parts)
    started = on.start("merge", place / "out", timeout=4)
    # Once it has met the others, whatever it does then.
    wait_until_met(place, 3)
    started[2].kill()
    first = ended(started)
    for code, _, err in first[:2]:
        assert code == 3 and "FS523" in err and "node2" in err, err
    assert not (place / "out").exists()
    for code, _, err in on.run("merge", place / "out", "--resume"):
        assert code == 0, err
    alone = place / "alone"
    assert cli("merge", *parts, alone).code == 0
    assert unnamed(content(place / "out")) == unnamed(content(alone))
    assert hidden(place) == []


def test_a_host_without_its_part_stops_all(split: Path, place: Path) -> None:
    part = divided(split, place, 1, texts_everywhere)[0]
    line = ["--world", 2, "--timeout", 30, "--node-local"]
    one = Host("node0").fastshard("merge", part, place / "out", "--rank", 0, *line)
    two = Host("node1").fastshard("merge", place / "nowhere", place / "out", "--rank", 1, *line)
    for code, _, err in ended([one, two]):
        assert code == 2 and "FS501" in err and "node1" in err, err
    assert not (place / "out").exists() and hidden(place) == []


def test_the_user_stops_one(split: Path, place: Path) -> None:
    parts = divided(split, place, 3, texts_everywhere)
    on = OnDisks(parts)
    started = on.start("merge", place / "out")
    wait_until_met(place, 3)
    os.killpg(started[1].running.pid, signal.SIGINT)  # type: ignore[union-attr]
    ran = ended(started)
    assert list(on.temporary.iterdir()) == []
    codes = [code for code, _, _ in ran]
    # What came too late stops nobody: the result is published then.
    assert codes in ([3, 130, 3], [0, 130, 0], [0, 0, 0]), ran
    assert (place / "out").exists() == (0 in codes)


def test_a_rank_that_comes_late_finds_all_done(split: Path, place: Path) -> None:
    parts = divided(split, place, 2, texts_everywhere)
    assert [code for code, _, _ in OnDisks(parts).run("merge", place / "out")] == [0, 0]
    again = ["merge", parts[1], place / "out", "--node-local", "--rank", 1, "--world", 2, "--timeout", 2]
    ran = cli(*again)
    assert ran.code == 0, ran.err
    # What was asked for otherwise, or of something else, is not done: it waits for the others, who are not there.
    assert cli("convert", *again[1:], "--to", "hf").code == 2
    assert cli(*again, "--dtype", "f32").code == 2
    later = parts[1] / "global_step11"
    shutil.copytree(next(parts[1].glob("global_step*")), later)
    assert cli(*again).code == 2
    shutil.rmtree(later)
    assert cli(*again).code == 0
    os.utime(next(parts[1].rglob("layer_*")))
    assert cli(*again).code == 2


def test_a_rank_that_is_started_again_lends_anew(split: Path, place: Path) -> None:
    """Its first process has gone without a word once the others have read from it."""
    parts = divided(split, place, 3, texts_everywhere)
    on = OnDisks(parts)
    started = on.start("merge", place / "out", own_pids=False)
    wait_until_met(place, 3)
    time.sleep(0.1)
    started[2].kill()
    again = on.start("merge", place / "out", own_pids=False, only=2)
    codes = [code for code, _, _ in ended([*started[:2], *again])]
    if codes != [0, 0, 0]:
        # The others have seen it go first.
        assert codes[:2] == [3, 3] and not (place / "out").exists(), codes
        assert [code for code, _, _ in on.run("merge", place / "out", "--resume")] == [0, 0, 0]
    assert cli("merge", *parts, place / "alone").code == 0
    assert unnamed(content(place / "out")) == unnamed(content(place / "alone"))


def test_a_folder_and_files_of_one_host(place: Path) -> None:
    hf = FIXTURES / "sharded/hf_sharded"
    parts = divided(hf, place, 2, texts_everywhere)
    odd = place / "odd"
    odd.mkdir()
    moved = next(parts[0].glob("*.safetensors"))
    moved.rename(odd / moved.name)
    line = ["--world", 2, "--timeout", 30, "--node-local"]
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


def test_two_steps_are_no_checkpoint(place: Path) -> None:
    parts = divided(NEOX, place, 2, texts_everywhere)
    [step] = parts[1].glob("global_step*")
    step.rename(step.with_name("global_step99"))
    (parts[1] / "latest").write_text("global_step99")
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code in (1, 3), err
    assert not (place / "out").exists() and hidden(place) == []


def test_stores_are_not_read_from_another_hosts_disk(place: Path) -> None:
    store = FIXTURES / "orbax/mp2_local_BROKEN_063_zarr3"
    parts = [shutil.copytree(store / name, place / name) for name in ("node0", "node1")]
    for code, _, err in OnDisks(parts).run("merge", place / "out"):
        assert code == 2 and "FS514" in err and "rsync" in err, err
    assert not (place / "out").exists()


def test_one_process_has_nobody_to_borrow_from(tmp_path: Path) -> None:
    ran = cli("merge", NEOX, tmp_path / "out", "--node-local")
    assert ran.code == 2 and "FS515" in ran.out and "--rank" in ran.out
