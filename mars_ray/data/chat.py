r"""Turns a conversation into tokens through the tokenizer's own chat template; and texts in JSON
values: listing, changing and checking them, and keys that compare prompts.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    [               prompt, no loss                      )[ response      )[ no loss

A response starts where the prompt ends, whose length comes from rendering it. The text is cut there
and at the special tokens which the template wrote. The pieces between are encoded as plain text, so
a special token spelled out inside a message is just text. Serving cuts prompts in the same way, so
the model meets the token boundaries it was trained on.
"""

import copy
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars_ray.data.sources import Call, Message
from mars_ray.errors import DataError, ModelError

# Variables of a chat template, such as whether the model is to think.
Options = Mapping[str, bool | str]
# A rendered conversation, cut into tokens and plain texts, with a mark for responses.
Plan = Sequence[tuple[int | str, bool]]


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_at", "description": "", "parameters": {"type": "object"}},
}
# A conversation for a look at the template.
_ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Why?"}]
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The L tokens of a conversation; `response` marks those an assistant wrote."""

    input_ids: np.ndarray  # int32 (L,)
    response: np.ndarray  # bool (L,)


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The tokens around a user's message."""

    before: tuple[int, ...]  # the tokens before it
    end_id: int  # the special token behind it


def encode_prompt(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """The token ids of the conversation and of the start of the next answer.

    The template describes `tools` to the model. Raises DataError if it refuses the conversation,
    ModelError if the tokenizer or its template cannot be used.
    """
    encoder = encoder_of(tokenizer, has_tools=bool(tools))
    plan = encoder.plan_prompt(messages, tools)
    return encoder.encode([plan])[0].input_ids.tolist()


def encoder_of(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool = False) -> "ChatEncoder":
    """The tokenizer's encoder, cached; of conversations with tools where they have a template."""
    # The size is part of the key because adding a token changes what is special.
    return _encoder(tokenizer, len(tokenizer), *_template(tokenizer, has_tools))


# A process rarely has more than one tokenizer.
@lru_cache(maxsize=4)
def _encoder(
    tokenizer: PreTrainedTokenizerBase, _size: int, template: str, is_for_tools: bool
) -> "ChatEncoder":
    return ChatEncoder(tokenizer, template, is_for_tools=is_for_tools)


def _template(tokenizer: PreTrainedTokenizerBase, has_tools: bool) -> tuple[str, bool]:
    """The chat template, and whether it is for conversations with tools alone."""
    templates = tokenizer.chat_template
    if not templates:
        raise ModelError(
            "the tokenizer has no chat template; use the tokenizer of an instruction-tuned model, "
            "or put a chat_template.jinja beside it"
        )
    if isinstance(templates, str):
        return templates, False
    if has_tools and "tool_use" in templates:
        return templates["tool_use"], True
    if "default" not in templates:
        raise ModelError(
            f"the tokenizer has chat templates named {', '.join(map(repr, sorted(templates)))}, "
            "and none is 'default': put the one for conversations beside it as chat_template.jinja"
        )
    return templates["default"], False


class ChatEncoder:
    """Encodes conversations with one tokenizer and its chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str, *, is_for_tools: bool = False
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ModelError(f"{type(tokenizer).__name__} has no tokenizer.json; convert it first")
        self._tokenizer = tokenizer
        self._template = template
        # For a look at the template: one for tools may do nothing without any.
        self._sample_tools = [_TOOL] if is_for_tools else []
        # A copy, because transformers changes the tokenizer's settings with every call.
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_ids = {
            added.content: index
            for index, added in tokenizer.added_tokens_decoder.items()
            if added.special
        }
        # A special token needs two characters to be broken up.
        short = [text for text in self._special_ids if len(text) < 2]
        if short or not self._special_ids:
            raise ModelError(
                f"the tokenizer has special tokens of one character: {short}"
                if short
                else "the tokenizer has no special tokens, so a turn of a conversation has no end"
            )
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._check()

    def plan(self, messages: Sequence[Message]) -> Plan:
        """Renders and cuts a conversation.

        Raises DataError if the template refuses it, or if the assistant's part cannot be found in
        its text. Other conversations may still work (Qwen3's fails on two answers in a row).
        """
        chat, _, sentinel = self._neutralise(messages)
        text = self._render(chat, prompt=False)
        for turn, message in enumerate(messages):
            if not message.reasoning:
                continue
            plain = {key: value for key, value in chat[turn].items() if "reasoning" not in key}
            if self._render([*chat[:turn], plain, *chat[turn + 1 :]], prompt=False) == text:
                raise DataError(
                    f"the chat template leaves out the thoughts of message {turn + 1}, which would "
                    "be lost: use a template that writes them, let a row end with the answer that "
                    "was thought about, or leave the thoughts out"
                )
        plan: list[tuple[int | str, bool]] = []
        done = 0
        for start, end in self._responses(chat, text):
            plan += self._cut(text[done:start], sentinel, response=False)
            plan += self._cut(text[start:end], sentinel, response=True)
            done = end
        return plan + self._cut(text[done:], sentinel, response=False)

    def plan_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        options: Options = MappingProxyType({}),
        *,
        is_answered: bool = True,
    ) -> Plan:
        """Renders and cuts a conversation that waits for an answer, with the template's options.

        Earlier answers are cut as in training, so they have the same tokens. The answer's beginning
        is left out if it is not answered.
        """
        chat, described, sentinel = self._neutralise(messages, tools)
        text = self._render(chat, described, options, prompt=is_answered)
        # An answer that the template rewrites once it is history cannot be found in the text. It
        # does not need to be, as nothing here carries a loss.
        starts = [
            len(before)
            for turn, message in enumerate(chat)
            if message["role"] == "assistant" and turn > 0
            if text.startswith(before := self._render(chat[:turn], described, options, prompt=True))
        ]
        return [
            piece
            for start, end in zip([0, *starts], [*starts, len(text)], strict=True)
            for piece in self._cut(text[start:end], sentinel, response=False)
        ]

    def user_turn(self, system: str | None = None) -> UserTurn:
        """The conversation up to where the user's first message begins.

        Raises ModelError if that place cannot be found in the template's text, or if the template
        ends such a message with plain text; DataError if it refuses the system message.
        """
        free = (char for char in map(chr, _PRIVATE_USE) if char not in f"{self._template}{system}")
        marker = next(free, "")
        told = [Message("system", system)] if system else []
        chat, _, sentinel = self._neutralise([*told, Message("user", marker)])
        before, *after = self._render(chat, prompt=True).split(marker)
        if len(after) != 1 or not before.strip():
            raise ModelError(
                f"the chat template writes a user's message {len(after)} times, or nothing before "
                "it, so this model cannot write prompts of its own: give it prompts"
            )
        end = self._special.match(after[0].lstrip())
        if end is None:
            raise ModelError(
                "the chat template ends a user's message without a special token, so this model "
                "cannot write prompts of its own: give it prompts"
            )
        # In all tokenizers whose text has a space there, it belongs to the next word.
        plan = self._cut(before.rstrip(" "), sentinel, response=False)
        tokens = self.encode([plan])[0].input_ids.tolist()
        return UserTurn(tuple(tokens), self._special_ids[end[0]])

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which are not text."""
        return frozenset(self._special_ids.values())

    def has_special(self, text: str) -> bool:
        """Whether a special token is spelled out in a text."""
        return self._special.search(text) is not None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, without special ones."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    @cached_property
    def vocabulary(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, plans: Sequence[Plan]) -> list[Encoded]:
        """The tokens of each plan; one call for many plans is faster than many calls."""
        texts: dict[str, int] = {}
        for plan in plans:
            for piece, _ in plan:
                if isinstance(piece, str):
                    texts.setdefault(piece, len(texts))
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in batch]
        encoded = []
        for plan in plans:
            tokens: list[int] = []
            response: list[bool] = []
            for piece, is_response in plan:
                new = ids[texts[piece]] if isinstance(piece, str) else [piece]
                tokens += new
                response += [is_response] * len(new)
            encoded.append(Encoded(np.array(tokens, np.int32), np.array(response, np.bool_)))
        return encoded

    def fingerprint(self) -> str:
        """A text that differs between tokenizers and templates that encode differently."""
        special = json.dumps(self._tokenizer.special_tokens_map, sort_keys=True, default=str)
        return "\n".join([self._backend.to_str(), special, self._template])

    @cached_property
    def describes_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        try:
            text = self._render(_ASKED, [_TOOL], prompt=True)
        except DataError:
            return False
        return _TOOL["function"]["name"] in text

    def written_calls(self, calls: Sequence[Call]) -> str:
        """What the template writes of an answer that makes these calls; nothing if it refuses."""
        called = Message("assistant", "", tuple(calls)).as_dict()
        try:
            text = self._render([*_ASKED, called], prompt=False)
            prompt = self._render(_ASKED, prompt=True)
        except DataError:
            return ""
        return _behind(prompt, text)

    def without_special(self, text: str) -> str:
        return self._special.sub("", text)

    def takes(self, *messages: Message) -> bool:
        """Whether the template writes such a conversation."""
        try:
            self._render([message.as_dict() for message in messages], prompt=True)
        except DataError:
            return False
        return True

    def answer_prefix(self, options: Options = MappingProxyType({})) -> str:
        """What the template writes behind a conversation for an answer to begin."""
        text = self._render(_ASKED, options=options, prompt=True)
        before = self._render(_ASKED, options=options, prompt=False)
        return _behind(before, text)

    def has_switch(self, name: str, *values: bool | str) -> bool:
        """Whether the template writes something else with each of these values of an option."""
        texts = set()
        for value in values:
            try:
                texts.add(self._render(_ASKED, options={name: value}, prompt=True))
            except DataError:
                texts.add(f"refused {value}")
        return len(texts) == len(values)

    def _neutralise(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
        """The messages and tools for the template, with special tokens in them broken up by the
        returned sentinel.

        The sentinel occurs in no text, so taking it out later restores each text exactly.
        """
        given = [[message.as_dict() for message in messages], list(tools)]
        texts = list(texts_of(given))
        contents = "".join(texts) + self._template
        try:
            contents.encode()
        except UnicodeEncodeError as error:
            # Half of a surrogate pair: JSON can hold it, UTF-8 cannot encode it.
            raise DataError(f"a message holds what is no character: {error}") from error
        if not any(self._special.search(text) for text in texts):
            return given[0], given[1], ""
        free = (char for char in map(chr, _PRIVATE_USE) if char not in contents)
        sentinel = next(free, None)
        if sentinel is None:
            raise DataError("a conversation with every private-use character of Unicode is refused")
        chat, described = mapped(given, lambda text: self._broken(text, sentinel))
        return chat, described, sentinel

    def _broken(self, text: str, sentinel: str) -> str:
        # More than once: a special token may contain another one.
        while self._special.search(text):
            text = self._special.sub(lambda match: match[0][0] + sentinel + match[0][1:], text)
        return text

    def _render(
        self,
        chat: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        options: Options = MappingProxyType({}),
        *,
        prompt: bool,
    ) -> str:
        # `Any`, because the names of options are not those of the method's own arguments.
        variables: dict[str, Any] = dict(options)
        try:
            text = self._tokenizer.apply_chat_template(
                chat,
                tools=list(self._sample_tools if tools is None else tools) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                **variables,
            )
        # TypeError: some templates treat a call's arguments as an object, but may get a list.
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def _responses(self, chat: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """The start and end of each assistant's turn in the rendered text."""
        spans = []
        for turn, message in enumerate(chat):
            if message["role"] == "assistant":
                before = self._render(chat[:turn], prompt=True)
                through = (
                    text if turn == len(chat) - 1 else self._render(chat[: turn + 1], prompt=False)
                )
                if not text.startswith(before):
                    raise DataError(
                        "the chat template does not render the conversation as a continuation of "
                        "the prompt before it, so the assistant's part cannot be found; use a "
                        f"template that does (rendered {text[:200]!r}, prompt {before[:200]!r})"
                    )
                spans.append((len(before), self._response_end(text, len(before), through)))
        return spans

    def _response_end(self, text: str, start: int, through: str) -> int:
        """Where a response ends: after its end-of-turn token, which some templates do not write.

        `through` is the text up to this turn, rendered with it as the last turn. The whole text
        does not continue `through` if the template writes a last turn differently from a past one
        (Qwen3: an empty thought). The messages hold no special tokens here, so the turn then ends
        at the first one.
        """
        if text.startswith(through):
            ends = [match.end() for match in self._special.finditer(through, start)]
            return ends[-1] if ends else len(through)
        match = self._special.search(text, start)
        if match is None:
            raise DataError(
                "the chat template rewrites earlier turns and ends none with a special token, so "
                "the assistant's part cannot be found; use a template that does neither"
            )
        return match.end()

    def _cut(self, text: str, sentinel: str, *, response: bool) -> list[tuple[int | str, bool]]:
        """Cuts the text into the special tokens' ids and the texts between them."""
        # The pattern is one group, so every second part is a special token.
        parts = self._special.split(text)
        return [
            (self._special_ids[part] if place % 2 else part.replace(sentinel, ""), response)
            for place, part in enumerate(parts)
            if part
        ]

    def _check(self) -> None:
        """Raises ModelError for a tokenizer that encodes a word differently at the start of a text,
        because its texts cannot be cut. (DeepSeek-R1's template opens thoughts that it leaves out
        later, so it can write prompts, but no conversations to train on.)"""
        messages = [Message("user", "Hi there"), Message("assistant", "Fine, thanks")]
        chat, _, _ = self._neutralise(messages)
        try:
            text, plan = self._render(chat, prompt=False), self.plan(messages)
        except DataError as error:
            if not self.answer_prefix().rstrip().endswith("<think>"):
                raise ModelError(
                    f"not even a question and its answer can be written: {error}"
                ) from error
            plan = self.plan_prompt(messages, self._sample_tools)
            text = self._render(chat, prompt=True)
        whole = self._tokenizer(text, add_special_tokens=False, split_special_tokens=False)
        ours = self.encode([plan])[0].input_ids.tolist()
        if ours != whole["input_ids"]:
            raise ModelError(
                "the tokenizer encodes a text differently when it is cut where the answer begins "
                f"({whole['input_ids']} became {ours}); use a tokenizer whose chat template ends "
                "the prompt with a special token or a line break"
            )


def _behind(before: str, text: str) -> str:
    """The text from where it differs from the one before it."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
    return text[sum(1 for _ in same) :]


# Prompts with the same first words count as one: sampled ones often differ only at the end.
_TELLING_WORDS = 16


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys among them."""
    match value:
        case str():
            yield value
        case dict():
            for key, part in value.items():
                yield key
                yield from texts_of(part)
        case list():
            for part in value:
                yield from texts_of(part)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text changed."""
    match value:
        case str():
            return change(value)
        case dict():
            return {change(key): mapped(part, change) for key, part in value.items()}
        case list():
            return [mapped(part, change) for part in value]
        case _:
            return value


def text_key(text: str, most_words: int | None = None) -> bytes:
    """A key that is the same for texts that differ only in case, spaces, punctuation or forms of
    characters; of their first words if a number is given."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())[:most_words]
    return hashlib.sha256(" ".join(words).encode(errors="replace")).digest()[:16]


def beginning_key(text: str) -> bytes:
    """A key that is the same for near-duplicates: texts that begin with the same words."""
    return text_key(text, _TELLING_WORDS)
