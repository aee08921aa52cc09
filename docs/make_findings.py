"""Writes docs/findings.md from the table of codes in the core."""

from pathlib import Path

from fastshard.common.codes import CODES

GROUPS = {
    "1": "Completeness",
    "2": "Shape, dtype, layout",
    "3": "Content",
    "4": "Optimizer and masters",
    "5": "Storage and publishing",
    "6": "Unsafe input",
}
EXITS = {1: "1 problem", 2: "2 could not run", 3: "3 incomplete"}


def page() -> str:
    """The page's text."""
    lines = [
        "# Findings",
        "",
        "Every check yields findings; all are reported, not only the first. Codes are stable. The exit code "
        "is 1 if",
        "an error of class 1 is among them, else 2, else 3; warnings and notes change nothing. `fastshard "
        "explain",
        "CODE` prints a row. This page is written by `docs/make_findings.py` from the table in the core.",
    ]
    for digit, title in GROUPS.items():
        lines += [
            "",
            f"## FS{digit}xx {title}",
            "",
            "| code | title | severity | exit | meaning | what to do |",
            "|---|---|---|---|---|---|",
        ]
        for code, row in sorted(CODES.items()):
            if code[2] == digit:
                lines.append(
                    f"| {code} | {row.title} | {row.severity} | {EXITS[row.exit]} | {row.meaning} | "
                    f"{row.help} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "findings.md").write_text(page(), encoding="utf-8")
