"""The controller's side of what the policy has learnt, which the model's actor keeps
(`threshold_actor.py`): that outlives Serve's controller and updates of the service.

Nothing here waits: answers of the actor are looked for at every tick.
"""

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from mars_ray.autoscale.policy import State
from mars_ray.errors import DataError
from mars_ray.serve.threshold_actor import Learnt

logger = logging.getLogger("ray.serve")

# How often the actor is asked whether an operator has replaced the memory, and told what is new.
_ASK_S, _KEEP_S = 5.0, 60.0
# How long a policy that has just been made waits for what one before it had learnt.
_FIRST_ANSWER_S = 2.0


class MemoryExchange:
    """Exchanges what the policy has learnt with the model's actor."""

    def __init__(self, model: str, control: Callable[[], Any]) -> None:
        """`control` returns the actor's handle."""
        self._model = model
        self._control = control
        self._at_s: float | None = None  # `Learnt.at_s` of what is here; None: no answer yet
        self._answer: ray.ObjectRef[Learnt | None] | None = None  # that has not come yet
        self._began_s: float | None = None
        self._next_ask_s = self._next_keep_s = 0.0

    def is_awaited(self, now: float) -> bool:
        """Whether the actor may still say soon what was learnt before."""
        began_s = now if self._began_s is None else self._began_s
        return self._at_s is None and now - began_s < _FIRST_ANSWER_S

    def exchange(self, state: State, now: float) -> State:
        """The state, with what the actor has instead of what it has learnt if that has to be taken
        up. An answer that comes late is taken up, too."""
        if self._began_s is None:
            self._began_s = now
            self._next_keep_s = now + _KEEP_S
        if self._answer is None:
            if now >= self._next_ask_s:
                self._ask(state, now)
            return state
        if not ray.wait([self._answer], timeout=0)[0]:
            return state
        answer, self._answer = self._answer, None
        try:
            given = ray.get(answer)
        except RayError as error:
            logger.warning("the memory of the policy of %s is lost: %s", self._model, error)
            return state
        return state if given is None else self._taken_up(given, state)

    def _ask(self, state: State, now: float) -> None:
        self._next_ask_s = now + _ASK_S
        learnt = None
        if self._at_s is not None:
            memory = None
            if now >= self._next_keep_s:
                self._next_keep_s = now + _KEEP_S
                memory = state.to_json()
            learnt = Learnt(self._at_s, memory)
        self._answer = self._control().exchange.remote(learnt)

    def _taken_up(self, given: Learnt, state: State) -> State:
        is_first, self._at_s = self._at_s is None, given.at_s
        if is_first and given.memory is None:
            return state
        try:
            state = state.relearnt(given.memory)
        except DataError as error:
            logger.warning("the policy of %s begins with an empty memory: %s", self._model, error)
            return state.relearnt(None)
        how = "an empty memory" if given.memory is None else "what was learnt before"
        logger.info("the policy of %s goes on from %s", self._model, how)
        return state
