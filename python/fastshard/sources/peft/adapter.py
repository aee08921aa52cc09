"""An adapter by itself: looked at and proven whole; into a model it is merged with its base."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.errors import Finding
from ...common.listing import File, Listing
from ...layouts.declaration import Description, Source, Unit
from ..base import Contents, Found, Options
from . import adapter_config, tensor_names
from .find_files import WEIGHTS

#: The factors that belong together.
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


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
        weights = next((inside[name] for name in WEIGHTS if name in inside), None)
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
            for module in told.modules.values():
                source.findings += _lacking(module, said, found.files[0].path)
        return source


def _lacking(module: tensor_names.Module, said: adapter_config.Config, file: str) -> list[Finding]:
    """Factors without the other one, and a magnitude that DoRA has of every module."""
    wanted: dict[str, str] = {}
    for pair in _PAIRS:
        for kind, other in (pair, pair[::-1]):
            if kind in module.factors:
                wanted[other] = module.factors[kind].replace(kind, other)
                if said.dora:
                    wanted["lora_magnitude_vector"] = (
                        f"{tensor_names.OUTER}{module.name}.lora_magnitude_vector"
                    )
    return [
        Finding.of(
            "FS102", "an adapter's tensor lacks its counterpart", file=file, tensor=name,
            help="copy the adapter again from the host that saved it",
        )
        for kind, name in wanted.items()
        if kind not in module.factors
    ]  # fmt: skip
