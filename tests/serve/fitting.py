"""Makes requests answerable whose fields are each allowed but contradict each other.

What is wrong by itself stays as it is, so a request that must be refused still is: 0 is not false,
and "05" is no token.
"""

import re
from collections.abc import Sequence
from typing import Any

VOCABULARY = 330
_TOKENS = 8
_PROMPTS = 2
_DEPTH = 4
MODES = ("verified", "confidence", "exact", "jacobi")
_TOKEN = re.compile("(0|[1-9][0-9]{0,8})")


def fit(body: dict[str, Any], modes: Sequence[str] = MODES) -> dict[str, Any]:
    """The body of a request for answers, for the limits of the fuzzer's service and its modes."""
    fitted = dict(body)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        _replace(fitted, name, _TOKENS)
    _replace(fitted, "n", 1 + len(body) % 2)
    if _is_open(body.get("logprobs")) and _is_count(body.get("top_logprobs")):
        fitted["logprobs"] = True
    if _is_open(body.get("stream")) and isinstance(body.get("stream_options"), dict):
        fitted["stream"] = True
    if _is_count(body.get("best_of")):
        fitted["best_of"] = fitted.get("n") or 1
    _fit_thinking(fitted)
    _fit_mode(fitted, modes)
    if isinstance(body.get("logit_bias"), dict):
        fitted["logit_bias"] = {
            str(int(key) % VOCABULARY) if _TOKEN.fullmatch(key) else key: bias
            for key, bias in body["logit_bias"].items()
        }
    for name in ("prompt", "stop_token_ids"):
        if name in body:
            fitted[name] = _known(body[name])
    prompt = fitted.get("prompt")
    if isinstance(prompt, list) and len(prompt) <= 128 and _all_text(prompt):
        fitted["prompt"] = prompt[:_PROMPTS]
    return fitted


def fit_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """The same of what is to be made tokens, or text."""
    return {name: _known(value) if name == "tokens" else value for name, value in body.items()}


def _is_open(value: Any) -> bool:
    """Whether a switch is not given or off; 0 and "" are neither."""
    return value is None or value is False


def _fit_thinking(body: dict[str, Any]) -> None:
    """Nothing that the model's template does not know."""
    if body.get("reasoning_effort") in ("minimal", "low", "medium", "high", "xhigh", "max"):
        body["reasoning_effort"] = "none"
    if body.get("include_reasoning") is False:  # which needs a parser
        body["include_reasoning"] = True
    switches = body.get("chat_template_kwargs")
    if isinstance(switches, dict):
        body["chat_template_kwargs"] = {
            name: False if value is True else value for name, value in switches.items()
        }
    for both in (("ignore_eos", "response_format"), ("ignore_eos", "tools")):
        if body.get(both[0]) is True and body.get(both[1]) is not None:
            body[both[0]] = False


def _fit_mode(body: dict[str, Any], modes: Sequence[str]) -> None:
    """A mode that the service has, and no setting that it does not."""
    if not isinstance(body.get("mode"), str | None):
        return
    mode = modes[len(str(body)) % len(modes)]
    if body.get("mode") in (*MODES, None):
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
