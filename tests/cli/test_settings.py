"""Settings of a project: what counts as an error, by files that the user trusts."""

from __future__ import annotations

import shutil
from pathlib import Path

import fastshard
import pytest
from helpers import HF, cli, copy

#: A file that no index names is a warning (FS108).
STRAY = "model-00007-of-00007.safetensors"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a checkpoint that gives a warning."""
    (tmp_path / "project/.git").mkdir(parents=True)
    (tmp_path / "project/jobs").mkdir()
    ckpt = copy(HF, tmp_path / "project/ckpt")
    shutil.copy(ckpt / "model-00001-of-00004.safetensors", ckpt / STRAY)
    monkeypatch.chdir(tmp_path / "project/jobs")
    return tmp_path / "project"


def code(project: Path, *words: object) -> int:
    return cli("inspect", project / "ckpt", *words).code


def test_without_settings_nothing_changes(project: Path) -> None:
    ran = cli("inspect", project / "ckpt", json_output=False)
    assert ran.code == 0 and "settings" not in ran.err and "warning FS108" in ran.out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fastshard.toml", 'fail-on = "warning"\n'),
        ("fastshard.toml", 'error = ["FS108"]\n'),
        ("pyproject.toml", '[tool.fastshard]\nfail_on = "warning"\n'),
    ],
)
@pytest.mark.parametrize("where", ["", "jobs"])
def test_they_are_read_from_the_folder_or_above(name: str, text: str, where: str, project: Path) -> None:
    path = project / where / name
    path.write_text(text)
    ran = cli("inspect", project / "ckpt", json_output=False)
    assert ran.code == 1 and ran.err == f"settings: {path}\n" and "error FS108 (by --" in ran.out
    assert code(project, "--no-settings") == 0
    # Scripts say themselves what they want.
    assert not [f for f in fastshard.inspect(project / "ckpt").findings if f.severity == "error"]


def test_what_is_ignored(project: Path) -> None:
    (project / "fastshard.toml").write_text('ignore = ["FS108"]\n')
    ran = cli("inspect", project / "ckpt", json_output=False)
    assert ran.code == 0 and "ignored as requested: 1 of FS108" in ran.out
    assert code(project, "--error", "FS108") == 1


def test_the_command_line_decides(project: Path) -> None:
    (project / "fastshard.toml").write_text('fail-on = "warning"\n')
    assert code(project, "--fail-on", "error") == 0


def test_the_nearest_file_alone_is_read(project: Path) -> None:
    (project / "fastshard.toml").write_text('fail-on = "warning"\n')
    (project / "jobs/pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert code(project) == 1
    (project / "jobs/pyproject.toml").write_text("[tool.fastshard]\n")
    assert code(project) == 0


def test_what_writes_publishes_nothing(project: Path) -> None:
    (project / "fastshard.toml").write_text('fail-on = "warning"\n')
    assert cli("merge", project / "ckpt", project / "out").code == 1 and not (project / "out").exists()


@pytest.mark.parametrize("where", ["ckpt", "ckpt/below"])
def test_a_checkpoint_does_not_judge_itself(
    where: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / where).mkdir(exist_ok=True)
    (project / where / "fastshard.toml").write_text('ignore = ["FS108"]\nerror = ["FS999"]\n')
    monkeypatch.chdir(project / where)
    ran = cli("inspect", project / "ckpt", json_output=False)
    assert ran.code == 0 and "settings" not in ran.err
    assert cli("inspect", "." if where == "ckpt" else "..", json_output=False).err == ""
    # Nor by one of its files.
    assert cli("inspect", project / "ckpt/model-00001-of-00004.safetensors", json_output=False).err == ""
    # Nor what is linked there.
    (project / "link").symlink_to(project / "ckpt")
    assert cli("inspect", project / "link", json_output=False).err == ""


def test_nothing_above_the_repository_is_read(project: Path) -> None:
    (project.parent / "fastshard.toml").write_text('fail-on = "warning"\n')
    assert code(project) == 0
    (project / ".git").rmdir()
    # Without a repository the folder alone is.
    assert code(project) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('fail-onn = "warning"\n', "there is no setting fail-onn; did you mean fail_on?"),
        ('fail-on = "note"\n', "fail-on"),
        ('ignore = "FS108"\n', "ignore"),
        ("ignore = [1]\n", "ignore"),
        ('like = "/elsewhere"\n', "there is no setting like"),
        ("= 1\n", "not TOML"),
        ('error = ["FS999"]\n', "FS999"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(text: str, message: str, project: Path) -> None:
    (project / "fastshard.toml").write_text(text)
    ran = cli("inspect", project / "ckpt")
    assert ran.code == 2 and ran.having("FS515", message=message)


def test_a_file_that_is_none(project: Path) -> None:
    (project / "fastshard.toml").write_bytes(b"\xff" * 10)
    assert code(project) == 2
    (project / "fastshard.toml").write_text("#" * (2 << 20))
    assert code(project) == 2
