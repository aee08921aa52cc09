"""All verbs, each in its own file, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..verb import Verb

#: Verbs in the groups and the order of ``fastshard --help``, each with its module here.
_GROUPS = {
    "Look": {
        "inspect": "inspect",
        "ls": "ls",
        "stats": "stats",
        "trace": "trace",
        "report": "report",
    },
    "Convert": {
        "plan": "plan",
        "merge": "convert",
        "convert": "convert",
        "zero-to-fp32": "drop_in",
        "consolidate": "drop_in",
        "master-weights": "master_weights",
    },
    "Check and publish": {
        "verify": "verify",
        "find": "find",
        "steps": "steps",
        "diff": "diff",
        "layers": "layers",
        "loss": "loss",
        "manifest": "manifest",
        "expected": "expected",
        "attest": "attest",
    },
    "Several hosts": {
        "check-storage": "check_storage",
        "split": "split",
        "make-part": "split",
        "commit": "split",
        "copy-local": "copy_local",
        "clean": "clean",
    },
    "Help": {
        "explain": "explain",
        "completion": "completion",
        "man": "man",
    },
}


class Verbs:
    """Verbs in the order of ``fastshard --help``; each is loaded on first use."""

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, str]],
        added: tuple[Verb, ...] = (),
    ) -> None:
        """Register verbs: ``groups`` has the module of each verb, by the verb's name.

        The record of a verb in its module has the verb's name in capitals.
        """
        self._groups, self._added = groups, added
        self._places = {name: module for places in groups.values() for name, module in places.items()}
        self._loaded = {verb.name: verb for verb in added}

    def and_also(self, *more: Verb) -> Verbs:
        """Return these verbs followed by more."""
        return Verbs(self._groups, (*self._added, *more))

    @property
    def groups(self) -> dict[str, list[str]]:
        """Names of verbs by their headings."""
        groups = {title: list(places) for title, places in self._groups.items()}
        return groups | ({"Further": [verb.name for verb in self._added]} if self._added else {})

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._loaded

    def __iter__(self) -> Iterator[Verb]:
        return (self[name] for name in {**self._places, **self._loaded})

    def __len__(self) -> int:
        return len({**self._places, **self._loaded})

    def __getitem__(self, name: str) -> Verb:
        """Return the verb with this name; raise KeyError if there is none."""
        if name not in self._loaded:
            module = import_module(f".{self._places[name]}", __name__)
            self._loaded[name] = getattr(module, name.upper().replace("-", "_"))
        return self._loaded[name]


VERBS = Verbs(_GROUPS)
