"""The judgement is one list of stages, and their order decides: for each pair of neighbours a case that tells
it from the other order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from fastshard import Finding
from fastshard.common.gate import Gate
from fastshard.expected.promised_parts import promised
from fastshard.findings.causes import Causes, LostFile
from fastshard.findings.grouping import RankFile
from fastshard.findings.missing_parts import PromisedPart
from fastshard.findings.stages import READ_STAGES, STAGES, Facts, Stage, judge

#: What is missing of a model with an MTP layer, of which every rank says it.
PART = PromisedPart(
    promised({"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1})[0], ()
)
LOST = Finding.of("FS101", "the file is missing", file="a-1.bin", coords={"tp": 1})


def missing(name: str, severity: str = "error") -> Finding:
    return Finding.of("FS102", "expected by the layout, but missing", tensor=name, severity=severity)


def note(name: str) -> Finding:
    return Finding.of("FS212", "left out: moments", tensor=name)


#: Pairs of neighbours, with facts and findings of which the other order makes something else.
CASES: dict[tuple[str, str], tuple[Facts, list[Finding]]] = {
    # A consequence is no reason why nothing is left.
    ("consequences", "selection"): (
        Facts(
            causes=Causes(broken=True),
            known=frozenset([LOST]),
            is_narrowed=True,
            explain_selection=lambda finding: finding.replace(code="FS106"),
        ),
        [LOST, Finding.of("FS515", "nothing is left to write")],
    ),
    # What the caller makes an error has no effect of its own.
    ("effects", "gate"): (
        Facts(
            causes=Causes(files=[LostFile(LOST.replace(severity="warning"))]),
            lost={"b": 1},
            usable=["c"],
            gate=Gate.of("warning"),
        ),
        [LOST.replace(severity="warning"), missing("b", "warning")],
    ),
    # The gate knows codes, and a part that is merged has one of them.
    ("gate", "parts"): (
        Facts(parts=[PART], gate=Gate.of(error=["FS103"])),
        [
            missing("model.layers.2.eh_proj.weight", "warning"),
            Finding.of(
                "FS103", "layer 2 is missing", layers=range(2, 3), count=3, axis="L", severity="warning"
            ),
        ],
    ),
    # What is merged into a part is none of the layers that are missing.
    ("parts", "causes"): (
        Facts(parts=[PART]),
        [
            Finding.of("FS103", f"layer {n} is missing", layers=range(n, n + 1), count=3, axis="L")
            for n in (1, 2)
        ],
    ),
    # A file over which copies lie is an error, whatever a manifest inside accepts.
    ("copies", "trust"): (
        Facts(
            read=frozenset(
                [Finding.of("FS303", "a copy", file="b", decided="accept copies", severity="warning")]
            ),
            find_causes=lambda errors: Causes(files=[LostFile(f) for f in errors]),
            untrusted=["copies"],
        ),
        [missing("x"), Finding.of("FS303", "a copy", file="b", decided="accept copies", severity="warning")],
    ),
    # What is not trusted is a warning that the gate may raise.
    ("trust", "gate"): (
        Facts(untrusted=["copies"], gate=Gate.of("warning")),
        [Finding.of("FS303", "a copy", file="b", decided="accept copies", severity="warning")],
    ),
    ("gate", "order"): (
        Facts(gate=Gate.of(error=["FS108"])),
        [Finding.of("FS307", "nonzero"), Finding.of("FS108", "unexpected", file="a")],
    ),
}


def run(stages: Sequence[Stage], facts: Facts, findings: Sequence[Finding]) -> list[Finding]:
    for stage in stages:
        findings = stage.apply(facts, findings)
    return list(findings)


@pytest.mark.parametrize("pair", CASES)
def test_the_order_of_two_stages_decides(pair: tuple[str, str]) -> None:
    facts, findings = CASES[pair]
    one, other = next(
        both for of in (STAGES, READ_STAGES) for both in pairwise(of) if (both[0].name, both[1].name) == pair
    )
    assert run([one, other], facts, findings) != run([other, one], facts, findings)


def test_every_stage_has_a_reason_for_its_place() -> None:
    assert all(stage.reason for of in (STAGES, READ_STAGES) for stage in of[1:])
    pairs = {(one.name, other.name) for of in (STAGES, READ_STAGES) for one, other in pairwise(of)}
    # Notes about what is left out have no effect and hide nothing: the place of their stage is free.
    assert {pair for pair in pairs if "reasons" not in pair} == CASES.keys()


def test_each_finding_stays_before_those_of_one_cause_are_merged() -> None:
    gone = [LOST, LOST.replace(file="a-2.bin", coords={"tp": 2})]
    judgement = judge(Facts(known=frozenset(gone), rank_files=[RankFile("a-0.bin", {"tp": 0})]), gone)
    (one,) = judgement.findings
    assert judgement.each == gone and one.files == ("a-1.bin", "a-2.bin")


def test_what_a_stage_does_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "fastshard"):
        judge(Facts(causes=Causes(of_all=[LOST]), known=frozenset([LOST])), [LOST, missing("a.weight")])
    (record,) = caplog.records
    assert record.name == "fastshard.findings"
    assert "stage consequences takes away FS102 a.weight: expected" in record.getMessage()
