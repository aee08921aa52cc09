"""The model card that a conversion to Hugging Face drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fastshard
import pytest
from helpers import FIXTURES, cli

HF = FIXTURES / "sharded/hf_sharded"


def test_a_card_says_what_is_known_and_nothing_of_this_machine(tmp_path: Path) -> None:
    for out in ("one", "two"):
        assert cli("convert", HF, tmp_path / out, "--to", "hf", "--dtype", "f32").code == 0
    text = (tmp_path / "one/README.md").read_text()
    assert text == (tmp_path / "two/README.md").read_text()
    assert text.startswith("---\nlibrary_name: transformers\n---\n# LlamaForCausalLM\n")
    assert "| Parameters | 251,456 |" in text and "| Dtype | float32 |" in text
    assert str(tmp_path) not in text and str(HF) not in text
    manifest = json.loads((tmp_path / "one/fastshard.manifest.json").read_text())
    assert "README.md" in {file["name"] for file in manifest["files"]}


def test_the_checkpoints_own_card_goes_along(tmp_path: Path) -> None:
    shutil.copytree(HF, tmp_path / "in")
    (tmp_path / "in/README.md").write_text("# Ours\n")
    assert cli("convert", tmp_path / "in", tmp_path / "out", "--to", "hf").code == 0
    assert (tmp_path / "out/README.md").read_text() == "# Ours\n"


def test_a_card_that_lies_beside_the_weights_alone_is_not_drafted_over(tmp_path: Path) -> None:
    ckpt, config = shutil.copytree(HF, tmp_path / "in"), tmp_path / "config.json"
    (ckpt / "README.md").write_text("# Ours\n")
    shutil.move(ckpt / "config.json", config)
    assert cli("convert", ckpt, tmp_path / "out", "--to", "hf", "--config", config).code == 0
    assert not (tmp_path / "out/README.md").exists()


def test_no_card_and_other_targets_have_none(tmp_path: Path) -> None:
    assert cli("convert", HF, tmp_path / "none", "--to", "hf", "--no-card").code == 0
    assert cli("convert", HF, tmp_path / "dcp", "--to", "dcp").code == 0
    assert cli("merge", HF, tmp_path / "merged").code == 0
    fastshard.convert(HF, tmp_path / "api", to="hf", card=False)
    for out in ("none", "dcp", "merged", "api"):
        assert not (tmp_path / out / "README.md").exists()
    ran = cli("convert", HF, tmp_path / "no", "--to", "dcp", "--no-card")
    assert ran.code == 2 and ran.errors[0]["message"].startswith("--no-card: dcp does not take it")


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("org/Model-7B", True),
        ("/scratch/org/model", False),
        ("../model", False),
        ("a/b\n- x", False),
        ("a|/b", False),
    ],
)
def test_the_base_model_is_named_where_the_config_names_a_repository(
    tmp_path: Path, path: str, named: bool
) -> None:
    config = json.loads((HF / "config.json").read_text()) | {"_name_or_path": path, "architectures": ["A|B"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = cli("convert", HF, tmp_path / "out", "--to", "hf", "--config", tmp_path / "config.json")
    assert ran.code == 0, ran.out
    text = (tmp_path / "out/README.md").read_text()
    assert (f"`{path}`" in text) == named and "| Base model |" in text if named else path not in text
    assert "# Model\n" in text and "A|B" not in text


def test_an_edited_card_is_a_note_and_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli("convert", HF, out, "--to", "hf").code == 0
    with (out / "README.md").open("a") as card:
        card.write("Trained on poems.\n")
    ran = cli("verify", out)
    assert ran.code == 0 and [f["severity"] for f in ran.findings if f["file"] == "README.md"] == ["note"]
    again = cli("convert", HF, out, "--to", "hf", "--overwrite", "--dtype", "f32")
    assert again.code == 2 and "Trained on poems." in (out / "README.md").read_text()
