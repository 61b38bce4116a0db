"""From tokens to text as they come, without broken characters and up to a stop string."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What a tokenizer writes for bytes that are not, or not yet, a character.
REPLACEMENT = "\ufffd"
# A character has at most four bytes, and a token at least one: so many tokens without a whole
# character are garbage, and waiting longer would decode an ever longer tail again at each token.
_MAX_HELD_TOKENS = 64

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Turns tokens into text one by one; the pieces join to the text of all tokens.

    tokens  [ .......... | context | held ]
                         ^ _context ^ _read
    Some tokenizers decode a token differently at the start of a text, so `held` is decoded behind
    the tokens of the piece before it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0

    def push(self, token: int) -> str:
        """The text which this token completes; empty while a character is incomplete."""
        self._tokens.append(token)
        text = self._held_text()
        held = len(self._tokens) - self._read
        if not text:
            if held > _MAX_HELD_TOKENS:
                del self._tokens[self._read :]  # special tokens, which are no part of the text
            return ""
        if text.endswith(REPLACEMENT) and held <= _MAX_HELD_TOKENS:
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text

    def push_all(self, tokens: Sequence[int]) -> str:
        """As one by one, but decoded in one go if their last character is whole."""
        self._tokens += tokens
        text = self._held_text()
        if text and not text.endswith(REPLACEMENT):
            self._context, self._read = self._read, len(self._tokens)
            return text
        del self._tokens[len(self._tokens) - len(tokens) :]
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        """What was held back, without the character that was never completed.

        Where the model has written U+FFFD itself at the very end, that goes too: the text does not
        tell the two apart.
        """
        text = self._held_text().rstrip(REPLACEMENT)
        self._context = self._read = len(self._tokens)
        return text

    def _held_text(self) -> str:
        before = self._decode(self._tokens[self._context : self._read])
        return self._decode(self._tokens[self._context :])[len(before) :]


class StopFilter:
    """Passes text on up to the first stop string, which is not passed on.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to pass on, and whether a stop string was met."""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        cut = len(text) - self._undecided(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class Written:
    """Text to pass on, how many of the given tokens were used for it, and whether to stop."""

    text: str
    tokens: int
    stopped: bool


class Writer:
    """An answer's text in the making: detokenised, and cut at the first stop string."""

    def __init__(self, decode: Decode, stops: Sequence[str], least: int = 0) -> None:
        """Stop strings are looked for behind so many tokens."""
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stops)
        self._has_stops = bool(stops)
        self._least = least

    def push(self, tokens: Sequence[int]) -> Written:
        """Adds tokens; those after a stop string are not used."""
        if not self._has_stops:
            return Written(self._detokenizer.push_all(tokens), len(tokens), False)
        free, self._least = min(self._least, len(tokens)), max(0, self._least - len(tokens))
        parts = [self._detokenizer.push_all(tokens[:free])] if free else []
        for used, token in enumerate(tokens[free:], start=free + 1):
            text, stopped = self._filter.push(self._detokenizer.push(token))
            parts.append(text)
            if stopped:
                return Written("".join(parts), used, True)
        return Written("".join(parts), len(tokens), False)

    def flush(self) -> Written:
        """What was held back, once no more tokens come."""
        text, stopped = self._filter.push(self._detokenizer.flush())
        return Written(text if stopped else text + self._filter.flush(), 0, stopped)
