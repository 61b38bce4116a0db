"""Grammars for JSON schemas and tool calls, by https://github.com/guidance-ai/llguidance."""

from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_ray.errors import ModelError, RequestError


class Grammars:
    """Compiles grammars for one tokenizer. Compiling takes up to a second, so it must not run on
    the engine's thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Iterable[int]
    ) -> None:
        """`vocabulary` is the model's, possibly larger than the tokenizer's. Raises ModelError."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{type(tokenizer).__name__} has no tokenizer.json; convert it first")
        self._tokenizer = from_tokenizer(tokenizer, vocabulary, sorted(stop_ids))
        added = tokenizer.added_tokens_decoder.items()
        # Tokens that no literal and no pattern of a grammar matches: a grammar must name their ids.
        # Of the tokens that are text for the tokenizer, these are all that look like tags.
        self.token_ids = {
            token.content: index
            for index, token in added
            if self._tokenizer.is_special_token(index)
        }
        self.tag_ids = tuple(
            index
            for index, token in sorted(added)
            if not token.special and self._tokenizer.is_special_token(index)
        )

    def compiled(self, lark: str, field: str) -> "CompiledGrammar":
        """A grammar in llguidance's variant of Lark's notation, which may contain JSON schemas.

        Raises RequestError that names `field` if it is wrong or too complex.
        """
        return CompiledGrammar(self._tokenizer, LLMatcher.grammar_from_lark(lark), field)


class CompiledGrammar:
    """See `request.Grammar`."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str, field: str) -> None:
        """Raises RequestError if the grammar is wrong or too complex."""
        self.source = grammar
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._tokenizer = tokenizer
        self._field = field
        _check(self._matcher, field)

    def start(self) -> "MatcherState":
        return MatcherState(self._matcher.deep_copy(), self._tokenizer, self._field)


class MatcherState:
    """See `request.GrammarState`. Its methods raise RequestError once the grammar has become too
    complex to follow."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, field: str) -> None:
        self._matcher = matcher
        self._field = field
        self._vocabulary = tokenizer.vocab_size
        self._ends = [[token] for token in tokenizer.eos_tokens]
        self._tokens: list[int] = []

    def allowed(self, back: int, tokens: Sequence[int]) -> NDArray[np.bool_]:
        allowed_RV = np.ones((back + 1 + len(tokens), self._vocabulary), np.bool_)
        self._matcher.rollback(back)
        path = [*self._tokens[len(self._tokens) - back :], *tokens]
        consumed = 0
        for row, allowed_V in enumerate(allowed_RV):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            _check(self._matcher, self._field)
            allowed_V[:] = np.unpackbits(bits, count=self._vocabulary, bitorder="little")
            if row == len(path) or not self._matcher.try_consume_tokens([path[row]]):
                break
            consumed += 1
        self._matcher.rollback(consumed - back)
        return allowed_RV

    def admissible(self, tokens: Sequence[int]) -> int:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            # Only the end can follow; the library would not allow even that.
            return int(tokens[:1] in self._ends)
        count = self._matcher.validate_tokens(list(tokens))
        _check(self._matcher, self._field)
        return count

    def forced(self) -> list[int]:
        return self._matcher.compute_ff_tokens()

    def consume(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        _check(self._matcher, self._field)
        self._tokens += tokens


def _check(matcher: LLMatcher, field: str) -> None:
    if matcher.is_error():
        # The lines after the first are details of the library's parser.
        first = matcher.get_error().strip().partition("\n")[0]
        raise RequestError(f"a schema cannot be followed: {first}", field=field)
