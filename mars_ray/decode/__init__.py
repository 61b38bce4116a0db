"""Decoding: the cacheless reference and the batched engine with a KV cache."""
