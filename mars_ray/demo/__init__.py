"""Demos: everything put together, to an answer over HTTP."""
