"""All verbs: a file for each, and its place here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..verb import Verb


class Verbs:
    """Verbs in the order of ``fastshard --help``; one is loaded when it is asked for."""

    def __init__(self, places: dict[str, str], loaded: tuple[Verb, ...] = ()) -> None:
        """``places`` has the module of each verb here, by the verb's name; its record is called by it in capitals."""
        self._places = places
        self._loaded = {verb.name: verb for verb in loaded}

    def and_also(self, *more: Verb) -> Verbs:
        """These, and more after them."""
        return Verbs(self._places, (*self._loaded.values(), *more))

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._loaded

    def __iter__(self) -> Iterator[Verb]:
        return (self[name] for name in {**self._places, **self._loaded})

    def __len__(self) -> int:
        return len({**self._places, **self._loaded})

    def __getitem__(self, name: str) -> Verb:
        """The verb of this name; KeyError if there is none."""
        if name not in self._loaded:
            module = import_module(f".{self._places[name]}", __name__)
            self._loaded[name] = getattr(module, name.upper().replace("-", "_"))
        return self._loaded[name]


VERBS = Verbs({
    "inspect": "inspect",
    "merge": "convert",
    "convert": "convert",
    "zero-to-fp32": "drop_in",
    "consolidate": "drop_in",
    "plan": "plan",
    "probe": "probe",
    "run-part": "parts",
    "commit": "parts",
    "gc": "gc",
    "piece": "piece",
    "verify": "verify",
    "stats": "stats",
    "diff": "diff",
    "report": "report",
    "ls": "ls",
    "why": "why",
    "masters": "masters",
    "manifest": "manifest",
    "attest": "attest",
    "explain": "explain",
    "completion": "completion",
    "man": "man",
})  # fmt: skip
