"""MARS multi-token decoding as a service, on Ray."""

__version__ = "0.2.0"
