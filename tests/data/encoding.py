from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mars_ray.data.chat import Encoded, encoder_of
from mars_ray.data.sources import Message


def encode(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """One conversation, as it is tokenised among others."""
    encoder = encoder_of(tokenizer)
    return encoder.encode([encoder.plan(messages)])[0]
