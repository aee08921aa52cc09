"""What the README says beside its blocks: its table is that of the tests, its links lead somewhere, its
versions are those that build."""

from __future__ import annotations

import re
from pathlib import Path

import tomlkit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Sources of tests/conformance by the README's rows, and targets by its columns.
ROWS = {
    "Hugging Face, rank shards, per-rank safetensors": (
        "hf_safetensors",
        "hf_bin",
        "hf_rank_shards",
        "tp_safetensors",
    ),
    "Megatron-LM (legacy, torch_dist)": ("megatron_legacy", "megatron_torch_dist"),
    "DeepSpeed ZeRO-1 to 3, universal": ("zero1", "zero2", "zero3", "universal"),
    "PyTorch DCP, FSDP rank files": ("dcp", "fsdp_ranks"),
    "ColossalAI (pipeline stages)": ("colossalai",),
    "GPT-NeoX, Llama architecture": ("neox_llama",),
    "GPT-NeoX, its own architecture": ("neox_pipeline", "neox_sequential"),
    "Levanter and EasyLM, Llama": ("levanter", "easylm"),
    "MaxText, Llama, Mixtral, Qwen3, DeepSeek V3": (
        "maxtext_scan",
        "maxtext_unscan",
        "maxtext_mixtral",
        "maxtext_qwen3_moe",
        "maxtext_deepseek",
    ),
    "MaxText and Paxml, GPT-3": ("maxtext_gpt3", "paxml"),
    "Orbax, any arrays": ("orbax",),
}
COLUMNS = {
    "merge": "merge",
    "HF": "hf",
    "GPT-NeoX": "gpt_neox",
    "Megatron": "megatron",
    "TP safetensors": "tp-safetensors",
    "DCP": "dcp",
    "universal": "universal",
    "MaxText": "maxtext",
    "Orbax": "orbax",
}


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose heading begins so."""
    lines = README.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {first}"))
    table = []
    for line in lines[at:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [table[0], *table[2:]]


def test_ticks_are_those_that_tests_prove() -> None:
    proven = {
        name: set(row["proven"])
        for name, row in tomlkit.parse((ROOT / "tests/conformance/matrix.toml").read_text()).items()
    }
    heads, *table = rows("from")
    assert [row[0] for row in table] == list(ROWS) and heads[1:] == list(COLUMNS)
    for row in table:
        for column, cell in zip(heads[1:], row[1:], strict=True):
            held = all(COLUMNS[column] in proven[name] for name in ROWS[row[0]])
            assert cell == ("✓" if held else ""), (row[0], column)


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if "://" not in link]
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        if anchor and path.endswith(".md"):
            titles = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, (
                link
            )


def test_versions_are_those_that_build() -> None:
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text())["project"]
    cargo = tomlkit.parse((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    (python,) = re.findall(r"Python (3\.\d+)\+", README)
    (rust,) = re.findall(r"Rust\]\(\S+\) (1\.\d+)\+", README)
    assert project["requires-python"] == f">={python}"
    assert cargo["rust-version"] == rust


def test_it_is_one_that_is_read() -> None:
    assert len(README.splitlines()) <= 150
