"""Rows that hold token ids: a model's own answers, exactly as it read and wrote them.

Text that is decoded and encoded again may come back as other tokens, and a cut answer as half a
character; ids do not change. They are of one tokenizer, and mean something else to another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mars_ray.data.chat import ChatEncoder, Message, Plan
from mars_ray.errors import DataError

# As they are stored (`rows.py`).
_MOST = 2**31
# Where decoding finds half a character, as at the end of an answer that was cut.
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """What a model read, and what it answered."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def token_row(prompt: object, answer: object) -> TokenRow:
    """The token ids in a row's two fields. Raises ValueError."""
    return TokenRow(_ids(prompt, "prompt_ids"), _ids(answer, "answer_ids"))


def token_plan(
    row: TokenRow, messages: Sequence[Message], encoder: ChatEncoder, max_length: int
) -> Plan:
    """The row's own tokens, of which the answer is the response.

    Raises DataError if nothing of the answer fits `max_length`, or if the ids are not of this
    tokenizer, as far as can be told: where there are messages, the last one must say the same.
    """
    if len(row.prompt) >= max_length:
        raise DataError(
            f"the prompt's {len(row.prompt)} tokens leave no room in max_length = {max_length}"
        )
    if (most := max(*row.prompt, *row.answer)) >= encoder.vocabulary:
        raise DataError(
            f"token {most} is beyond the tokenizer's {encoder.vocabulary}: the ids are of another "
            "model"
        )
    # An answer may have been cut after its text was made.
    said = encoder.decode(row.answer).rstrip(_BROKEN)
    if messages and not messages[-1].content.startswith(said):
        raise DataError(
            "answer_ids do not say what the last message says: they are of another model's "
            "tokenizer, or the text was changed. Use the model that wrote them, or leave the ids "
            "out"
        )
    prompt = [(token, False) for token in row.prompt]
    return Plan((*prompt, *((token, True) for token in row.answer)))


def _ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is not a list of token ids")
    if not all(type(item) is int and 0 <= item < _MOST for item in value):
        raise ValueError(f"{name} holds what is no token id")
    return tuple(value)
