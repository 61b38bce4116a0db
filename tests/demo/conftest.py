"""A plain model that asks and answers, as its own users would."""

from generate.conftest import talker

__all__ = ["talker"]
