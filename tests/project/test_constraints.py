"""The versions that the landing run uses: all that is asked for is pinned, for every Python that is
supported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from fastshard.common.optional_imports import EXTRAS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def lines(file: str) -> list[str]:
    return [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("python", PYTHONS)
def test_all_that_is_asked_for_is_pinned_once(python: str) -> None:
    on = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    pins: dict[str, list[Requirement]] = {}
    for line in lines(".ci/constraints.txt"):
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(on):
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    for name, found in pins.items():
        assert len(found) == 1 and re.fullmatch(r"==[^=*]+", str(found[0].specifier)), name
    together = (PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"])
    asked = [*PROJECT["project"]["dependencies"]]
    asked += [line for named in together for needs in named.values() for line in needs]
    asked += [*PROJECT["build-system"]["requires"], *lines(".ci/tools.in")]
    for line in asked:
        wanted = Requirement(line)
        if wanted.name == "fastshard":  # an extra of extras
            assert wanted.extras <= set(PROJECT["project"]["optional-dependencies"])
        elif wanted.marker is None or wanted.marker.evaluate(on):
            (pin,) = pins[canonicalize_name(wanted.name)]
            (version,) = (specifier.version for specifier in pin.specifier)
            assert wanted.specifier.contains(version), f"{wanted} is not what {pin} gives: sh scripts/pin.sh"


def test_what_a_message_says_to_install_is_what_the_extra_asks_for() -> None:
    assert {extra: tuple(PROJECT["project"]["optional-dependencies"][extra]) for extra in EXTRAS} == EXTRAS


def test_nothing_says_to_install_from_an_index_that_has_it_not() -> None:
    """Until it is there: a clone, a wheel or an address is named."""
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.yml"), *(ROOT / "python").rglob("*.py")]
    hints = re.compile(r"pip install (?:-\S+ )*['\"]?fastshard(?:\[[\w,]+\])?['\"]?(?! @)(?:\s|$|[`)])")
    found = [
        (path.name, hit[0]) for path in pages for hit in hints.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
