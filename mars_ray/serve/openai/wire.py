"""The base of all that a request's body consists of."""

from pydantic import BaseModel, ConfigDict


class Wire(BaseModel):
    """Part of a request's body: no unknown fields, and no text where a number belongs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
