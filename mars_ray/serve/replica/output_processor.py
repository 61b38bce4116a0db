"""Turns an engine's events for one answer into what its client reads.

A character may need several tokens, so text is held back until its characters are whole and it
cannot be the beginning of a stop string.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import regex
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mars_ray.autoscale.sample import PINNED
from mars_ray.decode.request import FinishReason, Request, TokenEvent, TokenLogprobs, as_one
from mars_ray.errors import DeadlineError, RequestError
from mars_ray.serve.openai.responses import ResponseWriter
from mars_ray.serve.openai.sse import ReplyWriter
from mars_ray.serve.protocol import (
    Finish,
    GenerationRequest,
    OutputDelta,
    Served,
    TokenText,
    ToolCallDelta,
)
from mars_ray.serve.replica.parsers import ReasoningReader, ToolCallReader
from mars_ray.serve.replica.stats import AnswerStats, Ending, ReplicaCounters, count_tokens

_BYTE_TOKEN = regex.compile(r"^<0x([0-9A-F]{2})>$")
# Tokenizers write this for bytes that are not, or not yet, a character.
REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token at least one. This many tokens without a whole
# character are garbage, and each further token would decode a longer tail again.
_MAX_HELD_TOKENS = 64
# Tokens of a prompt that tell how the first one behind it is decoded.
_BEFORE = 8
Decode = Callable[[Sequence[int]], str]
Writer = ReplyWriter | ResponseWriter


def reply_writer(request: GenerationRequest) -> Writer:
    return ResponseWriter(request) if request.reply.route == "response" else ReplyWriter(request)


class TokenBytes:
    """Looks up the bytes of tokens in a byte-level or SentencePiece vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added: dict[str, int] = tokenizer.get_added_vocab()  # type: ignore[operator]
        self._added = {token: text for text, token in added.items()}
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        # Decided by the whole vocabulary: a single token does not tell, since é and ü also
        # stand for bytes.
        own = tokenizer.get_vocab().keys() - added.keys()
        self._is_byte_level = self._byte_of.keys() >= set().union(*own)

    def of(self, token: int) -> bytes:
        """The bytes that the token stands for; empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(text, str):
            return b""
        if self._is_byte_level:
            return bytes(self._byte_of[character] for character in text)
        if match := _BYTE_TOKEN.match(text):
            return bytes([int(match[1], 16)])
        return text.replace("\u2581", " ").encode()


# `tokenizers.decoders.DecodeStream` gives the same pieces of whole text, but it has three faults
# (shown in `tests/serve/test_text.py`). It cannot be flushed, so an answer cut within a character
# loses the earlier characters of its last token. It holds bytes that are no text for ever. It
# decodes all special tokens again at each one.
class Detokenizer:
    """Turns tokens into text one by one; the pieces join to the text of all tokens.

    tokens  [ .......... | context | held ]
                         ^ _context ^ _read
    Some tokenizers decode a token differently at the start of a text, so `held` is decoded together
    with the tokens of the previous piece.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        """The text goes on behind the tokens `before`, if there are some."""
        self._decode = decode
        self._tokens = list(before[-_BEFORE:])
        if decode(self._tokens).endswith(REPLACEMENT):
            self._tokens = []
        self._context = 0
        self._read = len(self._tokens)

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._held_text()
        held = len(self._tokens) - self._read
        if not text:
            if held > _MAX_HELD_TOKENS:
                del self._tokens[self._read :]  # special tokens, which are not part of the text
            return ""
        if text.endswith(REPLACEMENT) and held <= _MAX_HELD_TOKENS:
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text

    def push_all(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; decoded in one call if its last character is
        whole."""
        self._tokens += tokens
        text = self._held_text()
        if text and not text.endswith(REPLACEMENT):
            self._context, self._read = self._read, len(self._tokens)
            return text
        del self._tokens[len(self._tokens) - len(tokens) :]
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        """The text held back, without a character that was never completed.

        A U+FFFD that the model itself wrote at the very end is dropped too, because the text does
        not distinguish the two.
        """
        text = self._held_text().rstrip(REPLACEMENT)
        self._context = self._read = len(self._tokens)
        return text

    def _held_text(self) -> str:
        before = self._decode(self._tokens[self._context : self._read])
        return self._decode(self._tokens[self._context :])[len(before) :]


class StopFilter:
    """Passes on the text before the first stop string, or up to its end.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        # Of several that begin at one place the shortest is met first.
        ways = "|".join(map(regex.escape, sorted(stops, key=len)))
        self._stop = regex.compile(ways) if stops else None
        self._shows_stop = shows_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to pass on, and whether a stop string was found."""
        text = self._held + text
        match = self._stop.search(text, partial=True) if self._stop else None
        if match and not match.partial:
            self._held = ""
            return text[: match.end() if self._shows_stop else match.start()], True
        cut = match.start() if match else len(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The text held back, which has not become a stop string."""
        text, self._held = self._held, ""
        return text


class OutputProcessor:
    """Turns the events of one answer into what its client reads, and counts them.

    This is the one place that makes text of tokens, takes thoughts and calls out of it, counts, and
    has the reply written.
    """

    def __init__(
        self,
        request: GenerationRequest,
        engine_request: Request,
        choice: int,
        decode: Decode,
        token_text: Callable[[int, float], TokenText],
        writer: Writer,
        counters: ReplicaCounters,
        calls: ToolCallReader | None = None,
        reasoning: ReasoningReader | None = None,
    ) -> None:
        """The writer is of the whole reply, the readers are of this answer, if it may have calls or
        thoughts that are told apart."""
        self._request, self._engine_request = request, engine_request
        self._choice = choice
        self._token_text = token_text
        self._writer = writer
        self._counters = counters
        self._calls, self._reasoning = calls, reasoning
        is_text = request.reply.route == "completion"
        self._detokenizer = Detokenizer(decode, engine_request.prompt if is_text else ())
        self._stop = StopFilter(request.stop, shows_stop=request.shows_stop)
        self._least = engine_request.sampling.min_new_tokens  # tokens before a stop string counts
        self._hidden = frozenset[int]() if request.shows_stop else engine_request.stop_ids
        self._echo = ""
        if request.is_echoed:
            prompt = request.prompts[choice // request.n]
            self._echo = prompt if isinstance(prompt, str) else decode(engine_request.prompt)
        self._owes_prompt = engine_request.prompt_logprobs is not None
        self._forwards = 0  # of the answer so far
        self._served: list[Served] = []
        # Modes without masks use no adapter, whichever is in force.
        self._is_drafted = engine_request.mode.has_masks
        prompt_tokens = 0 if choice % request.n else len(engine_request.prompt)
        quality_class = request.quality_class or PINNED
        self.stats = AnswerStats(engine_request.mode.type, prompt_tokens, quality_class)
        self.finish: Finish | None = None

    def process(self, events: Sequence[TokenEvent]) -> str:
        """Returns the client's text for some steps, the last of which may be a failure.

        Raises DeadlineError if the answer's time is over.
        """
        failure = events[-1].failure
        steps = events[:-1] if failure else events
        ending: Ending = "refused" if isinstance(failure, RequestError) else "error"
        if self.stats.is_over or not steps:
            self._counters.discarded += count_tokens(steps)  # that came after a stop string
            self.end(ending)
            return ""
        # Steps are read one by one only if the text may end between two of them, at a stop string,
        # or if they belong to different adapters, which have separate counts.
        is_apart = self._request.stop or len({step.adapter for step in steps}) > 1
        units = steps if is_apart else [as_one(steps)]
        if self._request.max_new_tokens == 0:
            units = list(map(_without_tokens, units))
        text, tokens, before = "", 0, self.stats.completion_tokens
        logprobs: tuple[TokenText, ...] = ()
        reason: FinishReason | None = None
        used = 0
        while reason is None and used < len(units):
            event, used = units[used], used + 1
            # Only the last token can be a stop token, which ends the text.
            shown = [token for token in event.tokens if token not in self._hidden]
            if self._request.stop:
                more, count, is_stopped = self._up_to_stop(shown)
            else:
                more, count, is_stopped = self._detokenizer.push_all(shown), len(shown), False
            text, tokens = text + more, tokens + count
            self._count(event, count if is_stopped else len(event.tokens))
            if is_stopped:
                reason = "stop"
            elif event.completion is not None:
                rest, is_stopped = self._stop.push(self._detokenizer.flush())
                text += rest if is_stopped else rest + self._stop.flush()
                reason = "stop" if is_stopped else event.completion.finish_reason
            if self._request.logprobs is not None and reason != "deadline":
                logprobs += self._logprobs(event, count)
            if self._reasoning:
                self._reasoning.count(tuple(shown[:count]))
        event, new = units[used - 1], self.stats.completion_tokens - before
        self._counters.discarded += count_tokens(steps) - new
        if reason == "deadline":
            self.end("deadline")
            limit_s = self._request.timeout_s
            raise DeadlineError(f"the answer was not finished within {limit_s:g} s")
        self._counters.step(self._request, self.stats, event, count_tokens(units[:used]))
        thoughts, behind, calls = "", "", tuple[ToolCallDelta, ...]()
        if self._reasoning or self._calls:
            thoughts, text, calls, behind = self._parsed(text, is_last=reason is not None)
        if reason:
            self.finish = self._finish(reason, event)
            self.end(self.finish.reason)
        elif failure:
            self.end(ending)
        echo, self._echo = self._echo, ""
        delta = OutputDelta(
            echo + text,
            None if behind else self.finish,
            self._choice,
            event.forward,
            tokens,
            logprobs,
            calls,
            len(self._engine_request.prompt),
            thoughts if self._request.shows_reasoning else "",
        )
        written = self._writer.write(delta)
        if behind:
            rest = replace(delta, text=behind, finish=self.finish, tokens=0)
            written += self._writer.write(replace(rest, logprobs=(), calls=(), reasoning=""))
        return written

    def end(self, ending: Ending) -> None:
        """Reports, once, to the counters of answers that this one is over."""
        if not self.stats.is_over:
            self._counters.ended(self.stats, ending)

    def _up_to_stop(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """The text of these tokens up to the first stop string, the number of tokens used for it,
        and whether there is one. What is behind it is not part of the answer."""
        free, self._least = min(self._least, len(tokens)), max(0, self._least - len(tokens))
        text = self._detokenizer.push_all(tokens[:free]) if free else ""
        for used, token in enumerate(tokens[free:], start=free + 1):
            more, is_stopped = self._stop.push(self._detokenizer.push(token))
            text += more
            if is_stopped:
                return text, used, True
        return text, len(tokens), False

    def _parsed(
        self, text: str, *, is_last: bool
    ) -> tuple[str, str, tuple[ToolCallDelta, ...], str]:
        """The additions to thoughts, answer and calls, and to the answer behind these calls."""
        thoughts, behind, calls = "", "", tuple[ToolCallDelta, ...]()
        if self._reasoning:
            thoughts, text = self._reasoning.push(text)
            if is_last:
                more, rest = self._reasoning.flush()
                thoughts, text = thoughts + more, text + rest
        if self._calls:
            said, calls = self._calls.push(text)
            end = len(said) - self._calls.behind
            text, behind = said[:end], said[end:]
            if is_last:
                behind += self._calls.flush()
            if not calls:
                text, behind = text + behind, ""
        return thoughts, text, calls, behind

    def _count(self, event: TokenEvent, tokens: int) -> None:
        """Counts the tokens and forwards of the answer, under the adapter that was in force."""
        forwards, self._forwards = event.forward - self._forwards, event.forward
        self.stats.completion_tokens += tokens  # the end token included
        adapter = event.adapter if self._is_drafted else None
        if self._served and self._served[-1].adapter == adapter:
            last = self._served.pop()
            tokens, forwards = last.tokens + tokens, last.forwards + forwards
        self._served.append(Served(adapter, tokens, forwards))

    def _finish(self, reason: FinishReason, event: TokenEvent) -> Finish:
        assert reason != "deadline"
        # A stop string may end the text within a call, which then cannot be made.
        reader, request, own = self._calls, self._request, self._engine_request
        has_called = reader is not None and reader.count > 0 and not reader.is_cut
        # OpenAI's finish reason is not `tool_calls` where the request names the tool.
        is_forced = request.tools is not None and request.tools.named is not None
        calls = reason == "stop" and has_called and not is_forced
        return Finish(
            "tool_calls" if calls else reason,
            len(own.prompt),
            self.stats.completion_tokens,
            event.forward,
            event.disagreed,
            event.threshold,
            None if own.mode == request.mode else own.mode.type,
            tuple(self._served),
            event.cached_tokens,
            event.ngram_tokens,
            self._reasoning.tokens if self._reasoning else None,
        )

    def _logprobs(self, event: TokenEvent, count: int) -> tuple[TokenText, ...]:
        """Log-probabilities of an event's first tokens, and before the first of all those of the
        prompt, if they are asked for too."""
        entries = zip(event.tokens[:count], event.logprobs, strict=False)
        own = tuple(self._with_others(token, entry) for token, entry in entries)
        if not self._owes_prompt:
            return own
        self._owes_prompt = False
        first, *others = self._engine_request.prompt
        prompt = zip(others, event.prompt_logprobs, strict=True)
        shown = (self._with_others(token, entry) for token, entry in prompt)
        return (replace(self._token_text(first, 0.0), logprob=None), *shown, *own)

    def _with_others(self, token: int, entry: TokenLogprobs) -> TokenText:
        return replace(
            self._token_text(token, entry.logprob),
            top=tuple(self._token_text(other, logprob) for other, logprob in entry.top),
        )


def _without_tokens(event: TokenEvent) -> TokenEvent:
    """The event of an answer that is only its prompt; an engine writes at least one token."""
    completion = event.completion
    if completion and completion.finish_reason == "stop":
        completion = replace(completion, finish_reason="length")
    return replace(event, tokens=(), logprobs=(), confidences=(), completion=completion)
