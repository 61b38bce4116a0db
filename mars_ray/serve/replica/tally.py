"""What a replica counts for the autoscaling policy, as plain numbers (`autoscale/collect.py`)."""

from collections import Counter
from dataclasses import dataclass, field

from mars_ray.autoscale import collect
from mars_ray.autoscale.sample import PINNED
from mars_ray.config.modes import VerifiedMode
from mars_ray.decode.engine import Engine
from mars_ray.serve.protocol import GenerationRequest
from mars_ray.serve.replica.stats import AnswerStats

_VERIFIED = VerifiedMode().type


@dataclass(slots=True)
class Tally:
    """Of answers, since the start."""

    refused: int = 0
    finished: int = 0
    output_tokens: int = 0
    of_class: Counter[str] = field(default_factory=Counter)

    def offered(self, call: GenerationRequest, *, refused: bool = False) -> None:
        """A call that has come, whatever becomes of it."""
        # Classes of what is refused count, too: shares of the rest would tell what shedding does
        # to the traffic, and not what the traffic is.
        self.of_class[call.quality_class or PINNED] += call.choices
        if refused:
            self.refused += call.choices

    def ended(self, seen: AnswerStats) -> None:
        """An answer, however it ended."""
        self.finished += 1
        self.output_tokens += seen.completion_tokens

    def sums(self, engine: Engine) -> dict[str, float]:
        """With those of the engine; for the engine's own thread."""
        totals, measures = engine.totals, engine.measures.by_mode.get(_VERIFIED)
        sums: dict[str, float] = {
            collect.ARRIVED: self.of_class.total() - self.refused,
            collect.REFUSED: self.refused,
            collect.FINISHED: self.finished,
            collect.OUTPUT_TOKENS: self.output_tokens,
            collect.PROMPT_STEPS: totals.prompt_steps,
            collect.PROMPT_ROWS: totals.prompt_rows,
            collect.PROMPTS: totals.prompts,
            collect.PROMPT_TOKENS: totals.prompt_tokens,
            collect.STEPS: totals.steps,
            collect.STEP_S: totals.seconds,
            collect.SEQUENCES: totals.sequences,
            collect.DECODE_ROWS: totals.decode_rows,
            collect.RUNNING: engine.running,
            collect.WAITING: engine.waiting,
            collect.THRESHOLD: engine.thresholds.set_point,
        }
        sums |= {collect.OF_CLASS + name: count for name, count in self.of_class.items()}
        if engine.control:
            table = engine.control.cost.table(engine.config.max_batch)
            sums |= {f"{collect.STEP_COST}{rows}": seconds for rows, seconds in table.items()}
        if measures and measures.forwards:
            sums |= {collect.VERIFIED_FORWARDS: measures.forwards}
            curve = measures.tokens_per_forward()
            sums |= {
                f"{collect.TOKENS_AT}{threshold:g}": mean * measures.forwards
                for threshold, mean in curve.items()
            }
        return sums
