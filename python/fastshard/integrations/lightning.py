"""A callback of Lightning's Trainer that checks each checkpoint and keeps the last good one.

source: Lightning 2.6 pytorch/trainer/trainer.py (save_checkpoint), pytorch/strategies/strategy.py
    (remove_checkpoint), pytorch/callbacks/model_checkpoint.py
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..common import codes
from ..common.errors import FastshardError
from ..common.log import log
from ..common.options import StrPath
from .save_guard import SaveGuard

# Two packages hold the same classes; a program uses those of one.
_is_alone = "pytorch_lightning" in sys.modules or find_spec("lightning") is None
_PACKAGE = "pytorch_lightning" if _is_alone else "lightning.pytorch"
_Callback: Any = importlib.import_module(f"{_PACKAGE}.callbacks").Callback
_AsyncCheckpointIO: Any = importlib.import_module(f"{_PACKAGE}.plugins.io").AsyncCheckpointIO

__all__ = ["CheckpointGuard"]


class CheckpointGuard(_Callback):  # type: ignore[misc]
    """Checks storage before training and each checkpoint after its save: ``Trainer(callbacks=[...])``.

    It works alongside ``ModelCheckpoint``, which chooses the checkpoints to save and to delete. The guard
    delays the deletion of the last fully verified checkpoint, and of checkpoints whose verification is still
    running. It cannot keep a checkpoint that a later save overwrites, such as ``last.ckpt``, but it keeps the
    same step under another name. Checkpoints in object stores (``s3://``) are not checked.
    """

    def __init__(
        self,
        *,
        like: StrPath | None = None,
        on_failure: Literal["warn", "raise"] = "warn",
        threads: int | None = None,
        timeout: float | None = None,
        wait: float = 240.0,
    ) -> None:
        """Prepare a callback.

        Args:
            like: a good checkpoint of the same model, with which the first save is compared.
            on_failure: ``"warn"`` issues a warning and logs it; ``"raise"`` raises FastshardError on rank 0.
            threads: threads of the background process; default: one for each core.
            timeout: seconds that ranks wait for one another before training; default 600.
            wait: seconds to wait at the end of training for each verification that is still running, at most
                two. Other ranks that enter a collective operation wait as long.
        """
        self._options: dict[str, Any] = {"like": like, "on_failure": on_failure, "threads": threads}
        self._timeout, self._wait = timeout, wait
        #: Checkpoints whose deletion is delayed.
        self._delayed: list[Path] = []
        #: Checkpoints that later saves overwrite.
        self._overwritten: set[Path] = set()
        self._checked_step: int | None = None
        #: The guard of the current training, or of the last one.
        self.guard = SaveGuard(**self._options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Hooks into the saves and deletions of a training run.

        Raises:
            FastshardError: ``FS514`` if checkpoints are saved asynchronously.
        """
        if stage != "fit" or trainer.fast_dev_run:
            return
        plugin = trainer.strategy.checkpoint_io
        while plugin is not None:
            if isinstance(plugin, _AsyncCheckpointIO):
                raise FastshardError.of(
                    codes.UNSUPPORTED,
                    "AsyncCheckpointIO does not report the end of a save, so the guard cannot check it",
                    help="save without this plugin, or call fastshard.integrations.after_save yourself",
                )
            plugin = getattr(plugin, "checkpoint_io", None)
        self._attach(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks that all ranks see the same storage in each checkpoint folder.

        Raises:
            FastshardError: ``FS522`` on each rank if one rank has a separate disk or does not appear.
        """
        if trainer.fast_dev_run:
            return
        resumed = None if trainer.ckpt_path is None else _find_local(trainer.ckpt_path)
        options = {**self._options, "like": self._options["like"] or resumed}
        self.guard = SaveGuard(rank=trainer.global_rank, world=trainer.world_size, **options)
        self._delayed, self._overwritten, self._checked_step = [], set(), None
        for folder in _list_folders(trainer):
            self.guard.before_training(folder, timeout=self._timeout)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Waits for running verifications, and performs the delayed deletions.

        Raises:
            FastshardError: for a checkpoint with an error, with ``on_failure="raise"``.
        """
        if stage != "fit" or trainer.fast_dev_run:
            return
        _detach(trainer)
        if trainer.is_global_zero:
            self.guard.results(self._wait)
            for path in self.guard.unfinished:
                warnings.warn(f"{path}: its verification has not ended yet", stacklevel=2)
            self._delete_delayed(trainer)

    def _attach(self, trainer: Any) -> None:
        """Wrap the Trainer's methods for saving and deleting checkpoints.

        ModelCheckpoint deletes an older checkpoint right after the save, before another callback runs.
        """
        # A training that ended by an exception may have left those of another guard.
        _detach(trainer)
        save, remove = trainer.save_checkpoint, trainer.strategy.remove_checkpoint

        def save_and_check(filepath: StrPath, *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            self._check(trainer, filepath)

        def remove_unless_protected(filepath: StrPath) -> None:
            path = _find_local(filepath)
            if path is None or not trainer.is_global_zero or not self._is_protected(path):
                remove(filepath)
            else:
                log("integrations", "%s: its deletion waits", path)
                self._delayed.append(path)

        trainer.save_checkpoint = save_and_check
        trainer.strategy.remove_checkpoint = remove_unless_protected

    def _check(self, trainer: Any, filepath: StrPath) -> None:
        """Check a new checkpoint, and delete checkpoints that are no longer protected."""
        path = _find_local(filepath)
        if path is None or not trainer.is_global_zero:
            return
        if str(filepath) in {getattr(c, "last_model_path", None) for c in trainer.checkpoint_callbacks}:
            self._overwritten.add(path)
        self._delayed = [delayed for delayed in self._delayed if delayed != path]
        # A second save of a step holds what the first one does.
        is_second = path in self._overwritten and self._checked_step == trainer.global_step
        self._checked_step = trainer.global_step
        self.guard.after_save(path, verify=not is_second)
        self._delete_delayed(trainer)

    def _delete_delayed(self, trainer: Any) -> None:
        """Delete the checkpoints whose deletion was delayed and that are no longer protected."""
        waiting, self._delayed = self._delayed, []
        for path in waiting:
            if self._is_protected(path):
                self._delayed.append(path)
            else:
                type(trainer.strategy).remove_checkpoint(trainer.strategy, path)

    def _is_protected(self, path: Path) -> bool:
        return path in self.guard.find_protected(self._overwritten)


def _detach(trainer: Any) -> None:
    """Restore the Trainer's own methods."""
    vars(trainer).pop("save_checkpoint", None)
    vars(trainer.strategy).pop("remove_checkpoint", None)


def _list_folders(trainer: Any) -> list[Path]:
    """List the local folders in which a Trainer will save checkpoints."""
    folders = [callback.dirpath for callback in trainer.checkpoint_callbacks if callback.dirpath is not None]
    local = (_find_local(folder) for folder in folders or [trainer.default_root_dir])
    return list(dict.fromkeys(path for path in local if path is not None))


def _find_local(path: StrPath) -> Path | None:
    """Return a path on a local file system; None for an address of other storage."""
    return None if "://" in str(path) else Path(path).absolute()
