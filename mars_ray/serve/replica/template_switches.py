"""What a request may tell the chat template: whether, and how hard, the model is to think.

A template with variables of its own is a program with inputs, so only these are let in. Whether it
knows a switch is seen by what it writes with one value and with another.
"""

from mars_ray.data.chat import ChatEncoder
from mars_ray.errors import RequestError
from mars_ray.serve.protocol import Switches

EFFORT = "reasoning_effort"
_THINKING = ("enable_thinking", "thinking")
_NO_EFFORT = "none"


def template_options(switches: Switches, encoder: ChatEncoder) -> dict[str, bool | str]:
    """The variables that the template gets.

    Raises RequestError for a switch that the template does not know, unless it says not to think,
    which is what a model without such a switch does.
    """
    options: dict[str, bool | str] = {}
    for name, value in switches:
        if name == EFFORT:
            options |= _effort(str(value), encoder) | options
        elif encoder.has_switch(name, False, True):
            options[name] = value
        elif value:
            raise RequestError(
                f"the chat template of this model has no switch {name!r}: leave it out",
                field=f"chat_template_kwargs.{name}",
            )
    return options


def _effort(value: str, encoder: ChatEncoder) -> dict[str, bool | str]:
    options: dict[str, bool | str] = {}
    if value == _NO_EFFORT:
        options |= {name: False for name in _THINKING if encoder.has_switch(name, False, True)}
    if encoder.has_switch(EFFORT, "low", "high"):
        options[EFFORT] = value
    elif value != _NO_EFFORT:
        raise RequestError(
            f"the chat template of this model knows no efforts: leave {EFFORT!r} out, or set a "
            "thinking switch in 'chat_template_kwargs'",
            field=EFFORT,
        )
    return options
