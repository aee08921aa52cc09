"""The model card that a conversion to Hugging Face drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fastshard
import pytest
import yaml
from helpers import FIXTURES, NEOX, cli

HF = FIXTURES / "sharded/hf_sharded"


def drafted(ckpt: Path, out: Path, *options: str | Path) -> str:
    """The card that a conversion writes."""
    ran = cli("convert", ckpt, out, "--to", "hf", *options)
    assert ran.code == 0, ran.out
    return (out / "README.md").read_text()


def metadata(card: str) -> Any:
    """As the Hub reads it."""
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


def with_config(folder: Path, **values: object) -> Path:
    config = json.loads((HF / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


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


def test_of_a_card_that_is_not_copied_the_draft_takes_license_and_base_model(tmp_path: Path) -> None:
    """The checkpoint's card is copied from the folder of config.json only."""
    run = shutil.copytree(NEOX, tmp_path / "run")
    front = "license: apache-2.0\nbase_model:\n- org/Model-7B\ntags: [x]"
    (run / "README.md").write_text(f"---\n{front}\n---\n# Ours\n")
    card = drafted(run, tmp_path / "out")
    assert metadata(card) == {
        "license": "apache-2.0",
        "base_model": "org/Model-7B",
        "library_name": "transformers",
    }
    assert "Ours" not in card and "README.md was not copied" in card
    assert "| Base model | `org/Model-7B`, from the checkpoint's README.md |" in card
    assert (run / "README.md").read_text().endswith("# Ours\n")


@pytest.mark.parametrize(
    "front",
    [
        "license: 'mit\n\n  evil: true'\nbase_model: org/name",
        "license: MIT License\nbase_model: [org/name]",
        "license: [mit]\nbase_model: org/name",
        "license: {name: mit}\nbase_model: org/name\nlibrary_name: evil",
        "license: ../mit\nbase_model: org/name",
    ],
)
def test_a_license_that_is_not_one_of_the_hub_is_left_out(tmp_path: Path, front: str) -> None:
    run = shutil.copytree(NEOX, tmp_path / "run")
    (run / "README.md").write_text(f"---\n{front}\n---\n")
    card = drafted(run, tmp_path / "out")
    assert metadata(card) == {"base_model": "org/name", "library_name": "transformers"}


@pytest.mark.parametrize(
    "base",
    [
        "name",
        "a/b/c",
        "/org/name",
        "'org/na me'",
        "org/name.git",
        "org/a--b",
        "[org/name, 'x: y']",
        "[]",
        "1",
    ],
)
def test_a_base_model_that_is_no_repository_is_left_out(tmp_path: Path, base: str) -> None:
    run = shutil.copytree(NEOX, tmp_path / "run")
    (run / "README.md").write_text(f"---\nlicense: mit\nbase_model: {base}\n---\n")
    assert metadata(drafted(run, tmp_path / "out")) == {"license": "mit", "library_name": "transformers"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# Ours\n---\nlicense: mit\n---\n",
        b"---\nlicense: mit\n",
        b"---\n- a: [\n---\n",
        b"---\n\xff\n---\n",
    ],
)
def test_a_card_without_metadata_that_can_be_read_gives_none(tmp_path: Path, content: bytes) -> None:
    run = shutil.copytree(NEOX, tmp_path / "run")
    (run / "README.md").write_bytes(content)
    assert metadata(drafted(run, tmp_path / "out")) == {"library_name": "transformers"}


def test_a_card_beside_the_weights_alone_is_not_overwritten(tmp_path: Path) -> None:
    ckpt, config = shutil.copytree(HF, tmp_path / "in"), tmp_path / "config.json"
    (ckpt / "README.md").write_text("---\nlicense: no\n---\n# Ours\n")
    shutil.move(ckpt / "config.json", config)
    card = drafted(ckpt, tmp_path / "out", "--config", config)
    # YAML reads this as a boolean.
    assert metadata(card) == {"library_name": "transformers"}
    assert (ckpt / "README.md").read_text().endswith("# Ours\n")


def test_the_snippet_loads_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    card = drafted(NEOX, tmp_path / "out")
    snippet = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    loaded: dict[str, Any] = {}
    exec(snippet, loaded)
    assert type(loaded["model"]).__name__ == "GPTNeoXForCausalLM"


@pytest.mark.parametrize(
    ("values", "loader"),
    [
        ({}, "AutoModelForCausalLM"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}, None),
        ({"architectures": ["LlamaForSomethingElse"]}, None),
        ({"architectures": None}, None),
    ],
)
def test_a_class_that_is_not_known_has_no_snippet(
    tmp_path: Path, values: dict[str, object], loader: str | None
) -> None:
    card = drafted(HF, tmp_path / "out", "--config", with_config(tmp_path, **values))
    assert ("## Usage" in card) == (loader is not None) and (loader or "# ") in card


def test_the_card_states_what_was_checked_and_how_to_check_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, verified = drafted(NEOX, tmp_path / "out").split("## Verified\n")
    assert "a GPT-NeoX checkpoint (tp 2) to 40 tensors" in " ".join(verified.split())
    assert "Each tensor that `config.json` calls for" in verified
    command = verified.split("```sh\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "out")
    assert command.split()[0] == "fastshard" and cli(*command.split()[1:]).code == 0


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
        ("a/b: c", False),
        ("a|/b", False),
    ],
)
def test_the_base_model_is_named_where_the_config_names_a_repository(
    tmp_path: Path, path: str, named: bool
) -> None:
    config = with_config(tmp_path, _name_or_path=path, architectures=["A|B"])
    text = drafted(HF, tmp_path / "out", "--config", config)
    # It may be a local folder, which the Hub must not take for a repository.
    assert "base_model" not in metadata(text)
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
