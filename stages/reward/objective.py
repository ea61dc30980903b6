"""The reward model's losses and its accuracy on ranked answers: tensors in, tensors out.

Shapes: N prompts with up to K answers each; `scores` and `ranks` are [N,K], rank 1 is best, equal ranks
are ties. `mask` is True where there is an answer; what lies in the other slots never matters.
All arithmetic is in float32, or float64 where the scores are.

Sources: Ouyang et al. 2022, section 3.5 (all pairs of a prompt as one example), Llama 2 (margin),
Ziegler et al. 2019 (best of k), Eisenstein et al. 2023 (centering).
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus


def ranking_loss(
    scores: Tensor,
    ranks: Tensor,
    mask: Tensor | None = None,
    loss: Literal["pairs", "plackett_luce", "best_of_k"] = "pairs",
    ties: Literal["drop", "soft"] = "drop",
    margin: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    centering: float = 0.0,
    num_prompts: Tensor | float | None = None,
) -> Tensor:
    """Mean loss of the prompts that have something to compare; 0, with gradient 0, if none has.

    loss: `pairs` is −log σ(better − worse), averaged over the pairs of a prompt; `plackett_luce` the
        likelihood of the whole order, summed over places; `best_of_k` cross-entropy of picking the best.
    ties: `drop` never compares equal answers; `soft` counts them as preferred either way by half
        (`pairs` and `best_of_k` only).
    margin: by how much the better answer i should lead answer j: a number, or [N,K,K] indexed [n,i,j].
    label_smoothing: probability that a pair's label is wrong. Both are for `pairs` only.
    centering: weight of (better + worse)², which keeps scores around 0.
    num_prompts: number of `comparable` prompts in the whole optimiser step, over microbatches and ranks;
        by default this batch's own. Given it, the losses of microbatches add up to that of the whole.
    """
    if loss != "pairs" and (margin is not None or label_smoothing):
        raise ValueError(f"margin and label_smoothing work with loss='pairs', not with {loss!r}")
    if ties not in ("drop", "soft"):
        raise ValueError(f"ties is {ties!r}; equal ranks can be treated as 'drop' or 'soft'")
    mask = _full(mask, scores)
    scores = torch.where(mask, _float(scores), 0.0)
    better = _better(ranks, mask)  # [N,K,K]
    pairs = better | _tied(ranks, mask) if ties == "soft" else better
    num_pairs = pairs.sum(dim=(1, 2)).clamp(min=1)

    if loss == "pairs":
        losses = _pair_losses(scores, better, margin, label_smoothing)
        losses = torch.where(pairs, losses, 0.0).sum(dim=(1, 2)) / num_pairs
    elif loss == "plackett_luce":
        if ties == "soft":
            raise ValueError("loss='plackett_luce' works with ties='drop' only")
        losses = _lead_losses(scores, better).sum(dim=1)
    elif loss == "best_of_k":
        best = mask & ~better.any(dim=1)
        rivals = mask.unsqueeze(1) if ties == "soft" else better
        losses = torch.where(best, _lead_losses(scores, rivals), 0.0).sum(dim=1)
        losses = losses / best.sum(dim=1).clamp(min=1)  # several share the first place only where tied
    else:
        raise ValueError(f"loss is {loss!r}; it can be 'pairs', 'plackett_luce' or 'best_of_k'")

    if centering:
        sums = scores.unsqueeze(2) + scores.unsqueeze(1)
        losses = losses + centering * torch.where(pairs, sums.square(), 0.0).sum(dim=(1, 2)) / num_pairs
    counted = pairs.any(dim=(1, 2))
    if num_prompts is None:
        num_prompts = counted.sum().clamp(min=1)
    return torch.where(counted, losses, 0.0).sum() / num_prompts


def comparable(ranks: Tensor, mask: Tensor | None = None, ties: Literal["drop", "soft"] = "drop") -> Tensor:
    """True [N] for prompts with at least one pair to learn from."""
    mask = _full(mask, ranks)
    pairs = _better(ranks, mask)
    return (pairs | _tied(ranks, mask) if ties == "soft" else pairs).any(dim=(1, 2))


def margins(strengths: Tensor, scale: float) -> Tensor:
    """By how much answer i should lead answer j [N,K,K]: `scale` per unit of its greater strength, never below 0."""
    return scale * (strengths.unsqueeze(2) - strengths.unsqueeze(1)).clamp(min=0)


def ranking_accuracy(scores: Tensor, ranks: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(correctly ordered pairs, pairs) over all better/worse pairs; equal scores count one half.

    Two sums, to be added over batches and ranks before they are divided.
    """
    mask = _full(mask, scores)
    better = _better(ranks, mask)
    lead = _float(scores).unsqueeze(2) - _float(scores).unsqueeze(1)
    correct = torch.where(better, (lead > 0).float() + (lead == 0).float() / 2, 0.0)
    return correct.sum(), better.sum()


def _pair_losses(scores: Tensor, better: Tensor, margin: Tensor | float | None, smoothing: float) -> Tensor:
    """Loss [N,K,K] if answer i should beat answer j; where they are tied, half of it each way."""
    lead = scores.unsqueeze(2) - scores.unsqueeze(1)
    if margin is not None:
        lead = lead - torch.where(better, torch.as_tensor(margin, device=lead.device, dtype=lead.dtype), 0.0)
    wrong = torch.full_like(lead, 0.5).masked_fill(better, smoothing)
    return (1 - wrong) * softplus(-lead) + wrong * softplus(lead)


def _lead_losses(scores: Tensor, rivals: Tensor) -> Tensor:
    """−log of the probability [N,K] that answer i is picked among itself and its rivals [N,K,K]."""
    itself = torch.eye(scores.shape[1], dtype=torch.bool, device=scores.device)
    candidates = scores.unsqueeze(1).masked_fill(~(rivals | itself), -torch.inf)
    return candidates.logsumexp(dim=2) - scores


def _better(ranks: Tensor, mask: Tensor) -> Tensor:
    """True at [n,i,j] where answer i ranks before answer j."""
    return (ranks.unsqueeze(2) < ranks.unsqueeze(1)) & mask.unsqueeze(2) & mask.unsqueeze(1)


def _tied(ranks: Tensor, mask: Tensor) -> Tensor:
    """True at [n,i,j], i < j, where two answers share a rank: each pair once."""
    equal = (ranks.unsqueeze(2) == ranks.unsqueeze(1)) & mask.unsqueeze(2) & mask.unsqueeze(1)
    return equal.triu(diagonal=1)


def _full(mask: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
