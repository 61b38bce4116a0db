"""Sums of tokens by hand."""

from token_sums import compared, log_sums, page_sums

LINES = [
    {"path": "/v1/models"},
    {"model": "m", "replica": "a", "key": "k", "prompt_tokens": 5, "completion_tokens": 7},
    {"model": "m", "replica": "a", "key": "l", "prompt_tokens": 5, "completion_tokens": 0},
    {"model": "m", "replica": "gone", "key": "k", "prompt_tokens": 2, "completion_tokens": 1},
    {"model": "m", "key": "k", "prompt_tokens": 0, "completion_tokens": 0},
    {"model": "other", "replica": "a", "prompt_tokens": 9, "completion_tokens": 9},
]


def page(written: int = 7, engine: int = 10, of_key: int = 8) -> str:
    ours, whose = 'replica="a",model_name="m"', 'replica="i",model_name="m"'
    counts = {
        f"prompt_tokens_total{{{ours}}}": 10,
        f'generation_tokens_total{{{ours},mode="exact"}}': written - 2,
        f'generation_tokens_total{{{ours},mode="verified"}}': 2,
        f"engine_tokens_total{{{ours}}}": engine,
        f"discarded_tokens_total{{{ours}}}": 3,
        f'key_prompt_tokens_total{{{whose},key="k"}}': 7,
        f'key_generation_tokens_total{{{whose},key="k"}}': of_key,
        f'key_prompt_tokens_total{{{whose},key="l"}}': 5,
        'generation_tokens_total{replica="a",model_name="other"}': 4,
    }
    return "".join(f"ray_mars_{name} {value}.0\n" for name, value in counts.items())


def test_sums_by_replica_and_by_key():
    """A replica that is gone is in the log alone, and its tokens are still its key's."""
    found = compared(log_sums(LINES, "m"), page_sums(page(), "m"))
    assert found["equal"]
    assert found["alive"] == {
        "a": {
            "log": {"prompt": 10, "completion": 7},
            "metrics": {"prompt": 10, "completion": 7},
            "engine": {"completion": 7},
        }
    }
    assert found["lost"] == {"gone": {"log": {"prompt": 2, "completion": 1}}}
    assert found["keys"]["k"] == {
        "log": {"prompt": 7, "completion": 8},
        "metrics": {"prompt": 7, "completion": 8},
    }


def test_a_token_too_many_is_seen():
    """In each of the three places, and in a key's."""
    log = log_sums(LINES, "m")
    for wrong in (page(written=8), page(engine=11), page(of_key=9)):
        assert not compared(log, page_sums(wrong, "m"))["equal"]
    assert not compared(log_sums(LINES[:2], "m"), page_sums(page(), "m"))["equal"]
