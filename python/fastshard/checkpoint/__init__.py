"""An opened checkpoint, its tensors, its plan and its manifest."""
