"""The sizes of a model, from its configuration alone; no weights are loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder with gated MLPs, like all supported architectures."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    query_size: int  # heads times head size
    key_size: int  # total size of the key heads
    biases: bool  # whether the projections to queries, keys and values have biases
    head_norms: int  # parameters of the norms of queries and keys in a layer
    tied: bool

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices."""
        h, i, q, k = self.hidden, self.intermediate, self.query_size, self.key_size
        return [(h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h)]

    @property
    def body_weights(self) -> int:
        """Number of weights in all layers' matrices."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def parameters(self) -> int:
        """Number of all parameters; a tied head counts once."""
        biases = self.query_size + 2 * self.key_size if self.biases else 0
        small = self.layers * (2 * self.hidden + biases + self.head_norms) + self.hidden
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.body_weights + small + tables

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of low-rank adapters on all of the layers' matrices."""
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)


def shape_of(directory: str | Path) -> ModelShape:
    """The shape of the model in a directory."""
    from transformers import AutoConfig  # takes seconds, and the rest needs none

    return shape_of_config(AutoConfig.from_pretrained(directory, trust_remote_code=False))


def shape_of_config(config: Any) -> ModelShape:
    """The shape of a model of one of `directory.ARCHITECTURES`."""
    given = config.to_dict()
    size = given.get("head_dim") or config.hidden_size // config.num_attention_heads
    return ModelShape(
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        query_size=config.num_attention_heads * size,
        key_size=config.num_key_value_heads * size,
        biases=config.model_type == "qwen2",
        head_norms=2 * size if config.model_type == "qwen3" else 0,
        tied=bool(config.tie_word_embeddings),
    )


def most_positions(config: Any) -> int:
    """Most positions of the model, including a stretched rotary embedding."""
    rope = getattr(config, "rope_parameters", None) or {}
    positions = config.max_position_embeddings
    match rope.get("rope_type"):
        case "linear":
            return int(positions * rope.get("factor", 1.0))
        case "yarn":
            # The length before stretching; the other number may be stretched already.
            return int(
                (rope.get("original_max_position_embeddings") or positions)
                * rope.get("factor", 1.0)
            )
        case _:
            return int(positions)


def sliding_window(config: Any) -> int | None:
    """Most tokens that a row sees, itself included; None if it sees all before it."""
    return getattr(config, "sliding_window", None)
