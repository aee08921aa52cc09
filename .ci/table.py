"""Prints what came of the steps of .ci/run: seconds, tests that passed, and those that were skipped with their reasons."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

#: cargo's summary of one test program.
_CARGO = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.M)


def counted(logs: Path, step: str) -> tuple[int, int, Counter[str]]:
    """Tests of a step that passed and that failed, and how many were skipped by reason."""
    passed = failed = 0
    skipped: Counter[str] = Counter()
    log = logs / f"{step}.log"
    for found in _CARGO.findall(log.read_text(errors="replace") if log.exists() else ""):
        passed, failed = passed + int(found[0]), failed + int(found[1])
        skipped["ignored by cargo"] += int(found[2])
    record = logs / f"{step}.xml"
    for case in ET.parse(record).iter("testcase") if record.exists() else ():
        skip = case.find("skipped")
        if skip is not None:
            skipped[skip.get("message", "").strip()] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        else:
            passed += 1
    return passed, failed, +skipped


def main(folder: str, *steps: str) -> int:
    """Prints the table; 1 if a step failed or did not run, else 0."""
    logs, worst, passes, failures, skips = Path(folder), 0, 0, 0, 0
    print(f"\n{'step':<12}{'seconds':>8}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for step in steps:
        passed, failed, skipped = counted(logs, step)
        ended = logs / f"{step}.ended"
        words = ended.read_text().split() if ended.exists() else []
        # A step that was stopped while it ended leaves an empty file.
        seconds, code = words[1:] if len(words) == 3 else ("-", "not run")
        worst |= code != "0"
        print(
            f"{step:<12}{seconds:>8}{passed or '':>8}{failed or '':>8}{sum(skipped.values()) or '':>8}"
            + ("" if code == "0" else f"  FAILED ({code})")
        )
        for reason, count in skipped.most_common():
            print(f"{'':<36}{count:>8}  {reason[:120]}")
        passes, failures, skips = passes + passed, failures + failed, skips + sum(skipped.values())
    print(f"\n{passes} passed, {failures} failed, {skips} skipped")
    return worst


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
