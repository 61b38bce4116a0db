import pytest

from mars_ray.errors import ModelError
from mars_ray.model.directory import PLAIN, ModelCard, read_card, write_card


def test_round_trip(tmp_path):
    """Decoding reads what training wrote."""
    card = ModelCard("<|mask|>", 7, 4)
    write_card(tmp_path, card)
    assert read_card(tmp_path) == card


def test_a_model_without_a_card_is_a_plain_one(tmp_path):
    """Any Hugging Face model can be served as it is."""
    (tmp_path / "config.json").write_text("{}")
    assert read_card(tmp_path) == PLAIN


def test_writing_a_plain_card_leaves_no_other(tmp_path):
    """A model that was saved over one of another kind would be decoded with its mask token."""
    write_card(tmp_path, ModelCard("<|mask|>", 7, 4))
    (tmp_path / "config.json").write_text("{}")
    write_card(tmp_path, PLAIN)
    assert read_card(tmp_path) == PLAIN


def test_a_directory_without_a_model_is_an_error(tmp_path):
    """The usual mistake: the run's directory instead of the model's."""
    with pytest.raises(ModelError, match=r"neither mars\.json nor config\.json"):
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
