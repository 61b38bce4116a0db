"""The base of everything a user writes: frozen, unknown keys refused."""

from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen configuration section; a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    for i, value in enumerate(values):
        if value in values[:i]:
            raise ValueError(f"holds {value!r} twice")
    return values


# Of a tuple whose values are told apart by themselves.
DISTINCT = AfterValidator(_distinct)
