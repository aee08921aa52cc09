"""What runs the blocks of pages: it finds what is not true, and refuses what it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import blocks
import checking
import pytest
import renew
from blocks import Unknown
from checking import Wrong
from running import Page, Untrue

FENCE = "```"


def page(*parts: str) -> str:
    """A page of blocks: a fence's first line with what is in it, after a comment if there is one."""
    lines = []
    for part in parts:
        comment, marked, block = part.rpartition("-->\n")
        lines.append(f"{comment}{marked}{FENCE}{block}{FENCE}\n")
    return "\n".join(lines)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Page]:
    made = Page(tmp_path)
    yield made
    made.kill()


def ran(run: Page, text: str) -> None:
    for block in blocks.blocks_of(text, "docs/a.md"):
        run.run(block)
    run.close()


TRUE = {
    "a script": ["sh\nmkdir a\ncd a\n", "sh\ntest -d a\n"],
    "output": ["console\n$ printf 'a\\n b\\n'\na\n b\n$ true\n"],
    "lines broken elsewhere": ["console\n$ echo one two three\none\ntwo three\n"],
    "what is left out": ["console\n$ echo one two three\none ...\n", "console\n$ seq 9\n1\n...\n9\n"],
    "an exit code": ["console\n$ false\n$ echo $?\n1\n"],
    "a command of two lines": ["console\n$ echo one \\\n  two\none two\n"],
    "an error that is shown": ["console\n$ fastshard verify nowhere\nerror FS501: ...\n"],
    "one namespace": ["python\na = 1\n", "python\nassert a == 1\n", "pycon\n>>> a + 1\n2\n"],
    "a file": ['python title="a.py"\nprint(1)\n', "console\n$ python a.py\n1\n"],
    "a table": ['toml\nlayout = "a"\nfamily = "a"\n'],
    "a tree": ["<!-- shown: what a tree looks like -->\ntext\na\n"],
    "what cannot run": [
        "<!-- not run: no cluster is here -->\nsh\nsrun -N 4 fastshard verify /data/a --json\n"
    ],
    "a job": [
        'yaml title=".github/workflows/a.yml"\non: push\njobs: {a: {runs-on: x, steps: [{run: fastshard '
        "verify a}]}}\n"
    ],
}


@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_passes(name: str, run: Page) -> None:
    ran(run, page(*TRUE[name]))
    assert sum(run.done.values()) == len(TRUE[name])


STOOD_IN = {
    "ranks": (
        "srun -N 2 --ntasks-per-node 1 sh -c 'echo $SLURM_PROCID > rank$SLURM_PROCID'",
        ["rank0", "rank1"],
    ),
    "ranks of MPI": (
        "mpirun -np 2 sh -c 'echo > of$OMPI_COMM_WORLD_SIZE.$OMPI_COMM_WORLD_RANK'",
        ["of2.0", "of2.1"],
    ),
    "an array": ("sh array.sh", ["task0", "task1", "last"]),
    "Jobs": ("kubectl apply -f jobs.yaml", ["index0", "index1"]),
}
ARRAY = """if [ -n "${SLURM_ARRAY_TASK_ID-}" ]; then echo > task$SLURM_ARRAY_TASK_ID; exit; fi
job=$(sbatch --parsable --array=0-1 "$0") || exit
sbatch --dependency=afterok:$job --wrap 'echo > last'
"""
JOBS = """apiVersion: batch/v1
kind: Job
metadata: {name: a}
spec:
  completions: 2
  completionMode: Indexed
  template:
    spec:
      restartPolicy: OnFailure
      containers: [{name: a, image: b, command: ["sh", "-c"], args: ["echo > index$JOB_COMPLETION_INDEX"]}]
"""


@pytest.mark.parametrize("name", STOOD_IN)
def test_a_cluster_is_stood_in_for(name: str, run: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    # What these start is no command of ours.
    monkeypatch.setitem(checking.PROGRAMS, "sh", checking.anything)
    (run.folder / "array.sh").write_text(ARRAY)
    (run.folder / "jobs.yaml").write_text(JOBS)
    line, made = STOOD_IN[name]
    ran(run, page(f"<!-- stand-in: no cluster is here -->\nsh\n{line}\n"))
    assert all((run.folder / file).exists() for file in made)
    assert run.done == {"stood in": 1}


def test_a_bucket_and_the_hub_are_stood_in_for(run: Page) -> None:
    for module in ("obstore", "huggingface_hub", "moto.server"):
        pytest.importorskip(module, reason="pip install '.[cloud,test]'")
    lines = [
        'aws s3 sync "$REPO"/tests/fixtures/sharded/hf_sharded s3://bucket/a',
        "fastshard diff s3://bucket/a hf://my-org/my-model",
    ]
    ran(run, page(*(f"<!-- stand-in: a server of this host -->\nsh\n{line}\n" for line in lines)))
    assert run.done == {"stood in": 2}


def test_a_rank_that_fails_fails_the_block(run: Page) -> None:
    text = page(
        "<!-- stand-in: no cluster is here -->\nsh\nsrun -N 2 --ntasks-per-node 1 fastshard verify nowhere\n"
    )
    with pytest.raises(Untrue, match="FS501"):
        ran(run, text)


FALSE = {
    "a script that fails": (["sh\nfalse\ntrue\n"], Untrue, "docs/a.md:1: exit code 1"),
    "a variable that is not set": (["sh\necho $a\n"], Untrue, "unbound"),
    "other output": (["console\n$ echo a\nb\n"], Untrue, "--- printed\na\n"),
    "more output": (["console\n$ seq 3\n1\n2\n"], Untrue, "$ seq 3"),
    "output that is not shown": (["console\n$ echo a\n"], Untrue, "$ echo a"),
    "output that never came": (["console\n$ true\na\n"], Untrue, "$ true"),
    "what is left out is not all": (["console\n$ seq 9\n1\n...\n8\n"], Untrue, "$ seq 9"),
    "another exit code": (["console\n$ false\n$ echo $?\n0\n"], Untrue, "$ echo $?"),
    "a failure that nothing shows": (
        ["console\n$ false\n"],
        Untrue,
        "exit code 1, and nothing shown says so",
    ),
    "a shell that ends": (["console\n$ exit 0\n$ true\n"], Untrue, "ended the shell"),
    "an exception": (["python\n\n1 / 0\n"], Untrue, 'File "docs/a.md", line 3'),
    "an example": (["pycon\n>>> 1 + 1\n3\n"], Untrue, "Expected:\n    3\nGot:\n    2"),
    "Python that ends": (["python\nimport os; os._exit(0)\n"], Untrue, "ended Python"),
    "a file that nothing uses": (['sh title="a.sh"\ntrue\n'], Untrue, "a.sh: no command"),
    "a file that is no Python": (['python title="a.py"\n1 +\n', "sh\npython a.py\n"], Wrong, "docs/a.md:1"),
    "no table": (['toml\nlayout = "a"\nno = 1\n'], Exception, ""),
    "no JSON": (["json\n{\n"], Wrong, "docs/a.md:1"),
    "no language": (["\na\n"], Unknown, "no language"),
    "another language": (["rust\nfn main() {}\n"], Unknown, "'rust'"),
    "text without a reason": (["text\na\n"], Unknown, "'text'"),
    "a reason for what can run": (["<!-- shown: because -->\nsh\ntrue\n"], Unknown, "marked 'shown'"),
    "an unknown attribute": (["sh hl_lines\ntrue\n"], Unknown, "hl_lines"),
    "an unknown test": (["<!-- ci: nobody -->\nsh\ntrue\n"], Wrong, "nobody"),
    "no command": (["console\na\n"], Unknown, "begins with"),
}


@pytest.mark.parametrize("name", FALSE)
def test_what_is_not_true_fails_and_says_where(name: str, run: Page) -> None:
    parts, kind, said = FALSE[name]
    with pytest.raises(kind) as raised:
        ran(run, page(*parts))
    assert said in str(raised.value)


def test_a_block_ends(run: Page) -> None:
    with pytest.raises(Unknown, match="without an end"):
        ran(run, f"{FENCE}sh\ntrue\n")


#: Lines of a block that is not run, and what is wrong with them.
NOT_RUN = {
    "fastshard verfy a": "there is no command",
    "fastshard convert a b --to hf --tpp 2": "--tpp",
    "fastshard convert a b --to hf --tp two": "--tp",
    "srun -N 4 fastshard merge a": "OUT",
    "srun --nodes-of 4 fastshard merge a b": "--nodes-of",
    "srun -N 4 python a.py": "a.py",
    "torchrun --nnodes 4 --no-python fastshard convert a b": "--to",
    "FASTSHARD_RANK=0 fastshard merge a b --wrold 2 > log": "--wrold",
    "ray job submit -- fastshard merge a b --rray auto": "--rray",
    "if true; then\nfastshard merge a\nfi": "OUT",
    "if true; then": "syntax error",
    "pip install 'fastshard[orbx]'": "orbx",
    "pip install . --group dox": "dox",
    "pytest tests/nowhere": "tests/nowhere",
    "pytest tests --fixture-dir=a": "--fixture-dir",
    "python tests/trials/kills.py --cont 3": "--cont",
    "just nothing": "nothing",
    "cargo test --test nowhere": "nowhere",
    "frobnicate": "frobnicate",
    "sbatch --arry=0-3 job.sh": "--arry",
    "sbatch nowhere.sh": "nowhere.sh",
    "sbatch job.sh": "--runn",
    "#SBATCH --nodes 4\ntrue": "--nodes",
    "kubectl create -f job.yaml": "apply",
    "kubectl apply -f job.yaml": "completionMode",
}


@pytest.mark.parametrize("lines", NOT_RUN)
def test_what_is_not_run_is_held_against_parsers(lines: str, run: Page) -> None:
    (run.folder / "job.sh").write_text("#SBATCH --nodes=4\nfastshard commit out --runn 1\n")
    (run.folder / "job.yaml").write_text(
        "{apiVersion: batch/v1, kind: Job, metadata: {name: a}, spec: {completionMode: indexed, template: "
        "{spec: "
        "{restartPolicy: Never, containers: [{name: a, image: b}]}}}}"
    )
    with pytest.raises(Wrong) as raised:
        ran(run, page(f"<!-- not run: no cluster is here -->\nsh\n{lines}\n"))
    assert NOT_RUN[lines] in str(raised.value)


def test_a_jobs_own_command_is_parsed(run: Page) -> None:
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": {
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "a", "image": "b", "args": ["fastshard verfy x"]}],
                }
            }
        },
    }
    with pytest.raises(Wrong, match="verfy"):
        checking.kubernetes(job, run.folder)


def test_a_workflow_is_held_against_its_schema(run: Page) -> None:
    pytest.importorskip("check_jsonschema", reason="pip install --group docs")
    head = 'yaml title=".github/workflows/a.yml"\n'
    for text, said in (
        ("on: push\njobs: {a: {runs-on: x, steps: [{runs: true}]}}\n", "runs"),
        ("on: push\njobs: {a: {runs-on: x, steps: [{run: fastshard verfy}]}}\n", "verfy"),
        (
            "on: push\njobs: {a: {runs-on: x, steps: [{uses: fastshard/fastshard@v0, with: {chekpoint: "
            "a}}]}}\n",
            "chekpoint",
        ),
    ):
        with pytest.raises(Wrong, match=said):
            ran(run, page(head + text))


def test_doctests_of_docstrings_are_blocks() -> None:
    found = blocks.doctests_of('"""A.\n\n>>> 1\n1\n"""\ndef f():\n    """B."""\n', "python/fastshard/a/b.py")
    assert [(block.language, block.line) for block in found] == [("pycon", 1)]
    assert blocks.module("python/fastshard/a/b.py") == "fastshard.a.b"
    assert blocks.module("python/fastshard/__init__.py") == "fastshard"
    assert blocks.module("docs/a.md") is None


def test_outputs_are_renewed_with_their_lines_broken_anew() -> None:
    printed = f"{'a' * 40} {'b' * 60}\n  help: c\n{'d' * 50}  {'e' * 50}\n"
    shown = f"{'a' * 40}\n{'b' * 60} help:\n...\n"
    assert renew.as_printed(shown, printed) == f"{'a' * 40} {'b' * 60}\n  help:\n...\n"
    assert renew.as_printed("", "\n") == ""
    assert renew.wrapped(printed) == f"{'a' * 40}\n{'b' * 60}\n  help: c\n{'d' * 50}  {'e' * 50}\n"


def test_a_page_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page("console\n$ echo a\nb\n$ echo a\na\n$ echo a\n", "sh\ntrue\n")
    for module in (blocks, renew):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text(text)
    renew.renew("docs/a.md")
    now = page("console\n$ echo a\na\n$ echo a\na\n$ echo a\na\n", "sh\ntrue\n")
    assert (tmp_path / "docs/a.md").read_text() == now
    assert "--- printed\na\n" in capsys.readouterr().out
