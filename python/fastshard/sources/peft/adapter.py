"""An adapter by itself: looked at and proven whole; into a model it is merged with its base."""

from __future__ import annotations

from ...common.listing import File, Listing
from ...common.records import dataclass
from ...layouts.declaration import Description, Source, Unit
from ...layouts.declared_parts import StoredAdapter
from ..base import Contents, Found, Options
from . import adapter_config, tensor_names
from .find_files import MLX_WEIGHTS, WEIGHTS
from .missing_factors import find_missing_halves, find_missing_modules


@dataclass(frozen=True)
class PeftFiles:
    """What lies beside the adapter's tensors."""

    #: ``adapter_config.json``.
    config: File


class PeftAdapter:
    """Directories that ``save_pretrained`` of a PeftModel wrote."""

    name = "peft"

    def detect(self, listing: Listing, options: Options) -> Found[PeftFiles] | None:
        """Looks for ``adapter_config.json`` beside ``adapter_model.*``, at the top of the directory given."""
        inside = {file.name: file for file in reversed(listing.within(""))}
        weights = next((inside[name] for name in (*WEIGHTS, MLX_WEIGHTS) if name in inside), None)
        said = inside.get(adapter_config.FILE)
        if weights is None or said is None or options.step is not None:
            return None
        return Found(self, "PEFT adapter", [weights], PeftFiles(said))

    def declare(
        self, found: Found[PeftFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Its tensors as they are; each factor must have the other one."""
        file = found.seen.config
        said = adapter_config.read(listing.roots[file.root] / file.path, file.path)
        source = Source(found.framework, units=[Unit(file=0)], pass_unknown=True)
        source.model = Description(
            no_table="an adapter of PEFT is no model by itself: `fastshard merge BASE OUT --adapter DIR` merges it into its base"
        )
        source.values = {
            "r": said.r, "lora_alpha": said.alpha, "use_rslora": said.rslora, "use_dora": said.dora, "base": said.base,
        }  # fmt: skip
        if contents.readable(0):
            told = tensor_names.told(contents.listed(0), saved=True)
            shapes = {".".join(tensor["path"]): tensor["shape"] for tensor in contents.tensors(0)}
            path = listing.roots[file.root] / file.path
            source.findings += find_missing_halves(told, said, shapes, found.files[0].path, path)
            if told.modules:
                source.findings += find_missing_modules(told, said, found.files[0].path)
            source.adapter = StoredAdapter(said.stored, file.path, found.files[0].path, shapes)
        return source
