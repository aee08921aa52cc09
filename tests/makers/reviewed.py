"""Documents that were reviewed and lie in files: what is said now must be what is said there."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

#: Deeper than this a value is on one line.
DEPTH = 4


def lines(value: Any, depth: int = 0) -> str:
    """JSON that shows its difference line by line, without a line for each number."""
    if depth < DEPTH and isinstance(value, dict) and value:
        inner = ",\n".join(
            f"{' ' * (depth + 1)}{json.dumps(k)}: {lines(v, depth + 1)}" for k, v in value.items()
        )
        return f"{{\n{inner}\n{' ' * depth}}}"
    if depth < DEPTH and isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        inner = ",\n".join(f"{' ' * (depth + 1)}{lines(item, DEPTH)}" for item in value)
        return f"[\n{inner}\n{' ' * depth}]"
    return json.dumps(value, ensure_ascii=False)


def told(value: Any, places: dict[Path, str]) -> Any:
    """A document without what differs from run to run: folders by a word each."""
    if isinstance(value, dict):
        return {key: told(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [told(item, places) for item in value]
    if isinstance(value, str):
        for path, word in places.items():
            value = value.replace(str(path), word)
    return value


def same(file: Path, document: Any, renew: bool) -> None:
    """Holds a document against its file, or writes it there."""
    text = lines(document) + "\n"
    if renew:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert file.is_file(), f"{file.name} was never reviewed: --renew-snapshots writes it"
    changed = list(
        difflib.unified_diff(file.read_text().splitlines(), text.splitlines(), "reviewed", "now", "", "", 1)
    )
    assert not changed, "\n".join([f"{file.name} (renew with --renew-snapshots):", *changed[:60]])
