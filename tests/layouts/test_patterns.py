"""Regular expressions that strangers wrote: matched as Python's re does, or refused by name, within one
budget for a file."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from fastshard.common.patterns import PatternBudget, PatternList
from fastshard.errors import FastshardError
from helpers import cli
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quantised_maker import model, write

How = Literal["start", "full", "module"]

_ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "q",
        "1",
        ".",
        "_",
        "-",
        "{",
        "}",
        "]",
        "é",
        "\n",
        "\\.",
        "\\-",
        "\\x61",
        "\\141",
        "\\n",
        "\\d",
        "\\w",
        "\\s",
        "\\D",
        "\\W",
        "\\S",
        "[ab]",
        "[^a]",
        "[a-c1]",
        "[\\w.]",
        "[^\\W_]",
        "[]a]",
        "[a-]",
        "[Z-a]",
        "\\b",
        "^",
        "$",
        "\\A",
        "\\Z",
        "\\1",
        "\\2",
        "(?P=n)",
    ]
)
_REPEATS = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "{,}", "*?", "+?", "??"]
_OPENS = ["(", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?P<n>", "(?i:", "(?s:", "(?m:", "(?-i:", "(?a:"]
if sys.version_info >= (3, 11):
    _REPEATS += ["*+", "++", "?+", "{1,2}+"]
    _OPENS.append("(?>")
PATTERNS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(st.sampled_from(_OPENS), inner, st.just(")")).map("".join),
        st.tuples(inner, st.sampled_from(_REPEATS)).map("".join),
        st.tuples(st.sampled_from(["(?i)", "(?m)", "(?s)", "(?a)", "(?#x)"]), inner).map("".join),
    ),
    max_leaves=8,
)
NAMES = st.one_of(st.text("aabq1._-A", max_size=8), st.text("aq.1_A\né ", max_size=6))


def matches(pattern: str, name: str, how: How) -> bool:
    return PatternList([pattern], how, PatternBudget("config.json")).first(name) is not None


@given(PATTERNS, NAMES, st.sampled_from(["start", "full", "module"]))
@settings(max_examples=1500, derandomize=True, deadline=None)
@example("(?P<n>[^a]+?)*+", "bq.A", "full")
@example("$", "\n", "start")
@example("a$", "a\n", "module")
@example("\\w+", "é", "full")
@example("[^\\d]", "\n", "full")
@example("(a)|\\1b", "b", "full")
@example("(?:a|)*", "ab", "full")
@example("a|b)(c", "x.a", "module")
@example("(?i)[Z-a]", "A", "full")
def test_patterns_match_what_python_matches(pattern: str, name: str, how: How) -> None:
    text = rf"(.*\.)?({pattern})$" if how == "module" else pattern
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = re.compile(text)
    except re.error:
        with pytest.raises(FastshardError):
            matches(pattern, name, how)
        return
    try:
        found = matches(pattern, name, how)
    except FastshardError as error:
        assert [one.code for one in error.findings] == ["FS514"], (pattern, error)
        return
    assert found is ((wanted.fullmatch if how == "full" else wanted.match)(name) is not None)


def test_classes_are_those_of_python() -> None:
    for pattern in ("\\d", "\\w", "\\s", "\\D", "[^\\W]", "(?a)\\w", "(?a)\\s"):
        budget = PatternBudget("config.json")
        patterns = PatternList([pattern], "full", budget)
        # Further characters come with each version of Unicode.
        for sign in map(
            chr, (*range(0x250), *range(0x660, 0x66A), 0x1680, *range(0x2000, 0x2070), 0x3000, 0x4E00)
        ):
            assert (patterns.first(sign) is not None) is (re.fullmatch(pattern, sign) is not None), (
                pattern,
                sign,
            )


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("(a|a)" * 40 + "b", "a" * 40),
        ("(a|aa|aaa)" * 30 + "b", "a" * 60),
        ("(a+)+$", "a" * 40 + "."),
        (".*.*.*b", "a" * 3000),
        ("a{0,40}" * 12, "a" * 480),
        ("(.*)*x", "a" * 100),
        (".*a" * 60 + ".*b$", "a" * 200),
        ("[a-z]*[a-z]*[a-z]*b", "a" * 200),
        ("(a|b)*a(a|b){12}$", "ab" * 100),
    ],
)
def test_patterns_without_an_end_in_python_take_few_steps(pattern: str, name: str) -> None:
    budget = PatternBudget("config.json")
    patterns = PatternList([pattern], "module", budget)
    found = [patterns.first(name + end) for end in ("", "c", "cb")]
    assert len(found) == 3 and budget.taken < 50_000_000


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("(x+x+)+y(?!z)", "x" * 60), ("(.*)(.*)(.*)(.*)(.*)\\1\\2\\3\\4\\5.{9}$b", "ab" * 50)],
)
def test_what_goes_back_for_ever_is_refused_with_the_pattern(pattern: str, name: str) -> None:
    patterns = PatternList([pattern], "start", PatternBudget("a/config.json"))
    with pytest.raises(FastshardError) as caught:
        for n in range(1000):
            patterns.first(f"{name}{n}")
    (found,) = caught.value.findings
    assert (found.code, found.file, found.got) == ("FS514", "a/config.json", pattern)


def test_one_budget_is_for_all_patterns_of_a_file() -> None:
    budget = PatternBudget("config.json", 10_000)
    first, second = (PatternList(["(a|b)*c"], "start", budget) for _ in range(2))
    with pytest.raises(FastshardError, match="FS514"):
        for _ in range(100):
            first.first("ab" * 50), second.first("ab" * 50)
    assert budget.taken < 100_000


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(FastshardError, match="FS211"):
        PatternList(["\ud800"], "start", PatternBudget("config.json"))


def _targets(*targets: str) -> dict[str, Any]:
    config = json.loads(json.dumps(model("ct 4 bit")[0]["quantization_config"]))
    for group in config["config_groups"].values():
        group["targets"] = list(targets)
    return dict(config)


#: quantization_config of models, and whether it is good, or the code of what is found.
CONFIGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "bounded repeats": (_targets("re:" + "a{0,40}" * 12, "Linear"), None),
    "very many": (
        _targets(*(f"re:model.layers.{n}.(q|k)*[a-z]*b$" for n in range(20_000)), "Linear"),
        "FS514",
    ),
    "look-ahead": (_targets("re:^(?!.*vision).*_proj"), None),
    "look-ahead for ever": (_targets("re:" + "(.*)" * 9 + "\\1\\2\\3\\4\\5(?=x)", "Linear"), "FS514"),
    "none": (_targets("re:(", "Linear"), "FS211"),
    "very many groups": (
        {
            **_targets("Linear"),
            "config_groups": {str(n): {"targets": ["Linear"], "weights": {}} for n in range(5000)},
        },
        "FS514",
    ),
    "some groups": (
        {
            **_targets("Linear"),
            "config_groups": {
                **_targets("Linear")["config_groups"],
                **{str(n): {"targets": [f"re:.*x{n}(?!y)"], "weights": {"num_bits": 8}} for n in range(50)},
            },
        },
        None,
    ),
    "a condition": (_targets("re:(a)?(?(1)b|c)", "Linear"), "FS514"),
    "rules of GPTQModel": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 16,
            "dynamic": {"-:(a|a)*b": {}, "+:.*(a+)+$": {"bits": 8}},
        },
        None,
    ),
    "a rule that is none": (
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {"+:*": {"bits": 8}}},
        "FS211",
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("verb", ["verify", "inspect", "merge"])
def test_patterns_of_quantisers(kind: str, verb: str, tmp_path: Path) -> None:
    said, code = CONFIGS[kind]
    config, tensors = model("gptq 4 bit" if said["quant_method"] == "gptq" else "ct 4 bit")
    more = {"model.norm.weight": torch.ones(8)}
    path = write(tmp_path / "in", config | {"quantization_config": said}, tensors | more)
    words = (verb, path, tmp_path / "out") if verb == "merge" else (verb, path)
    ran = cli(*words)
    assert not ran.having("FS520"), ran.out
    if code is not None and verb == "verify":
        (found,) = ran.errors
        assert (ran.code, found["code"], found["file"]) == (2, code, "config.json"), ran.out
        assert not (tmp_path / "out").exists()
    if code is None:
        assert not ran.having("FS514") and not ran.having("FS211"), ran.out


def _adapter(folder: Path, **said: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **said})
    )
    return path


def test_patterns_of_adapters_are_those_of_peft(tmp_path: Path) -> None:
    from fastshard.sources.peft import adapter_config
    from peft.utils.other import get_pattern_key

    ranks = {
        "(?:a|b)_proj": 1,
        r"layers\.[13]\..*q_proj": 2,
        "^v_proj": 3,
        r"(?!x)k_proj": 4,
        "model.layers.0.o_proj": 5,
        "q_proj": 6,
        r"up|down": 7,
        r"(e)\3x": 8,
    }
    config = adapter_config.read(_adapter(tmp_path, rank_pattern=ranks), "adapter_config.json")
    for name in (
        "a_proj",
        "x.b_proj",
        "x.ab_proj",
        "m.layers.1.s.q_proj",
        "m.layers.2.s.q_proj",
        "xq_proj",
        "v_proj",
        "x.v_proj",
        "x.k_proj",
        "model.layers.0.o_proj",
        "modelxlayers.0.o_proj",
        "base.model.layers.0.o_proj",
        "x.up",
        "x.down",
        "x.eex",
        "q_proj\n",
        "größe.q_proj",
    ):
        assert config.rank(name) == ranks.get(get_pattern_key(list(ranks), name), 4), name


def test_a_hundred_thousand_names_of_an_adapter_are_taken(tmp_path: Path) -> None:
    from fastshard.sources.peft import adapter_config

    ranks = {f"model.layers.{n}.self_attn.q_proj": n + 1 for n in range(100_000)}
    config = adapter_config.read(_adapter(tmp_path, rank_pattern=ranks), "adapter_config.json")
    assert [config.rank(f"model.layers.{n}.self_attn.q_proj") for n in (0, 9, 99_999)] == [1, 10, 100_000]


@pytest.mark.parametrize(
    ("pattern", "code"),
    [("(", "FS211"), ("(?i)q_proj", "FS211"), ("(a)?(?(1)b|c)", "FS514"), ("(q{9999}){9999}", "FS514")],
)
def test_patterns_of_adapters_that_are_refused(pattern: str, code: str, tmp_path: Path) -> None:
    from fastshard.sources.peft import adapter_config

    for key in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(FastshardError) as caught:
            adapter_config.read(_adapter(tmp_path, **{key: {pattern: 4}}), "a/adapter_config.json")
        (found,) = caught.value.findings
        assert (found.code, found.file, found.got) == (code, "a/adapter_config.json", pattern)
