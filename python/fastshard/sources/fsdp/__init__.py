"""Files that each rank of FSDP saves separately, with DTensors or ShardedTensors."""
