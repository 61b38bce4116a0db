"""Fleets of replicas on a virtual clock."""
