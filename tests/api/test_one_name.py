"""A command, its function in Python and its document have one name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
from fastshard.cli.verbs import VERBS
from helpers import HF, NEOX, TP4, cli

#: Commands that are for shells alone, and those that stand for other tools' scripts.
ONLY_COMMANDS = {"completion", "man", "zero-to-fp32", "consolidate"}
#: Functions whose name is a package of fastshard.
OTHERWISE = {"expected": "expected_tensors"}


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS if verb.name not in ONLY_COMMANDS])
def test_python_has_a_function_of_this_name(verb: str) -> None:
    name = OTHERWISE.get(verb, verb.replace("-", "_"))
    assert name in fastshard.__all__ and callable(getattr(fastshard, name))


@pytest.mark.parametrize("verb", ["masters", "probe", "run-part", "piece", "gc"])
def test_an_old_command_is_answered_with_its_new_name(verb: str) -> None:
    ran = cli(verb, TP4, json_output=False)
    new = {"masters": "master-weights", "probe": "check-storage", "run-part": "make-part"}
    new |= {"piece": "copy-local", "gc": "clean"}
    assert ran.code == 2 and f"fastshard {new[verb]} " in ran.err


def test_every_document_states_its_schema_and_the_tool() -> None:
    tool = f"fastshard {fastshard.__version__}"
    for words in (("inspect", HF), ("ls", HF), ("explain", "FS303"), ("merge", HF), ("--json",)):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "fastshard",
                *map(str, words),
                *(() if "--json" in words else ("--json",)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        document = json.loads(done.stdout)
        command = words[0] if words[0] != "--json" else "usage"
        assert (document["schema"], document["tool"]) == (f"fastshard.cli.{command}.v1", tool)


def test_a_document_lists_what_was_not_checked(tmp_path: Path) -> None:
    assert cli("verify", HF).doc["not_checked"] == ["the contents (there are no checksums)"]
    assert fastshard.merge(HF, tmp_path / "out").document["not_checked"]
    document = cli("verify", tmp_path / "out").doc
    assert (document["verdict"], document["not_checked"]) == ("OK", [])
    document = cli("merge", TP4, tmp_path / "merged").doc
    assert document["written"] is True and "would go unnoticed" in document["not_checked"][0]


def test_sizes_have_the_names_that_configs_have() -> None:
    dimensions = fastshard.inspect(NEOX).dimensions
    assert dimensions == cli("inspect", NEOX).doc["dimensions"]
    config = {"hidden_size": 32, "num_layers": 3, "head_dim": 8, "intermediate_size": 128}
    assert config.items() <= dimensions.items() and all(len(name) > 1 for name in dimensions)


def test_a_tensor_is_traced_as_the_command_does(tmp_path: Path) -> None:
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.weight"
    traced = fastshard.trace(NEOX, name, "hf", reads=True)
    document = cli("trace", NEOX, name, "--to", "hf", "--hash").doc
    assert traced.to_dict().items() <= document.items() and len(traced.parts) == 2
    fastshard.convert(NEOX, tmp_path / "out")
    assert fastshard.trace(tmp_path / "out", name).blake3_stated == traced.blake3
    with pytest.raises(fastshard.FastshardError, match="did you mean") as caught:
        fastshard.trace(NEOX, name + "s", "hf")
    assert caught.value.findings[0].code == "FS515"


def test_a_code_is_explained_as_the_command_does() -> None:
    explained = fastshard.explain("fs303")
    assert explained == fastshard.explain("303") == fastshard.explain("DUPLICATED_SHARD")
    assert explained.to_dict().items() <= cli("explain", "FS303").doc.items()
    assert explained.causes and explained.confirmation and explained.help
    with pytest.raises(fastshard.FastshardError, match="no finding has the code FS999"):
        fastshard.explain("FS999")
