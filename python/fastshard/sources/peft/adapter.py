"""An adapter without its base. It is inspected and checked for completeness; a merge requires the base."""

from __future__ import annotations

from ...common.listing import File, Listing
from ...common.records import dataclass
from ...layouts.declaration import Binding, Description, Source, SourceFiles, Unit
from ...layouts.declared_parts import StoredAdapter
from ..base import Contents, Found, Options
from ..choose_step import ITSELF, folder_of, note_steps_within
from ..step_names import is_step
from ..step_trackers import OF_RUNS
from . import adapter_config, tensor_names
from .find_files import MLX_WEIGHTS, WEIGHTS
from .missing_factors import find_missing_halves, find_missing_modules


@dataclass(frozen=True)
class PeftFiles:
    """The files next to the adapter's tensors."""

    #: The ``adapter_config.json``.
    config: File


class PeftAdapter:
    """Directories written by ``save_pretrained`` of a PeftModel."""

    name = "peft"

    def detect(self, listing: Listing, options: Options) -> Found[PeftFiles] | None:
        """Look for ``adapter_config.json`` with ``adapter_model.*``, in the given directory or its steps."""
        found = {
            folder: files
            for folder in listing.folders()
            if (files := self._files(listing, folder)) is not None
        }
        if not found or (options.step == ITSELF and "" not in found):
            return None
        if "" in found and options.step in (None, ITSELF):
            folder, step, findings = "", None, note_steps_within(found)
        else:
            places = [(files[1].root, folder) for folder, files in found.items()]
            folder, chosen, _ = folder_of(listing, places, options, OF_RUNS)
            step, findings = chosen.name if is_step(chosen.name) else None, chosen.findings
        weights, config_file = found[folder]
        return Found(
            self, "PEFT adapter", [weights], PeftFiles(config_file), folder, findings=findings, step=step
        )

    @staticmethod
    def _files(listing: Listing, folder: str) -> tuple[File, File] | None:
        """Return the tensors and the config of the adapter in a folder; None if there is no adapter."""
        inside = {file.name: file for file in reversed(listing.within(folder))}
        weights = next((inside[name] for name in (*WEIGHTS, MLX_WEIGHTS) if name in inside), None)
        config_file = inside.get(adapter_config.FILE)
        return None if weights is None or config_file is None else (weights, config_file)

    def declare(
        self, found: Found[PeftFiles], listing: Listing, contents: Contents, options: Options
    ) -> Source:
        """Declare the adapter's tensors as stored; each factor must have its counterpart."""
        file = found.seen.config
        config = adapter_config.read(listing.roots[file.root] / file.path, file.path)
        source = Source(
            found.framework,
            step=found.step,
            files=SourceFiles(units=[Unit(file=0)]),
            binding=Binding(pass_unknown=True),
        )
        source.model = Description(
            no_table="a PEFT adapter is not a model by itself: `fastshard merge BASE OUT --adapter DIR` "
            "merges it into its base"
        )
        source.files.values = {
            "r": config.r,
            "lora_alpha": config.alpha,
            "use_rslora": config.rslora,
            "use_dora": config.dora,
            "base": config.base,
        }
        if contents.readable(0):
            adapter = tensor_names.read_names(contents.listed(0), saved=True)
            shapes = {".".join(tensor["path"]): tensor["shape"] for tensor in contents.tensors(0)}
            path = listing.roots[file.root] / file.path
            source.findings += find_missing_halves(adapter, config, shapes, found.files[0].path, path)
            if adapter.modules:
                source.findings += find_missing_modules(adapter, config, found.files[0].path)
            source.files.adapter = StoredAdapter(config.stored, file.path, found.files[0].path, shapes)
        return source
