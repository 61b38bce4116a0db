"""Metrics of what every key uses, by the same numbers as the log of requests."""

from typing import Any

from ray.serve.metrics import Counter

from mars_ray.serve.ingress.middleware import Entry

# Ray's annotation allows only one tag, its code any number.
_WHOSE: Any = ("key", "model_name")
_HOW: Any = ("key", "model_name", "ending")
# Where no keys are asked for; Prometheus would drop an empty label.
_NO_KEY = "none"


class UsageMetrics:
    """Counters by key and model, from the entry of each finished request."""

    def __init__(self) -> None:
        self._requests = Counter("mars_key_requests", "Requests by how they ended.", _HOW)
        self._prompt_tokens = Counter("mars_key_prompt_tokens", "Tokens of prompts.", _WHOSE)
        self._generation_tokens = Counter("mars_key_generation_tokens", "Tokens written.", _WHOSE)

    def count(self, entry: Entry) -> None:
        """Adds a request that went to a replica."""
        if entry.model is None or entry.ending is None:
            return
        whose = {"key": entry.key or _NO_KEY, "model_name": entry.model}
        self._requests.inc(tags=whose | {"ending": entry.ending})
        for counter, tokens in (
            (self._prompt_tokens, entry.prompt_tokens),
            (self._generation_tokens, entry.completion_tokens),
        ):
            # Ray refuses an increment of zero.
            if tokens:
                counter.inc(tokens, whose)
