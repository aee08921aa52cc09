"""The two lines of the README say what is missing and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SH = shutil.which("sh") or "/bin/sh"


def ran(folder: Path, programs: dict[str, str], **environment: str) -> tuple[int, str]:
    """Exit code and stderr of the first line where only these programs and the system's small ones are to be
    had."""
    folder.mkdir()
    needed = (
        "cat",
        "cp",
        "cut",
        "date",
        "dirname",
        "grep",
        "head",
        "mkdir",
        "printf",
        "rm",
        "sleep",
        "sort",
        "tail",
        "tr",
    )
    for name in needed:
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, text in programs.items():
        (folder / name).write_text(f"#!{SH}\n{text}\n")
        (folder / name).chmod(0o755)
    copied = folder / "repository"
    shutil.copytree(ROOT / "scripts", copied / "scripts")
    found = subprocess.run(
        [SH, copied / "scripts/demo.sh"],
        env={"PATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return found.returncode, found.stderr


PYTHON = (
    'case "$*" in *sys.exit*) exit 0;; *ensurepip*) exit 0;; --version) echo Python 3.12.1;; *) exit 9;; esac'
)
OLD = 'case "$*" in *sys.exit*) exit 1;; --version) echo Python 3.8.2;; esac'
#: Nothing is installed, and nothing said of it.
NO_SETUP = "need_tools() { :; }\nsetup() { :; }\nsay() { :; }\n"
BARE = 'case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac'


@pytest.mark.parametrize(
    ("programs", "told"),
    [
        ({}, ("Python 3.10 or newer is needed: there is no python3", "PYTHON=")),
        ({"python3": OLD}, ("Python 3.8.2 is older", "PYTHON=")),
        ({"python3": BARE}, ("venv is missing", "python3-venv")),
        ({"python3": PYTHON}, ("Rust 1.87 or newer is needed to build", "rustup.rs")),
        (
            {"python3": PYTHON, "cargo": "exit 0", "rustc": "echo rustc 1.9.0"},
            ("this is 1.9.0", "rustup update"),
        ),
    ],
)
def test_what_is_missing_is_said_with_how_to_get_it(
    programs: dict[str, str], told: tuple[str, ...], tmp_path: Path
) -> None:
    code, said = ran(tmp_path / "bin", programs)
    assert code == 2 and all(part in said for part in told), said
    assert not (tmp_path / "bin/repository/.venv").exists()


def test_what_is_new_enough_goes_on(tmp_path: Path) -> None:
    """As far as making the environment, which this Python refuses."""
    code, said = ran(
        tmp_path / "bin", {"python3": PYTHON, "cargo": "exit 0", "rustc": "echo rustc 1.100.0-nightly"}
    )
    assert (
        code == 9 and said == "this failed: python3 -m venv .venv; all that it said is in target/setup.log\n"
    )


def test_the_demo_removes_nothing_but_what_it_left(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text(NO_SETUP)
    (tmp_path / "bin").mkdir()
    layer = "global_step0/layer_03-model"
    for name, text in {
        "python": f"""case "$*" in
        *gpt_neox\\ run*) mkdir -p run/global_step0; echo 0 > run/{layer}_00-model_states.pt
            echo 1 > run/{layer}_01-model_states.pt;;
        *gpt_neox*|*big*) mkdir original;;
        -c*) exit 1;;
        esac""",
        "fastshard": f"""case $1 in
        convert) cmp -s run/{layer}_0*.pt && exit 1; mkdir "$3";;
        report) echo page > report.html;;
        esac""",
        "df": "echo; echo disk 1 1 1000",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!{SH}\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    demo = tmp_path / "fastshard-demo"
    demo.mkdir()
    (demo / "mine").write_text("mine")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    for _ in range(2):
        subprocess.run(
            [SH, tmp_path / "scripts/demo.sh"], env={"PATH": path}, check=True, stdout=subprocess.DEVNULL
        )
        assert {p.name for p in demo.iterdir()} == {
            "mine",
            "original",
            "run",
            "node1",
            "model",
            "report.html",
        }
        (demo / "model/older").touch()
    assert (demo / "mine").read_text() == "mine"


def test_an_option_of_the_tests_that_nobody_knows_is_refused_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for argv in (["--al"], ["--all", "more"]):
        done = subprocess.run(
            [SH, tmp_path / "scripts/test.sh", *argv], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "usage: sh scripts/test.sh [--all]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


@pytest.mark.parametrize(("argv", "chosen"), [([], "not slow"), (["--all"], "slow or not slow")])
def test_slow_tests_are_run_where_they_are_asked_for(argv: list[str], chosen: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/setup.sh").write_text(NO_SETUP)
    (tmp_path / "bin").mkdir()
    for name in ("cargo", "python"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!{SH}\necho {name} "$@"\n')
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [SH, tmp_path / "scripts/test.sh", *argv],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    cargo, pytest_ = (line for line in done.stdout.splitlines() if line.startswith(("cargo ", "python ")))
    assert cargo == "cargo test --workspace" and pytest_.endswith(f"-m {chosen} -rs")


def test_the_readme_has_the_two_lines() -> None:
    text = (ROOT / "README.md").read_text()
    for name, line in (("quickstart", "sh scripts/demo.sh"), ("tests", "sh scripts/test.sh")):
        assert f"<!-- ci: {name} -->\n```sh\n{line}\n```" in text
    assert os.access(ROOT / ".ci/run", os.R_OK)
