"""A small tokenizer of the corpus, once a session."""

import pytest
from transformers import PreTrainedTokenizerFast

from mars_ray.data.corpus import problems
from mars_ray.model.create import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    texts = [text for p in problems("train", 200, 0) for text in (p.question, p.solution)]
    return train_tokenizer(texts, 400)
