"""Scaling policies on simulated fleets: engine model, traces, baselines, report."""
