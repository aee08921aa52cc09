"""A callback of transformers' Trainer that checks each checkpoint and never deletes the last good one."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..common.log import log
from ..common.options import StrPath
from .save_guard import SaveGuard

__all__ = ["CheckpointGuard"]


class CheckpointGuard(TrainerCallback):  # type: ignore[misc]
    """A callback that checks storage before training, and then each save: ``Trainer(callbacks=[...])``.

    The guard takes over ``save_total_limit`` during training, because the Trainer deletes old checkpoints
    before a callback sees the new one. The guard deletes after the check. It keeps the last fully verified
    checkpoint, checkpoints whose verification is still running, the best and the newest one, even if these
    exceed the limit. It does nothing in a hyperparameter search.
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
        #: The training arguments from which the guard took the limit, and the limit.
        self._args: Any = None
        self._limit: int | None = None
        #: The checkpoint that the training resumed from, if it is in the folder of saves.
        self._resumed: Path | None = None
        #: The guard of the current training, or of the last one.
        self.guard = SaveGuard(**self._options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that all ranks see the same storage, and takes over ``save_total_limit``.

        Raises:
            FastshardError: ``FS522`` on each rank if one rank has a separate disk or does not appear.
        """
        if state.is_hyper_param_search:
            return
        resumed = _checkpoint(args, state)
        self._resumed = resumed if resumed.is_dir() else None
        options = {**self._options, "like": self._options["like"] or self._resumed}
        if args.save_on_each_node:
            # Each node saves to its own disk, and checks its own saves.
            place = {"rank": args.local_process_index, "world": args.local_process_index + 1}
            self.guard = SaveGuard(**place, **options)
        else:
            self.guard = SaveGuard(rank=args.process_index, world=args.world_size, **options)
            self.guard.before_training(args.output_dir, timeout=self._timeout)
        if args is not self._args:
            # A training that ended by an exception did not give its limit back.
            self._args, self._limit = args, None
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks the new checkpoint, then deletes old ones beyond ``save_total_limit``.

        Raises:
            FastshardError: for a checkpoint with an error, with ``on_failure="raise"``.
        """
        if state.is_hyper_param_search or not args.should_save:
            return
        self.guard.after_save(_checkpoint(args, state))
        self._rotate(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for running verifications, and restores ``save_total_limit``.

        Raises:
            FastshardError: for a checkpoint with an error, with ``on_failure="raise"``.
        """
        if state.is_hyper_param_search:
            return
        limit = self._limit
        try:
            if args.should_save:
                self.guard.results(self._wait)
                for path in self.guard.unfinished:
                    warnings.warn(f"{path}: its verification has not ended yet", stacklevel=2)
                self._rotate(args, state)
        finally:
            if limit is not None:
                args.save_total_limit, self._limit = limit, None

    def _rotate(self, args: Any, state: Any) -> None:
        """Delete the oldest unprotected checkpoints beyond the limit."""
        if self._limit is None or self._limit <= 0:
            return
        folder = Path(args.output_dir).absolute()
        checkpoints = _list_checkpoints(folder)
        kept = self.guard.find_protected()
        if self._resumed is not None and self.guard.last_verified is None:
            kept.add(self._resumed)
        # Of an earlier training in the folder may be higher steps than that of the new checkpoint.
        kept |= {*checkpoints[-1:], _checkpoint(args, state)}
        if state.best_model_checkpoint is not None:
            # By its name: a training that resumed has the path of another working directory, or of a link.
            kept.add(folder / Path(state.best_model_checkpoint).name)
        remaining = len(checkpoints)
        for checkpoint in checkpoints:
            if remaining <= self._limit:
                break
            if checkpoint not in kept:
                log("integrations", "%s: deleted, save_total_limit is %d", checkpoint, self._limit)
                shutil.rmtree(checkpoint, ignore_errors=True)
                remaining -= 1


def _checkpoint(args: Any, state: Any) -> Path:
    """Return the folder of the checkpoint of the current step."""
    return Path(args.output_dir).absolute() / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder of saves by their steps."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    numbers = {path: path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*")}
    found = [path for path, number in numbers.items() if number.isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(numbers[path]))
