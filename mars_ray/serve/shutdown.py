"""Shutdown of a service: it refuses new requests, finishes the accepted ones, and stops."""

import logging
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util import list_named_actors

from mars_ray.config.serve import ServeJob
from mars_ray.serve.deploy import APP_NAME
from mars_ray.serve.ingress.deployment import Ingress
from mars_ray.serve.threshold_actor import end_controls

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Serve's proxy may still be sending to clients what the ingress has passed to it.
_FLUSH_S = 1.0
_ANSWER_S = 10.0


def wait_until_stopped(job: ServeJob) -> None:
    """Blocks until SIGINT or SIGTERM, then drains the job's service and stops Serve.

    A second signal ends the draining at once. Must run in the main thread, which gets the signals.
    """
    stop, at_once = threading.Event(), threading.Event()
    is_drained = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        (at_once if stop.is_set() else stop).set()

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in signals]
    try:
        stop.wait()
        is_drained = drain(job.drain_s, at_once)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        if not is_drained:
            _cut()
        serve.shutdown()
        end_controls()


def drain(limit_s: float, at_once: threading.Event) -> bool:
    """Refuses new requests and waits for the accepted ones, until the limit or until `at_once`.

    Returns whether all of them are finished.
    """
    deadline = time.monotonic() + limit_s
    try:
        ingress = serve.get_deployment_handle(Ingress.__name__, APP_NAME)
        ingress.broadcast("close").results(timeout_s=_ANSWER_S)
        while open_requests := sum(ingress.broadcast("inside").results(timeout_s=_ANSWER_S)):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or at_once.is_set():
                logger.warning("%d accepted requests were not finished", open_requests)
                return False
            at_once.wait(_POLL_S)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("the ingress cannot be asked what it has accepted: %s", error)
        return False
    at_once.wait(_FLUSH_S)
    return True


def _cut() -> None:
    """Kills the replicas with their work; Serve alone would give them time to drain once more."""
    # Ray's annotation is for the other value of the argument.
    actors: Any = list_named_actors(all_namespaces=True)
    for actor in actors:
        if actor["name"].startswith(f"SERVE_REPLICA::{APP_NAME}#"):
            # The actor may have ended meanwhile.
            with suppress(ValueError):
                ray.kill(ray.get_actor(**actor))
