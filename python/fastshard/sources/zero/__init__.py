"""DeepSpeed ZeRO: the elements of each rank's flat partition that make up a parameter."""
