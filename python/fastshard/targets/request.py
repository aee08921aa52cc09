"""A request for a plan: one record, passed from the command line or the API to the target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..common import codes
from ..common.byte_sizes import parse_size
from ..common.errors import FastshardError
from ..common.options import Option
from ..common.records import dataclass, field
from ..common.target_options import OPTIONS
from ..models.tokenizer import Tokenizer

#: Dtypes of floating-point tensors in a result, by their safetensors names; None keeps each tensor's dtype.
DTYPES = {"keep": None, "bf16": "BF16", "f16": "F16", "f32": "F32"}
_REPLICAS = ("equal", "mean")
_WEIGHTS = (None, "params", "masters")


@dataclass(frozen=True)
class Request:
    """A merge (``to`` is None) or a conversion; :func:`fastshard.plan` describes the fields.

    Raises:
        FastshardError: ``FS515`` or ``FS211`` for invalid values.
    """

    to: str | None = None
    vocab_size: int | None = None
    dtype: str = "keep"
    keep_dtype: str = "auto"
    replicas: str = "equal"
    include: Iterable[str] = ()
    exclude: Iterable[str] = ()
    max_shard_size: str | int = "5GB"
    weights: str | None = None
    optimizer: bool = False
    #: Values of target options, by option name.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The model's tokenizer, if one was given or found.
    tokenizer: Tokenizer | None = None
    #: True if a result is written; False if the checkpoint is only inspected.
    writes: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("keep_dtype", self.keep_dtype, ("auto", "none")),
            ("replicas", self.replicas, _REPLICAS),
            ("weights", self.weights, _WEIGHTS),
        ):
            if value not in known:
                expected = " | ".join(word for word in known if word is not None)
                raise FastshardError.of(codes.USAGE, name, expected=expected, got=repr(value))
        # They are looked at more than once.
        object.__setattr__(self, "include", tuple(self.include))
        object.__setattr__(self, "exclude", tuple(self.exclude))
        object.__setattr__(self, "max_shard_size", parse_size(self.max_shard_size, "max_shard_size"))
        vocab = self.vocab_size
        if vocab is not None and (not isinstance(vocab, int) or not 0 < vocab < 1 << 48):
            raise FastshardError.of(
                codes.BAD_VALUE, "vocab_size", expected="a positive integer", got=repr(vocab)
            )

    def __getitem__(self, option: Option) -> Any:
        return self.options.get(option.name, option.default)

    @property
    def is_narrowed(self) -> bool:
        """True if the caller requests only some of the tensors."""
        return bool(self.include or self.exclude)

    def wants(self, name: str) -> bool:
        """Return True if the caller requests a tensor, given its name in the result."""
        taken = not self.include or any(fnmatchcase(name, pattern) for pattern in self.include)
        return taken and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def list_changed(self) -> list[Option]:
        """List the target options whose value is not the default."""
        return [option for option in OPTIONS if self[option] != option.default]


#: A merge of all tensors under their own names.
MERGE = Request()
