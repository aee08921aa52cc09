"""DeepSpeed ZeRO: which elements of which rank's flat partition make up a parameter."""
