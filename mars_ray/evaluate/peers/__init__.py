"""Decoders measured side by side, each a process of its own that answers JSON lines.

They may live in environments that do not know this package: a peer is a script, run by any Python.

    -> {"mode": ..., "batches": [[[ids], ...], ...], "max_new_tokens": n, "stop_ids": [...]}
    <- {"seconds": s, "tokens": [[ids], ...], ...}

A batch is decoded together, and the next one when it is done.
"""
