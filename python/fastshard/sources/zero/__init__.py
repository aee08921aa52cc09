"""DeepSpeed ZeRO: the elements in each rank's flat partition that make up a parameter."""
