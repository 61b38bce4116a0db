"""A description of an engine for logs and status, without torch, which their processes lack."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's dtype, device, attention backend and KV cache, which never change."""

    engine: str
    dtype: str
    device: str
    attention: str  # name of the backend, as in `attention_backend`
    # Of the compiled step: results are the same bit for bit where this is the same.
    instructions: str | None
    threads: int  # CPU threads
    cache_bytes: int  # size of keys and values
    cache_tokens: int

    def __str__(self) -> str:
        step = f"{self.attention} attention"
        if self.instructions:
            step = f"compiled step ({self.instructions})"
        return (
            f"{self.engine} engine, {self.dtype} on {self.device}, {step}, "
            f"{self.threads} CPU threads, KV cache of {self.cache_tokens} tokens in "
            f"{self.cache_bytes / 1e6:.1f} MB"
        )
