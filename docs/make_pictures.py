"""Draws docs/pictures/*.svg: where rules put the rows of a tensor on the ranks of a framework.

Nothing is drawn by hand. A small model is made whose elements say where they belong (a head, a block of
rows), fastshard converts it, and what the ranks' files hold is drawn. With a folder as argument the pictures
are written there.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import fastshard
import numpy as np
from fastshard import _core, examples
from fastshard.manifests import MANIFEST_NAME

PICTURES = Path(__file__).parent / "pictures"
#: Kinds of rows: a letter for their boxes, and a colour on which dark text can be read.
KINDS = {
    "q": "#a9c7ea",
    "k": "#f6c28b",
    "v": "#a7d7a0",
    "gate": "#d5b8e8",
    "up": "#f2b5c4",
    "out": "#a9c7ea",
    "words": "#a9c7ea",
}
PADDING = "#dddddd"
#: Blocks that an MLP's rows are painted in.
BLOCKS = 4
WIDTH, LABEL, HEIGHT, GAP = 640, 150, 26, 8


@dataclass(frozen=True)
class Bar:
    """A stored tensor: its boxes along the dimension that is drawn, each with its kind, its number and its
    extent."""

    label: str
    boxes: list[tuple[str, int, int]]


# --- painted models


def _painted(kind: str, size: int, blocks: int) -> np.ndarray[Any, Any]:
    """Numbers of rows: their kind and their block; 0 stands for padding."""
    code = (list(KINDS).index(kind) + 1) * 1000
    return (code + np.arange(size) * blocks // size).astype(np.float32)


def _value(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    value = np.zeros(shape, np.float32)
    rows: np.ndarray[Any, Any] | None = None
    if match := re.search(r"\.([qkv])_proj\.", name):
        rows = _painted(match[1], shape[0], heads if match[1] == "q" else groups)
    elif match := re.search(r"\.(gate|up)_proj\.", name):
        rows = _painted(match[1], shape[0], BLOCKS)
    elif "embed_tokens" in name:
        rows = _painted("words", shape[0], 1)
    elif name.endswith("query_key_value.weight"):
        # transformers keeps q, k and v of a head together.
        parts = [_painted(kind, shape[0] // 3, heads).reshape(heads, -1) for kind in "qkv"]
        rows = np.concatenate(parts, axis=1).reshape(-1)
    elif ".o_proj." in name:
        return value + _painted("out", shape[1], heads)
    return value if rows is None else value + rows.reshape(-1, *[1] * (len(shape) - 1))


def _model(model: str, folder: Path) -> Path:
    with fastshard.Writer(folder / model, config=examples.CONFIGS[model], fsync=False) as writer:
        for name, value in examples.tensors(model):
            writer[name] = _value(name, value.shape, examples.CONFIGS[model])
    (folder / model / MANIFEST_NAME).unlink()
    return folder / model


# --- what lies in files


def _stored(root: Path, pattern: str, ending: str, axis: int = 0) -> list[list[tuple[str, int, int]]]:
    """The boxes of the tensor whose name ends so, in each file that has it, in the order of the files'
    names."""
    files = sorted(str(path.relative_to(root)) for path in root.rglob(pattern))
    catalog = _core.Catalog([root], [(0, file) for file in files], 1)
    found = []
    for at in range(len(files)):
        for index, tensor in enumerate(catalog.tensors(at)):
            if ".".join(tensor["path"]).endswith(ending):
                raw = catalog.tensor_bytes(at, index, 1 << 20)
                found.append(_boxes(np.frombuffer(raw, np.float32).reshape(tensor["shape"]), axis))
                break
    assert found, (root, pattern, ending)
    return found


def _boxes(value: np.ndarray[Any, Any], axis: int) -> list[tuple[str, int, int]]:
    line = np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1)
    assert (line == line[:, :1]).all(), "a row holds one number"
    runs = [(int(code), len(list(run))) for code, run in itertools.groupby(line[:, 0])]
    return [(list(KINDS)[code // 1000 - 1] if code else "", code % 1000, size) for code, size in runs]


def _bars(label: str, root: Path, pattern: str, ending: str, axis: int = 0) -> list[Bar]:
    found = _stored(root, pattern, ending, axis)
    return [
        Bar(f"{label}, rank {rank}" if len(found) > 1 else label, boxes) for rank, boxes in enumerate(found)
    ]


def _layer(root: Path, label: str, framework: str, part: str, axis: int = 0) -> list[Bar]:
    """A tensor of the first layer as a framework's ranks hold it."""
    where = {
        "gpt_neox": (
            "layer_02-model_*",
            {"qkv": "query_key_value.weight", "mlp": "mlp.linear1.weight", "out": "attention.dense.weight"},
        ),
        "megatron": (
            "model_optim_rng.pt",
            {
                "qkv": "layers.0.self_attention.linear_qkv.weight",
                "mlp": "layers.0.mlp.linear_fc1.weight",
                "out": "layers.0.self_attention.linear_proj.weight",
            },
        ),
    }
    pattern, endings = where[framework]
    return _bars(label, root, pattern, endings[part], axis)


# --- drawing


def _svg(title: str, bars: Iterable[Bar], numbered: bool = True, extents: bool = False) -> str:
    bars = list(bars)
    longest = max(sum(size for *_, size in bar.boxes) for bar in bars)
    scale = (WIDTH - LABEL - 10) / longest
    height = len(bars) * (HEIGHT + GAP) + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#fafafa"/>',
    ]
    for at, bar in enumerate(bars):
        y = GAP + at * (HEIGHT + GAP)
        lines.append(f'<text x="8" y="{y + 17}" fill="#222">{escape(bar.label)}</text>')
        x = float(LABEL)
        for kind, number, size in bar.boxes:
            width = size * scale
            text = f"{kind}{number}" if kind and numbered else kind or "pad"
            text += f" {size}" if extents else ""
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" '
                f'fill="{KINDS.get(kind, PADDING)}" '
                f'stroke="#555" stroke-width="0.7"/>'
            )
            if width >= 6.2 * len(text):
                at_x, anchor = x + width / 2, "middle"
            else:
                # Beside the last box of a bar there is room.
                at_x, anchor = x + width + 4, "start"
            if anchor == "middle" or (kind, number, size) == bar.boxes[-1]:
                lines.append(
                    f'<text x="{at_x:.1f}" y="{y + 17}" text-anchor="{anchor}" fill="#222">{text}</text>'
                )
            x += width
    return "\n".join([*lines, "</svg>"]) + "\n"


def pictures() -> dict[str, str]:
    """All pictures by their names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        llama, neox = _model("llama", folder), _model("gpt_neox", folder)
        made = {}
        for model, to in ((llama, "gpt_neox"), (llama, "megatron:legacy"), (neox, "gpt_neox")):
            made[model.name, to] = folder / f"{model.name}-{to.partition(':')[0]}-ranks"
            fastshard.convert(model, made[model.name, to], to=to, tp=2, fsync=False)
        of_neox, of_megatron = made["llama", "gpt_neox"], made["llama", "megatron:legacy"]
        plain = [
            Bar(f"{kind}_proj", _stored(llama, "*.safetensors", f"layers.0.self_attn.{kind}_proj.weight")[0])
            for kind in "qkv"
        ]
        gated = [
            Bar(f"{kind}_proj", _stored(llama, "*.safetensors", f"layers.0.mlp.{kind}_proj.weight")[0])
            for kind in ("gate", "up")
        ]
        out = _bars("o_proj", llama, "*.safetensors", "layers.0.self_attn.o_proj.weight", axis=1)
        words = _bars("embed_tokens", llama, "*.safetensors", "embed_tokens.weight")
        return {
            "qkv": _svg(
                "Queries, keys and values of one layer: three tensors of Hugging Face, and the ranks of two "
                "frameworks",
                [
                    *plain,
                    *_layer(of_neox, "GPT-NeoX", "gpt_neox", "qkv"),
                    *_layer(of_megatron, "Megatron", "megatron", "qkv"),
                ],
            ),
            "qkv_heads": _svg(
                "Queries, keys and values of one layer of a GPT-NeoX model: together by head, in Hugging "
                "Face and on each rank",
                [
                    *_bars(
                        "query_key_value", neox, "*.safetensors", "layers.0.attention.query_key_value.weight"
                    ),
                    *_layer(made["gpt_neox", "gpt_neox"], "GPT-NeoX", "gpt_neox", "qkv"),
                ],
            ),
            "mlp": _svg(
                "The gated MLP of one layer: two tensors of Hugging Face, and the ranks of two frameworks",
                [
                    *gated,
                    *_layer(of_neox, "GPT-NeoX", "gpt_neox", "mlp"),
                    *_layer(of_megatron, "Megatron", "megatron", "mlp"),
                ],
            ),
            "columns": _svg(
                "Columns of the output projection: a rank holds those of its own heads",
                [*out, *_layer(of_neox, "GPT-NeoX", "gpt_neox", "out", axis=1)],
            ),
            "vocabulary": _svg(
                "Rows of the vocabulary: 500 words, padded to 512, over two ranks",
                [*words, *_bars("GPT-NeoX", of_neox, "layer_00-model_*", "word_embeddings.weight")],
                numbered=False,
                extents=True,
            ),
        }


if __name__ == "__main__":
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    to.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (to / f"{name}.svg").write_text(text, encoding="utf-8")
