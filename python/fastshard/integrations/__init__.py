"""Functions for trainers: what they record, to be compared with a checkpoint later."""

from __future__ import annotations

from ..evaluation.layer_outputs import record

__all__ = ["record"]
