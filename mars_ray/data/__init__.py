"""Turns a source of conversations into batches of token rows."""
