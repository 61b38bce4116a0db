"""Decoders measured side by side, each a process of its own that answers JSON lines.

A peer is a script run by any Python, so that its environment need not have this package.

    -> {"mode": ..., "batches": [[[ids], ...], ...], "max_new_tokens": n, "stop_ids": [...]}
    <- {"seconds": s, "tokens": [[ids], ...], ...}

The sequences of a batch are decoded together, and batches one after the other.
"""
