"""Functions for trainers: checks of what they save, and records that a checkpoint is compared with later."""

from __future__ import annotations

from ..evaluation.layer_outputs import record
from .save_guard import SaveGuard, StepVerdict, after_save, before_training

__all__ = ["SaveGuard", "StepVerdict", "after_save", "before_training", "record"]
