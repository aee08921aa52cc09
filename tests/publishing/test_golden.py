"""Plans, whole: what is read, moved and written for three checkpoints was reviewed once, box by box."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import FIXTURES, cli
from reviewed import same, told

GOLDEN = Path(__file__).parents[1] / "golden"
#: name -> (fixture, options)
PLANS: dict[str, tuple[str, tuple[object, ...]]] = {
    "neox_pipeline_to_hf": ("gpt_neox/llama_gqa_pp_tp2", ("--to", "hf", "--vocab-size", 509)),
    "torch_dist_to_tp_safetensors": (
        "sharded/megatron_torch_dist_tp2_pp2",
        ("--to", "tp-safetensors", "--tp", 2, "--vocab-size", 1000),
    ),
    "maxtext_to_hf": ("maxtext_twins/a_mt_f32_scan", ("--to", "hf", "--vocab-size", 250)),
}
#: What the machine and the moment decide.
ELSEWHERE = ("space", "memory")


def settled(document: dict[str, Any]) -> dict[str, Any]:
    """A plan without what differs from checkout to checkout. The digest follows from the rest, from times and
    headers, which a store of arrays has with times too."""
    kept = {key: value for key, value in document.items() if key not in (*ELSEWHERE, "digest")}
    for source in kept["plan"]["sources"]:
        del source["mtime_ns"], source["header"]
    return kept


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_what_was_reviewed(name: str, pytestconfig: pytest.Config) -> None:
    fixture, options = PLANS[name]
    ran = cli("plan", FIXTURES / fixture, *options)
    assert ran.code == 0, ran.out
    document = told(settled(ran.doc), {FIXTURES / fixture: "CKPT"})
    same(GOLDEN / f"{name}.json", document, pytestconfig.getoption("--renew-snapshots"))


def test_each_file_is_of_a_plan() -> None:
    assert {file.stem for file in GOLDEN.glob("*.json")} == set(PLANS)
