"""The door of an ingress: it counts the requests inside, and once closed it lets nobody in."""

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mars_ray.serve.openai.responses import error_body
from mars_ray.serve.protocol import ErrorInfo

# As long as another process takes to answer on this address, or a load balancer to look elsewhere.
_RETRY_AFTER_S = 5
# What is asked to see how the service is, and counts for nothing.
_ALWAYS_OPEN = ("/healthz", "/readyz", "/metrics")
_CLOSED = ErrorInfo(503, "the service is stopping; try again later", code="draining")


class Gate:
    """Open until it is closed for good."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_open = True

    @property
    def inside(self) -> int:
        """Requests whose last byte has not been sent."""
        return self._inside

    @property
    def is_open(self) -> bool:
        """Whether requests are let in."""
        return self._is_open

    def close(self) -> None:
        """Let nobody in from now on; whoever is inside stays until served."""
        self._is_open = False

    def around(self, app: ASGIApp) -> ASGIApp:
        """The app behind this gate."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in _ALWAYS_OPEN:
                await app(scope, receive, send)
                return
            if not self._is_open:
                headers = {"Retry-After": str(_RETRY_AFTER_S)}
                refused = JSONResponse(error_body(_CLOSED), _CLOSED.status, headers)
                await refused(scope, receive, send)
                return
            self._inside += 1
            try:
                await app(scope, receive, send)
            finally:
                self._inside -= 1

        return gated
