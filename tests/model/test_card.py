import pytest

from mars_ray.errors import ModelError
from mars_ray.model.card import ModelCard, read_card, write_card


def test_round_trip(tmp_path):
    """Decoding reads what training wrote."""
    card = ModelCard("<|mask|>", 7, 4)
    write_card(tmp_path, card)
    assert read_card(tmp_path) == card


def test_a_missing_card_says_what_to_do(tmp_path):
    """The usual mistake: the run's directory instead of the model's, or a model not trained."""
    with pytest.raises(ModelError, match=r"has no mars\.json.*mars-ray train` first"):
        read_card(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"mask_token": "m", "mask_token_id": 1}',
        '{"mask_token": "m", "mask_token_id": "1", "block_size": 0}',
        '{"mask_token": "m", "mask_token_id": true, "block_size": 0}',
        '{"mask_token": "m", "mask_token_id": 1, "block_size": 0, "more": 1}',
    ],
)
def test_a_wrong_card_is_an_error(tmp_path, text):
    """Of another version, or edited by hand."""
    (tmp_path / "mars.json").write_text(text)
    with pytest.raises(ModelError, match=r"mars\.json"):
        read_card(tmp_path)
