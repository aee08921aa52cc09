"""What mkdocs does not do by itself: pages made of the parser, of the public names and of files beside
`docs/`."""

from __future__ import annotations

import argparse
import inspect
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastshard
from fastshard.cli.help_text import EXIT_CODES, EXIT_NOTE
from fastshard.cli.parser import build
from fastshard.cli.verbs import VERBS
from fastshard.common.codes import CODES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: Files beside `docs/` that are pages too.
BESIDE = {
    "FORMAT.md": "format.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "benches/NOTES.md": "project/measurements.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s]+)\)")
#: A code of a finding, as code or plain; not in other code, in links, headings and comments.
_CODE = re.compile(
    r"^#.*$|<!--.*?-->|`(?P<alone>FS\d{3})`|`[^`\n]*`|\[[^\]\n]*\]\([^)\n]*\)|\b(?P<plain>FS\d{3})\b",
    re.MULTILINE,
)
_FENCED = re.compile(r"^( *)(```+).*?^\1\2$", re.MULTILINE | re.DOTALL)


# --- hooks, as mkdocs calls them


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the generated pages into the navigation."""
    config.nav = _filled(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {**commands(), **names(), **findings(), **beside(), "project/blocks.md": blocks()}
    sources = {to: source for source, to in BESIDE.items()}
    for path, text in pages.items():
        file = File.generated(config, path, content=text)
        if path in sources:
            file.edit_uri = f"../{sources[path]}"
        files.append(file)
    return files


def on_env(env: Any, config: MkDocsConfig, files: Files) -> Any:
    """Adds llms.txt, now that the pages' contents are known."""
    from mkdocs.structure.files import File

    # Not at the top: mkdocs restores the path of modules after it has loaded this one.
    sys.path.insert(0, str(ROOT / "docs"))
    import llms

    home = files.src_uris["index.md"].page
    assert home is not None
    files.append(File.generated(config, "llms.txt", content=llms.make_text(home, config)))
    return env


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files of the repository become links to their pages, or plain text where they have none."""
    beside = {to: source for source, to in BESIDE.items()}
    path = page.file.src_uri
    return with_codes(relinked(markdown, beside.get(path, f"docs/{path}"), path), path)


def _filled(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_filled(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _filled(entry) for title, entry in nav.items()}
    made = {"reference/cli/": cli_nav, "reference/python/": python_nav, "reference/findings/": findings_nav}
    return made.get(nav, lambda: nav)()


# --- links


def site_path(path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if path == "README.md":
        return "index.md"
    return BESIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def relinked(markdown: str, source: str, page: str) -> str:
    """A page's links, which are relative to its file in the repository, relative to its place on the site."""

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        to = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = site_path(to)
        if there is None:
            return text if (ROOT / to).exists() else match[0]
        return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return outside(markdown, lambda text: _LINK.sub(link, text))


def outside(markdown: str, change: Callable[[str], str]) -> str:
    """A page of which all that is in no fence is changed."""
    parts: list[str] = []
    end = 0
    for fenced in _FENCED.finditer(markdown):
        parts += [change(markdown[end : fenced.start()]), fenced[0]]
        end = fenced.end()
    return "".join([*parts, change(markdown[end:])])


def with_codes(markdown: str, page: str) -> str:
    """Codes of findings lead to their rows, and the rows have anchors."""
    if page == "findings.md":
        row = r'| <a id="\1"></a>[\1](reference/findings/\1.md) |'
        return re.sub(r"^\| (FS\d{3}) \|", row, markdown, flags=re.MULTILINE)
    to = posixpath.relpath("findings.md", posixpath.dirname(page) or ".")

    def linked(match: re.Match[str]) -> str:
        code = match["alone"] or match["plain"]
        return f"[{match[0]}]({to}#{code})" if code in CODES else match[0]

    return outside(markdown, lambda text: _CODE.sub(linked, text))


def beside() -> dict[str, str]:
    """Pages that are files beside `docs/`."""
    return {to: (ROOT / source).read_text(encoding="utf-8") for source, to in BESIDE.items()}


# --- the command line


def cli_nav() -> list[Any]:
    """The commands, in the groups of ``fastshard --help``."""
    groups = (
        {title: [{name: f"reference/cli/{name}.md"} for name in names]}
        for title, names in VERBS.groups.items()
    )
    return ["reference/cli/index.md", *groups]


def commands() -> dict[str, str]:
    """A page for each command, made of its parser and its record, and one of all."""
    parser = build()
    own = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    pages = {f"reference/cli/{verb.name}.md": command(own[verb.name], verb) for verb in VERBS}
    lines = ["# Commands", "", parser.description or "", ""]
    for title, names in VERBS.groups.items():
        rows = (f"| [`fastshard {name}`]({name}.md) | {_cell(VERBS[name].help)} |" for name in names)
        lines += [f"## {title}", "", "| command | what it does |", "|---|---|", *rows, ""]
    codes = (f"| {code} | {_cell(meaning)} |" for code, meaning in EXIT_CODES)
    lines += ["## Exit codes", "", "| code | meaning |", "|---|---|", *codes, "", EXIT_NOTE]
    return {"reference/cli/index.md": "\n".join(lines) + "\n", **pages}


def command(parser: argparse.ArgumentParser, verb: Any) -> str:
    """The page of a command."""
    lines = [f"# fastshard {verb.name}", "", *_described(parser.description or verb.help), ""]
    lines += ["```text", str(parser.usage), "```", "", "```sh", *verb.examples, "```", ""]
    for group in parser._action_groups:
        actions = [
            a for a in group._group_actions if a.help is not argparse.SUPPRESS and group.title != "help"
        ]
        if actions:
            title = {"positional arguments": "Arguments", "options": "Options"}.get(group.title or "")
            lines += [f"## {title or _begun(group.title or '')}", ""]
            lines += ["| argument | meaning |", "|---|---|", *map(_argument, actions), ""]
    if not verb.judges:
        lines += [
            "What it finds is printed, and does not change its exit code: it is 0 once there is a result.",
            "",
        ]
    lines += ["[Exit codes](index.md#exit-codes)"]
    return "\n".join(lines) + "\n"


def _argument(action: argparse.Action) -> str:
    named = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else named
    if not action.option_strings:
        called = f"`{value}{'...' if action.nargs == '+' else ''}`"
    elif action.nargs == 0:
        called = ", ".join(f"`{flag}`" for flag in action.option_strings)
    else:
        called = ", ".join(f"`{flag} {value}`" for flag in action.option_strings)
    text = (action.help or "").replace("%%", "%") % {"default": action.default} if action.help else ""
    if action.choices and action.default not in (None, argparse.SUPPRESS) and "default" not in text:
        text = f"{text} (default: {action.default})".strip()
    return f"| {_cell(called)} | {_cell(text)} |"


def _begun(text: str) -> str:
    """With a capital at its beginning, and nowhere else."""
    return text[:1].upper() + text[1:]


def _described(text: str) -> list[str]:
    """A description, whose indented lines are commands."""
    lines: list[str] = []
    for block in re.split(r"\n\n+", text):
        is_code = block.startswith("  ")
        lines += ["```sh", *block.splitlines(), "```", ""] if is_code else [_cell(_sentences(block)), ""]
    return lines


def _sentences(text: str) -> str:
    """Begun and ended as a sentence is."""
    return _begun(text) + ("" if text.rstrip().endswith((".", ":", "`")) else ".")


def _cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


# --- findings


def findings_nav() -> list[Any]:
    """The page of all codes, and one for each."""
    return [
        "findings.md",
        *({f"{code} {CODES[code].title}": f"reference/findings/{code}.md"} for code in sorted(CODES)),
    ]


def findings() -> dict[str, str]:
    """A page for each code."""
    # Not at the top: mkdocs restores the path of modules after it has loaded this one.
    sys.path.insert(0, str(ROOT / "docs"))
    import finding_pages

    return {f"reference/findings/{code}.md": finding_pages.page(code) for code in CODES}


# --- the Python API


def _kind(name: str) -> str:
    value = getattr(fastshard, name)
    if inspect.ismodule(value):
        return "Modules"
    if inspect.isclass(value):
        return "Exceptions" if issubclass(value, Exception) else "Classes"
    return "Functions" if callable(value) else "Constants"


def _by_kind() -> Iterator[tuple[str, list[str]]]:
    for kind in ("Functions", "Classes", "Exceptions", "Modules", "Constants"):
        if of_kind := [name for name in sorted(fastshard.__all__) if _kind(name) == kind]:
            yield kind, of_kind


def python_nav() -> list[Any]:
    """The public names by kind."""
    return [
        "reference/python/index.md",
        *(
            {kind: [{name: f"reference/python/{name}.md"} for name in of_kind]}
            for kind, of_kind in _by_kind()
        ),
    ]


def names() -> dict[str, str]:
    """A page for each public name, made of its docstring, and one of all."""
    pages: dict[str, str] = {}
    lines = ["# Python", "", "All that is public is in the package `fastshard` itself:", ""]
    for kind, of_kind in _by_kind():
        lines += [f"## {kind}", "", "| name | what it is |", "|---|---|"]
        for name in of_kind:
            value = getattr(fastshard, name)
            said = _comment(name) if kind == "Constants" else (inspect.getdoc(value) or "").partition("\n")[0]
            lines.append(f"| [`fastshard.{name}`]({name}.md) | {_cell(_plain(said))} |")
            pages[f"reference/python/{name}.md"] = _reference(name, value)
        lines.append("")
    return {"reference/python/index.md": "\n".join([*lines, *_example_checkpoints()]), **pages}


def _example_checkpoints() -> list[str]:
    """How to make the checkpoints that examples of names read."""
    program = (ROOT / "docs/example_checkpoints.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    return [
        "## Examples",
        "",
        "The examples import `fastshard` and read small checkpoints, which this program makes in the current "
        "folder:",
        "",
        f"```python\n{program}```",
        "",
        "`stale`, a run whose fp32 master weights are out of date, is "
        "`tests/fixtures/stale_masters_zero1_bf16_dp2` in the repository.",
        "",
    ]


def _reference(name: str, value: Any) -> str:
    """The page of a public name; of a module those of its names that it calls public."""
    options: dict[str, Any] = {"heading": f"fastshard.{name}", "toc_label": f"fastshard.{name}"}
    path = f"fastshard.{name}"
    if inspect.ismodule(value):
        options["members"] = [n for n in value.__all__ if callable(getattr(value, n))]
    elif hasattr(value, "__qualname__"):
        # Where it is defined: a module may have the name of what it defines.
        path = f"{value.__module__}.{value.__qualname__}"
    lines = [f"---\ntitle: fastshard.{name}\n---", "", f"::: {path}", "    options:"]
    lines += [f"      {key}: {value}" for key, value in options.items()]
    if _kind(name) != "Constants":
        lines += ["", "[Checkpoints of the examples](index.md#examples)"]
    return "\n".join(lines) + "\n"


def _comment(name: str) -> str:
    """What the comment above a constant says."""
    for file in (ROOT / "python/fastshard").rglob("*.py"):
        found = re.search(rf"((?:^#: .*\n)+){name}\b", file.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return " ".join(line.removeprefix("#: ") for line in found[1].splitlines())
    return ""


def _plain(text: str) -> str:
    """A docstring's line without roles."""
    return re.sub(r":\w+:`[~.]?([^`]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text).replace("``", "`")


# --- blocks


def blocks() -> str:
    """The page of how many blocks there are, and how each is held."""
    # Not at the top: mkdocs restores the path of modules after it has loaded this one.
    sys.path.insert(0, str(ROOT / "tests/docs"))
    import blocks as found

    pages = [page for page in found.PAGES if found.blocks(page)]
    apart = [block for page in pages for block in found.blocks(page) if block.held == "checked only"]
    lines = [
        "# Blocks of these pages",
        "",
        "Every command and every block of code on these pages is executed by `tests/docs` with each change, "
        "page by page, "
        "beginning in an empty folder. What cannot run there is checked by a parser or a schema, and counted "
        "apart.",
        "",
        "| held | meaning |",
        "|---|---|",
        *(f"| {how} | {meaning} |" for how, meaning in found.MEANT.items()),
        "",
        found.table(found.counts(pages)),
        "## Checked only",
        "",
        "| block | why it is not run |",
        "|---|---|",
        *(f"| {block.where} | {_cell(block.reason)} |" for block in apart),
    ]
    return "\n".join(lines) + "\n"
