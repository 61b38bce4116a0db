"""Tasks, the frontier of a checkpoint, plots, benchmarks."""
