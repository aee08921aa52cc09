"""Files that each rank of FSDP has saved for itself, of DTensors or ShardedTensors."""
