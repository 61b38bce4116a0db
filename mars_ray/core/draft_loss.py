"""The losses of a draft adapter, against the frozen model's own predictions.

    loss = sum over mask rows of  row coefficient  * D(clean twin || mask row, over the vocabulary)
                                + head coefficient * D(clean twin || corrected row, over candidates)

D is the KL divergence, the total variation, 0.9 of the second with 0.1 of the first (`tv_kl`;
DSpark, arXiv 2607.05147, mixes so), or cross-entropy on the data's token. Candidates are the mask
row's likeliest tokens. If the twin's choice (for cross-entropy the data's token) is not among them,
it takes the last place. Distributions over candidates are renormalised.

Rows are multiplied with the vocabulary's matrix in chunks, and a chunk's logits are processed in
parts that stay in a CPU's cache. Each pass over a part matters: exp and log_softmax of 16 rows of
49,152 take 0.75 ms, softmax alone 0.28, the products with the matrix 3.9.

Shape suffixes: N mask rows with a target, T clean rows, C rows of a chunk, P rows of a part,
U distinct twins of a part, H hidden size, V vocabulary, S candidates.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from mars_ray.core.draft_head import candidate_logits, likeliest

LossKind = Literal["kl", "ce", "tv", "tv_kl"]

_TV_SHARE = 0.9  # of tv_kl

# Size of a part's float32 logits: fits a CPU's cache, or takes little of a GPU's memory.
_PART_BYTES = {"cpu": 3 << 20, "cuda": 1 << 28}
_CHUNK_PARTS = 8


class DraftTargets(NamedTuple):
    teacher_TH: Tensor  # last hidden states of clean rows
    twin_N: Tensor  # each mask row's index among them, non-decreasing
    token_N: Tensor  # the data's next token


class DraftChoices(NamedTuple):
    """Losses and choices of each mask row, without a gradient."""

    row_N: Tensor
    head_N: Tensor  # 0 without a head
    row_choice_N: Tensor
    head_choice_N: Tensor
    twin_choice_N: Tensor


class DraftLoss(torch.autograd.Function):
    """The loss with its gradients at once: no logits are kept."""

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

        `coefficient_N2` holds the coefficients of the row's loss and of the head's loss.
        """
        losses_N2 = torch.zeros_like(coefficient_N2)
        grad_NH = torch.empty_like(hidden_NH)
        grad_corrected_NH = None if corrected_NH is None else torch.empty_like(corrected_NH)
        for rows in _chunks(hidden_NH, weight_VH):
            logits_CV = linear(hidden_NH[rows].to(weight_VH.dtype), weight_VH)
            for part in _parts(logits_CV, weight_VH, targets, rows, kind):
                if corrected_NH is not None and grad_corrected_NH is not None:
                    loss_P, grad_PH = part.head(corrected_NH[part.rows], weight_VH, candidates)
                    losses_N2[part.rows, 1] = loss_P
                    grad_corrected_NH[part.rows] = grad_PH.to(corrected_NH.dtype)
                # The loss's gradient takes the place of the logits.
                losses_N2[part.rows, 0], logits_CV[part.place] = part.slope()
            grad_NH[rows] = torch.mm(logits_CV, weight_VH).to(hidden_NH.dtype)
        grad_NH *= coefficient_N2[:, :1]
        if grad_corrected_NH is not None:
            grad_corrected_NH *= coefficient_N2[:, 1:]
        ctx.save_for_backward(grad_NH, grad_corrected_NH)
        row_N, head_N = losses_N2.unbind(1)
        ctx.mark_non_differentiable(row_N, head_N)
        return (coefficient_N2 * losses_N2).sum(), row_N, head_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients that the forward has computed, times the gradient of the loss."""
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
    """Losses for evaluation, and the tokens that mask rows, the head and the twins choose."""
    loss_N = torch.zeros(len(hidden_NH), device=hidden_NH.device)
    token_N = torch.zeros_like(targets.twin_N)
    found = DraftChoices(loss_N, loss_N.clone(), token_N, token_N.clone(), token_N.clone())
    for rows in _chunks(hidden_NH, weight_VH):
        logits_CV = linear(hidden_NH[rows].to(weight_VH.dtype), weight_VH)
        for part in _parts(logits_CV, weight_VH, targets, rows, kind):
            here = part.rows
            found.row_N[here], _ = part.slope()
            found.twin_choice_N[here] = part.twin_choice_P
            candidate_PS = likeliest(part.logits_PV, candidates)
            found.row_choice_N[here] = found.head_choice_N[here] = candidate_PS[:, 0]
            if corrected_NH is not None:
                found.head_N[here], _ = part.head(corrected_NH[here], weight_VH, candidates)
                # No candidate is replaced by the twin's choice here: decoding could not do that.
                logits_PS = candidate_logits(
                    corrected_NH[here].to(weight_VH.dtype), weight_VH, candidate_PS
                )
                best_P1 = logits_PS.argmax(dim=-1, keepdim=True)
                found.head_choice_N[here] = candidate_PS.gather(1, best_P1)[:, 0]
    return found


def _softmax(logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of rows, and the logarithms of its denominators; `best` is each row's largest logit,
    whose share is large enough for a logarithm."""
    share = logits.softmax(dim=-1)
    best = best[:, None]
    log_sum = logits.gather(1, best) - share.gather(1, best).log()
    return share, log_sum[:, 0]


def _parts(
    logits_CV: Tensor, weight_VH: Tensor, targets: DraftTargets, rows: slice, kind: LossKind
) -> Iterator["_Part"]:
    """The rows of a chunk in parts whose float32 logits fit into a CPU's cache."""
    twins, twin_C = targets.twin_N[rows].unique_consecutive(return_inverse=True)
    teacher_UV, token_C = linear(targets.teacher_TH[twins], weight_VH), targets.token_N[rows]
    size = _part_rows(logits_CV)
    for start in range(0, len(logits_CV), size):
        place = slice(start, min(start + size, len(logits_CV)))
        twin_P = twin_C[place]
        first, last = int(twin_P[0]), int(twin_P[-1]) + 1
        yield _Part(
            place,
            slice(rows.start + place.start, rows.start + place.stop),
            logits_CV[place].float(),
            teacher_UV[first:last].float(),
            twin_P - first,
            token_C[place],
            kind,
        )


class _Part:
    """Some rows of a chunk, in float32."""

    def __init__(
        self,
        place: slice,
        rows: slice,
        logits_PV: Tensor,
        teacher_UV: Tensor,
        twin_P: Tensor,
        token_P: Tensor,
        kind: LossKind,
    ) -> None:
        """The rows stand at this place in their chunk."""
        self.place, self.rows, self.logits_PV = place, rows, logits_PV
        self._teacher_UV, self._twin_P, self._token_P = teacher_UV, twin_P, token_P
        self._kind: LossKind = kind
        self._twin_choice_U = likeliest(teacher_UV, 1)[:, 0]
        self.twin_choice_P = self._twin_choice_U[twin_P]

    def slope(self) -> tuple[Tensor, Tensor]:
        """Loss of the rows over the vocabulary, and its gradient with respect to their logits."""
        twin_P = self._twin_P
        share_PV, log_sum_P = _softmax(self.logits_PV, likeliest(self.logits_PV, 1)[:, 0])
        if self._kind == "ce":
            return _cross_entropy(self.logits_PV, share_PV, log_sum_P, self._token_P)
        teacher_UV, teacher_log_sum_U = _softmax(self._teacher_UV, self._twin_choice_U)
        variation = None
        if self._kind != "kl":
            variation = _total_variation(share_PV, teacher_UV[twin_P])
            if self._kind == "tv":
                return variation
        # KL(p || q) = (log-sum - p z) of q minus that of p.
        own_U = teacher_log_sum_U - torch.linalg.vecdot(teacher_UV, self._teacher_UV)
        if share_PV.device.type == "cpu":
            # Row by row and in place, to make no large copy.
            pairs = list(zip(range(len(share_PV)), twin_P.tolist(), strict=True))
            dot_P = torch.stack([self.logits_PV[row].dot(teacher_UV[t]) for row, t in pairs])
            for row, t in pairs:
                share_PV[row].sub_(teacher_UV[t])
        else:
            dot_P = torch.linalg.vecdot(self.logits_PV, teacher_UV[twin_P])
            share_PV.sub_(teacher_UV[twin_P])
        divergence = log_sum_P - dot_P - own_U[twin_P], share_PV
        return _mixed(variation, divergence) if variation else divergence

    def head(
        self, corrected_PH: Tensor, weight_VH: Tensor, candidates: int
    ) -> tuple[Tensor, Tensor]:
        """Loss of the corrected rows over candidates, and its gradient with respect to them, in the
        model's dtype."""
        wanted_P = self._token_P if self._kind == "ce" else self.twin_choice_P
        candidate_PS = likeliest(self.logits_PV, candidates)
        missing_P = ~(candidate_PS == wanted_P[:, None]).any(dim=1)
        candidate_PS[:, -1] = torch.where(missing_P, wanted_P, candidate_PS[:, -1])
        weight_PSH = weight_VH[candidate_PS]
        logits_PS = torch.einsum("ph,psh->ps", corrected_PH.to(weight_VH.dtype), weight_PSH).float()
        share_PS, log_sum_P = _softmax(logits_PS, logits_PS.argmax(dim=-1))
        if self._kind == "ce":
            place_P = (candidate_PS == wanted_P[:, None]).int().argmax(dim=1)
            found = _cross_entropy(logits_PS, share_PS, log_sum_P, place_P)
        else:
            log_teacher_PS = self._teacher_UV[self._twin_P[:, None], candidate_PS].log_softmax(-1)
            teacher_PS = log_teacher_PS.exp()
            log_share_PS = logits_PS - log_sum_P[:, None]
            found = (
                torch.linalg.vecdot(teacher_PS, log_teacher_PS - log_share_PS),
                share_PS - teacher_PS,
            )
            if self._kind != "kl":
                variation = _total_variation(share_PS, teacher_PS)
                found = variation if self._kind == "tv" else _mixed(variation, found)
        loss_P, slope_PS = found
        grad_PH = torch.einsum("ps,psh->ph", slope_PS.to(weight_VH.dtype), weight_PSH)
        return loss_P, grad_PH


def _cross_entropy(
    logits: Tensor, share: Tensor, log_sum: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    token = token[:, None]
    loss = log_sum - logits.gather(1, token)[:, 0]
    return loss, share.scatter_add_(1, token, torch.full_like(loss, -1.0)[:, None])


def _total_variation(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    difference = student - teacher
    loss = difference.abs().sum(dim=-1).mul_(0.5)
    sign = difference.sign_()
    mean = torch.linalg.vecdot(sign, student)[:, None]
    return loss, sign.sub_(mean).mul_(student).mul_(0.5)


def _mixed(
    variation: tuple[Tensor, Tensor], divergence: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of `tv_kl`."""
    loss, slope = (
        one.mul_(_TV_SHARE).add_(other, alpha=1 - _TV_SHARE)
        for one, other in zip(variation, divergence, strict=True)
    )
    return loss, slope


def _part_rows(logits_CV: Tensor) -> int:
    return max(1, _PART_BYTES[logits_CV.device.type] // (4 * logits_CV.shape[1]))


def _chunks(hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
    size, rows = _CHUNK_PARTS * _part_rows(weight_VH.t()), len(hidden_NH)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
