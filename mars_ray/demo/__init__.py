"""Demos: all parts together, up to an answer over HTTP."""
