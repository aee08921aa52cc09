"""What targets declare of themselves is what the command line, the API and the refusals are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.cli import parser
from fastshard.common import options
from fastshard.common.options import Option
from fastshard.common.target_options import OPTIONS
from fastshard.targets.registry import TARGETS
from helpers import HF, cli

#: A value that is no option's default.
OTHER: dict[str, Any] = {
    "tp": 2,
    "pp": 2,
    "ep": 2,
    "etp": 2,
    "make_vocab_size_divisible_by": 64,
    "param_scan_axis": 0,
    "fused_qkv": False,
    "rope_type": "default",
    "zarr2": True,
    "stacked_experts": True,
    "card": False,
}


def test_each_option_is_typed_and_has_a_flag() -> None:
    assert set(options.Placing.__annotations__) == {option.name for option in OPTIONS} == set(OTHER)
    for command in ("convert", "plan"):
        assert {option.flag for option in OPTIONS} <= set(
            parser.flags(parser.subparsers(parser.build())[command])
        )
    assert {option for target in TARGETS.values() for option in target.options} == set(OPTIONS)
    assert [*TARGETS] == [name for target in dict.fromkeys(TARGETS.values()) for name in target.names]


@pytest.mark.parametrize("to", [None, *TARGETS])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_that_a_target_does_not_take_is_refused_and_not_passed_over(
    to: str | None, option: Option
) -> None:
    takes = to is not None and option in TARGETS[to].options
    given = {option.name: OTHER[option.name]}
    if not takes:
        with pytest.raises(fastshard.CannotRunError) as caught:
            fastshard.plan(HF, to, **given)
        found = caught.value.findings[0]
        assert found.code in ("FS514", "FS515")
        assert option.departure in str(found) or option.kind == "degree", found
        return
    try:
        fastshard.plan(HF, to, **given)
    except fastshard.CannotRunError as error:
        # Of another model, or another form of the target: not because it is unknown.
        assert "does not take it" not in str(error)


def test_the_command_line_says_which_targets_take_an_option(tmp_path: Path) -> None:
    ran = cli("convert", HF, tmp_path / "out", "--to", "hf", "--make-vocab-size-divisible-by", "64")
    assert ran.code == 2 and ran.having(
        "FS515", message="--make-vocab-size-divisible-by: hf does not take it"
    )
    assert "gpt_neox" in ran.errors[0]["expected"] and "maxtext" in ran.errors[0]["expected"]
