"""Every error this package raises on purpose.

MarsError
├── ConfigError                a job file or an override cannot be used
├── DataError                  a source cannot be read, or too many of its rows are bad
├── ModelError                 a model, tokenizer or chat template cannot be used
├── CheckpointError            a checkpoint is missing, incomplete or of another shape
├── ClusterError               a local cluster does not start, or is not there
├── TrainingError              training cannot start or go on
│   ├── NonFiniteLossError     the loss became NaN or infinite
│   └── MemoryShortError       a stage does not fit, or did not fit, into memory
├── RequestError               a decoding request is wrong (an HTTP 400)
│   └── PromptTooLongError     the prompt and the answer do not fit the context
├── DeadlineError              an answer was not finished in the time that its request had
└── EngineError                the decoding engine failed or was shut down
    └── PoisonError            the decoding engine failed on this request, and on no other

Messages say what is wrong, where, and what to do about it. Broken invariants are `assert`s, not
members of this tree.
"""


class MarsError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(MarsError):
    """A job file or an override cannot be used."""


class DataError(MarsError):
    """A source cannot be read, or too many of its rows are bad."""


class ModelError(MarsError):
    """A model, tokenizer or chat template cannot be used."""


class CheckpointError(MarsError):
    """A checkpoint is missing, incomplete or of another shape."""


class ClusterError(MarsError):
    """A local cluster does not start, or is not there."""


class TrainingError(MarsError):
    """Training cannot start or go on."""


class NonFiniteLossError(TrainingError):
    """The loss became NaN or infinite; the last checkpoint is untouched."""


class MemoryShortError(TrainingError):
    """A stage does not fit into memory: by the estimate, or when it ran."""


class RequestError(MarsError):
    """A decoding request is wrong; `field` names the part of the request at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLongError(RequestError):
    """The prompt and the answer do not fit the context."""


class DeadlineError(MarsError):
    """An answer was not finished in the time that its request had."""


class EngineError(MarsError):
    """The decoding engine failed or was shut down."""


class PoisonError(EngineError):
    """The decoding engine failed on this request, and on no other."""
