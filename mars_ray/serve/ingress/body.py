"""Reads a request's body within the limits of size and time."""

import asyncio

from fastapi import Request

from mars_ray.config.serve import Limits
from mars_ray.serve.openai.request_models import ApiError
from mars_ray.serve.protocol import ErrorInfo


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body. Raises ApiError."""
    message = f"the body has more than {limits.body_bytes} bytes, this server's limit"
    too_large = ApiError(ErrorInfo(413, message, code="body_too_large"))
    # The HTTP parser has checked that it is a number.
    if int(request.headers.get("content-length", "0")) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_s:g} s"
        raise ApiError(ErrorInfo(408, message, code="body_too_slow")) from None
    return bytes(body)
