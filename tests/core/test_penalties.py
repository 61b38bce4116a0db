"""Penalties, biases and the least length, worked by hand."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mars_ray.config.decode import Sampling
from mars_ray.core.sampling import adjust


def adjusted(sampling, answers, prompt=(0,), logits=(2.0, -1.0, 0.5, 1.0)):
    rows = torch.tensor([logits] * len(answers))
    adjust(rows, sampling, prompt, answers, [len(answer) for answer in answers], stop_ids={3})
    return rows


def test_openai_penalties_count_the_answer_only():
    """Token 1 once and token 2 twice; the prompt's token 0 is none of theirs."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    rows = adjusted(sampling, [[1, 2, 2], []])
    assert rows[0].tolist() == pytest.approx([2.0, -1.75, -0.5, 1.0])
    assert rows[1].tolist() == [2.0, -1.0, 0.5, 1.0]


def test_the_repetition_penalty_makes_seen_tokens_less_likely():
    """Positive logits are divided, negative ones multiplied; the prompt counts."""
    rows = adjusted(Sampling(repetition_penalty=2.0), [[1], []])
    assert rows[0].tolist() == [1.0, -2.0, 0.5, 1.0]
    assert rows[1].tolist() == [1.0, -1.0, 0.5, 1.0]


def test_a_banned_token_stays_banned():
    """Guards -inf - -inf and -inf * 0."""
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=-1.0, logit_bias={1: 100.0})
    rows = adjusted(sampling, [[1]], logits=(2.0, -math.inf, 0.5, 1.0))
    assert rows[0, 1] == -math.inf
    assert not rows.isnan().any()


def test_bias_and_least_length():
    """The stop token is out of reach before the third token, and for no row after."""
    rows = adjusted(Sampling(logit_bias={0: -3.0}, min_new_tokens=2), [[], [1], [1, 1]])
    assert rows[:, 0].tolist() == [-1.0] * 3
    assert rows[:, 3].tolist() == [-math.inf, -math.inf, 1.0]


def test_a_row_that_sees_less_than_stands_before_it_knows_its_place():
    """Guards a mask whose token could stop the answer, but was not let."""
    rows = torch.zeros(2, 4)
    adjust(rows, Sampling(min_new_tokens=2), [0], [[1], [1]], [1, 2], stop_ids={3})
    assert rows[:, 3].tolist() == [-math.inf, 0.0]


def test_rows_are_counted_behind_what_they_share():
    """The same as counting each row's text by itself."""
    sampling = Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    answers, prompt = [[2, 2], [2, 2, 1], [2, 2, 3, 3], [2, 2, 2]], (0, 2)
    together = adjusted(sampling, answers, prompt)
    apart = [adjusted(sampling, [answer], prompt)[0] for answer in answers]
    assert together.equal(torch.stack(apart))


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_biases_are_one_operation():
    """Guards three operations for each, in every step, on the one thread that serves everybody."""
    counts = []
    for biases in (1, 1000):
        rows = torch.zeros(2, 1000)
        with Operations() as operations:
            bias = {token: token / 10 for token in range(biases)}
            adjust(rows, Sampling(logit_bias=bias), [0], [[], [1]], [0, 1], stop_ids={3})
        counts.append(operations.count)
        expected = torch.tensor([*bias.values(), *[0.0] * (1000 - biases)])
        assert rows.equal(expected.expand(2, 1000))
    assert counts[0] == counts[1]
