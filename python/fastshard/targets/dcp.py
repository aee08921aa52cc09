"""The target torch.distributed.checkpoint: a Hugging Face model in ``.distcp`` files, as FSDP and torchtitan load it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..declared import Source
from ..naming.dcp import METADATA, chunk_name
from ..placing import TP
from ..request import Request
from ..trees import TensorOf, tree
from .base import Bound, Completed, Target, positive
from .huggingface import HfTarget

#: A file of a whole model grows to about this many bytes: a reader opens few, a loss of one is small.
_FILE_BYTES = 5 << 30


@dataclass
class Records:
    """The records of ``.distcp`` files, and what ``.metadata`` says of them."""

    folder: str = ""
    _files: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def chunk(
        self, file: str, rank: int, name: str, of: str, extents: list[int], at: list[int], shape: list[int]
    ) -> None:
        """A chunk.

        Args:
            file: the file's name.
            rank: tensor-parallel rank whose outputs the file holds.
            name: the output.
            of: the whole tensor's fully qualified name.
            extents: the whole tensor's shape.
            at: first index of the chunk.
            shape: shape of the chunk.
        """
        entry = self._entries.setdefault(of, {"name": of, "shape": extents, "chunks": []})
        record = {"key": chunk_name(of, at), "value": tree(TensorOf(name)), "shape": shape}
        entry["chunks"].append((record, at))
        self._files.setdefault(file, (rank, []))[1].append(record)

    def value(self, file: str, key: str, value: Any) -> None:
        """A record without tensors."""
        self._entries[key] = {"name": key}
        self._files.setdefault(file, (0, []))[1].append({"key": key, "value": tree(value)})

    def files(self) -> list[dict[str, Any]]:
        """The files that the target prescribes, ``.metadata`` last."""
        for entry in self._entries.values():
            chunks = entry.get("chunks", [])
            if len(chunks) == 1:
                # A tensor that is stored whole is called by its name alone.
                chunks[0][0]["key"] = entry["name"]
            if chunks:
                entry["chunks"] = [(record["key"], at) for record, at in chunks]
        inside = f"{self.folder}/" if self.folder else ""
        files = [
            {"name": inside + name, "coords": {"tp": rank}, "content": {"records": records}}
            for name, (rank, records) in self._files.items()
        ]
        metadata = {"dcp_metadata": list(self._entries.values())}
        return [*files, {"name": f"{inside}{METADATA}", "content": metadata}]


@dataclass
class DcpTarget(Target):
    """Hugging Face tensors as chunks, divided as the layout's axes are."""

    whole: HfTarget
    tp: int
    name: str = "dcp"
    names = ("dcp",)
    options = (TP,)
    takes_any_head = True

    @classmethod
    def of(cls, source: Source, request: Request) -> DcpTarget:
        """What the source allows.

        Raises:
            FastshardError: as :meth:`.HfTarget.of`, and ``FS515`` for degrees that no run has.
        """
        positive(request, TP)
        tp = request[TP]
        whole = HfTarget.known(source, "--tp") if tp > 1 else HfTarget.of(source)
        return cls(whole, tp)

    @property
    def keeps_names(self) -> bool:
        """True where no table says what the names mean, so that they stay, and the model's config with them."""
        return self.whole.keeps_names

    def side(self) -> dict[str, Any]:
        """The target's side of the core's request."""
        # torch keeps no padding: chunks of a vocabulary that does not divide are refused.
        return {**self.whole.side(), "name": self.name, "degrees": {"tp": self.tp}, "chunks": True}

    def complete(self, bound: Bound) -> Completed:
        """Files by rank, several where the tensors of a rank are many, and config.json."""
        whole = self.whole.complete(bound)
        records = Records()
        filled = [0] * self.tp
        for name, tensor in sorted(bound.tensors.items()):
            for rank in range(self.tp if tensor.cuts else 1):
                file = f"__{rank}_{filled[rank] // _FILE_BYTES}.distcp"
                records.chunk(file, rank, name, name, tensor.whole, tensor.first(rank), tensor.shape)
                filled[rank] += tensor.bytes
        return replace(whole, files=records.files(), pointers=(METADATA,))
