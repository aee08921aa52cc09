"""What users read is written with the field's terms: phrases that make a sentence hard to read do not come
back."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastshard
import pytest
from fastshard.common.codes import CODES

ROOT = Path(__file__).parents[2]
#: Phrases, each with a plainer one. CONTRIBUTING lists the terms.
BANNED = {
    r"\b(is|are) not (there|here)\b": "is missing",
    r"\bin no file\b": "is missing",
    r"\bnothing was published\b": "wrote nothing to OUT",
    r"\bpublishe[sd]\b": "put in place, complete",
    r"\bnothing wrong found\b": "OK",
    r"\btells?\b": "says, states",
    r"(?<!\{)\btold\b(?!\})": "said, stated",
    r"\bstated nowhere\b": "is not stated",
    r"\bnothing here states\b": "is not stated",
    r"(?<!--weights )(?<!--weights\n        )\bmasters\b": "master weights",
    r"\bfurther CKPT\b": "another CKPT",
    r"\bof (its|their) own\b": "separate, different",
    r"\bone of the two\b": "name both",
    r"\bthat is meant\b": "choose with OPTION",
    r"\bbelongs to another\b": "is from another",
    r"\banother run or step\b": "another run",
    r"\bcopy it again\b": "copy {file} again",
    r"\bthe right (file|one)\b": "the file of {rank}",
    r"\bfrom where\b": "from the node that ...",
    r"\bcut short\b": "truncated",
    r"\ba leftover\b": "left by another run",
    r"\bthe same bytes as\b": "is a copy of",
    r"\bmend(s|ed)?\b": "fix, repair",
    r"\bwhole (tensors?|checkpoint|number|model|file)\b": "full tensor, complete, integer",
}


def of_python() -> Iterator[tuple[str, int, str]]:
    for path in sorted((ROOT / "python/fastshard").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
            if isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield str(path.relative_to(ROOT)), node.lineno, node.value


def of_rust() -> Iterator[tuple[str, int, str]]:
    for path in sorted((ROOT / "rust").glob("*/src/**/*.rs")):
        if "tests" in path.parts or path.name == "tests.rs":
            continue
        text = re.split(r"#\[cfg\(test\)\]\s*mod", path.read_text(encoding="utf-8"))[0]
        text = re.sub(r"^\s*//.*$", "", text, flags=re.M)
        # What a defect of ours would print.
        text = re.sub(r'\.expect\(\s*"(?:[^"\\]|\\.)*"', "", text)
        text = re.sub(
            r'(?:unreachable|assert|debug_assert|debug_assert_eq|assert_eq)!\((?:[^"]|"(?:[^"\\]|\\.)*")*?\);',
            "",
            text,
        )
        for literal in re.finditer(r'"((?:[^"\\]|\\.)*)"', text, re.S):
            line = text[: literal.start()].count("\n") + 1
            yield str(path.relative_to(ROOT)), line, re.sub(r"\\\n\s*", "", literal[1])


SENTENCES = [found for found in (*of_python(), *of_rust()) if " " in found[2].strip()]


def test_sentences_are_found() -> None:
    assert len(SENTENCES) > 3000 and {path.split("/")[0] for path, _, _ in SENTENCES} == {"python", "rust"}


@pytest.mark.parametrize("phrase", BANNED)
def test_a_phrase_does_not_come_back(phrase: str) -> None:
    found = [f"{path}:{line}: {text}" for path, line, text in SENTENCES if re.search(phrase, text)]
    assert not found, f"write `{BANNED[phrase]}`:\n" + "\n".join(found)


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_explanation_is_short_sentences(code: str) -> None:
    row = CODES[code]
    sentences = re.split(r"(?<=[.:;)]) ", f"{row.meaning} {row.help}")
    assert all(len(sentence.split()) <= 30 for sentence in sentences)
    assert row.meaning.endswith(".") and row.title[0].isupper()
    assert row.help == "" or (row.help.endswith(".") and IMPERATIVE.match(row.help.lower()))


#: How an advice begins. What deletes is missing: it comes behind another verb.
IMPERATIVE = re.compile(
    r"(?:did you mean|"
    r"add|allow|ask|begin|check|choose|compare|continue|convert|copy|correct|count|create|cut|dequantise|describe|"
    r"do|download|expect|fetch|fill|finish|fix|free|give|ignore|install|keep|leave|let|list|load|log|look|"
    r"lower|make|mark|merge|mount|move|name|narrow|pass|point|put|raise|rebuild|redistribute|rename|"
    r"repair|replace|report|restore|run|save|say|see|set|start|submit|test|unset|untie|use|wait|wrap|write)\b"
)
#: Calls whose ``help`` is that of an option or a command.
NO_FINDING = {"Option", "Verb", "add_argument", "add_parser"}
#: Functions that take it by its place.
HELP_AT = {"class_of": 1, "missing": 3, "problem": 6}


def help_of_python() -> Iterator[tuple[str, int, str]]:
    for path in sorted((ROOT / "python/fastshard").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        assigned = [
            (node.targets[0].id, node.value)
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        ]

        def texts(value: ast.AST, assigned: list[tuple[str, ast.expr]] = assigned) -> Iterator[str]:
            match value:
                case ast.Constant(value=str(text)):
                    yield text
                case ast.JoinedStr(values=[ast.Constant(), *_] as parts):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
                    )
                case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]):
                    yield from (*texts(one), *texts(other))
                case ast.Name(id=called):
                    yield from (text for known, given in assigned if known == called for text in texts(given))

        for node in nodes:
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                values = [k.value for k in node.keywords if k.arg == "help" and name not in NO_FINDING]
                values += node.args[HELP_AT[name] :][:1] if name in HELP_AT else []
                for text in (text for value in values for text in texts(value)):
                    yield str(path.relative_to(ROOT)), node.lineno, text


def help_of_rust() -> Iterator[tuple[str, int, str]]:
    literal = r'(?:&?format!\(\s*)?"((?:[^"\\]|\\.)*)"'
    places = rf"(?:\.help\(\s*|let help =\s*|\.help = Some\(\s*|const RESTORE: &str =\s*){literal}"
    for path in sorted((ROOT / "rust").glob("*/src/**/*.rs")):
        if "tests" not in path.parts and path.name != "tests.rs":
            text = re.split(r"#\[cfg\(test\)\]\s*mod", path.read_text(encoding="utf-8"))[0]
            for found in re.finditer(places, text, re.S):
                line = text[: found.start()].count("\n") + 1
                yield str(path.relative_to(ROOT)), line, re.sub(r"\\\n\s*", "", found[1])


def test_a_help_text_says_first_what_to_do() -> None:
    helps = [*help_of_python(), *help_of_rust()]
    assert len(helps) > 450
    wrong = [f"{path}:{line}: {text}" for path, line, text in helps if not IMPERATIVE.match(text)]
    long = [
        f"{path}:{line}: {text}"
        for path, line, text in helps
        if any(len(sentence.split()) > 30 for sentence in re.split(r"(?<=[.:;)]) ", text))
    ]
    assert not wrong, "begin with what to do:\n" + "\n".join(wrong)
    assert not long, "at most 30 words a sentence:\n" + "\n".join(long)


def _public_callables() -> Iterator[tuple[str, Any]]:
    for name in fastshard.__all__:
        thing = getattr(fastshard, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            for method, of in vars(thing).items():
                of = getattr(of, "__func__", of)
                if not method.startswith("_") and inspect.isfunction(of):
                    yield f"{name}.{method}", of


def test_what_a_function_does_begins_with_a_verb() -> None:
    """``Checks ...``, not ``A check of ...``: the first line is what completion and ``help()`` show."""
    first = {name: (inspect.getdoc(of) or "").partition("\n")[0] for name, of in _public_callables()}
    wrong = {name: line for name, line in first.items() if not re.match(r"[A-Z][a-z]+s [a-z`A-Z]", line)}
    assert len(first) > 40 and not wrong, wrong
