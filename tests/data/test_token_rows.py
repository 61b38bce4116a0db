"""Rows of token ids: what a model wrote is what is trained on, to the byte."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from mars_ray.config.inputs import DataConfig, FilesSource
from mars_ray.data.loader import Loader
from mars_ray.data.rows import Conversations, tokenize
from mars_ray.errors import DataError


def source_of(tmp_path: Path, *rows: dict[str, Any]) -> FilesSource:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FilesSource(paths=(str(path),))


def read_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, *rows: dict[str, Any], **settings: Any
) -> Conversations:
    source = source_of(tmp_path, *rows)
    return tokenize(source, tokenizer, DataConfig(train=source, **settings), tmp_path / "cache")


def apart(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Tokens whose text is written with fewer of them."""
    letters = list(" apples")
    ids = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in letters]
    again = tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)
    assert len(again) < len(ids), "these would survive decoding and encoding"
    return ids


def test_ids_reach_a_batch_as_they_are(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    """Guards answers that are decoded and encoded again: other tokens than the model wrote, so
    other rows than those its masks stand for. The rows of the batch are compared byte for byte."""
    ids = apart(tokenizer)
    end = tokenizer.eos_token_id
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": " apples"}]
    rows = [
        # As generate writes it; cut at its limit and so without an end; and ids alone.
        {"messages": turns, "prompt_ids": [5, *ids], "answer_ids": [*ids, end], "forwards": 8},
        {"messages": turns, "prompt_ids": [6, 7, *ids], "answer_ids": ids[:-1]},
        {"prompt_ids": [8], "answer_ids": ids[::-1] * 2},
    ]
    conversations = read_rows(tmp_path, tokenizer, *rows)
    loader = Loader(
        conversations,
        global_batch_size=3,
        micro_batch_size=3,
        rank=0,
        world_size=1,
        seed=0,
        packing=False,
        max_length=64,
    )
    (batch,) = next(iter(loader))
    found = {}
    for tokens, documents, response in zip(
        batch.input_ids_BL, batch.document_BL, batch.response_BL, strict=True
    ):
        length = int(conversations.lengths[documents[0]])
        found[int(documents[0])] = (tokens[:length].numpy(), response[:length].numpy())
    for index, row in enumerate(rows):
        whole = np.array(row["prompt_ids"] + row["answer_ids"], dtype=found[index][0].dtype)
        assert found[index][0].tobytes() == whole.tobytes()
        is_answer = np.arange(len(whole)) >= len(row["prompt_ids"])
        assert found[index][1].tobytes() == is_answer.tobytes()


def test_long_rows_are_cut_and_those_of_long_prompts_are_left_out(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    """At the end, where an answer is, as rows of text are. Guards rows that teach nothing, and data
    of which a few such rows are too many."""
    rows = [{"prompt_ids": [5] * prompt, "answer_ids": [6] * 10} for prompt in (3, 20, 30)]
    conversations = read_rows(tmp_path, tokenizer, *rows, max_length=25)
    assert conversations.lengths.tolist() == [13, 25]
    assert conversations[1].response.tolist() == [False] * 20 + [True] * 5
    summary = conversations.summary
    assert (summary.bad, summary.dropped, summary.truncated) == (0, 1, 1)


def test_an_answer_that_was_cut_after_it_was_written_is_taken(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    """Loops are cut from ids and not from the text; a cut may split a character."""
    half = tokenizer.encode("é", add_special_tokens=False)[:1]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": " apples é"}]
    row = {"messages": turns, "prompt_ids": [5], "answer_ids": apart(tokenizer)}
    space = tokenizer.encode(" ", add_special_tokens=False)
    split = row | {"answer_ids": [*row["answer_ids"], *space, *half]}
    assert len(read_rows(tmp_path, tokenizer, row, split)) == 2


BAD = [
    ({"prompt_ids": [5], "answer_ids": []}, "answer_ids is not a list of token ids"),
    ({"prompt_ids": "5", "answer_ids": [5]}, "prompt_ids is not a list"),
    ({"prompt_ids": [5], "answer_ids": [-1]}, "answer_ids holds what is no token id"),
    ({"prompt_ids": [5], "answer_ids": [True]}, "answer_ids holds what is no token id"),
    ({"prompt_ids": [5], "answer_ids": [2**31]}, "answer_ids holds what is no token id"),
    ({"prompt_ids": [5], "answer_ids": [100_000]}, "token 100000 is beyond the tokenizer's"),
    ({"prompt_ids": [5], "answer_ids": [5], "messages": "?"}, "messages is not a list"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_bad_rows_say_why(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, Any], reason: str
):
    """Guards an index error inside the model, an hour later."""
    with pytest.raises(DataError, match=rf"own\.jsonl:1: .*{reason}"):
        read_rows(tmp_path, tokenizer, row)


def test_ids_of_another_tokenizer_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    """Guards a model trained on noise: the ids are in its vocabulary and mean something else."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": " apples"}]
    other = [token + 1 for token in apart(tokenizer)]
    row = {"messages": turns, "prompt_ids": [5], "answer_ids": other}
    with pytest.raises(DataError, match="do not say what the last message says"):
        read_rows(tmp_path, tokenizer, row)


def test_other_ids_are_cached_elsewhere(tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    """Guards a run on the answers of an earlier one, whose file had the same name."""
    row = {"prompt_ids": [5], "answer_ids": [6, 7]}
    first = read_rows(tmp_path, tokenizer, row)
    second = read_rows(tmp_path, tokenizer, row | {"answer_ids": [6, 8]})
    assert first.directory != second.directory
    assert first.fingerprint != second.fingerprint
    assert second[0].input_ids.tolist() == [5, 6, 8]
