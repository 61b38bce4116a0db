"""Why prompts have no line in the output: by reason, and by the lines that they came from."""

from collections.abc import Iterator

from mars_ray.config.generate import GenerateJob
from mars_ray.generate.part import Answer
from mars_ray.generate.prompts import Asked, Prompt

# Messages name this many places for a reason; the table beside the output has all.
_TOLD = 5


class LeftOut:
    """The origins of what is left out, by reason."""

    def __init__(self, asked: Asked) -> None:
        """With what was left out when the sources were read."""
        self.origins: dict[str, list[str]] = {}
        for origin, reason in asked.bad:
            self.add(f"bad row: {reason}", origin)
        for origin in asked.excluded:
            self.add("excluded", origin)

    def add(self, reason: str, origin: str) -> None:
        """Records one more."""
        self.origins.setdefault(reason, []).append(origin)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are for each reason."""
        return {reason: len(origins) for reason, origins in self.origins.items()}

    def lines(self) -> Iterator[str]:
        """A sentence for each reason."""
        for reason, origins in self.origins.items():
            more = f" and {len(origins) - _TOLD} more" if len(origins) > _TOLD else ""
            yield f"left out: {len(origins)}, {reason} ({', '.join(origins[:_TOLD])}{more})"


def has_room(prompt: Prompt, job: GenerateJob) -> bool:
    """Whether the context holds the prompt and the longest answer."""
    return len(prompt.ids) + job.max_new_tokens <= job.engine.max_context


def why_left_out(prompt: Prompt, answer: Answer | None, text: str, job: GenerateJob) -> str:
    """Why a prompt with this answer gets no line; empty if it gets one."""
    if answer is None and not has_room(prompt, job):
        return (
            f"too long: no room for {job.max_new_tokens} new tokens in engine.max_context "
            f"{job.engine.max_context}"
        )
    if answer is None:
        return "minutes were over"
    if answer.finish_reason != "stop" and not job.keep_cut:
        return "the answer was cut off by max_new_tokens"
    return "" if text.strip() else "the answer is empty"
