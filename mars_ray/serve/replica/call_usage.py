"""What calls have used, told to an ingress that has lost sight of them.

When a client leaves, its ingress closes the call, and a closed call cannot say anything any more.
So the ingress asks for the tokens afterwards, by the call's id.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from mars_ray.serve.protocol import Used
from mars_ray.serve.replica.stats import AnswerStats

_KEPT = 1024


class CallUsage:
    """The tokens of the last calls that have ended here."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._over: OrderedDict[str, Used] = OrderedDict()

    def begin(self, call_id: str) -> None:
        """Note that the call is here."""
        self._open[call_id] = asyncio.Event()

    def end(self, call_id: str, used: Used) -> None:
        """Note what the call has used in all."""
        self._over[call_id] = used
        if len(self._over) > _KEPT:
            self._over.popitem(last=False)
        self._open.pop(call_id).set()

    async def of(self, call_id: str) -> Used | None:
        """What the call has used, as soon as it has ended; None if it has not been here."""
        if ended := self._open.get(call_id):
            await ended.wait()
        return self._over.pop(call_id, None)


def used_by(answers: Iterable[AnswerStats]) -> Used:
    """The sums over a call's answers, but for those that the engine has refused."""
    return sum((_used(seen) for seen in answers if seen.ending != "refused"), start=Used())


def _used(seen: AnswerStats) -> Used:
    return Used(
        seen.prompt_tokens,
        seen.cached_tokens,
        seen.completion_tokens,
        seen.forwards,
        seen.disagreed,
    )
