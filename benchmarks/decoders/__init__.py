"""Decoders that `compare_decoders.py` measures side by side, each a process of its own that answers
JSON lines.

A peer is a script run by any Python, so that its environment need not have this package. Its one
argument is JSON: {"peer", "checkpoint", "dtype", "max_context", "max_batch", "threads", "depths",
"draft_adapter", "window_control"}. Its first line tells its version. Then

    -> {"batches": [[[ids], ...], ...], "places": n, "max_new_tokens": n, "stop_ids": [...],
        "temperature": t, and "mode", or whatever else it alone understands}
    <- {"seconds": s, "tokens": [[ids], ...], ...}

As many sequences as there are places are decoded together, and where one ends, the next takes its
place, as in a service. A peer that cannot do so decodes one batch after the other.
"""
