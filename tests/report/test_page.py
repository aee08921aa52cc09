"""The page: what it says, that it can be opened safely whatever names are in it, its size, and the command
that writes it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fastshard
import pytest
import torch
from fastshard.cli import main
from fastshard.common.codes import CODES
from fastshard.errors import FastshardError, Finding
from fastshard.reporting import page
from fastshard.reporting.report import about
from fastshard.reporting.report_data import Check, Fact, Report, _groups
from fastshard.reporting.small_multiples import picture
from helpers import FIXTURES, HF, NEOX, TP4, cli, copy
from hostile import NAMES, Parsed, checkpoint
from safetensors.torch import save_file

MEMORY = "2GiB"


def unescaped(parsed: Parsed) -> str:
    return " ".join("".join(parsed.texts).split())


def safe(html: str) -> Parsed:
    """Holds what must hold of every page: one policy, hashes that fit, nothing that loads or runs but what is
    meant."""
    parsed = Parsed(html)
    assert parsed.mismatched == [] and parsed.open == [], (parsed.mismatched[:3], parsed.open[:3])
    (policy,) = [m["content"] or "" for m in parsed.all("meta") if m.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    # An oracle of its own: the texts as a parser sees them.
    for kind, texts in (
        ("style-src", parsed.content("style")),
        (
            "script-src",
            [
                t
                for t, s in zip(parsed.content("script"), parsed.all("script"), strict=True)
                if not s.get("type")
            ],
        ),
    ):
        (text,) = texts
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert set(re.findall(r"([a-z-]+) ", policy)) >= {"base-uri", "form-action"} and "unsafe" not in policy
    allowed = {
        "html",
        "head",
        "meta",
        "link",
        "title",
        "style",
        "body",
        "a",
        "header",
        "p",
        "h1",
        "h2",
        "h3",
        "span",
        "strong",
        "nav",
        "main",
        "section",
        "dl",
        "div",
        "dt",
        "dd",
        "article",
        "ul",
        "li",
        "b",
        "em",
        "code",
        "pre",
        "small",
        "svg",
        "g",
        "path",
        "line",
        "rect",
        "circle",
        "text",
        "tspan",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "input",
        "label",
        "kbd",
        "br",
        "script",
        "button",
        "footer",
        "details",
        "summary",
        "caption",
        "colgroup",
        "col",
        "polyline",
    }
    assert {tag for tag, _ in parsed.elements} <= allowed
    for tag, attributes in parsed.elements:
        assert not any(
            name.startswith("on") or name in ("style", "src", "srcset", "action") for name in attributes
        ), (tag, attributes)
        href = attributes.get("href")
        assert href is None or href.startswith("#") or (tag == "link" and href == "data:,")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]", html)
    html.encode()
    assert len(html.encode()) <= page.LIMIT
    # Headings in order, and every reference leads somewhere.
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in parsed.elements:
        for name in ("aria-labelledby", "aria-describedby", "aria-controls", "for"):
            assert set((attributes.get(name) or "").split()) <= set(ids)
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in ids
    return parsed


# --- what it says


def test_a_good_checkpoint() -> None:
    parsed = safe(fastshard.report(NEOX))
    text = unescaped(parsed)
    for words in (
        "OK Complete, by its headers.",
        "GPT-NeoX",
        "tp 2",
        "40 of 40",
        "from 80 stored",
        "2 ranks and 2 other files",
        "headers alone",
        "Not checked: whether the layout is right",
        "There is no manifest",
    ):
        assert words in text, words
    data = json.loads(parsed.content("script")[0])
    assert len(data["rows"]) == data["all"] == 40


def test_a_broken_one_says_what_to_do(tmp_path: Path) -> None:
    root = copy(TP4, tmp_path / "ckpt")
    (root / "tp_rank_02.safetensors").unlink()
    text = unescaped(safe(fastshard.report(root)))
    for words in (
        "INCOMPLETE",
        "1 error",
        "error FS101",
        "Fix: copy tp_rank_02.safetensors from the node",
        "rsync -a --ignore-existing",
        "tp 2: 21 missing",
        "Effect: 16 of 21 tensors are missing or incomplete",
        "of 21",
    ):
        assert words in text, words


@pytest.mark.parametrize("damage", ["no metadata", "tracker"])
def test_one_that_cannot_be_opened_gives_a_page_too(damage: str, tmp_path: Path) -> None:
    if damage == "tracker":
        root = copy(NEOX, tmp_path / "ckpt")
        (root / "latest").write_text("global_step9")
    else:
        root = copy(FIXTURES / "sharded/dcp_tp_micro", tmp_path / "ckpt")
        (root / ".metadata").unlink()
    text = unescaped(safe(fastshard.report(root)))
    assert "Opened as a checkpoint failed" in text and "Fix:" in text
    assert ("latest" if damage == "tracker" else "__0_0.distcp") in text


def test_statistics_of_a_manifest_are_shown_and_not_read(tmp_path: Path) -> None:
    fastshard.convert(NEOX, tmp_path / "out", stats=True, memory=MEMORY)
    parsed = safe(fastshard.report(tmp_path / "out", against=NEOX))
    text = unescaped(parsed)
    for words in (
        "as fastshard.manifest.json recorded them; not read again",
        "By role, over all layers",
        "Standard deviation by layer",
        "values were not compared",
        "40 tensors are in both",
        "made by",
        "headers alone",
    ):
        assert words in text, words
    assert len([s for s in parsed.all("svg") if s.get("class") == "lin"]) >= 9
    # All data of both: a conversion changes no distribution, and no rounding may say that it does.
    text = unescaped(safe(fastshard.report(tmp_path / "out", against=NEOX, stats=True, memory=MEMORY)))
    assert "40 of them have the same bytes; 0 differences" in text
    assert text.count("; alike") >= 9 and "overlap" not in text.split("Values")[-1].split("Provenance")[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"histogram": [1] * 64},
        {"histogram": [0] * 63},
        {"std": "wide"},
        {"count": -1},
        {"zeros": 1.5},
        {"zero_slabs": 3},
    ],
)
def test_statistics_that_cannot_be_are_no_picture(damage: dict[str, object], tmp_path: Path) -> None:
    fastshard.convert(NEOX, tmp_path / "out", stats=True, memory=MEMORY)
    file = tmp_path / "out/fastshard.manifest.json"
    document = json.loads(file.read_text())
    document["tensors"][3]["stats"] |= damage
    file.write_text(json.dumps(document))
    text = unescaped(safe(fastshard.report(tmp_path / "out")))
    assert "Not shown" in text


def test_a_file_that_its_manifest_names_is_missed(tmp_path: Path) -> None:
    """All files of a rank are named; without the manifest the first of them is, by the shapes of the tensors
    that are left."""
    root = copy(FIXTURES / "sharded/dcp_hf_rank_sharded_micro/sharded", tmp_path / "ckpt")
    fastshard.manifest(root, memory=MEMORY)
    last = max(root.glob("shard-*")).name.split("-model")[0]
    lost = sorted(p.name for p in root.glob(f"{last}-*"))
    for name in lost:
        (root / name).unlink()
    report = about(root)
    assert report.verdict == "broken"
    assert [f.file for f in report.all_findings if f.code == "FS101"] == lost
    (root / "fastshard.manifest.json").unlink()
    assert [f.file for f in about(root).all_findings if f.code == "FS101"] == lost[:1]


def test_before_and_after_by_all_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = {f"model.layers.{i}.w.weight": torch.randn(64, 64) for i in range(4)}
    after = {name: t.clone() for name, t in before.items()}
    after["model.layers.2.w.weight"] *= 5
    after["model.layers.1.w.weight"][8:24] = 0
    after["new"] = torch.ones(2)
    for name, tensors in (("a", before), ("b", after)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    report = about(tmp_path / "b", against=tmp_path / "a", stats=True, memory=MEMORY)
    c = report.comparison
    assert c is not None and (c.common, c.equal) == (4, 2)
    assert [(d.name, d.what) for d in c.changes] == [
        ("model.layers.1.w.weight", "values"),
        ("model.layers.2.w.weight", "values"),
        ("new", "only here"),
    ]
    # What `diff` finds is what is found here.
    found = fastshard.diff(tmp_path / "a", tmp_path / "b", memory=MEMORY)
    assert [d.tensor for d in found] == [d.name for d in c.changes]
    text = unescaped(safe(page.rendered(report)))
    assert "std is 5 times that of its like" in text and "zero throughout: rows 8-23" in text
    assert "all data of both was read" in text


def test_what_cannot_be_compared_says_why(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    save_file({"a": torch.ones(4)}, tmp_path / "other/model.safetensors")
    text = unescaped(safe(fastshard.report(TP4, against=tmp_path / "other")))
    assert "nothing: they have no names in common" in text and "FS209" in text
    (tmp_path / "empty").mkdir()
    assert "nothing: it cannot be opened" in unescaped(
        safe(fastshard.report(TP4, against=tmp_path / "empty"))
    )
    with pytest.raises(FastshardError) as error:
        fastshard.report(TP4, against=tmp_path / "absent")
    assert error.value.code == "FS501"


def test_tensors_that_are_alike_are_one_line(tmp_path: Path) -> None:
    names = [f"params.decoder.layers_{i}.mlp.wi_{j}.kernel" for i in range(3) for j in range(2)]
    names += [f"model.layers.{i}.experts.{e}.w" for i in (2, 5, 9) for e in range(4)] + [
        "lm_head",
        "a/b/7/c",
        "x.00012345678901.y",
    ]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    report = about(tmp_path)
    found = {f.pattern: f.count for f in report.families}
    assert found == {
        "params.decoder.layers_{0-2}.mlp.wi_0.kernel": 3,
        "params.decoder.layers_{0-2}.mlp.wi_1.kernel": 3,
        "model.layers.{2-9}.experts.{0-3}.w": 12,
        "lm_head": 1,
        "a/b/7/c": 1,
        "x.00012345678901.y": 1,
    }
    assert sum(n for of in report.sizes.values() for n, _ in of.values()) == len(names)
    assert report.sizes["experts.*.w"] == {"F32": (12, 96)}


# --- names of strangers


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("evil") / "</title><script>alert(9)")


def test_hostile_tensor_names(evil: Path) -> None:
    parsed = safe(fastshard.report(evil, stats=True, against=evil, memory=MEMORY))
    text = unescaped(parsed)
    assert "</script><img src=x onerror=alert(1)>" in text and "{{ 7 * 7 }}" in text
    data = json.loads(parsed.content("script")[0])
    assert {row[0] for row in data["rows"]} >= {
        NAMES[0],
        NAMES[1],
        "a\\u202egpj.exe",
        "two\\nlines\\r\\x1b[31m",
    }
    raw = fastshard.report(evil)
    inside = raw.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(inside)


def test_hostile_findings_files_and_values() -> None:
    surrogate = os.fsdecode(b"\xff\xfe")
    findings = [
        Finding.of(
            "FS101", name, file=name, tensor=other, rank=name, host=other, expected=name, got=other, help=name
        )
        for name, other in zip(NAMES, NAMES[::-1], strict=True)
    ]
    findings.append(Finding.of("FS301", surrogate, file=surrogate))
    report = Report(
        paths=(*NAMES, surrogate),
        version="</style>",
        verdict="broken",
        facts=tuple(Fact(n, n, n) for n in NAMES),
        findings=_groups(findings),
        not_checked=NAMES[0],
        read=NAMES[1],
        commands=NAMES,
        folder=NAMES[0],
        assumed=tuple((n, n) for n in NAMES),
        checks=tuple(Check(n, n, n, n) for n in NAMES),
        provenance=tuple((n, n) for n in NAMES),
        files=tuple((n, 1) for n in NAMES),
    )
    safe(page.rendered(report))


def test_hostile_file_names_and_config_values(tmp_path: Path) -> None:
    root = copy(HF, tmp_path / "ckpt")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(
        json.dumps(config | {"architectures": [NAMES[0]], "_name_or_path": NAMES[1]})
    )
    index = json.loads((root / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {NAMES[0]: "model-00001-of-00004.safetensors", "</td>": "<img src=x>.safetensors"}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "<b>leftover.safetensors").write_bytes(b"")
    safe(fastshard.report(root))
    (root / os.fsdecode(b"model-\xff.safetensors")).write_bytes(b"")
    safe(fastshard.report(root))


def test_hostile_roles_in_pictures() -> None:
    for name in NAMES:
        made = picture(name, [(0, 1.0), (1, 2.0)], [(0, 1.5), (1, 1.5)])
        parsed = Parsed(f"<svg>{made['svg']}</svg>")
        assert {tag for tag, _ in parsed.elements} == {"svg", "path", "polyline", "text"}
        assert {n for _, a in parsed.elements for n in a} <= {"class", "d", "points", "x", "y", "text-anchor"}


def test_the_layer_that_stands_out_is_named() -> None:
    points = [(layer, 0.01 if layer != 7 else 0.03) for layer in range(20)]
    made = picture("w", points)
    assert "layer 7: 0.03, 3 x its neighbours" in made["svg"] and made["note"] == "1 layer stands out"
    assert "layer 7 stands out" in made["label"] and not picture("w", points[:5])["note"]


# --- size, and the same bytes


def test_the_same_input_is_the_same_page(tmp_path: Path) -> None:
    fastshard.convert(NEOX, tmp_path / "out", stats=True, memory=MEMORY)
    pages = {
        subprocess.run(
            [sys.executable, "-m", "fastshard", "report", "out", "-o", "-", "--against", str(NEOX), "-q"],
            cwd=tmp_path,
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(pages) == 1


def test_many_tensors_are_cut_and_counted(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{i}.some.rather.long.role.{'x' * 60}.weight": torch.ones(1) for i in range(12_000)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    html = fastshard.report(tmp_path)
    parsed = safe(html)
    data = json.loads(parsed.content("script")[0])
    assert 5_000 < len(data["rows"]) < data["all"] == 12_000
    assert f"{len(data['rows']):,} of 12,000 shown" in unescaped(parsed)


def test_no_page_is_too_large() -> None:
    """Names and findings as long and as many as a stranger likes."""
    long = "<&\u202e" * 3000
    findings = [
        Finding.of(code, f"{i} {long}", file=long, tensor=long, help=f"{i} {long}")
        for code in CODES
        for i in range(60)
    ]
    report = Report(
        paths=(long,) * 50,
        version="1",
        verdict="broken",
        facts=(Fact("a", long),) * 20,
        findings=_groups(findings),
        not_checked=long,
        read=long,
        commands=(long,) * 3,
        files=tuple((f"{i}{long}", 1) for i in range(500)),
    )
    html = page.rendered(report)
    safe(html)
    assert "shown" in html


# --- the command


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    ran = cli("report", NEOX, "-o", tmp_path / "r.html")
    assert ran.code == 0 and ran.doc["verdict"] == "ok"
    html = (tmp_path / "r.html").read_text()
    safe(html)
    assert ran.doc["bytes"] == len(html.encode()) and sorted(p.name for p in tmp_path.iterdir()) == ["r.html"]
    # A report of ours is replaced; what is broken is told of, and exits with 0 all the same.
    root = copy(TP4, tmp_path / "ckpt")
    (root / "tp_rank_02.safetensors").unlink()
    again = cli("report", root, "-o", tmp_path / "r.html")
    assert again.code == 0 and again.doc["errors"] == 1 and again.having("FS101")
    assert "INCOMPLETE" in (tmp_path / "r.html").read_text()


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    ran = cli("report", NEOX, "-o", tmp_path / "index.html")
    assert ran.code == 2 and ran.having("FS504") and (tmp_path / "index.html").read_text() == "<h1>mine</h1>"
    assert cli("report", NEOX, "-o", tmp_path / "index.html", "--overwrite").code == 0
    safe((tmp_path / "index.html").read_text())
    assert cli("report", NEOX, "-o", tmp_path).having("FS515")
    assert cli("report", NEOX, "-o", tmp_path / "no/such/r.html").having("FS501")


def test_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(NEOX), "-o", "-"]) == 0
    safe(capsys.readouterr().out)
    assert cli("report", NEOX, "-o", "-").having("FS515")


def test_paths_that_are_not_there_are_errors_of_the_call(tmp_path: Path) -> None:
    ran = cli("report", tmp_path / "absent", "-o", tmp_path / "r.html")
    assert ran.code == 2 and ran.having("FS501") and not (tmp_path / "r.html").exists()
    (tmp_path / "empty").mkdir()
    ran = cli("report", tmp_path / "empty", "-o", tmp_path / "r.html")
    assert ran.code == 0 and ran.doc["verdict"] == "unopened"


@pytest.mark.parametrize("absent, stats", [("jinja2", False), ("vl_convert", True)])
def test_what_is_not_installed_is_told(absent: str, stats: bool, tmp_path: Path) -> None:
    (tmp_path / f"{absent}.py").write_text("raise ImportError('not here')")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "fastshard",
            "report",
            str(NEOX),
            "-o",
            str(tmp_path / "r.html"),
            *(["--stats"] if stats else []),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 2 and "FS514" in ran.stderr and "vl-convert-python" in ran.stderr
    assert not (tmp_path / "r.html").exists()


def test_headers_alone_need_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "vl_convert.py").write_text("raise ImportError('not here')")
    ran = subprocess.run(
        [sys.executable, "-m", "fastshard", "report", str(NEOX), "-o", str(tmp_path / "r.html")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr


def test_what_pictures_need_is_asked_for_before_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function as by the command."""
    from fastshard.reporting import report_data

    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr(report_data, "gathered", lambda *a, **k: pytest.fail("all was read for nothing"))
    with pytest.raises(fastshard.FastshardError, match="vl-convert"):
        fastshard.report(NEOX, stats=True)


#: The command line, with as many bytes of addresses as its first argument says.
_LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from fastshard.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("gib", "recorded"),
    [
        (6, False),
        (60, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((6, True), (60, False))),
    ],
)
def test_a_limit_of_addresses_leaves_the_pictures_out(gib: int, recorded: bool, tmp_path: Path) -> None:
    """What draws them ends the whole process there."""
    source, out = NEOX, tmp_path / "r.html"
    if recorded:
        source = tmp_path / "merged"
        fastshard.merge(NEOX, source, stats=True, fsync=False)
    options = [] if recorded else ["--stats"]
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            _LIMITED,
            str(gib << 30),
            "report",
            str(source),
            "-o",
            str(out),
            *options,
            "--threads",
            "1",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (told,) = [f for f in json.loads(ran.stdout)["findings"] if f["code"] == "FS514"]
    assert (told["severity"], "the page has no charts" in told["message"]) == ("warning", True)
    page = out.read_text()
    assert "the page has no charts" in page and '<h2 id="h-numbers">' in page
    assert "<figure" in page and 'class="lin"' not in page
    # With numbers alone the command says so to people too.
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            _LIMITED,
            str(gib << 30),
            "report",
            str(source),
            "-o",
            str(out),
            *options,
            "--threads",
            "1",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and "warning FS514: the page has no charts" in ran.stderr


def test_without_distributions_nothing_is_said_of_pictures(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            _LIMITED,
            str(6 << 30),
            "report",
            str(NEOX),
            "-o",
            str(tmp_path / "r.html"),
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and not [f for f in json.loads(ran.stdout)["findings"] if f["code"] == "FS514"]
