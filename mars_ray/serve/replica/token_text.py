"""A token's own bytes: a character may need several tokens."""

import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-F]{2})>$")


class TokenBytes:
    """Looks tokens up in a byte-level vocabulary, or in one of SentencePiece's kind."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added: dict[str, int] = tokenizer.get_added_vocab()  # type: ignore[operator]
        self._added = {token: text for text, token in added.items()}
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        # Of the whole vocabulary: a token alone does not tell, for é and ü stand for bytes, too.
        own = tokenizer.get_vocab().keys() - added.keys()
        self._is_byte_level = self._byte_of.keys() >= set().union(*own)

    def of(self, token: int) -> bytes:
        """The bytes that the token stands for; none for an id without a token."""
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
