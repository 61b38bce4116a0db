"""Loops at the end of answers."""

from mars_ray.core.statistics import before_loop, is_looping


def test_a_loop_is_cut_behind_its_second_time():
    """What comes after would be learnt dozens of times."""
    tokens = [1, 2, 3] + [7, 8, 9] * 20
    assert is_looping(tokens)
    assert before_loop(tokens) == [1, 2, 3, 7, 8, 9, 7, 8, 9]


def test_a_loop_that_is_cut_off_in_the_middle():
    """Answers end at a limit, wherever the loop stands then."""
    tokens = [5] + [7, 8, 9, 6] * 12 + [7, 8]
    assert before_loop(tokens) == [5, 7, 8, 9, 6, 7, 8, 9, 6]


def test_text_that_repeats_a_little_is_no_loop():
    """A list's lines begin alike."""
    tokens = [n for i in range(20) for n in (1, 2, 100 + i)]
    assert not is_looping(tokens)
    assert before_loop(tokens) == tokens


def test_short_answers_are_no_loops():
    """`ha ha ha` is one, but too short to matter."""
    assert not is_looping([4] * 31)
    assert is_looping([4] * 32)


def test_the_longest_period():
    """A period of 16 is seen twice in the tail, one of 17 is not."""
    assert is_looping(list(range(16)) * 3)
    assert not is_looping(list(range(17)) * 3)
