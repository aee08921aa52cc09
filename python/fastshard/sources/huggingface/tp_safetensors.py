"""Directories with one safetensors file per rank: ``tp_rank_NN.safetensors``, with or without
``layout.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..._core import Rule, Table
from ...common import codes
from ...common.config_text import shown
from ...common.errors import FastshardError, Finding
from ...common.listing import File, Listing
from ...common.options import MAX_DEGREE
from ...common.ranks import rank_range
from ...common.records import dataclass
from ...common.regex import compile_when_used
from ...layouts.declaration import Binding, Source, SourceFiles, Unit
from .. import hf_config
from ..base import Contents, Found, Options, counted, lacking, missing, unexpected
from ..choose_step import folder_of, within_this
from ..index_files import read_json
from ..step_names import is_step
from .adapter import slices_as_wholes

_RANK = compile_when_used(r"^(.*?)(?:tp_rank|rank|mp_rank|tp)[_-]?(\d+)\.safetensors$")
_KNOWN_KEYS = {"tp", "tp_dim", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "pad_value"}
#: Tensors with one row per token, in the frameworks that write such directories.
_VOCABULARY = compile_when_used(
    r"(^|\.)(embed_tokens|embed_in|word_embeddings|wte|lm_head|embed_out|output_layer|final_linear)\.weight$"
)


@dataclass(frozen=True)
class TpFiles:
    """The ranks of the files, and the contents of ``layout.json``."""

    #: Rank of each file.
    ranks: tuple[int, ...]
    #: Tensor-parallel degree.
    tp: int
    #: Content of ``layout.json``.
    layout: Mapping[str, Any] | None
    #: Its path, or its expected path.
    layout_path: str


class TpSafetensors:
    """One safetensors file per tensor-parallel rank, under Hugging Face or other names."""

    name = "tp-safetensors"

    def detect(self, listing: Listing, options: Options) -> Found[TpFiles] | None:
        """Look for files numbered by rank in one folder."""
        if listing.single:
            return None
        places = [(f.root, f.folder) for f in listing.files if _RANK.match(f.name)]
        if not places:
            return None
        folder, chosen, within = folder_of(listing, places, options)
        ranks: dict[int, list[File]] = {}
        widths: dict[str, int] = {}
        for file in listing.within(folder):
            if match := _RANK.match(file.name):
                ranks.setdefault(counted(match[2], file), []).append(file)
                stem, width = file.name[: match.start(2)], len(match[2])
                # A format of two digits writes three for rank 100.
                widths[stem] = min(width, widths.get(stem, width))
        layout_file = listing.find(f"{folder}/layout.json" if folder else "layout.json")
        layout = read_json(listing, layout_file) if layout_file else None
        if layout is not None and not isinstance(layout, dict):
            raise FastshardError.of(codes.BAD_VALUE, "layout.json is not an object", file="layout.json")
        path = layout_file.path if layout_file else "layout.json"
        degree = None if layout is None else _read_degree(layout, path)
        tp = max(ranks) + 1 if degree is None else degree
        why = (
            f"ranks 0..{max(ranks)}, by the other files"
            if degree is None
            else (f"tp {degree}, by layout.json")
        )
        findings = [*chosen.findings, *within_this(within), *_unknown_keys(layout or {}, path)]
        if len(widths) == 1:
            findings += _ranks_missing(folder, *widths.popitem(), ranks, tp, why)
        findings += [
            unexpected(file.path, f"tensor-parallel rank {rank} is beyond the {tp} of this checkpoint")
            for rank in sorted(ranks)
            for file in ranks[rank]
            if rank >= tp
        ]
        taken = [(rank, file) for rank in sorted(ranks) for file in ranks[rank] if rank < tp]
        return Found(
            self,
            "per-rank safetensors",
            [file for _, file in taken],
            TpFiles(tuple(rank for rank, _ in taken), tp, layout, path),
            folder,
            findings,
            step=chosen.name if is_step(chosen.name) else None,
        )

    def declare(self, found: Found[TpFiles], listing: Listing, values: Contents, options: Options) -> Source:
        """Declare axes from config.json if the model is known, or dimensions from layout.json."""
        layout, path = found.seen.layout, found.seen.layout_path
        config, config_path = hf_config.config_of(listing, found.folder, options)
        source = Source(
            framework=found.framework,
            step=found.step,
            files=SourceFiles(
                units=[
                    Unit(file=i, coords={"tp": rank}, rank=f"tp {rank}")
                    for i, rank in enumerate(found.seen.ranks)
                ]
            ),
            binding=Binding(degrees={"tp": found.seen.tp}),
        )
        hf_config.describe(source, listing, config, config_path, values.names())
        if source.binding.layout is not None:
            # Each rank holds rows of the padded vocabulary: its extent comes from the shards.
            source.binding.axes.pop("P", None)
            source.binding.vocab_size = source.binding.axes.get("V")
        if layout is not None:
            source.index.is_provable = True
            if vocab := _positive(layout, "vocab_size", path):
                if source.binding.axes.get("V", vocab) != vocab:
                    source.findings.append(
                        Finding.of(
                            codes.CONFIG_DISAGREES,
                            "layout.json and the config state different values of vocab_size",
                            file=path,
                            expected=str(source.binding.axes["V"]),
                            got=str(vocab),
                            help="check in the tokenizer which value is right, and correct the other file",
                        )
                    )
                source.binding.vocab_size = vocab
                source.binding.axes.pop("V", None)
            if padded := _positive(layout, "padded_vocab_size", path):
                source.binding.axes["P"] = padded
            dims = _divided(layout.get("tp_dim") or {}, path)
            source.index.names = set(dims)
            if source.binding.layout is None:
                source.binding.layout = "layout.json"
                source.binding.table = _own_table(dims, source)
                source.binding.axes = {k: v for k, v in source.binding.axes.items() if k == "P"}
        if source.binding.layout is None and options.layout is None:
            source.findings.append(
                Finding.of(
                    codes.AMBIGUOUS,
                    "nothing states along which dimension the ranks divide each tensor",
                    file=found.folder or ".",
                    help="write a layout.json with tp and tp_dim, or pass the model's config.json",
                    run=["--config FILE"],
                )
            )
        if options.vocab_size:
            source.binding.vocab_size = options.vocab_size
            source.binding.axes.pop("V", None)
        source.findings += slices_as_wholes(
            listing, found.folder, found.files, values, "files of tensor-parallel ranks"
        )
        return source


def _read_degree(layout: dict[str, Any], path: str) -> int:
    """Read the tensor-parallel degree from layout.json."""
    degree = _positive(layout, "tp", path)
    if degree is None or degree > MAX_DEGREE:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "layout.json: tp",
            file=path,
            expected="the tensor-parallel degree" if degree is None else f"at most {MAX_DEGREE}",
            got="nothing" if degree is None else str(degree),
        )
    return degree


def _unknown_keys(layout: dict[str, Any], path: str) -> list[Finding]:
    return [
        Finding.of(
            codes.UNEXPECTED_FILE,
            f"layout.json: unknown key {key!r} is ignored",
            file=path,
            severity="warning",
        )
        for key in sorted(set(layout) - _KNOWN_KEYS)
    ]


def _ranks_missing(
    folder: str, stem: str, width: int, ranks: Iterable[int], tp: int, why: str
) -> list[Finding]:
    findings = []
    for rank, last in lacking(ranks, 0, tp - 1):
        name, end = (f"{stem}{r:0{width}d}.safetensors" for r in (rank, last))
        findings.append(
            missing(
                f"{folder}/{name}" if folder else name,
                {"tp": rank_range(rank, last)},
                why,
                f"copy {name} from the node that ran tp rank {rank}",
                upto=end if last > rank else None,
            )
        )
    return findings


def _positive(layout: Mapping[str, Any], key: str, path: str) -> int | None:
    value = layout.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FastshardError.of(
            codes.BAD_VALUE, f"layout.json: {key}", file=path, expected="a positive number", got=repr(value)
        )
    return value


def _divided(tp_dim: Any, path: str) -> dict[str, tuple[int | None, list[int]]]:
    """Parse ``tp_dim`` in a layout.json: the dimension that ranks divide, and the parts of a fused tensor.

    Raises:
        FastshardError: ``FS211`` for an invalid value.
    """
    if not isinstance(tp_dim, dict):
        raise FastshardError.of(
            codes.BAD_VALUE,
            "layout.json: tp_dim",
            file=path,
            expected="an object by tensor names",
            got=shown(tp_dim),
        )
    divided: dict[str, tuple[int | None, list[int]]] = {}
    for name, value in tp_dim.items():
        dim, parts = (value.get("dim"), value.get("parts")) if isinstance(value, dict) else (value, [])
        sizes = isinstance(parts, list) and all(_is_number(n, 1 << 40) and n > 0 for n in parts)
        if not sizes or not (_is_number(dim, 64) or (dim is None and not parts)):
            raise FastshardError.of(
                codes.BAD_VALUE,
                "layout.json: tp_dim",
                file=path,
                tensor=name,
                expected='a dimension, null, or {"dim": dimension, "parts": sizes of the parts of a fused '
                "tensor}",
                got=shown(value),
            )
        divided[name] = dim, list(parts or ())
    return divided


def _is_number(value: Any, below: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below


def _own_table(dims: dict[str, tuple[int | None, list[int]]], source: Source) -> Table:
    """Build a table for tensors with padded vocabulary rows; others get separate rules from ``tp_dim``."""
    padded, vocab = source.binding.axes.get("P"), source.binding.vocab_size
    # The only rank has all of the rows, whose dimension nothing divides.
    whole = (None, 0) if source.binding.degrees.get("tp") == 1 else (0,)
    of_words = [n for n, (d, parts) in dims.items() if d in whole and not parts and _VOCABULARY.search(n)]
    rows = of_words if padded and vocab else []
    source.binding.generic = [(name, *divided) for name, divided in dims.items() if name not in rows]
    rules = [Rule.literal(name, f"[V~P, H{i}]", name) for i, name in enumerate(rows)]
    return Table.of("layout.json", "V", {"tp": ["V~P"]}, rules)
