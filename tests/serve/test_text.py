"""Detokenisation piece by piece, and stop strings."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mars_ray.config.decode import Sampling
from mars_ray.config.modes import ExactMode
from mars_ray.config.serve import ServeJob
from mars_ray.decode.request import Request
from mars_ray.serve.openai.sse import ReplyWriter
from mars_ray.serve.protocol import GenerationRequest, ReplyForm, TokenText
from mars_ray.serve.replica.output_processor import (
    REPLACEMENT,
    Detokenizer,
    OutputProcessor,
    StopFilter,
)
from mars_ray.serve.replica.stats import ReplicaCounters


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer of 256 tokens."""
    return bytes(tokens).decode("utf-8", errors="replace")


def pieces(tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode_bytes)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]


@given(st.text())
def test_pieces_join_to_the_text_and_never_break_a_character(text):
    """Guards U+FFFD in the middle of an emoji that spans several tokens."""
    parts = pieces(text.encode())
    assert "".join(parts) == text or REPLACEMENT in text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in part for part in parts)


def test_a_character_waits_for_its_last_token():
    """Hand-worked: é is two bytes, 😀 four."""
    assert pieces("é😀a".encode()) == ["", "é", "", "", "", "😀", "a", ""]


def test_an_answer_cut_inside_a_character_loses_that_character():
    """Guards a replacement character at the end of an answer that reached its limit."""
    assert pieces("ok😀".encode()[:-1]) == ["o", "k", "", "", "", ""]


def test_bytes_that_are_no_text_do_not_wait_forever():
    """Guards a held tail that grows, and is decoded again at each token, without end."""
    parts = pieces([0xFF] * 200)
    assert len("".join(parts)) > 100


# Bytes, and one token of a text and a character's beginning.
_TOKEN_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_MIXED = 256


def byte_level() -> Tokenizer:
    mixed = "".join(bytes_to_unicode()[byte] for byte in "ok😀".encode()[:-3])
    tokenizer = Tokenizer(BPE(vocab=_TOKEN_OF | {mixed: _MIXED}, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def both(tokens: Sequence[int]) -> tuple[list[str], list[str], str]:
    """The pieces that we give and those of `tokenizers`, and what we flush at the end."""
    tokenizer, stream = byte_level(), DecodeStream(skip_special_tokens=True)
    detokenizer = Detokenizer(tokenizer.decode)
    ours = [detokenizer.push(token) for token in tokens]
    theirs = [stream.step(tokenizer, token) or "" for token in tokens]
    return ours, theirs, detokenizer.flush()


@given(st.text())
def test_whole_text_has_the_pieces_that_tokenizers_gives(text):
    """Of a library that many use; it holds a U+FFFD that the model has written itself, as we do."""
    ours, theirs, _ = both([*text.encode(), *b" end"])
    assert ours == theirs


def test_where_the_stream_of_tokenizers_would_not_do():
    """Should this fail with a newer version, ours may have become superfluous."""
    ours, theirs, rest = both([_MIXED])
    assert (ours, theirs, rest) == ([""], [""], "ok")  # there is nothing to flush theirs with
    ours, theirs, _ = both([0xFF] * 200)
    assert (len("".join(ours)) > 100, "".join(theirs)) == (True, "")


def test_a_leading_space_that_depends_on_the_place_is_kept():
    """SentencePiece drops the first token's space: decoded alone, every word would lose its own."""
    words = {1: " one", 2: " two"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    detokenizer = Detokenizer(decode)
    assert [detokenizer.push(token) for token in (1, 2, 1)] == ["one", " two", " one"]
    # Behind a prompt, which a completion goes on with, no word is the first.
    assert Detokenizer(decode, [2, 1]).push(2) == " two"
    assert Detokenizer(decode, [2] * 99).push_all([1, 2]) == " one two"


def test_the_prompt_is_no_part_of_a_completion():
    """Also where it ends within a character, which the answer completes."""
    assert Detokenizer(decode_bytes, "ok é".encode()).push(*b"a") == "a"
    emoji = "😀".encode()
    detokenizer = Detokenizer(decode_bytes, b"ok" + emoji[:2])
    assert "ok" not in detokenizer.push_all(emoji[2:] + b"ab") + detokenizer.flush()


@pytest.mark.parametrize(("route", "text"), [("completion", " two"), ("chat", "two")])
def test_a_completion_goes_on_behind_its_prompt(route, text):
    """As other engines have it: the text of prompt and answer is the two put together."""
    words = {1: " one", 2: " two"}

    def decode(tokens: Sequence[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    asked = GenerationRequest(
        "a", ("x",), ExactMode(), Sampling(), 9, 9, reply=ReplyForm(route=route)
    )
    request = Request("a-0", (1, 1), ExactMode(), Sampling(), 9, frozenset())
    counters = ReplicaCounters(ServeJob(checkpoint="x"))
    answer = OutputProcessor(asked, request, 0, decode, nothing, ReplyWriter(asked), counters)
    assert answer._detokenizer.push(2) == text


@given(
    st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
)
def test_the_text_ends_before_the_first_stop_string(parts, stops):
    """Whatever the pieces: what is passed on is the text up to the earliest stop string."""
    text = "".join(parts)
    places = [text.find(stop) for stop in stops if stop in text]
    stop_filter = StopFilter(stops)
    passed, stopped = "", False
    for part in parts:
        new, stopped = stop_filter.push(part)
        passed += new
        if stopped:
            break
    if not stopped:
        passed += stop_filter.flush()
    assert stopped == bool(places)
    if not places:
        assert passed == text
        return
    # A longer stop string may begin earlier, but end later, than the one that was met first.
    assert text.startswith(passed)
    assert len(passed) in {place for stop in stops for place in _places(text, stop)}


def _places(text: str, stop: str) -> list[int]:
    return [place for place in range(len(text)) if text.startswith(stop, place)]


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    """Guards a stream that lags behind, and one that shows half of a stop string."""
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("the E") == ("the ", False)
    assert stop_filter.push("N") == ("", False)
    assert stop_filter.push("d.") == ("ENd.", False)
    assert stop_filter.push("..END of") == ("..", True)


def up_to_stop(stop: str, least: int = 0) -> Callable[[Sequence[int]], tuple[str, int, bool]]:
    """What an answer with this stop string makes of tokens that are bytes."""
    sampling = Sampling(min_new_tokens=least)
    asked = GenerationRequest("a", ("x",), ExactMode(), sampling, 9, 9, stop=(stop,))
    request = Request("a-0", (1,), ExactMode(), sampling, 9, frozenset())
    counters = ReplicaCounters(ServeJob(checkpoint="x"))
    return OutputProcessor(
        asked, request, 0, decode_bytes, nothing, ReplyWriter(asked), counters
    )._up_to_stop


def nothing(_token: int, logprob: float) -> TokenText:
    return TokenText("", (), logprob)


@pytest.mark.parametrize(("stop", "text", "used"), [("c", "ab", 3), ("bc", "a", 3), ("a", "", 1)])
def test_tokens_after_a_stop_string_are_not_counted(stop, text, used):
    """Several tokens come at once: the ones behind the stop string are not part of the answer."""
    assert up_to_stop(stop)(b"abcdef") == (text, used, True)


def test_a_stop_string_counts_behind_the_least_length():
    """Guards an answer that is shorter than `min_tokens`."""
    push = up_to_stop("b", 4)
    assert push(b"abc") == ("abc", 3, False)
    assert push(b"babab") == ("ba", 3, True)


def test_special_tokens_do_not_pile_up():
    """Guards an event loop that stands still: they were decoded all together at each of them."""
    decoded = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return "".join(chr(token) for token in tokens if token)

    detokenizer = Detokenizer(decode)
    text = "".join(map(detokenizer.push, [97, *[0] * 3000, 98, 99]))
    assert text == "abc"
    assert decoded < 300_000
