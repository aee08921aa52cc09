"""The files of an adapter: its config, and its tensors next to it."""

from __future__ import annotations

import os
from pathlib import Path

from ...common import codes, safe_files
from ...common.errors import FastshardError
from ...common.listing import Folder, refuse_unprintable
from ...common.options import StrPath
from ...common.records import dataclass
from . import adapter_config

#: In the order in which peft looks for them. source: peft utils/constants.py (SAFETENSORSWEIGHTS_NAME,
#: WEIGHTS_NAME)
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: Adapters of mlx-lm, which are refused by name. source: mlx_lm/tuner/utils.py (load_adapters)
MLX_WEIGHTS = "adapters.safetensors"


@dataclass(frozen=True)
class Files:
    """An adapter's folder, its config, and the name of its tensor file; the name is empty if there is only a
    config.
    """

    folder: Path
    config: Path
    weights: str | None

    @property
    def size(self) -> int:
        """Size of the tensor file in bytes."""
        return (self.folder / self.weights).stat().st_size if self.weights else 0


def find(path: StrPath) -> Files:
    """Find an adapter's files.

    Args:
        path: its folder, its ``adapter_config.json`` (for adapters in the checkpoint itself), or its tensor
            file.

    Raises:
        FastshardError: ``FS501`` if the path does not exist, ``FS101`` for an adapter without config,
            ``FS513`` for another folder, ``FS603`` for a link that leaves the folder.
    """
    at = Path(path)
    refuse_unprintable(at.name, at)
    if not at.exists():
        raise FastshardError.of(codes.NO_SUCH_PATH, "no such file or directory", file=os.fspath(at))
    folder = at if at.is_dir() else at.parent
    # The file that was named is the user's choice, wherever it leads.
    inside = Folder.named(folder)
    weights = None
    if at.is_dir():
        weights = next((name for name in WEIGHTS if inside.file(name) is not None), None)
    elif at.suffix != ".json":
        weights = at.name
    is_config = not at.is_dir() and weights is None
    config_file = at if is_config and safe_files.is_file(at) else inside.file(adapter_config.FILE)
    if config_file is None:
        what = (
            "an adapter without its config, which states its scale"
            if weights
            else "this is not a PEFT adapter"
        )
        raise FastshardError.of(
            codes.MISSING_FILE if weights else codes.NOT_A_CHECKPOINT,
            what,
            file=os.fspath(folder / adapter_config.FILE),
            expected=f"{adapter_config.FILE} next to its tensors",
            got="no such file",
            help="copy it from the original adapter",
        )
    return Files(folder, config_file, weights)
