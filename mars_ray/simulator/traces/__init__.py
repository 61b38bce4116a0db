"""Requests over time: read from files, sampled from published clients, or generated."""
