"""Every checkpoint of Orbax, MaxText and Paxml: whole ones give their hashes, broken ones say what is lost,
hosts' directories repair."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import fastshard
import pytest
from helpers import FIXTURES, assert_refused, cli, read_result, sha256

#: What _ABORTED_ ones need, whose directories all still carry the mark of temporary ones.
UNCOMMITTED = ("--accept", "uncommitted")


def wanted(fixture: Path) -> dict[str, tuple[list[int], str]]:
    described = json.loads((fixture / "expected.json").read_text())
    tensors = described.get("tensors") or described["maxtext_tensors"]
    return {name: (t["shape"], t["sha256"]) for name, t in tensors.items()}


def merged(out: Path) -> dict[str, tuple[list[int], str]]:
    return {name: (list(t.shape), sha256(t)) for name, t in read_result(out).items()}


def nodes(fixture: Path) -> list[Path]:
    """One directory, or those of the hosts."""
    hosts = sorted(fixture.glob("node*"))
    return hosts or [next(p for p in sorted(fixture.iterdir()) if p.is_dir())]


def holes(fixture: Path, node: Path) -> set[str]:
    described: dict[str, Any] = json.loads((fixture / "holes.json").read_text())
    (found,) = [h for item, h in described.items() if item.startswith(f"{node.name}/")]
    return set(found["missing_chunks"])


def named(findings: list[dict[str, Any]]) -> set[str]:
    """Keys of the chunks that findings name."""
    found = set()
    for finding in findings:
        match = re.search(r"chunks are missing: (.*)", finding["message"])
        if match:
            found |= {f"{finding['tensor']}/{key}" for key in match[1].split(", ")}
    return found


def test_whole_or_repaired_every_tensor_has_its_hash(orbax_fixture: Path, tmp_path: Path) -> None:
    options = UNCOMMITTED if "ABORTED" in orbax_fixture.name else ()
    ran = cli("merge", *nodes(orbax_fixture), tmp_path / "out", *options)
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(orbax_fixture)


def test_the_order_of_the_hosts_does_not_matter(orbax_fixture: Path, tmp_path: Path) -> None:
    if len(nodes(orbax_fixture)) == 1:
        pytest.skip("one directory")
    options = UNCOMMITTED if "ABORTED" in orbax_fixture.name else ()
    ran = cli("merge", *reversed(nodes(orbax_fixture)), tmp_path / "out", *options)
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(orbax_fixture)


def test_what_is_opened_has_the_hashes(orbax_fixture: Path) -> None:
    accept = ["uncommitted"] if "ABORTED" in orbax_fixture.name else []
    checkpoint = fastshard.open(*nodes(orbax_fixture), accept=accept)
    assert not [f for f in checkpoint.findings if f.severity == "error"]
    have = {name: (list(t.shape), sha256(t.torch())) for name, t in checkpoint.items()}
    assert have == wanted(orbax_fixture)


def test_maxtext_s_own_conversions_have_their_hashes(twin_fixture: Path, tmp_path: Path) -> None:
    root = twin_fixture / "0"
    assert cli("verify", root).code == 0
    ran = cli("merge", root, tmp_path / "out")
    assert ran.code == 0, ran.out
    assert merged(tmp_path / "out") == wanted(twin_fixture)
    assert fastshard.open(root).step == "0"


def test_a_whole_one_is_proven(orbax_fixture: Path) -> None:
    if len(nodes(orbax_fixture)) > 1:
        pytest.skip("several hosts")
    ran = cli("verify", *nodes(orbax_fixture))
    assert ran.code == 0, ran.out
    # Nothing but its directories says which variables a checkpoint of Paxml has.
    assert bool(ran.having("FS109")) == orbax_fixture.name.startswith("paxml_")


def test_one_host_s_directory_alone_is_refused(orbax_fixture: Path, tmp_path: Path) -> None:
    hosts = nodes(orbax_fixture)
    if len(hosts) == 1:
        pytest.skip("one directory")
    options = UNCOMMITTED if "ABORTED" in orbax_fixture.name else ()
    for number, host in enumerate(hosts):
        lost = holes(orbax_fixture, host)
        if options and number == 0:
            # The store was never merged: holes.json, which looks for merged ones, has nothing of it.
            assert_refused(host, tmp_path / "out", "FS111", exit=3, options=options, rank="process 1")
            continue
        if not lost:
            assert_refused(host, tmp_path / "out", "FS104", exit=3, options=UNCOMMITTED)
            continue
        ran = assert_refused(host, tmp_path / "out", "FS111", exit=3)
        (told,) = ran.having("FS111")
        assert named(told["parts"]) == lost
        assert all(f["rank"] == f"process {1 - number}" for f in (told, *told["parts"]))
        assert ran.having("FS111", message=f"{len(lost)} of 25 chunks are missing, in 8 of 17 arrays")
        assert ran.having("FS111", message="48.8 % of all elements")
        assert told["parts"] and all("50 % of them lost" in f["got"] for f in told["parts"])
        assert cli("verify", host).code == 3


def test_without_consent_uncommitted_directories_are_refused(orbax_fixture: Path, tmp_path: Path) -> None:
    if "ABORTED" not in orbax_fixture.name:
        pytest.skip("committed")
    ran = assert_refused(nodes(orbax_fixture), tmp_path / "out", "FS104", exit=3)
    assert "--accept uncommitted" in ran.errors[0]["run"][0]


@pytest.mark.parametrize("damage", ["deleted", "cut short"])
def test_a_data_file_that_the_index_names_is_missed_without_reading_it(damage: str, tmp_path: Path) -> None:
    # Where chunks of zeros are left out, an absent chunk proves nothing; one that the index names does.
    root = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES / "orbax" / "mp2_shared_good_063_zarr3_elided_zeros", root)
    data = max(root.glob("checkpoints/*/items/ocdbt.process_1/d/*"), key=lambda p: p.stat().st_size)
    if damage == "deleted":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:100])
    ran = assert_refused(root, tmp_path / "out", "FS111", exit=3)
    assert any(data.name in f["evidence"] for f in ran.errors)
