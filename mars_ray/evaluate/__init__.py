"""Tasks, the frontier of a checkpoint, plots, and decoders side by side."""
