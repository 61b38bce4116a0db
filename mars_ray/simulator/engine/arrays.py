"""The data of the compiled core: records in arrays; and its compiler, numba.

N requests, R places for replicas, B sequences of a batch, L quality levels.

Compiling takes several seconds, so the result is kept. Numba itself checks only the file of a
function, not those of the functions that it calls; here the cache's folder is named after the
content of all of them. It lies in the user's cache, because the installation may be read-only.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mars_ray.autoscale.service_model import PLAIN, Level, Mix, ServiceModel
from mars_ray.errors import ConfigError
from mars_ray.simulator.config import Cluster
from mars_ray.simulator.traces.trace import Trace

try:
    import numba
    from numba.core import config
except ModuleNotFoundError:
    raise ConfigError(
        "the simulator needs numba, which is not installed: pip install numba"
    ) from None

# Type checkers do not know the true types of these.
_CONFIG: Any = config
_NJIT: Any = numba.njit
_Function = TypeVar("_Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Records = Any  # numpy records, whose fields no type checker knows

# Status of a place.
FREE, STARTING, READY, DRAINING = range(4)
# Outcome of a request.
OPEN, DONE, SHED, FAILED = range(4)
# Routing.
TWO_CHOICES, LEAST_OUTSTANDING, PREFIX = range(3)
_ROUTINGS = {"two-choices": TWO_CHOICES, "least-outstanding": LEAST_OUTSTANDING, "prefix": PREFIX}
# Places of `World.counts`; SENT counts tokens of prompts that were routed.
NEXT, HELD_HEAD, HELD_TAIL, HELD, READIES, FIRSTS, ENDS, REFUSED, PINNED, SENT = range(10)
NOBODY = -1

_REQUEST = np.dtype(
    [
        # From the trace.
        ("arrival_s", "f8"),
        ("prompt", "i8"),
        ("output", "i8"),
        ("priority", "i8"),
        ("pinned", "i8"),  # the lowest level that may serve it
        ("pins", "?"),  # whether it pins a level itself, even if that is the last level
        ("parent", "i8"),  # an earlier request whose first tokens are the same; or NOBODY
        ("shared", "i8"),  # how many of them are
        ("gain", "f8"),  # tokens that masks bring it, as a multiple of those of the mean request
        # Uniform random numbers: for refusal when load is shed, and for routing.
        ("shed_at", "f8"),
        ("one", "f8"),
        ("other", "f8"),
        # Results.
        ("first_s", "f8"),  # time of the first token
        ("end_s", "f8"),
        ("points", "f8"),  # sum over tokens of points lost
        ("lowest", "i8"),  # lowest level that served it
        ("replica", "i8"),
        ("outcome", "i8"),
        ("retries", "i8"),
        ("behind", "i8"),  # the next one in the same queue
        ("found", "i8"),  # tokens of its prompt that were in the cache
        # Tokens that had passed before its own: through its replica's cache, when it ended, and
        # through the router's table, when it was sent.
        ("freed_before", "i8"),
        ("sent_before", "i8"),
    ]
)
# A segment is a run of consecutive steps of one kind.
_REPLICA = np.dtype(
    [
        ("status", "i8"),
        ("level", "i8"),  # in force from the next step on
        ("born_s", "f8"),
        ("running", "i8"),
        ("waiting", "i8"),
        ("head", "i8"),
        ("tail", "i8"),
        ("start_s", "f8"),  # start of the segment
        ("steps", "i8"),  # steps of the segment; 0: idle
        ("step_s", "f8"),  # seconds of its first step
        ("growth_s", "f8"),  # additional seconds of each step over the one before
        ("room", "i8"),  # rows of each step for prompts
        ("decoding", "i8"),  # sequences that decode in it
        ("used_level", "i8"),
        ("promised", "i8"),  # cache tokens that the batch needs when its sequences end
        ("freed", "i8"),  # cache tokens of all sequences that have ended here
        ("rows", "f8"),  # rows of a decoding sequence, mean over the batch
        ("chunk", "i8"),  # rows of prompts in each step
        # Totals since the replica started, over finished segments.
        ("all_steps", "i8"),
        ("busy_s", "f8"),
        ("decode_rows", "f8"),
        ("prompt_steps", "i8"),
        ("prompt_rows", "i8"),
    ]
)
_SEQUENCE = np.dtype([("request", "i8"), ("prompt_left", "i8"), ("output_left", "f8")])


def compiled(function: _Function) -> _Function:
    if _FOLDER is None:
        return _NJIT(function)
    before = _CONFIG.CACHE_DIR
    _CONFIG.CACHE_DIR = str(_FOLDER)
    try:
        return _NJIT(cache=True)(function)
    finally:
        _CONFIG.CACHE_DIR = before


def _cache_folder() -> Path | None:
    """Folder of compiled functions; None if it cannot be written: then every process compiles."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = root / "mars-ray" / "numba" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


_FOLDER = _cache_folder()


class Tables(NamedTuple):
    """The service model, looked up by level and by how many sequences decode."""

    rows_LB: Floats  # rows of a sequence in a step
    tokens_LB: Floats  # tokens that it commits in a step
    points_L: Floats  # points of accuracy lost per token
    seconds: Floats  # seconds of a step, by rows
    cache_token_s: float
    prompt_attention_s: float
    cache_tokens: int  # size of a replica's cache
    page_tokens: int
    step_tokens: int  # rows that a step may have
    queue_limit: int  # requests that may wait at a replica
    max_retries: int
    routing: int


class World(NamedTuple):
    """State of a run: everything that changes."""

    requests: Records  # [N]
    replicas: Records  # [R]
    batch: Records  # [R, B]
    ready: Ints  # places that take requests, the first READIES
    # Next event of each place, as a tournament tree, [2P] with P a power of two. The winner of the
    # subtree under i stands at tree[i]; place r enters at tree[P + r].
    tree: Floats
    counts: Ints
    first_log: Ints  # requests by time of the first token; a retried one may be in it twice
    end_log: Ints  # requests by time of their end
    spent_s: Floats  # [1] seconds of replicas that are gone
    slowness: Floats  # [1] factor on all steps that begin


def make_world(
    trace: Trace,
    thresholds: list[float],
    places: int,
    batch: int,
    retries: int,
    seed: int,
    spread: tuple[float, ...] = (),
) -> World:
    """The state before the first replica. `thresholds` holds those of the levels, falling; `spread`
    is the service model's."""
    leaves = 1 << max(0, places - 1).bit_length()
    counts = np.zeros(SENT + 1, np.int64)
    counts[HELD_HEAD] = counts[HELD_TAIL] = NOBODY
    replicas = np.zeros(places, _REPLICA)
    replicas["head"] = replicas["tail"] = NOBODY
    requests = np.zeros(len(trace), _REQUEST)
    requests["arrival_s"] = trace.arrival_s
    requests["prompt"], requests["output"] = trace.prompt_tokens, trace.output_tokens
    requests["priority"] = trace.priority
    allowed = np.array(thresholds)[None] >= trace.pinned_threshold[:, None]
    requests["pinned"] = np.maximum(0, allowed.sum(1) - 1)
    requests["pins"] = trace.pinned_threshold > 0
    requests["parent"], requests["shared"] = trace.parent, trace.shared_tokens
    rng = np.random.default_rng([seed, 2])
    for name in ("shed_at", "one", "other"):
        requests[name] = rng.random(len(trace))
    requests["first_s"] = requests["end_s"] = np.nan
    requests["replica"] = requests["behind"] = NOBODY
    requests["gain"] = 1
    if spread:
        # Drawn from the distribution with these quantiles, which has their mean.
        middles = (np.arange(len(spread)) + 0.5) / len(spread)
        shares = np.random.default_rng([seed, 4]).random(len(trace))
        requests["gain"] = np.interp(shares, middles, spread)
    return World(
        requests=requests,
        replicas=replicas,
        batch=np.zeros((places, batch), _SEQUENCE),
        ready=np.zeros(places, np.int64),
        tree=np.full(2 * leaves, np.inf),
        counts=counts,
        first_log=np.zeros(len(trace) * (retries + 1), np.int64),
        end_log=np.zeros(len(trace), np.int64),
        spent_s=np.zeros(1),
        slowness=np.ones(1),
    )


def make_tables(
    model: ServiceModel, levels: tuple[Level, ...], mix: Mix, cluster: Cluster
) -> Tables:
    """The tables of a model. A level's window is the one that window control would pick at that
    batch."""
    slowness, step_tokens = cluster.slowness, cluster.step_tokens or model.step_rows
    model = replace(model, step_rows=step_tokens)
    sizes = range(model.max_batch + 1)
    shapes = [[model.at(level, b, mix).shape if b else PLAIN for b in sizes] for level in levels]
    rows = np.array([[shape.positions for shape in line] for line in shapes])
    most = step_tokens + 2
    return Tables(
        rows_LB=rows,
        tokens_LB=np.array([[shape.tokens_per_forward for shape in line] for line in shapes]),
        points_L=np.array([level.points_lost for level in levels]),
        seconds=slowness * np.array([model.step_s(max(1, n)) for n in range(most)]),
        cache_token_s=slowness * model.cache_token_s,
        prompt_attention_s=slowness * model.prompt_attention_s,
        cache_tokens=model.cache_tokens or np.iinfo(np.int64).max,
        page_tokens=model.page_tokens,
        step_tokens=step_tokens,
        queue_limit=cluster.waiting_requests,
        max_retries=cluster.retries,
        routing=_ROUTINGS[cluster.routing],
    )
