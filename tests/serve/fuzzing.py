"""Requests made up from the served schema, and what every answer to them has to be."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from serve.fitting import MODES, fit, fit_tokens

# Routes without a body have a few kinds of requests only.
PLAIN = (
    "/",
    "/healthz",
    "/readyz",
    "/health",
    "/ping",
    "/version",
    "/metrics",
    "/v1/models",
    "/v1/mars/status",
)
# How the generated requests are spread.
SHARES = {
    "/v1/chat/completions": 0.3,
    "/v1/completions": 0.3,
    "/v1/responses": 0.2,
    "/tokenize": 0.1,
    "/detokenize": 0.1,
}
_ANSWER_S = 60  # on machines that do much else, too


@dataclass(slots=True)
class Fuzzed:
    """What came back."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were answered."""
        return sum(self.statuses.values())

    @property
    def errors(self) -> int:
        """Answers that say that the fault is the service's."""
        return sum(count for (_, status), count in self.statuses.items() if status >= 500)

    def result(self) -> dict[str, Any]:
        """The counts, for `benchmarks/results`."""
        statuses: dict[str, dict[str, int]] = {}
        for (path, status), count in sorted(self.statuses.items()):
            statuses.setdefault(path, {})[str(status)] = count
        return {
            "requests": self.requests,
            "status_5xx": self.errors,
            "failures": len(self.failures),
            "statuses": statuses,
        }

    def table(self) -> str:
        """Counts by route and status, one line each."""
        lines = [f"{path:24} {status} {n:6}" for (path, status), n in sorted(self.statuses.items())]
        return "\n".join([*lines, f"{'all':24}     {self.requests:6}"])


def fuzz(
    url: str,
    path: str,
    examples: int,
    seed: int,
    fuzzed: Fuzzed,
    *,
    every_kind: bool = True,
    modes: Sequence[str] = MODES,
) -> None:
    """Sends every kind of request that one path's schema gives rise to, and `examples` more;
    `modes` are those of the engine behind it."""
    config = SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "request-timeout": _ANSWER_S,
            "max-stream-events": 1000,
            "continue-on-failure": True,
            "generation": {"max-examples": examples, "database": "none", "no-shrink": True},
            "phases": {"stateful": {"enabled": False}, "coverage": {"enabled": every_kind}},
            # Some of what a schema allows contradicts itself, or is beyond a server's limits.
            "checks": {
                "positive_data_acceptance": {"enabled": False},
                "negative_data_rejection": {"expected-statuses": [400, 404, 405, 413]},
            },
        }
    )
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)

    @schema.hook("map_body")
    def fitted(_context: Any, body: Any) -> Any:
        fitting = partial(fit, modes=modes) if path.endswith("completions") else fit_tokens
        return fitting(body) if isinstance(body, dict) and len(str(body)) % 8 else body

    for event in from_schema(schema.include(path=path)).execute():
        if isinstance(event, ScenarioFinished):
            _note(event, path, fuzzed)
        elif isinstance(event, NonFatalError | FatalError):
            error = getattr(event, "value", None) or event.exception
            fuzzed.failures.append(f"{path}: {error!r}")


def _note(event: ScenarioFinished, path: str, fuzzed: Fuzzed) -> None:
    recorder = event.recorder
    for case_id, interaction in recorder.interactions.items():
        response = interaction.response
        if response is None:
            fuzzed.failures.append(f"{path}: no answer to {recorder.cases[case_id].value!r}")
            continue
        fuzzed.statuses[path, response.status_code] += 1
        for check in recorder.checks.get(case_id, ()):
            if check.status == Status.FAILURE:
                body = recorder.cases[case_id].value.body
                fuzzed.failures.append(f"{path}: {check.name}: {body!r:.500}: {response.text:.500}")


@schemathesis.check
def streams_end(_context: Any, response: Any, _case: Any) -> None:
    """The shape of the events is the schema's to check; that the last one is an end is not."""
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        last = response.text.removesuffix("\n\n").split("\n\n")[-1]
        ends = ('data: {"error":', "event: response.completed", "event: response.incomplete")
        assert last == "data: [DONE]" or last.startswith((*ends, "event: error")), last
