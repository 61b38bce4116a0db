"""How the compiled step is found, built, checked, and left out where it cannot be used."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decode.cases import untrained

from mars_ray.config.decode import EngineConfig
from mars_ray.decode.attention import backend
from mars_ray.decode.cpu import backend as checking
from mars_ray.decode.cpu import compiling, library
from mars_ray.decode.cpu.backend import CompiledBackend
from mars_ray.decode.cpu.compiling import NoLibraryError
from mars_ray.decode.fused_model import FusedModel
from mars_ray.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not library.supported() or not compiling.compiler(), reason="needs g++ and AVX2"
)
SMALLEST = "avx2"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache, whose libraries are small and quickly compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "_COMMON", (*compiling._COMMON[1:], "-O0"))
    return tmp_path / "mars-ray"


def test_it_is_compiled_once_by_two_processes(tmp_path):
    """Guards a library that another process is still writing."""
    code = (
        "from mars_ray.decode.cpu import compiling, library\n"
        "compiling._COMMON = (*compiling._COMMON[1:], '-O0')\n"
        "print(library._in_cache('avx2'), library._loaded('avx2') is not None)"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {process.communicate()[0] for process in both}
    assert len(said) == 1
    assert [path.suffix for path in sorted((tmp_path / "mars-ray").iterdir())] == [".so", ".lock"]


def test_a_broken_file_of_the_cache_is_made_again(home):
    """Guards a start that fails for ever after a full disk."""
    path = library._in_cache(SMALLEST)
    path.write_bytes(b"no library")
    assert library._loaded(SMALLEST).mars_free
    assert path.stat().st_size > 10_000


def test_another_option_makes_another_file(home, monkeypatch):
    """Guards a library that was compiled otherwise, and says other texts."""
    made = []
    monkeypatch.setattr(library, "build", lambda _, to: made.append(to))
    library._in_cache(SMALLEST)
    monkeypatch.setattr(compiling, "_EXACT", ())
    library._in_cache(SMALLEST)
    assert len(set(made)) == 2


def test_a_cache_that_others_can_write_to_is_not_used(home, caplog):
    """What is loaded runs with our rights."""
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    with caplog.at_level(logging.INFO):
        path = library._in_cache(SMALLEST)
    assert path.exists()
    assert path.parent != home
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "others can write" in caplog.text


def test_without_a_compiler_it_says_what_to_install(home, monkeypatch):
    """In one sentence."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoLibraryError, match=r"install g\+\+, or a wheel"):
        library._in_cache(SMALLEST)


def test_a_library_with_wrong_results_is_not_used(monkeypatch, caplog):
    """Engines fall back to torch in one line, and refuse if the compiled step was asked for."""
    monkeypatch.setattr(checking, "_TOLERANCE", {torch.float32: 1e-9})
    checking.check.cache_clear()
    model = untrained("llama")
    assert isinstance(backend.runner_of(model, EngineConfig(), 64, False), FusedModel)
    (line,) = caplog.messages
    assert "two to three times slower" in line
    assert "wrong on this processor" in line
    with pytest.raises(ConfigError, match="wrong on this processor"):
        backend.runner_of(model, EngineConfig(attention_backend="compiled"), 64, False)
    monkeypatch.undo()
    checking.check.cache_clear()
    assert isinstance(backend.runner_of(model, EngineConfig(), 64, False), CompiledBackend)
