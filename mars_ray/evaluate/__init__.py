"""Tasks, the frontier of a checkpoint, plots, and comparisons of decoders."""
