"""Sweeps: trials of a training stage on Ray Tune, and what is made of their results."""
