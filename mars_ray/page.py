"""Pages of reports: each is one HTML file that needs no other, made by one template.

A page is a title and parts, each a kind and its content:

    heading, text, facts, pre   a string; in text and facts `code` and **bold** are marked
    items, small_items          strings
    numbers                     pairs of a number and what it is
    table                       a Table
    details                     a summary and what it hides
    svg, html                   markup that is there already
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's, which differ also for readers who see few colours.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#888888"
Part = tuple[str, Any]
# A text, or a text with attributes such as "colspan=2".
Cell = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of headings, and rows."""

    heads: Sequence[Sequence[Cell]]
    rows: Sequence[Sequence[Cell]]


def page(title: str, parts: Sequence[Part], style: str = "") -> str:
    """The page's HTML; `style` is CSS of this page alone."""
    return _TEMPLATES.get_template("page.html.j2").render(title=title, parts=parts, style=style)


def _marked(text: str) -> Markup:
    """Text with code between backticks, and bold between pairs of asterisks."""
    code = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", code))


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters["marked"] = _marked


def plain(axes: Axes) -> None:
    """Gives axes a faint grid and no frame at the top and on the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: Figure) -> str:
    """The figure as SVG, without the XML header, which may not stand inside a page."""
    text = io.StringIO()
    # The same plot always gets the same internal names, and its text stays text.
    with rc_context({"svg.hashsalt": "mars-ray", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    content = text.getvalue()
    return content[content.index("<svg") :]
