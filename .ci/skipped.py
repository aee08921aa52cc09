"""Prints the tests that a record of pytest says were skipped, one argument of pytest a line: modules that were skipped whole too."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def name_skipped_tests(record: Path) -> list[str]:
    """Names the skipped tests of a JUnit record by their node IDs, in its order.

    Raises:
        ValueError: a record names a test of no file.
    """
    names = {}
    for case in ET.parse(record).iter("testcase"):
        if case.find("skipped") is None:
            continue
        words = [word for word in (case.get("classname") or "").split(".") if word]
        test = case.get("name", "")
        if not words:
            # A module that is skipped while it is collected.
            words, test = test.split("."), ""
        file = Path(*words).with_suffix(".py")
        if not file.is_file():
            raise ValueError(f"{record}: no file {file}")
        names[f"{file}::{test}" if test else str(file)] = None
    return list(names)


if __name__ == "__main__":
    print("\n".join(name_skipped_tests(Path(sys.argv[1]))))
