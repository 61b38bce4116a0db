"""Sweeps: trials of a training stage on Ray Tune, and the evaluation of their results."""
