"""The log, of Python and of the core: off by default, and in Python's logging where that has a listener."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fastshard
import pytest
from helpers import NEOX

#: Topics of the core that a merge by one process logs to.
CORE = {"fastshard.catalog", "fastshard.plan", "fastshard.engine", "fastshard.publish"}


def merge(out: Path, *options: str, log: str = "debug") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastshard", "merge", str(NEOX), str(out), *options]
    environment = {**os.environ, "FASTSHARD_LOG": log}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)


def find_topics(text: str) -> set[str]:
    words = [line.split() for line in text.splitlines()]
    return {line[2].rstrip(":") for line in words if len(line) > 2 and line[1] == "ms"}


def test_the_core_logs_to_stderr_with_eight_threads(tmp_path: Path) -> None:
    lines = merge(tmp_path / "out", "--threads", "8").stderr
    assert find_topics(lines) >= CORE
    for event in ("staging directory", "workers", "sealed", "the result is at"):
        assert event in lines


def test_each_of_several_processes_logs_its_part(tmp_path: Path) -> None:
    ranks = ((tmp_path / "out", "--rank", rank, "--world", "2") for rank in ("0", "1"))
    with ThreadPoolExecutor(2) as pool:
        leader, follower = (done.stderr for done in pool.map(lambda words: merge(*words), ranks))
    assert "rank 0 of 2 leads" in leader and "concludes run" in leader
    assert "rank 1 of 2 follows" in follower and "makes part 1" in follower


def test_nothing_is_logged_without_a_listener(tmp_path: Path) -> None:
    assert find_topics(merge(tmp_path / "out", log="").stderr) == set()


def test_the_core_keeps_no_records_without_a_listener(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not logging.getLogger("fastshard.publish").isEnabledFor(logging.DEBUG)
    fastshard.merge(NEOX, tmp_path / "out")
    with caplog.at_level("DEBUG", "fastshard"):
        fastshard.open(NEOX)
    assert {record.name for record in caplog.records} & CORE == {"fastshard.catalog"}


def test_one_topic_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "fastshard.publish"):
        fastshard.merge(NEOX, tmp_path / "out")
    assert {record.name for record in caplog.records} == {"fastshard.publish"}


def test_merges_side_by_side_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outs = [tmp_path / name for name in ("a", "b", "c")]
    with caplog.at_level("DEBUG", "fastshard"), ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda out: fastshard.merge(NEOX, out, threads=8), outs))
    messages = [record.getMessage() for record in caplog.records]
    for out in outs:
        assert any(message.startswith(f'the result is at "{out}"') for message in messages)


def test_a_listener_that_raises_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("broken listener")

    logger, broken = logging.getLogger("fastshard.publish"), Broken()
    logger.addFilter(broken)
    try:
        with caplog.at_level("DEBUG", "fastshard"), pytest.raises(RuntimeError, match="broken listener"):
            fastshard.merge(NEOX, tmp_path / "out")
    finally:
        logger.removeFilter(broken)
