"""What an engine has done since its start, summed over steps."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from mars_ray.decode.scheduler import Work


@dataclass(slots=True)
class StepTotals:
    """Means over any span are differences of two readings."""

    steps: int = 0
    seconds: float = 0.0  # of whole steps, with what they commit
    prompt_steps: int = 0  # that had rows of prompts
    prompt_rows: int = 0  # computed, not found in the prefix cache
    prompts: int = 0  # done
    prompt_tokens: int = 0  # of those that are done; computed, as above
    sequences: int = 0  # decoding, one count per step
    decode_rows: int = 0  # of those

    def add(self, work: Several[Work]) -> None:
        """A step before its tokens are committed."""
        self.steps += 1
        self.prompt_steps += any(not item.sequence.forwards for item in work)
        for item in work:
            if item.sequence.forwards:
                self.sequences += 1
                self.decode_rows += item.rows
            else:
                self.prompt_rows += item.count
                if item.plan:
                    self.prompts += 1
                    self.prompt_tokens += item.sequence.committed - (item.sequence.found or 0)
