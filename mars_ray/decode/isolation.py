"""The search for the sequence that made a step fail.

A step commits nothing before its forward has succeeded, and a sequence that leaves the batch and
returns gives the same text as one that stays. So all leave, and each takes its next steps alone.
"""

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.decode.engine import Engine
from mars_ray.decode.request import Request, TokenEvent
from mars_ray.decode.sequence import Sequence


def step_apart(engine: Engine) -> list[TokenEvent]:
    """The events of each sequence's next steps without the others, including failures.

    Afterwards all sequences that have neither failed nor ended are back in their order. Those that
    were not near the batch had no part in the failure and are not tried.
    """
    suspects = engine.config.max_batch
    everybody = engine.set_aside()
    turns = {sequence.request.id: sequence.order for sequence in everybody}
    events, staying = [], everybody[suspects:]
    for sequence in everybody[:suspects]:
        events += _alone(engine, sequence)
        staying = [*engine.set_aside(), *staying]
    for sequence in sorted(staying, key=lambda sequence: turns[sequence.request.id]):
        engine.take_back(sequence)
    return events


def works(engine: Engine) -> bool:
    """Whether the engine can decode a token of a test prompt alone; all sequences come back.

    This distinguishes a broken engine from faulty requests.
    """
    everybody, written = engine.set_aside(), engine.totals.output_tokens
    probe = Request("probe", (0,), ExactMode(), Sampling(), 1, frozenset())
    try:
        engine.submit(probe)
        said = engine.step()
        return bool(said and said[0].completion)
    except Exception:  # noqa: BLE001 - whatever it is, it is not the requests' fault
        return False
    finally:
        engine.cancel(probe.id)
        engine.totals.output_tokens = written  # the probe's token is nobody's
        for sequence in everybody:
            engine.take_back(sequence)


def _alone(engine: Engine, sequence: Sequence) -> list[TokenEvent]:
    """The events of a sequence's next two steps that commit tokens. The first has to compute its
    prompt again, and only the second prepares a sequence that is already running."""
    engine.take_back(sequence)
    events = []
    try:
        while engine.has_work and len(events) < 2:
            events += engine.step()
    except Exception as error:  # noqa: BLE001 - whatever it is, this sequence is to blame
        engine.cancel(sequence.request.id)
        events.append(TokenEvent(sequence.request.id, (), sequence.forwards, failure=error))
    return events
