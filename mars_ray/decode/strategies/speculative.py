"""`speculative`: a draft model continues what the masks began (paper, section 4.6).

The drafts of a step are what the masks of the step before said, and behind them the tokens that the
draft model finds likely to follow. All are verified as in `verified`, and by default every outcome
gets a group of masks.
"""

from mars_ray.config.modes import SpeculativeMode
from mars_ray.decode.sequence import Sequence
from mars_ray.decode.strategies.verified import Verified


class Speculative(Verified):
    """As `verified`, with a draft model's tokens from the second forward on: the first is the
    prompt's."""

    def drafts_wanted(self, sequence: Sequence) -> int:
        mode = sequence.request.mode
        assert isinstance(mode, SpeculativeMode)
        return mode.draft_tokens if sequence.extended < sequence.forwards else 0
