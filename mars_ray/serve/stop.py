"""The end of a service: it lets nobody in, finishes what it has accepted, and stops."""

import logging
import signal
import threading
import time
from types import FrameType

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from mars_ray.config.serve import ServeJob
from mars_ray.serve.build import APP_NAME
from mars_ray.serve.control import end_control
from mars_ray.serve.ingress import Ingress

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Serve's proxy may still be handing to clients what the ingress has already given to it.
_FLUSH_S = 1.0
_ANSWER_S = 10.0


def wait_until_stopped(job: ServeJob) -> None:
    """Blocks until SIGINT or SIGTERM, then drains the job's service and stops Serve.

    A second signal ends the draining at once. Only for the main thread, which gets the signals.
    """
    stop, at_once = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        (at_once if stop.is_set() else stop).set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in signals]
    try:
        stop.wait()
        drain(job.drain_s, at_once)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        serve.shutdown()
        for name in job.each():
            end_control(name)


def drain(limit_s: float, at_once: threading.Event) -> None:
    """Refuse new requests and wait for the accepted ones: so long, or until told otherwise."""
    deadline = time.monotonic() + limit_s
    try:
        ingress = serve.get_deployment_handle(Ingress.__name__, APP_NAME)
        ingress.broadcast("close").results(timeout_s=_ANSWER_S)
        while open_requests := sum(ingress.broadcast("inside").results(timeout_s=_ANSWER_S)):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or at_once.is_set():
                logger.warning("%d accepted requests were not finished", open_requests)
                return
            at_once.wait(_POLL_S)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the ingress cannot be asked what it has accepted: %s", error)
        return
    at_once.wait(_FLUSH_S)
