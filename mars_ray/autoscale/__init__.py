"""Threshold against replicas: load samples, service model, policy. Arithmetic only."""
