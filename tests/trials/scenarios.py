"""Commands under trial, each with the result that it must have."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import sources
import trees
from intercept import Call
from runner import Run, Zygote

#: What stands for the destination among a command's arguments.
OUT = "OUT"
#: Commands by name; ``@NAME`` is a source.
COMMANDS = {
    "merge-hf": "merge @hf OUT --max-shard-size 600KB",
    "merge-tp": "merge @tp OUT --max-shard-size 900KB",
    "merge-neox": "merge @neox OUT --max-shard-size 900KB",
    "merge-gpt": "merge @gpt OUT",
    "merge-zero3": "merge @zero3 OUT",
    "hf": "convert @tp OUT --to hf --max-shard-size 900KB",
    "tp": "convert @hf OUT --to tp-safetensors --tp 4",
    "gpt_neox": "convert @hf OUT --to gpt_neox --tp 2",
    "sequential": "convert @gpt OUT --to gpt_neox:sequential",
    "megatron": "convert @hf OUT --to megatron --tp 2",
    "legacy": "convert @hf OUT --to megatron:legacy --tp 2 --pp 2",
    "torch_dist": "convert @hf OUT --to megatron:torch_dist --tp 2",
    "dcp": "convert @hf OUT --to dcp --tp 2",
    "repair": "master-weights @zero --repair OUT",
    "orbax": "convert @hf OUT --to orbax",
    "maxtext": "convert @hf OUT --to maxtext",
    "zarr2": "convert @hf OUT --to maxtext:unscan --zarr2",
}
#: Commands that write arrays by way of TensorStore.
_ARRAYS = ("orbax", "maxtext", "zarr2")
#: Sources that are fixtures: where they may be.
_FIXTURES = {
    "gpt": ("gpt_neox/neox_pp_tp2",),
    "zero": ("stale_masters_zero1_bf16_dp2", "broken/stale_masters_zero1_bf16_dp2"),
    "zero3": ("deepspeed/zero3_bf16_dp2",),
}


@dataclass
class Scenario:
    """A command, and what is known of its undisturbed runs."""

    name: str
    argv: tuple[str, ...]
    #: Meaning of the result; found by a reference run.
    new: trees.Tree = field(default_factory=dict)
    #: Seconds from the start to the end, to the first sight of the staging folder, and of its life.
    seconds: float = 0.0
    staged_at: float = 0.0
    staged_for: float = 0.0
    #: Calls on the run's files, in order, of a run with one thread.
    calls: list[Call] = field(default_factory=list)

    def command(self, out: Path, *options: str) -> list[str]:
        """The arguments for a destination."""
        return [str(out) if word == OUT else word for word in self.argv] + list(options)


def staging(area: Path) -> list[Path]:
    """Staging folders beside and inside the destination."""
    places = (area, area / "out")
    return [p for place in places if place.is_dir() for p in place.iterdir() if ".fastshard-" in p.name]


class Library:
    """Sources, shared by all trials, which only read them, and scenarios with their references."""

    def __init__(self, folder: Path, zygote: Zygote, fixtures: Path) -> None:
        self._folder, self._zygote, self._fixtures = folder, zygote, fixtures
        self.sources = folder / "src"
        self._area = folder / "reference"
        self._area.mkdir(parents=True)
        sources.small(self.sources / "hf", fixtures, seed=1)
        other = sources.small(self.sources / "other", fixtures, seed=2)
        #: A result of an earlier run, of other content.
        self.old = folder / "old"
        self._done("merge", other, self.old, "--max-shard-size", "600KB", "-q")
        self.old_meaning = trees.meaning(self.old, trees.raw(self.old) or {})
        self.before = self.fingerprint()

    def fingerprint(self) -> dict[str, tuple[int, int]]:
        """Size and time of every source file: no run may change one."""
        files = [p for p in self.sources.rglob("*") if p.is_file()]
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in files}

    def known(self, scenario: Scenario) -> dict[str, trees.Tree]:
        """What OUT may be."""
        return {"old": self.old_meaning, "new": scenario.new}

    def _done(self, *argv: object) -> None:
        ended = self._zygote.run(*argv)
        if ended.code:
            raise SystemExit(f"an undisturbed run failed: {argv}\n{ended.said}")

    def chosen(self, *names: str, fixtures: bool = False) -> list[Scenario]:
        """The scenarios of these names, or all; sources are made where they are needed.

        Those that need TensorStore are left out where that is not installed.

        Args:
            names: of :data:`COMMANDS`; none for all.
            fixtures: a merge of every good fixture too.
        """
        arrays = find_spec("tensorstore") is not None
        found = [
            Scenario(
                name,
                tuple(str(self._source(word[1:])) if word.startswith("@") else word for word in argv.split()),
            )
            for name, argv in COMMANDS.items()
            if (not names or name in names) and (arrays or name not in _ARRAYS)
        ]
        for name in sources.further(self._fixtures) if fixtures else ():
            source = sources.fixture(self._fixtures, name, self.sources / name)
            if self._zygote.run("plan", source).code == 0:
                found.append(Scenario(f"merge {name}", ("merge", str(source), OUT)))
        self.before = self.fingerprint()
        return found

    def _source(self, name: str) -> Path:
        """A source by name, made when it is first asked for."""
        place = self.sources / name
        if place.exists():
            return place
        if name == "tp":
            return sources.derived(
                self._zygote, self.sources / "hf", place, "--to", "tp-safetensors", "--tp", "2"
            )
        if name == "neox":
            return sources.derived(self._zygote, self.sources / "hf", place, "--to", "gpt_neox", "--tp", "2")
        found = next(p for p in _FIXTURES[name] if (self._fixtures / p).is_dir())
        return sources.fixture(self._fixtures, found, place)

    def measure(self, scenario: Scenario, *, calls: bool) -> Scenario:
        """Makes the reference, twice, and measures the run."""
        out = self._area / "out"
        for _ in range(2):
            run = self._zygote.start(*scenario.command(out, "-q"))
            self._watch(run, scenario)
            ended = run.finish(self._zygote)
            tree = trees.raw(out)
            if ended.code or tree is None:
                raise SystemExit(f"{scenario.name}: the reference run failed\n{ended.said}")
            new = trees.meaning(out, tree)
            if scenario.new and new != scenario.new:
                raise SystemExit(
                    f"{scenario.name}: two runs of one command differ: {trees.difference(new, scenario.new)}"
                )
            scenario.new, scenario.seconds = new, ended.seconds
            shutil.rmtree(out)
        if calls:
            scenario.calls = self.calls(scenario, out)
        return scenario

    def calls(self, scenario: Scenario, out: Path) -> list[Call]:
        """The calls of an undisturbed run with one thread."""
        seen: list[Call] = []

        def note(run: Run, call: Call) -> None:
            seen.append(call)

        options = ("-q", "--threads", "1")
        self._zygote.run(*scenario.command(out, *options), watch=[self.sources, self._area], hook=note)
        shutil.rmtree(out)
        return seen

    def _watch(self, run: Run, scenario: Scenario) -> None:
        """Measures when the staging folder comes and goes."""
        while run.alive() and not staging(self._area):
            time.sleep(0.0001)
        scenario.staged_at = run.age()
        while run.alive() and staging(self._area):
            time.sleep(0.0001)
        scenario.staged_for = run.age() - scenario.staged_at
