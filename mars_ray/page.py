"""What the HTML pages of reports have in common: each is one file that needs no other."""

import io
from html import escape

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's, which differ also for readers who see few colours.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #181818) }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 14px; margin: .8rem 0 }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid #8884 }
th { border-bottom: 1px solid #888 } th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto; background: #fff; margin: .5rem 0 }
.facts { color: light-dark(#555, #aaa); font-size: 13px }
pre { background: #8882; padding: .6rem .8rem; overflow-x: auto; font-size: 13px }
.numbers { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1rem 0 }
.numbers b { display: block; font-size: 1.7rem; font-weight: 600 }
"""


def html(title: str, body: str, style: str = "") -> str:
    """A page of this body, which is HTML already; the title is plain text, and `style` is CSS of
    this page alone."""
    viewport = "<meta name=viewport content='width=device-width, initial-scale=1'>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>{viewport}"
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style><body>{body}</body></html>\n"
    )


def plain(axes: Axes) -> None:
    """Gives axes a faint grid and no frame at the top and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: Figure) -> str:
    """The figure as SVG, without the XML header, which may not stand inside a page."""
    FigureCanvasSVG(figure)
    text = io.StringIO()
    # The same plot always gets the same internal names, and its text stays text.
    with rc_context({"svg.hashsalt": "mars-ray", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    content = text.getvalue()
    return content[content.index("<svg") :]
