"""Scaling policies of other systems, for the same simulator."""
