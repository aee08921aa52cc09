"""The time by which ranks under trial wait for one another: it stands still until somebody is disturbed.

So a run of which nobody is disturbed cannot fail, however slow the machine is. Afterwards it moves by steps,
and no step is taken before each rank that lives has shown a sign of life since the last one: none of them is
ever silent.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner import Run

#: Time between two signs of life of a rank, in seconds.
STEP = 0.5
#: Phases of a rank that shows no more signs of life.
_OVER = ("published", "stopped")


@dataclass
class Rank:
    """A process that takes part as a rank."""

    number: int
    run: Run
    #: True while it has got SIGSTOP.
    stopped: bool = False


@dataclass
class Clock:
    """Time for the ranks of one destination; they read :attr:`file`."""

    file: Path
    #: The folder in which ranks meet.
    cards: Path
    ranks: list[Rank] = field(default_factory=list)
    _nanoseconds: int = 0
    _thread: threading.Thread | None = None
    _still: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.file.write_bytes(bytes(8))

    @property
    def seconds(self) -> float:
        """How late it is."""
        return self._nanoseconds / 1e9

    def go(self) -> None:
        """Lets time move from now on."""
        if self._thread is None:
            self._still.clear()
            self._thread = threading.Thread(target=self._move, daemon=True)
            self._thread.start()

    def stand(self) -> None:
        """Lets time stand still."""
        if self._thread is not None:
            self._still.set()
            self._thread.join()
            self._thread = None

    def signalled(self, run: Run, stopped: bool) -> None:
        """Notes that a process was stopped, or goes on."""
        for rank in self.ranks:
            if rank.run is run:
                rank.stopped = stopped

    def _move(self) -> None:
        while not self._still.is_set():
            shown = {id(rank): self._shows(rank) for rank in self._living()}
            self._nanoseconds += int(STEP * 1e9)
            with self.file.open("r+b", buffering=0) as file:
                # In one call, and in place: nobody reads a part of it.
                file.write(self._nanoseconds.to_bytes(8, "little"))
            # Where no rank lives, whoever works alone still gets a moment between two steps.
            time.sleep(0.002)
            while not self._still.is_set() and any(
                self._owes(rank, shown.get(id(rank))) for rank in self._living()
            ):
                time.sleep(0.002)

    def _living(self) -> list[Rank]:
        return [rank for rank in list(self.ranks) if not rank.stopped and rank.run.alive()]

    def _card(self, rank: Rank) -> dict[str, Any] | None:
        try:
            card = json.loads((self.cards / f"rank-{rank.number:05}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return card if isinstance(card, dict) else None

    def _shows(self, rank: Rank) -> int | None:
        """The last sign of life of a rank."""
        card = self._card(rank)
        return card["beat"] if card and card["process"]["pid"] == rank.run.pid else None

    def _owes(self, rank: Rank, shown: int | None) -> bool:
        """True if a rank that lives has shown nothing since."""
        card = self._card(rank)
        if card is None or card["process"]["pid"] != rank.run.pid:
            # Before it has a card. It may wait for time to pass if another process has its number.
            return not rank.run.holds(self.cards) or (shown is None and not self._is_taken(card))
        return card["beat"] == shown and card["phase"] not in _OVER

    def _is_taken(self, card: dict[str, Any] | None) -> bool:
        pids = {rank.run.pid for rank in self.ranks if rank.run.alive()}
        return card is not None and card["process"]["pid"] in pids
