"""The memory that a stage will need, estimated before it starts, in bytes per worker.

There are P parameters, T of them trained (all, except with LoRA), W workers, and e bytes per number
in the forward (4 in float32, 2 in bfloat16).

    torch               weights 4P, gradients 4T, AdamW's moments 8T; in bfloat16 autocast's copy 2P
    ZeRO 1              weights eP, gradients eT, (float32 copy, its gradient, moments: 16T) / W
    ZeRO 2              gradients eT / W besides
    ZeRO 3              weights eP / W besides, and what is gathered at a time
    offload optimizer   float32 copy, moments and their gradient go to the node's memory
    offload all         ZeRO 3's weights too

A row of a forward (a token of the clean stream, or a mask) keeps for the backward, in each layer,
8 hidden and 2 key sizes in float32 and 4 intermediate ones, as autograd's saved tensors of Qwen2
show. With gradient checkpointing it keeps one hidden size per layer, and one layer in full, with
its gradients. The dense attention mask (CPU) costs 4 bytes per pair of rows and layer. The head
takes three times a chunk's float32 logits, and the gradient of its weight. A starting model that
anchors answers (anchor_weight) is a whole copy eP on each worker, with its own chunk's logits.

A draft adapter's model is frozen and whole on every worker, eP; T counts the adapter's parameters.
Clean rows keep keys and values of each layer. Mask rows keep in each layer 2 hidden sizes in
float32; in the forward's dtype 2 hidden, 2 query, 2 key and 4 intermediate sizes; and the weights
of their attention.
"""

import math
import socket
from dataclasses import dataclass

import torch

from mars_ray.config.inputs import DataConfig
from mars_ray.config.train import DeepSpeedEngine as ZeroConfig
from mars_ray.config.train import DraftObjective, MarsObjective, StageConfig, TrainJob
from mars_ray.data.rows import Conversations
from mars_ray.errors import MemoryShortError
from mars_ray.model.shape import ModelShape
from mars_ray.provenance import free_on_node
from mars_ray.train.model_step import chunk_rows
from mars_ray.train.ranks import Ranks

# DeepSpeed's default number of parameters that ZeRO-3 has gathered at a time.
_ZERO_3_LIVE = 1_000_000_000
_GIB = 1 << 30
_SAMPLED = 512


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one worker."""

    parts: dict[str, float]  # on its device, by purpose
    offloaded: float  # on its node

    @property
    def device(self) -> float:
        return sum(self.parts.values())

    def text(self) -> str:
        listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in self.parts.items() if size)
        return f"{self.device / _GIB:.2f} GiB a worker ({listed})"


@dataclass(frozen=True, slots=True)
class RowSize:
    """The longest row of the training data: its tokens, and how many of them may get a mask."""

    tokens: int
    responses: int

    @classmethod
    def of(cls, conversations: Conversations, data: DataConfig) -> "RowSize":
        step = max(1, len(conversations) // _SAMPLED)
        sample = [conversations[index].response for index in range(0, len(conversations), step)]
        if data.packing:
            share = sum(r.sum() for r in sample) / sum(len(r) for r in sample)
            return cls(data.max_length, math.ceil(data.max_length * share))
        tokens = int(conversations.lengths.max())
        return cls(tokens, min(tokens, max(int(response.sum()) for response in sample)))


def estimate(
    shape: ModelShape,
    job: TrainJob,
    stage: StageConfig,
    row: RowSize,
    world_size: int,
    *,
    on_cuda: bool,
) -> MemoryEstimate:
    """Memory that one of `world_size` workers needs for a stage."""
    share = math.ceil(stage.global_batch_size / world_size)
    batch = min(stage.micro_batch_size or share, share)
    if isinstance(stage.objective, DraftObjective):
        return _draft_estimate(shape, job, stage, row, world_size, batch)
    trained = shape.adapter_parameters(stage.lora.rank) if stage.lora else shape.parameters
    states, offloaded = _states(shape.parameters, trained, job, world_size)
    # Noisy rows, and rows with a target, for one row of a batch.
    masks, targets, anchor = 0, row.responses, 0.0
    if isinstance(stage.objective, MarsObjective):
        noisy = math.ceil(row.responses * stage.objective.noisy_share)
        masks = row.tokens if stage.objective.layout == "paper" else noisy
        targets += noisy
        if stage.objective.anchor_weight:
            anchor = _number_bytes(job) * shape.parameters + _logits(shape, batch * row.tokens)
    head = _logits(shape, batch * targets)
    if stage.lora is None:
        head += _number_bytes(job) * shape.vocabulary * shape.hidden  # its weight's gradient
    length, size = row.tokens + masks, _number_bytes(job)
    kept = 8 * shape.hidden + 2 * shape.key_size
    layer = (4 * kept + 4 * size * shape.intermediate) * batch * length
    if not on_cuda:
        layer += 4 * length * batch * length
    activations = shape.layers * layer
    if job.gradient_checkpointing:
        activations = shape.layers * size * shape.hidden * batch * length + 2 * layer
    forward = {"activations": activations, "output head": head, "starting model": anchor}
    return MemoryEstimate(states | forward, offloaded)


def check_memory(
    shape: ModelShape, job: TrainJob, stage: StageConfig, row: RowSize, ranks: Ranks
) -> None:
    """Raises MemoryShortError on all ranks if one lacks the memory; collective.

    With `cluster.memory_check` off it never raises.
    """
    on_cuda = ranks.device.type == "cuda"
    needs = estimate(shape, job, stage, row, ranks.world_size, on_cuda=on_cuda)
    host = socket.gethostname()
    hosts = ranks.gather(host)
    node_bytes = free_on_node() / hosts.count(host)
    device_bytes = torch.cuda.mem_get_info(ranks.device)[0] if on_cuda else node_bytes
    on_node = needs.offloaded if on_cuda else needs.offloaded + needs.device
    fits = needs.device <= device_bytes and on_node <= node_bytes
    told = ranks.gather(None if fits else (host, device_bytes, node_bytes))
    short = [found for found in told if found is not None]
    if short and job.cluster.memory_check:
        where, device, node = short[0]
        raise MemoryShortError(
            f"this stage needs about {needs.text()} and {needs.offloaded / _GIB:.2f} GiB of its "
            f"node, but a worker on {where} has {device / _GIB:.2f} GiB free, its node's share "
            f"{node / _GIB:.2f}. {advice(job, stage)}, or set cluster.memory_check=false to try"
        )


def advice(job: TrainJob, stage: StageConfig) -> str:
    """Changes by which a stage needs less memory, the cheapest first."""
    ways = ["lower micro_batch_size" if stage.micro_batch_size != 1 else "lower data.max_length"]
    if not job.gradient_checkpointing:
        ways.append("set gradient_checkpointing=true")
    if isinstance(stage.objective, DraftObjective):
        ways += ["lower objective.grids"] * (stage.objective.grids > 1)
        return f"To need less: {', '.join(ways)}"
    if not isinstance(job.engine, ZeroConfig):
        ways.append("use engine.type=deepspeed with zero_stage=3 on more workers")
    elif job.engine.zero_stage < 3:
        ways.append("raise engine.zero_stage to 3")
    elif job.engine.offload != "all":
        ways.append("set engine.offload=all")
    if stage.lora is None:
        ways.append("train adapters (stages.*.lora)")
    return f"To need less: {', '.join(ways)}"


def _draft_estimate(
    shape: ModelShape, job: TrainJob, stage: StageConfig, row: RowSize, workers: int, batch: int
) -> MemoryEstimate:
    objective, config = stage.objective, stage.adapter
    assert isinstance(objective, DraftObjective), "a draft stage"
    assert config is not None, "the config demands an adapter"
    size, depth = _number_bytes(job), objective.max_block_size
    head = 2 * shape.hidden if config.head_size is None else config.head_size
    trained = depth * (shape.hidden + head) + 3 * shape.hidden * head
    trained += shape.adapter_parameters(config.rank)
    states, offloaded = _states(trained, trained, job, workers)
    states["weights"] += size * shape.parameters
    masks = batch * math.ceil(row.responses * objective.grids * objective.noisy_share)
    sizes = 2 * (shape.hidden + shape.query_size + shape.key_size) + 4 * shape.intermediate
    attention = shape.query_heads * (row.tokens + depth)
    layer = masks * (8 * shape.hidden + size * (sizes + attention))
    kept = 2 * size * shape.key_size * batch * row.tokens * shape.layers
    if job.gradient_checkpointing:
        kept += 4 * shape.hidden * masks * shape.layers + 2 * layer
    else:
        kept += shape.layers * layer
    forward = {"activations": kept, "output head": _logits(shape, masks)}
    return MemoryEstimate(states | forward, offloaded)


def _number_bytes(job: TrainJob) -> int:
    """Bytes per number in the forward."""
    return 2 if job.precision == "bfloat16" else 4


def _logits(shape: ModelShape, rows: int) -> float:
    """Bytes of a chunk's float32 logits, with their copies."""
    return 3 * 4.0 * shape.vocabulary * min(rows, chunk_rows(shape.vocabulary))


def _states(held: int, trained: int, job: TrainJob, workers: int) -> tuple[dict[str, float], float]:
    """Bytes of an engine's weights, `trained` of which get a gradient, and of its optimizer; and
    those that are offloaded."""
    size = _number_bytes(job)
    if not isinstance(job.engine, ZeroConfig):
        weights = (6.0 if size == 2 else 4.0) * held  # with autocast's copy
        return {"weights": weights, "gradients": 4.0 * trained, "optimizer": 8.0 * trained}, 0.0
    zero = job.engine
    weights = float(size * held)
    gradients: float = size * trained / (workers if zero.zero_stage >= 2 else 1)
    optimizer: float = 16 * trained / workers
    offloaded = 0.0
    if zero.zero_stage == 3:
        whole, weights = weights, weights / workers
        if zero.offload == "all":
            offloaded, weights = weights, 0
        if workers > 1 or zero.offload == "all":
            weights += min(whole, size * _ZERO_3_LIVE)
    if zero.offload != "none":
        offloaded, optimizer = offloaded + optimizer, 0
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}, offloaded
