"""Relations between findings: causes, consequences, effects, and groups of findings with one cause."""
