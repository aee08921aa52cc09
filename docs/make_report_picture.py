"""Takes the picture of a report that the README shows: docs/pictures/report.png. Needs Chromium and
playwright."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import fastshard
from fastshard import examples
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "pictures/report.png"


def main() -> int:
    """A run of 4 tensor-parallel ranks, one of which saved to a disk of its own."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as work:
        run = Path(work) / "run"
        examples.make("gpt_neox", run, to="gpt_neox", tp=4)
        for file in run.glob("global_step0/*model_02*"):
            file.unlink()
        (Path(work) / "report.html").write_text(fastshard.report(run).replace(work, "/data"), "utf-8")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1200, "height": 760})
            page.goto((Path(work) / "report.html").as_uri())
            page.screenshot(path=PICTURE)
            browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
