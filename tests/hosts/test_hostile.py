"""What somebody else puts into the folders of a run, and hosts whose clocks are hours apart."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Host, can_have_hosts, card, content, ended, hidden, hosts
from helpers import FIXTURES, NEOX, at_once, cli
from holding import HANG, Clock, Steps, needs_steps

pytestmark = pytest.mark.skipif(
    can_have_hosts() is not None, reason=f"no namespaces can be made here: {can_have_hosts()}"
)

TREASURE = b"somebody else's"


def treasure(place: Path) -> tuple[Path, Path]:
    """A file and a folder that nobody may touch."""
    folder = place / "theirs"
    folder.mkdir()
    (folder / "file").write_bytes(TREASURE)
    return folder / "file", folder


def untouched(folder: Path) -> bool:
    return [p.name for p in folder.iterdir()] == ["file"] and (folder / "file").read_bytes() == TREASURE


def ranks(out: Path) -> list[Host]:
    words = ["merge", NEOX, out, "--world", 2, "--timeout", HANG, "--json"]
    return [Host(f"node{rank}").fastshard(*words, "--rank", rank) for rank in range(2)]


#: Names in the folder where ranks meet that can be known beforehand; empty for the folder itself.
MEETING = ["", "rank-00000.json", "rank-00001.json", "sources-00000.json"]


@pytest.mark.parametrize("name", at_once(MEETING, ["", "rank-00001.json"]))
def test_links_where_ranks_meet_lead_nowhere(name: str, place: Path) -> None:
    file, folder = treasure(place)
    meeting, out = place / ".out.fastshard-ranks", place / "out"
    if name:
        meeting.mkdir(mode=0o700)
        (meeting / name).symlink_to(file)
    else:
        meeting.symlink_to(folder)
    results = ended(ranks(out))
    assert untouched(folder)
    codes = [code for code, _, _ in results]
    if name:
        # A card is put in the place of whatever has its name.
        assert codes == [0, 0], results
        assert content(out) == alone(place)
    else:
        assert all(code == 2 for code in codes) and not out.exists(), results
        assert all(".out.fastshard-ranks" in printed for _, printed, _ in results), results


def alone(place: Path) -> dict[str, bytes]:
    out = place / "alone"
    assert cli("merge", NEOX, out).code == 0
    return content(out)


def begun(place: Path) -> tuple[str, Path]:
    """A run of two parts: its id, and its folder."""
    ran = cli("split", NEOX, place / "out", "--to", "hf", "--parts", 2)
    assert ran.code == 0, ran.out
    [folder] = hidden(place)
    return ran.doc["run"], place / folder


def to_file(path: Path, file: Path, folder: Path) -> None:
    path.unlink()
    path.symlink_to(file)


def to_folder(path: Path, file: Path, folder: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(folder)


#: Entry of the folder of a run, and how it is replaced by a link.
PLANTED: dict[str, Callable[[Path, Path, Path], None]] = {
    "state": to_file,
    "run.json": to_file,
    "round-1.json": to_file,
    "claim-1": to_file,
    "plan": to_file,
    "data.*": to_folder,
    "data.*/*": to_file,
}


@pytest.mark.parametrize("name", at_once(PLANTED, ["state", "data.*", "data.*/*"]))
def test_links_in_the_folder_of_a_run_lead_nowhere(name: str, place: Path) -> None:
    run, at = begun(place)
    file, folder = treasure(place)
    [path] = list(at.glob(name))
    PLANTED[name](path, file, folder)
    results = [
        cli("make-part", 0, place / "out", "--run", run),
        cli("make-part", 1, place / "out", "--run", run),
        cli("commit", place / "out", "--run", run),
        cli("convert", NEOX, place / "out", "--to", "hf", "--resume"),
    ]
    assert untouched(folder), results
    if (place / "out").exists():
        # What was damaged was made again.
        assert cli("verify", place / "out").code == 0
    else:
        assert all(ran.code in (2, 3) for ran in results), results
    assert cli("clean", place / "out", "--timeout", 1).code in (0, 2)
    assert untouched(folder)


def test_somebody_elses_run_id_in_the_folder(place: Path) -> None:
    run, at = begun(place)
    document = json.loads((at / "run.json").read_text())
    (at / "run.json").write_text(json.dumps({**document, "nonce": "0" * 32}))
    for verb in (["make-part", 0, place / "out"], ["commit", place / "out"]):
        ran = cli(*verb, "--run", run)
        assert ran.code == 2 and ran.errors[0]["code"] == "FS501" and run in ran.out, ran.out
    assert not (place / "out").exists()
    (at / "run.json").write_text("{}")
    for verb in (["make-part", 0, place / "out"], ["commit", place / "out"]):
        ran = cli(*verb, "--run", run)
        assert ran.code == 2 and "run.json" in ran.out, ran.out
    assert not (place / "out").exists()


#: Where all ranks are held, and where rank 0 is besides.
PLACES, PLACES_OF_ZERO = {"met", "opened", "tile-0", "made", "farewell"}, {"sealed", "published"}


@needs_steps
def test_clocks_that_are_hours_apart(place: Path, held_at: Callable[..., Steps], clock: Clock) -> None:
    """The times of all that the ranks write jump by hours, both ways, wherever they are, and between all
    signs of life."""
    source, out = FIXTURES / "gpt_neox/neox_pp_tp2", place / "out"

    def turn(hours: int) -> None:
        for hidden_folder in place.glob(".out.fastshard-*"):
            # Passes over folders that are removed meanwhile, when the result is published.
            for folder, _, files in os.walk(hidden_folder):
                for path in [folder, *(f"{folder}/{name}" for name in files)]:
                    # Cards are written anew again and again, under another name first.
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(path, (time.time() + hours * 3600,) * 2)

    both, steps = hosts(2, clock=clock), [held_at(*PLACES, *PLACES_OF_ZERO) for _ in range(2)]
    came: list[set[str]] = [set(), set()]
    for rank, host in enumerate(both):
        host.steps = steps[rank]
        host.fastshard("merge", source, out, "--world", 2, "--timeout", 8, "--json", "--rank", rank)
    end = time.monotonic() + HANG
    while not all(host.has_ended for host in both) and time.monotonic() < end:
        for rank in range(2):
            for held in steps[rank].held():
                came[rank].add(held.place)
                for hours in (5, -5):
                    turn(hours)
                    clock.beat(card(out, 0), card(out, 1))
                held.release()
        time.sleep(0.002)
    results = ended(both)
    assert [code for code, _, _ in results] == [0, 0], results
    assert came == [PLACES | PLACES_OF_ZERO, PLACES]
    assert content(out) == alone(place)
    assert hidden(place) == []
