"""The page at `/` and the files that it is made of, all of them shipped with the package."""

from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

FILES = "/page"
_DIRECTORY = Path(__file__).with_name("page")
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
# The page may use only its own files and this server; nothing may make HTML or scripts of text.
_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'self'; script-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


async def page() -> Response:
    """The page, which needs no key: it holds no data and asks for the key itself."""
    text = (_DIRECTORY / "index.html").read_text("utf-8")
    return HTMLResponse(text, headers=_HEADERS | {"Content-Security-Policy": _POLICY})


class PageFiles(StaticFiles):
    """The scripts and styles, which browsers ask for anew: an update changes all or none."""

    def __init__(self) -> None:
        super().__init__(directory=_DIRECTORY)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """See StaticFiles."""
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS | {"Cache-Control": "no-cache"})
        return response
