"""The sizing table of docs/training.md against the script that makes it."""

import importlib.util
from pathlib import Path

import pytest

from mars_ray.model.presets import preset_config
from mars_ray.model.shape import shape_of_config

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sizing.py"


@pytest.fixture(scope="module")
def sizing():
    spec = importlib.util.spec_from_file_location("sizing", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_says_what_the_script_says(sizing):
    """Guards a table that was made before the arithmetic changed."""
    assert "\n".join(sizing.table()) in sizing.PAGE.read_text()


def test_the_scripts_shapes_are_those_of_the_models(sizing):
    """Guards a typo in a shape; 32B's parameters are as its model card says, 32.5 billion."""
    assert sizing.SHAPES["0.5b"] == shape_of_config(preset_config("qwen2.5-0.5b", 151_936))
    assert sizing.SHAPES["7b"] == shape_of_config(preset_config("qwen2.5-7b", 152_064))
    assert sizing.SHAPES["32b"].parameters == pytest.approx(32.76e9, rel=0.005)
