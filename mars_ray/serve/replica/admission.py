"""Admission of calls: limits answers to the places, and refuses a share of calls in an overload."""

from dataclasses import dataclass

from mars_ray.serve.protocol import ErrorInfo, GenerationRequest

_RETRY_AFTER_S = 1


@dataclass(slots=True)
class Admission:
    """Counts answers. `shed` is the share to refuse of the calls that pin nothing."""

    places: int
    open: int = 0
    shed: float = 0.0
    _owed: float = 0.0  # accumulated fraction of a refusal

    def refusal(self, call: GenerationRequest) -> ErrorInfo | None:
        """The error for a call that is refused, else None."""
        if self.open + call.choices > self.places:
            message = f"{self.open} answers are being written or wait; try again later"
            return ErrorInfo(429, message, code="too_many_requests", retry_after_s=_RETRY_AFTER_S)
        if call.quality_class is None:
            return None
        # Evenly spread, not random: at a share of 0.3, three of any ten calls.
        self._owed += self.shed
        if self._owed < 1:
            return None
        self._owed -= 1
        message = "the service is overloaded and refuses part of the requests; try again later"
        return ErrorInfo(429, message, code="overloaded", retry_after_s=_RETRY_AFTER_S)
