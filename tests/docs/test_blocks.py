"""Every block of every page is executed, or says why it cannot be and is checked; see blocks.py."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import blocks
import pytest
from helpers import at_once
from running import Page

WITH_BLOCKS = [page for page in blocks.PAGES if blocks.blocks(page)]


#: Pages that use what an extra or a group installs; CI has it.
NEEDS = {
    "docs/guides/gate_in_ci.md": ("check_jsonschema",),
    "docs/guides/publish_weights.md": ("model_signing",),
    "docs/guides/stores.md": ("obstore", "huggingface_hub", "moto.server"),
}


@pytest.mark.parametrize("page", at_once(WITH_BLOCKS, ("README.md", "docs/tutorial.md")))
def test_a_page_is_true(page: str, tmp_path: Path) -> None:
    """Its blocks in their order, from an empty folder."""
    for module in NEEDS.get(page, ()):
        pytest.importorskip(module, reason="pip install '.[sign,cloud,test]' --group docs")
    run = Page(tmp_path, blocks.in_clone(page))
    found = blocks.blocks(page)
    try:
        for block in found:
            run.run(block)
    except BaseException:
        run.kill()
        raise
    run.close()
    assert run.done == Counter(block.held for block in found)


def test_every_block_is_of_a_known_kind_and_what_is_not_run_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted = blocks.counts()
    every = [block for page in blocks.PAGES for block in blocks.blocks(page)]
    assert sum(sum(found.values()) for found in counted.values()) == len(every)
    apart = [block for block in every if block.held == "checked only"]
    assert all(len(block.reason.split()) > 2 for block in apart if block.held in ("checked only", "shown"))
    with capsys.disabled():
        print(f"\n\n{blocks.table(counted)}\nchecked only:")
        for block in apart:
            print(f"  {block.where}: {block.reason}")
    executed = sum(
        block.held in ("run", "compared", "stood in", "validated", "by another test") for block in every
    )
    # What is checked only is the exception.
    assert len(apart) <= executed // 5, (len(apart), executed)
