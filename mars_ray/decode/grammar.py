"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): JSON schemas, tool calls."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_ray.errors import ModelError, RequestError


class Grammars:
    """Compiles grammars for one tokenizer. Compiling takes up to a second: not for the engine's
    thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Iterable[int]
    ) -> None:
        """`vocabulary` is the model's, which may be larger. Raises ModelError."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{type(tokenizer).__name__} has no tokenizer.json; convert it first")
        self._tokenizer = from_tokenizer(tokenizer, vocabulary, sorted(stop_ids))

    def json_schema(self, schema: dict[str, Any]) -> "CompiledGrammar":
        """Texts that are JSON of this schema. Raises RequestError if it cannot be held to."""
        return self.compiled(LLMatcher.grammar_from_json_schema(json.dumps(schema)))

    def compiled(self, grammar: str) -> "CompiledGrammar":
        """From llguidance's own notation. Raises RequestError."""
        return CompiledGrammar(self._tokenizer, grammar)


class CompiledGrammar:
    """See `constraint.Grammar`."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        """Raises RequestError if the grammar is wrong or too complex."""
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self._vocabulary = tokenizer.vocab_size
        _check(self._matcher)

    def start(self) -> "MatcherState":
        """See Grammar."""
        return MatcherState(self._matcher.deep_copy(), self._vocabulary)


class MatcherState:
    """See `constraint.GrammarState`. Its methods raise RequestError once the grammar has become too
    complex to follow."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._tokens: list[int] = []

    def allowed(self, back: int, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """See GrammarState."""
        allowed_RV = np.ones((back + 1 + len(tokens), self._vocabulary), np.bool_)
        self._matcher.rollback(back)
        path = [*self._tokens[len(self._tokens) - back :], *tokens]
        consumed = 0
        for row, allowed_V in enumerate(allowed_RV):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            _check(self._matcher)
            allowed_V[:] = np.unpackbits(bits, count=self._vocabulary, bitorder="little")
            if row == len(path) or not self._matcher.try_consume_tokens([path[row]]):
                break
            consumed += 1
        self._matcher.rollback(consumed - back)
        return allowed_RV

    def admissible(self, tokens: Sequence[int]) -> int:
        """See GrammarState."""
        count = self._matcher.validate_tokens(list(tokens))
        _check(self._matcher)
        return count

    def forced(self) -> list[int]:
        """See GrammarState."""
        return self._matcher.compute_ff_tokens()

    def consume(self, tokens: Sequence[int]) -> None:
        """See GrammarState."""
        self._matcher.consume_tokens(list(tokens))
        _check(self._matcher)
        self._tokens += tokens


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        # What follows the first line are details of the library's parser.
        first = matcher.get_error().strip().partition("\n")[0]
        raise RequestError(f"the schema cannot be held to: {first}", field="response_format")
