"""What users read is written with the field's terms: phrases that make a sentence hard to read do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastshard.common.errors import CODES

ROOT = Path(__file__).parents[1]
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
    sentences = re.split(r"(?<=[.:;)]) ", CODES[code].explanation)
    assert all(len(sentence.split()) <= 30 for sentence in sentences)
    assert CODES[code].explanation.endswith(".") and CODES[code].title[0].isupper()
