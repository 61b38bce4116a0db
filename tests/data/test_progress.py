import io
import sys

from mars_ray.data import rows


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_only_a_terminal_sees_a_bar(monkeypatch):
    """Log files of a cluster job must not fill with redrawn lines."""
    monkeypatch.setattr(rows, "_QUIET_S", 0.0)
    shown = {}
    for kind in (io.StringIO, Terminal):
        monkeypatch.setattr(sys, "stderr", kind())
        with rows.counted(range(600), "reading") as items:
            assert list(items) == list(range(600))
        shown[kind] = sys.stderr.getvalue()
    assert shown[io.StringIO] == ""
    assert "reading" in shown[Terminal]
