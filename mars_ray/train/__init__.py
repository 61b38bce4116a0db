"""Training: one step, engines, checkpoints, the loop, and its shell on Ray Train."""
