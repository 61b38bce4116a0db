"""The trained tiny model, once a session."""

import pytest
from decode.models import trained_model


@pytest.fixture(scope="session")
def model():
    return trained_model()
