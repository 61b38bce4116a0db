"""The base of everything a user writes: frozen, unknown keys refused."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen configuration section; a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
    )
