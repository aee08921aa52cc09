"""Files that each FSDP rank saves separately, with DTensors or ShardedTensors."""
