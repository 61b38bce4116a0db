"""MARS decoding inside vLLM: a plug-in for vLLM's V1 model runner.

A step's row of a request is `[last | drafts | masks]` in one forward, sent as speculative tokens:
drafts by their ids, masks as vLLM's padding (-1), which it never accepts. This file imports nothing
of vLLM, so that what is plain Python here can be used without it.
"""
