"""Functions for trainers: checks of their saves, and recorded outputs for later comparison with a
checkpoint."""

from __future__ import annotations

from ..evaluation.layer_outputs import record
from .save_guard import SaveGuard, StepVerdict, after_save, before_training

__all__ = ["SaveGuard", "StepVerdict", "after_save", "before_training", "record"]
