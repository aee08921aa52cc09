"""Batches of token ids, from a text and the checkpoint's tokenizer, or from a file of ids."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common import codes, json_text, safe_files
from ..common.errors import FastshardError
from ..common.options import StrPath
from ..common.records import dataclass
from ..models.tokenizer import is_of
from ..models.vocab_files import MAX_BYTES

if TYPE_CHECKING:
    import torch

    from ..checkpoint.planned_view import PlannedView
    from .layerwise_model import LayerwiseModel

__all__ = ["Batch", "make_batch"]

#: Maximum size in bytes of a text or a file of ids, because a batch is computed at once.
_MAX_BYTES = 64 << 20
#: Name of the package's text in messages.
_SAMPLE = "the page of text in the package"


@dataclass(frozen=True)
class Batch:
    """Token ids for one forward pass."""

    #: Token ids, of shape (sequences, length), int64.
    ids: torch.Tensor
    #: Number of ids that the tokenizer adds at the start of each sequence (a BOS token).
    prefix: int
    #: Origin of the ids, for messages.
    origin: str
    #: Number of given ids that do not fit into the batch.
    left_out: int

    @property
    def count(self) -> int:
        """Number of predicted tokens: all except the first of each sequence and BOS tokens."""
        rows, length = self.ids.shape
        return rows * (length - max(self.prefix, 1))


def make_batch(model: LayerwiseModel, text: StrPath | None, tokens: Any, length: int, most: int) -> Batch:
    """Make a batch from a text file, from token ids, or from the package's page of text.

    Args:
        model: the model; the tokenizer of its checkpoint tokenizes a text.
        text: a text file in UTF-8; None for the page of text in the package.
        tokens: a file of token ids (JSON, npy or safetensors), or ids as a sequence, an array or a tensor; of
            one or two dimensions.
        length: maximum number of tokens in a sequence; the model's limit may be lower.
        most: maximum number of tokens in the batch.

    Raises:
        FastshardError: ``FS515`` for a text together with tokens; ``FS211`` for values that are not token
            ids, ``FS209`` without a tokenizer.
    """
    if text is not None and tokens is not None:
        raise FastshardError.of(
            codes.USAGE, "both a text and tokens were passed", help="leave one of them out"
        )
    length = min(length, model.max_length or length)
    if tokens is not None:
        ids, origin = _as_tensor(tokens)
        prefix: list[int] = []
    else:
        words, origin = (_read_sample(), _SAMPLE) if text is None else (_read_text(text), str(text))
        ids, prefix = _encode(model.view, words)
    divided = _divide(ids, length, most, prefix)
    batch = Batch(divided, len(prefix), origin, ids.numel() - divided.numel() + len(divided) * len(prefix))
    largest = int(batch.ids.max())
    if int(batch.ids.min()) < 0 or largest >= model.vocab_size:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "a token id is outside the model's embedding",
            file=origin,
            expected=f"ids from 0 to {model.vocab_size - 1}",
            got=str(largest if largest >= model.vocab_size else int(batch.ids.min())),
            help="pass the tokenizer, or the ids, of this model",
        )
    return batch


def _read_sample() -> str:
    """Read the page of text in the package.

    It is in the public domain: the first pages of J. Conrad, Heart of Darkness (1899), C. Darwin, On the
    Origin of Species (1859), and J. Austen, Emma (1815).
    """
    return safe_files.read_text(Path(__file__).with_name("sample.txt"), _MAX_BYTES)


def _read_text(path: StrPath) -> str:
    """Read a text file.

    Raises:
        FastshardError: ``FS211`` if it is not UTF-8, or empty; others if it cannot be read.
    """
    text = safe_files.read_text(path, _MAX_BYTES)
    if not text.strip():
        raise FastshardError.of(codes.BAD_VALUE, "the text is empty", file=str(path))
    return text


def _encode(view: PlannedView, text: str) -> tuple[torch.Tensor, list[int]]:
    """Tokenize a text; return its token ids, and the ids that the tokenizer adds before a text.

    Raises:
        FastshardError: ``FS209`` if the checkpoint has no tokenizer, ``FS514`` for one that cannot be loaded.
    """
    import torch
    import transformers

    tokenizer_files = {name: path for name, path in view.companions.items() if is_of(name)}
    if not tokenizer_files:
        raise FastshardError.of(
            codes.FACT_UNKNOWN,
            "no tokenizer is next to the checkpoint",
            help="pass its tokenizer, or token ids",
            run=["--tokenizer DIR", "--tokens FILE"],
        )
    with tempfile.TemporaryDirectory() as folder:
        for name, path in tokenizer_files.items():
            (Path(folder) / name).write_bytes(safe_files.read_bytes(path, MAX_BYTES))
        (Path(folder) / "config.json").write_text(json_text.compact(view.config or {}), encoding="utf-8")
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            # Tokenizers are read by several libraries, each with errors of its own.
            raise FastshardError.of(
                codes.UNSUPPORTED,
                f"transformers {transformers.__version__} cannot load the tokenizer: {error}".splitlines()[0],
                help="pass token ids",
                run=["--tokens FILE"],
            ) from None
        plain = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        full = list(tokenizer(text, verbose=False)["input_ids"])
    start = next((at for at in range(len(full) - len(plain) + 1) if full[at : at + len(plain)] == plain), 0)
    return torch.tensor(plain, dtype=torch.int64), full[:start]


def _divide(ids: torch.Tensor, length: int, most: int, prefix: Sequence[int]) -> torch.Tensor:
    """Divide ids into sequences of equal length, each with the prefix, and drop the remainder.

    Raises:
        FastshardError: ``FS211`` for fewer than two ids.
    """
    import torch

    if ids.dim() == 2:
        rows = ids[: max(most // max(ids.shape[1], 1), 1), :length]
    else:
        own = max(length - len(prefix), 1)
        ids = ids[: max(most, 2)]
        whole = ids.numel() // own * own
        rows = ids[:whole].reshape(-1, own) if whole else ids[None]
    if rows.numel() == 0 or rows.shape[1] + len(prefix) < 2:
        raise FastshardError.of(
            codes.BAD_VALUE, "a loss needs at least two tokens", got=f"{rows.numel()} tokens"
        )
    before = torch.tensor(list(prefix), dtype=torch.int64).expand(rows.shape[0], len(prefix))
    return torch.cat([before, rows], dim=1)


def _as_tensor(tokens: Any) -> tuple[torch.Tensor, str]:
    """Return token ids as a tensor of one or two dimensions, and their origin.

    Raises:
        FastshardError: ``FS211`` if they are not integers, or have another shape.
    """
    import torch

    origin = "tokens"
    if isinstance(tokens, (str, Path)):
        tokens, origin = _read_ids(Path(tokens)), str(tokens)
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FastshardError.of(
            codes.BAD_VALUE,
            f"these are not token ids: {error}",
            file=origin,
            expected="integers in rows of equal length",
        ) from None
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise FastshardError.of(
            codes.BAD_VALUE,
            "these are not token ids",
            file=origin,
            expected="integers, in one dimension or in two (sequences, length)",
            got=f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}",
        )
    return ids.to(torch.int64), origin


def _read_ids(path: Path) -> Any:
    """Read token ids from a file, in the format that its suffix indicates; nothing in it is executed.

    Raises:
        FastshardError: ``FS211`` for a file of another kind, or one whose content does not match its suffix.
    """
    import numpy as np

    content = safe_files.read_bytes(path, _MAX_BYTES)
    try:
        if path.suffix == ".npy":
            import io

            return np.load(io.BytesIO(content), allow_pickle=False)
        if path.suffix == ".safetensors":
            from safetensors.torch import load

            tensors: Mapping[str, Any] = load(content)
            if len(tensors) == 1 or "tokens" in tensors or "input_ids" in tensors:
                return tensors.get("tokens", tensors.get("input_ids", next(iter(tensors.values()))))
            raise ValueError(f"{len(tensors)} tensors, none of them called tokens or input_ids")
        if path.suffix == ".json":
            document = json_text.load(content)
            return (
                document.get("tokens", document.get("input_ids")) if isinstance(document, dict) else document
            )
    except FastshardError:
        raise
    except Exception as error:
        raise FastshardError.of(
            codes.BAD_VALUE, f"the file of token ids cannot be read: {error}", file=str(path)
        ) from None
    raise FastshardError.of(
        codes.BAD_VALUE,
        "the file does not hold token ids",
        file=str(path),
        expected="a .json, .npy or .safetensors file",
    )
