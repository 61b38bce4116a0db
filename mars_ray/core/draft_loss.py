"""The losses of a draft adapter, against the frozen model's own predictions.

    loss = sum over mask rows of  row coefficient  * D(clean twin || mask row, over the vocabulary)
                                + head coefficient * D(clean twin || corrected row, over candidates)

D is the KL divergence, the total variation, or cross-entropy on the data's token. Candidates are
the mask row's likeliest tokens, with the twin's choice (for cross-entropy the data's token) in the
last place if it is not among them; distributions over them are renormalised.

Shape suffixes: N mask rows with a target, T clean rows, C rows of a chunk, P rows of a part of it,
U distinct twins of a part, H hidden size, V vocabulary, S candidates, J groups of the vocabulary.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from mars_ray.core.draft_head import candidate_logits

LossKind = Literal["kl", "ce", "tv"]

# Rows that go through the vocabulary's matrix at once, and of them those whose float32 logits are
# worked on at once: 3 MB of them at 49,152 tokens stay in a CPU's cache.
_CHUNK_ROWS = {"cpu": 128, "cuda": 4096}
_PART_ROWS = {"cpu": 16, "cuda": 1024}
_GROUP = 64


class DraftTargets(NamedTuple):
    """What mask rows are held to."""

    teacher_TH: Tensor  # last hidden states of clean rows
    twin_N: Tensor  # each mask row's among them, not falling
    token_N: Tensor  # the data's next token


class DraftChoices(NamedTuple):
    """What was found of each mask row, without a gradient."""

    row_N: Tensor
    head_N: Tensor  # 0 without a head
    row_choice_N: Tensor
    head_choice_N: Tensor
    twin_choice_N: Tensor


class DraftLoss(torch.autograd.Function):
    """The loss with its gradients at once, in chunks: no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        corrected_NH: Tensor | None,
        weight_VH: Tensor,
        targets: DraftTargets,
        coefficient_N2: Tensor,
        kind: LossKind,
        candidates: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, float32 (), and each row's row and head loss, float32 (N,), without a gradient.

        `coefficient_N2` are those of the row's loss and of the head's.
        """
        dtype = weight_VH.dtype
        losses = torch.zeros_like(coefficient_N2)
        grad_NH = torch.empty_like(hidden_NH)
        grad_corrected_NH = None if corrected_NH is None else torch.empty_like(corrected_NH)
        for rows in _chunks(hidden_NH):
            chunk = _Chunk(hidden_NH[rows], weight_VH, targets, rows, kind)
            if grad_corrected_NH is not None:
                assert corrected_NH is not None
                head = chunk.head(corrected_NH[rows], candidates)
                losses[rows, 1] = head.loss_C
                slope_CS = head.slope_CS * coefficient_N2[rows, 1:]
                grad_corrected_NH[rows] = torch.einsum(
                    "cs,csh->ch", slope_CS.to(dtype), weight_VH[head.candidate_CS]
                ).to(hidden_NH.dtype)
            losses[rows, 0], slope_CV = chunk.slope(coefficient_N2[rows, 0])
            grad_NH[rows] = torch.mm(slope_CV, weight_VH).to(hidden_NH.dtype)
        ctx.save_for_backward(grad_NH, grad_corrected_NH)
        row_N, head_N = losses.unbind(1)
        ctx.mark_non_differentiable(row_N, head_N)
        return (coefficient_N2 * losses).sum(), row_N, head_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the forward has computed, times the gradient of the loss."""
        grads = [None if g is None else g.mul_(grad) for g in ctx.saved_tensors]
        return *grads, *(None,) * 5


@torch.no_grad()
def draft_choices(
    hidden_NH: Tensor,
    corrected_NH: Tensor | None,
    weight_VH: Tensor,
    targets: DraftTargets,
    kind: LossKind,
    candidates: int,
) -> DraftChoices:
    """For evaluation: losses, and what mask rows, the head and the twins choose."""
    parts = []
    # Without rows there is one chunk, of none.
    for rows in _chunks(hidden_NH) or [slice(0, 0)]:
        chunk = _Chunk(hidden_NH[rows], weight_VH, targets, rows, kind)
        candidate_CS = likeliest(chunk.logits_CV, candidates)
        row_choice_C = head_choice_C = candidate_CS[:, 0]
        head_C = torch.zeros_like(row_choice_C, dtype=torch.float32)
        if corrected_NH is not None:
            # Nothing is put in the place of a candidate here: decoding could not.
            logits_CS = candidate_logits(
                corrected_NH[rows].to(weight_VH.dtype), weight_VH, candidate_CS
            )
            head_choice_C = candidate_CS.gather(1, logits_CS.argmax(dim=-1, keepdim=True))[:, 0]
            head_C = chunk.head(corrected_NH[rows], candidates).loss_C
        row_C, _ = chunk.slope(torch.ones_like(head_C))
        parts.append((row_C, head_C, row_choice_C, head_choice_C, chunk.twin_choice_C))
    return DraftChoices(*(torch.cat(column) for column in zip(*parts, strict=True)))


def likeliest(logits_CV: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest logits of each row, int64 (C, count), largest first.

    A row's largest are among its groups with the largest maxima, so only those are sorted: on a CPU
    topk over a whole vocabulary costs more than the product that made the logits.
    """
    rows, size = logits_CV.shape
    groups = size // _GROUP
    if groups <= count:
        return logits_CV.topk(min(count, size), dim=-1).indices
    even = groups * _GROUP
    best_CJ = logits_CV[:, :even].unflatten(1, (groups, _GROUP)).amax(dim=-1)
    group_CS = best_CJ.topk(count, dim=-1, sorted=False).indices
    index = (group_CS[:, :, None] * _GROUP + torch.arange(_GROUP, device=group_CS.device)).flatten(
        1
    )
    rest = torch.arange(even, size, device=index.device).expand(rows, -1)
    index = torch.cat([index, rest], dim=1)
    return index.gather(1, logits_CV.gather(1, index).topk(count, dim=-1).indices)


class _HeadLoss(NamedTuple):
    loss_C: Tensor
    slope_CS: Tensor
    candidate_CS: Tensor


class _Chunk:
    """Logits of some mask rows and of their twins, in the model's type."""

    def __init__(
        self,
        hidden_CH: Tensor,
        weight_VH: Tensor,
        targets: DraftTargets,
        rows: slice,
        kind: LossKind,
    ) -> None:
        self._weight_VH = weight_VH
        self._kind: LossKind = kind
        self._token_C = targets.token_N[rows]
        twins, self._twin_C = targets.twin_N[rows].unique_consecutive(return_inverse=True)
        self.logits_CV = linear(hidden_CH.to(weight_VH.dtype), weight_VH)
        self._teacher_UV = linear(targets.teacher_TH[twins], weight_VH)
        self.twin_choice_C = likeliest(self._teacher_UV, 1)[self._twin_C, 0]

    def head(self, corrected_CH: Tensor, candidates: int) -> _HeadLoss:
        """Loss of the corrected rows, and its gradient by the candidates' logits."""
        wanted_C = self._token_C if self._kind == "ce" else self.twin_choice_C
        candidate_CS = likeliest(self.logits_CV, candidates)
        is_wanted_CS = candidate_CS == wanted_C[:, None]
        missing_C = ~is_wanted_CS.any(dim=1)
        candidate_CS[:, -1] = torch.where(missing_C, wanted_C, candidate_CS[:, -1])
        dtype = self._weight_VH.dtype
        logits_CS = candidate_logits(corrected_CH.to(dtype), self._weight_VH, candidate_CS)
        teacher_CS = self._teacher_UV[self._twin_C].gather(1, candidate_CS)
        place_C = (candidate_CS == wanted_C[:, None]).int().argmax(dim=1)
        teacher = _Teacher.of(teacher_CS.float())
        loss_C, slope_CS = _divergence(logits_CS, teacher, place_C, self._kind)
        return _HeadLoss(loss_C, slope_CS, candidate_CS)

    def slope(self, coefficient_C: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of the rows over the vocabulary, and its gradient in the place of their logits."""
        loss_C = torch.empty_like(coefficient_C)
        size = _PART_ROWS[coefficient_C.device.type]
        for start in range(0, len(loss_C), size):
            part = slice(start, start + size)
            twins = self._twin_C[part]
            first, last = int(twins[0]), int(twins[-1]) + 1
            teacher = _Teacher.of(self._teacher_UV[first:last].float()).take(twins - first)
            loss_C[part], slope_PV = _divergence(
                self.logits_CV[part].float(), teacher, self._token_C[part], self._kind
            )
            self.logits_CV[part] = slope_PV.mul_(coefficient_C[part, None])
        return loss_C, self.logits_CV


class _Teacher(NamedTuple):
    """Distributions, and their entropies."""

    share: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, logits: Tensor) -> "_Teacher":
        log_share = logits.log_softmax(dim=-1)
        share = log_share.exp()
        return cls(share, -torch.linalg.vecdot(share, log_share))

    def take(self, index: Tensor) -> "_Teacher":
        return _Teacher(self.share[index], self.entropy[index])


def _divergence(
    logits: Tensor, teacher: _Teacher, token: Tensor, kind: LossKind
) -> tuple[Tensor, Tensor]:
    """Each row's loss, and its gradient by the logits."""
    log_student = logits.log_softmax(dim=-1)
    student = log_student.exp()
    match kind:
        case "ce":
            loss = -log_student.gather(1, token[:, None])[:, 0]
            slope = student.scatter_add_(1, token[:, None], torch.full_like(loss, -1.0)[:, None])
        case "kl":
            loss = -teacher.entropy - torch.linalg.vecdot(teacher.share, log_student)
            slope = student.sub_(teacher.share)
        case "tv":
            difference = student - teacher.share
            loss = difference.abs().sum(dim=-1).mul_(0.5)
            sign = difference.sign_()
            mean = torch.linalg.vecdot(sign, student)[:, None]
            slope = sign.sub_(mean).mul_(student).mul_(0.5)
    return loss, slope


def _chunks(hidden_NH: Tensor) -> list[slice]:
    size = _CHUNK_ROWS[hidden_NH.device.type]
    return [slice(start, start + size) for start in range(0, len(hidden_NH), size)]
