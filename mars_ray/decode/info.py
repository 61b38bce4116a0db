"""What an engine is, for logs and status: no torch, as who shows it has none."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's dtype, device, form of attention and KV cache, which never change."""

    engine: str
    dtype: str
    device: str
    attention: str  # the form of it, as `attention_backend` names them
    threads: int  # of the CPU
    cache_bytes: int  # of keys and values
    cache_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.engine} engine, {self.dtype} on {self.device}, {self.attention} attention, "
            f"{self.threads} CPU threads, KV cache of {self.cache_tokens} tokens in "
            f"{self.cache_bytes / 1e6:.1f} MB"
        )
