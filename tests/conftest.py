"""Options and parametrisation: the committed fixtures, or all those of `--fixtures-dir DIR`."""

from __future__ import annotations

import gc
import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: each process would start as many threads as there are cores, beside as many
    # processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from fastshard.sources import registry
from helpers import FIXTURES
from hypothesis import HealthCheck, settings

#: Cases of `broken/` that name a checkpoint this version reads.
BROKEN = ("neox_", "tp4_", "zero", "stale_masters_", "dcp_", "hf_", "latest_points_nowhere")
#: fixture argument -> (folder, prefix of the names)
KINDS = {
    "neox": ("gpt_neox", ""),
    "tp4": ("sharded", "tp4_"),
    "hf": ("sharded", "hf_"),
    "sharded": ("sharded", ""),
    "deepspeed": ("deepspeed", ""),
    "universal": ("universal", ""),
    "orbax": ("orbax", ""),
    "maxtext": ("orbax", "gpt3_"),
    "twin": ("maxtext_twins", "a_mt_"),
}

#: Cases that real frameworks wrote and that this version does not read right yet: each fails, and says so
#: once it does not any more.
NOT_YET: dict[str, str] = {}


#: These cases exist in `--fixtures-dir` only; the default run builds its damaged checkpoints and train states
#: itself.
ONLY_THERE = ("test_broken_fixtures.py", "test_broken_snapshots.py", "test_maxtext_pairs.py")


# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Importing transformers in a process of its own takes seconds: tests of what it lists ask for it.
os.environ.setdefault("FASTSHARD_TRANSFORMERS", "off")

# A shell without job control starts `command &` with SIGINT ignored, and so does nohup. Every child would
# keep that, and the tests that send it would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _ask(entry: registry.Entry, listing: Any, options: Any) -> Any:
    """Asks an adapter and looks for its mark: all checkpoints of all tests show that no mark is too
    narrow."""
    names, is_single = registry.names_of(listing), listing.single
    try:
        found = entry.load().detect(listing, options)
    except BaseException:
        assert entry.may_find(names, is_single), "an adapter refused what its mark does not match"
        raise
    assert found is None or entry.may_find(names, is_single), "an adapter found what its mark does not match"
    return found


registry._ask = _ask
# All are asked in their order, as if there were no marks.
registry._in_order = lambda listing: registry._ENTRIES


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--renew-snapshots") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--renew-snapshots: one process writes, so no -n")


#: Folders whose tests run in one process: they share ports, clusters, or what a framework has made for all of
#: them.
TOGETHER = ("real_deepspeed", "real_megatron", "real_ray", "fsdp")


@cache
def _scope(file: str) -> str | None:
    """What runs in one process with the tests of a file: its folder, itself if it shares fixtures, or
    nothing."""
    path = Path(__file__).parent.parent / file
    if path.parent.name in TOGETHER:
        return path.parent.name
    return file if 'scope="module"' in path.read_text(encoding="utf-8") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives processes what belongs together, the largest first, then single tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid.partition("::")[0]) or nodeid

    return Together(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves what was imported out of what the collector looks through: the frameworks alone are millions of
    objects."""
    del session
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fixtures-only"):
        others = [item for item in items if not _is_of_fixtures(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _is_of_fixtures(item)]
        assert items, "no test takes a fixture: this run would show nothing"
    for item in items:
        reason = NOT_YET.get(item.nodeid.rpartition("/")[2])
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _is_of_fixtures(item: pytest.Item) -> bool:
    taken = getattr(item, "fixturenames", ())
    return item.path.name in ONLY_THERE or any(f"{kind}_fixture" in taken for kind in KINDS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fixtures-dir",
        type=Path,
        metavar="DIR",
        help="run the checks over all fixtures of this folder, broken/ too",
    )
    parser.addoption(
        "--renew-snapshots",
        action="store_true",
        help="write what was reviewed anew: tests/snapshots, tests/golden and tests/conformance/matrix.toml",
    )
    parser.addoption(
        "--fixtures-only", action="store_true", help="leave out the tests that are the same for any fixtures"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name in ONLY_THERE and config.getoption("--fixtures-dir") is None:
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    root: Path = metafunc.config.getoption("--fixtures-dir") or FIXTURES
    for kind, (folder, prefix) in KINDS.items():
        if f"{kind}_fixture" in metafunc.fixturenames:
            # Those of the folder that is given, and the committed ones that it does not have.
            named = {
                path.parent.name: path.parent
                for place in (FIXTURES, root)
                for path in (place / folder).glob(f"{prefix}*/expected.json")
            }
            found = [named[name] for name in sorted(named)]
            assert found, f"no {prefix}* in {root / folder}: these tests would show nothing"
            metafunc.parametrize(f"{kind}_fixture", found, ids=[p.name for p in found])
    if "broken_case" in metafunc.fixturenames:
        index = json.loads((root / "broken/index.json").read_text())
        cases = [
            case | {"path": root / "broken" / case["name"]}
            for case in index
            if case["name"].startswith(BROKEN)
        ]
        assert cases
        metafunc.parametrize("broken_case", cases, ids=[case["name"] for case in cases])
