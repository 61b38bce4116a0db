"""The engine side of the service."""
