"""Makes requests answerable whose fields are each allowed but contradict each other.

What is wrong by itself stays as it is, so a request that must be refused still is.
"""

from typing import Any

VOCABULARY = 330
_TOKENS = 8
_PROMPTS = 2
_DEPTH = 4
_MODES = ("verified", "confidence", "exact", "jacobi")


def fit(body: dict[str, Any]) -> dict[str, Any]:
    """The body, for the limits of the fuzzer's service."""
    fitted = dict(body)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        _replace(fitted, name, _TOKENS)
    _replace(fitted, "n", 1 + len(body) % 2)
    if body.get("logprobs") in (None, False) and _is_count(body.get("top_logprobs")):
        fitted["logprobs"] = True
    if not body.get("stream") and body.get("stream_options") == {"include_usage": True}:
        fitted["stream"] = True
    _fit_mode(fitted)
    if isinstance(body.get("logit_bias"), dict):
        fitted["logit_bias"] = {
            str(int(key) % VOCABULARY) if key.isascii() and key.isdigit() else key: bias
            for key, bias in body["logit_bias"].items()
        }
    for name in ("prompt", "tokens"):
        if name in body:
            fitted[name] = _known(body[name])
    prompt = fitted.get("prompt")
    if isinstance(prompt, list) and len(prompt) <= 128 and _all_text(prompt):
        fitted["prompt"] = prompt[:_PROMPTS]
    return fitted


def _fit_mode(body: dict[str, Any]) -> None:
    """A mode that the service has, and no setting that it does not."""
    if not isinstance(body.get("mode"), str | None):
        return
    mode = _MODES[len(str(body)) % len(_MODES)]
    if body.get("mode") in (*_MODES, "speculative", None):
        body["mode"] = mode
    for name, most in (("window", 64), ("threshold", 1)):
        if _is_count(body.get(name)) and body[name] <= most:
            body[name] = min(body[name], _DEPTH)
            if mode in ("exact", "jacobi"):
                del body[name]


def _replace(body: dict[str, Any], name: str, count: int) -> None:
    if _is_count(body.get(name)):
        body[name] = count


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _all_text(prompt: list[Any]) -> bool:
    return all(isinstance(part, str) for part in prompt)


def _known(prompt: Any) -> Any:
    """Tokens of the model in place of others, and no prompt without any."""
    if isinstance(prompt, list):
        return [_known(part) for part in prompt]
    return prompt % VOCABULARY if _is_count(prompt) else "a" if prompt == "" else prompt
