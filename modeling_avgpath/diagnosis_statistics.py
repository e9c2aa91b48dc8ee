# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The statistics behind `diagnose`: what one layer's q, k, v and attention say about each step of the path.

All of it is sums over tokens, so that the memory does not depend on how many there are:

- `winsorise`: vectors beyond a multiple of the median distance from the median are drawn back to it, so that one token
  counts as one token, whatever its size;
- `ridge`: least squares from sums of products, its penalty chosen by generalised cross-validation (Golub et al., 1979);
- `attention_moments`: sink mass, entropy, distance and averages of one layer's attention, in blocks of queries;
- `predict_online`, `read_memory`: the recurrent memories with gates that are constant over time;
- `bootstrap`: intervals over groups of windows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch

from .norms import l2_norm
from .ops import gated_delta_rule, mesa

QUERY_BLOCK = 512  # queries whose scores are held at a time
PENALTIES = [10.0 ** (exponent / 2) for exponent in range(-16, 3)]  # as shares of the largest eigenvalue
CAUTION = 1.4
LEAST = 1e-30  # of what stands below a fraction
# Gates that are tried: step size; memory in tokens, the decay is exp(-1/span); ridge of mesa, in tokens of unit keys.
STEP_SIZES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
SPANS = (math.inf, 1024.0, 256.0, 64.0)
RIDGES = (0.25, 1.0, 4.0)  # the mixer has at least 0.25
ONLINE_MEMORIES = ("delta_net", "gated_delta_net", "mesa_net")
FEW_GROUPS = 8
ROUNDING = 1e-12  # of sums of squares in float64
MESA_TOLERANCE = 1e-4  # far below what decides on a share of variance

Sums = dict[str, torch.Tensor]


# Robustness.


def robust_scale(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The median `[H, D]` of `x` `[T, H, D]` by channels, and the median distance from it `[H]`."""
    centre = x.median(dim=0).values
    return centre, (x - centre).norm(dim=-1).median(dim=0).values


def winsorise(
    x: torch.Tensor, centre: torch.Tensor, radius: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x - centre`, shortened to `clip` times `radius` where it is longer, and where that was: `[T, H, D]`, `[T, H]`."""
    x = x - centre
    length, limit = x.norm(dim=-1), clip * radius
    is_far = length > limit
    return x * torch.where(is_far, limit / length, 1.0)[..., None], is_far


# Least squares.


def products(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None) -> Sums:
    """Sums of products of `[1, x]` with itself and with `y`, over the tokens of `x` `[T, H, D]` and `y` `[T, H, E]`.

    Args:
        weight: on both sides of every product, `[T, H]`.

    Returns:
        xx `[H, D + 1, D + 1]`, xy `[H, D + 1, E]`, yy `[H]` and n (tokens), float64.
    """
    x = torch.cat((torch.ones_like(x[..., :1]), x), dim=-1)
    if weight is not None:
        x, y = x * weight[..., None], y * weight[..., None]
    x, y = x.transpose(0, 1), y.transpose(0, 1)  # [H, T, ...]
    n = torch.tensor(float(x.shape[1]), device=x.device)
    found = {"xx": x.mT @ x, "xy": x.mT @ y, "yy": y.square().sum((1, 2)), "n": n}
    return {name: value.cpu().double() for name, value in found.items()}


def ridge(sums: Sums, size: int | None = None) -> torch.Tensor:
    """The affine map `[H, D + 1, E]`, intercept first, that predicts y from x at least penalised squared error.

    The penalty, on all but the intercept, is the one of `PENALTIES` with the least generalised cross-validation error
    n RSS / (n - 1.4 df)^2, head by head; the factor 1.4 guards against fits that are too close (Kim & Gu, 2004).

    Args:
        sums: of `products`.
        size: use the first so many channels of x.
    """
    size = sums["xx"].shape[-1] - 1 if size is None else size
    xx, xy = sums["xx"][:, : size + 1, : size + 1], sums["xy"][:, : size + 1]
    mass = xx[:, :1, :1].clamp(min=LEAST)  # tokens, or the sum of their squared weights
    mean_x, mean_y = xx[:, :1, 1:] / mass, xy[:, :1] / mass  # [H, 1, D], [H, 1, E]
    variance = xx[:, 1:, 1:] - mass * mean_x.mT * mean_x
    covariance = xy[:, 1:] - mass * mean_x.mT * mean_y
    total = sums["yy"] - (mass * mean_y.square()).sum((1, 2))
    values, vectors = torch.linalg.eigh(variance)
    values = values.clamp(min=0)
    rotated = vectors.mT @ covariance  # [H, D, E]
    largest = values[:, -1:].clamp(min=LEAST)
    penalty = largest[..., None] * torch.tensor(PENALTIES, dtype=values.dtype)[:, None]  # [H, P, 1]
    damped = values[:, None] + penalty  # [H, P, D]
    explained = rotated.square().sum(-1)[:, None]  # [H, 1, D]
    residual = total[:, None] - (explained * (values[:, None] + 2 * penalty) / damped.square()).sum(-1)
    freedom = sums["n"] - CAUTION * (1 + (values[:, None] / damped).sum(-1))
    error = torch.where(freedom > 0, residual.clamp(min=0) / freedom.square(), math.inf)
    best = torch.where(error.isinf().all(dim=-1), len(PENALTIES) - 1, error.argmin(dim=-1))  # too little data: the most
    damped = damped[torch.arange(len(best)), best]  # [H, D]
    slope = vectors @ (rotated / damped[..., None])
    return torch.cat((mean_y - mean_x @ slope, slope), dim=1)


def apply_map(x: torch.Tensor, affine: torch.Tensor) -> torch.Tensor:
    """`x` `[..., H, D]` through affine maps `[H, D + 1, E]`, intercept first: `[..., H, E]`."""
    affine = affine.to(x)
    return torch.einsum("...hd,hde->...he", x, affine[:, 1:]) + affine[:, 0]


def moments(y: torch.Tensor) -> Sums:
    """n, sum `[H, E]` and sum of squares `[H]` of `y` `[T, H, E]`, float64."""
    n = torch.tensor(float(len(y)), device=y.device)
    found = {"n": n, "sum": y.sum(0), "squares": y.square().sum((0, 2))}
    return {name: value.cpu().double() for name, value in found.items()}


def squared_error(error: torch.Tensor) -> torch.Tensor:
    """Sum of squares of `error` `[T, H, E]` by heads, float64."""
    return error.square().sum((0, 2)).cpu().double()


def random_features(x: torch.Tensor, frequencies: torch.Tensor, phases: torch.Tensor) -> torch.Tensor:
    """`x` `[T, H, D]` with random Fourier features behind it, `[T, H, D + M]` (Rahimi & Recht, 2007).

    Args:
        frequencies: `[M, D]`; phases: `[M]`.
    """
    return torch.cat((x, math.sqrt(2) * torch.cos(x @ frequencies.mT.to(x) + phases.to(x))), dim=-1)


# Attention.


@dataclass(frozen=True)
class AttentionMoments:
    """What the queries 1 ... T - 1 of a window look at, the sink (token 0) apart.

    Attributes:
        sink: attention on the sink, `[T - 1, H]`; rest: on all others, exact where it is next to nothing.
        entropy: of the whole attention, nats, likewise.
        distance: mean distance in tokens of what is attended beside the sink, likewise.
        means: averages of the given vectors over all tokens but the sink, `[T - 1, H, E]`.
    """

    sink: torch.Tensor
    rest: torch.Tensor
    entropy: torch.Tensor
    distance: torch.Tensor
    means: torch.Tensor


def attention_moments(
    q: torch.Tensor, k: torch.Tensor, vectors: torch.Tensor, visible: torch.Tensor, scaling: float
) -> AttentionMoments:
    """Moments of one window's softmax attention; takes memory for `QUERY_BLOCK` queries' scores at a time.

    Args:
        q, k: `[T, H, D]`, `[T, H_kv, D]` as they are scored, rotated; T at least 2.
        vectors: what is averaged, of all tokens but the sink, `[T - 1, H_kv, E]`.
        visible: `[T, T]`, which keys a query sees.
    """
    groups = q.shape[1] // k.shape[1]
    keys, vectors = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, vectors))  # [H, T, ...]
    places = torch.arange(1, len(q), device=q.device, dtype=q.dtype)
    parts = []
    for start in range(1, len(q), QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        scores = q[block].transpose(0, 1) @ keys.mT * scaling  # [H, B, T]
        scores = scores.masked_fill(~visible[block], -math.inf)
        weights = scores[..., 1:].softmax(dim=-1)
        # The sink against all others together.
        margin = scores[..., 0] - scores[..., 1:].logsumexp(dim=-1)
        sink, rest = torch.sigmoid(margin), torch.sigmoid(-margin)
        entropy = torch.special.entr(sink) + torch.special.entr(rest) + rest * torch.special.entr(weights).sum(-1)
        distance = places[start - 1 : start - 1 + QUERY_BLOCK] - weights @ places
        parts.append((sink, rest, entropy, distance, weights @ vectors))
    return AttentionMoments(*(torch.cat(column, dim=1).transpose(0, 1) for column in zip(*parts, strict=True)))


# Memories with gates that are constant over time.


@dataclass(frozen=True)
class Gates:
    """Gates of one recurrent memory, one number for each of H heads, `[H]`.

    Attributes:
        beta: step size; mesa's weight of a token.
        span: memory in tokens, log-decay -1 / span; infinite for none.
        ridge: mesa's penalty, in tokens of unit keys; `None` for the delta rules.
    """

    beta: torch.Tensor
    span: torch.Tensor
    ridge: torch.Tensor | None = None

    def repeat(self, groups: int) -> "Gates":
        """Those of `groups` query heads for each key head."""
        fields = (self.beta, self.span, self.ridge)
        return Gates(*(None if field is None else field.repeat_interleave(groups) for field in fields))


def candidate_gates(memory: str) -> list[tuple[float, float, float | None]]:
    """The (beta, span, ridge) that are tried for a memory, one of `ONLINE_MEMORIES`."""
    if memory == "mesa_net":
        return [(1.0, span, penalty) for span in SPANS for penalty in RIDGES]
    spans = SPANS if memory == "gated_delta_net" else (math.inf,)
    return [(beta, span, None) for span in spans for beta in STEP_SIZES]


def read_memory(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: Gates) -> torch.Tensor:
    """Reads at `q` `[B, T, H, D]` of the memory of the pairs up to the query's own: `[B, T, H, D_v]`.

    Keys `k` are brought to unit length, `q` is read as it is. The memory is a mesa layer if `gates` have a ridge, else a
    (gated) delta rule.
    """
    k = l2_norm(k)
    beta, decay = (x.to(k).expand(k.shape[:-1]) for x in (gates.beta, -1 / gates.span))
    if gates.ridge is None:
        return gated_delta_rule(q, k, v, g=decay, beta=beta, scale=1.0, backend="torch")[0]
    penalty = gates.ridge.to(k)[:, None].expand(k.shape[-2:])
    return mesa(q, k, v, g=decay, beta=beta, lamb=penalty, tolerance=MESA_TOLERANCE, backend="torch")[0]


def predict_online(k: torch.Tensor, v: torch.Tensor, gates: Gates) -> torch.Tensor:
    """Each value but the first from its key, by the memory of the pairs before it: `[B, T - 1, H, D_v]`.

    The memory of tokens 0 ... t is read at the key of token t + 1: queries are the keys, one token on.
    """
    following = torch.cat((k[:, 1:], k[:, -1:]), dim=1)
    reads = read_memory(l2_norm(following), k, v, gates)[:, :-1]
    if gates.ridge is None:  # the delta rule decays its state before it compares; mesa's decay cancels in the quotient
        reads = reads * torch.exp(-1 / gates.span).to(reads)[:, None]
    return reads


def online_errors(k: torch.Tensor, v: torch.Tensor, memory: str) -> torch.Tensor:
    """Squared error of `predict_online` for each of `candidate_gates`, `[C, H]`, on one window `[T, H, D]`."""
    heads = k.shape[1]
    errors = []
    for beta, span, penalty in candidate_gates(memory):
        gates = Gates(*(None if value is None else torch.full((heads,), value) for value in (beta, span, penalty)))
        errors.append(squared_error(predict_online(k[None], v[None], gates)[0] - v[1:]))
    return torch.stack(errors)


def choose_gates(errors: torch.Tensor, memory: str) -> Gates:
    """For each head the candidate with the least of `errors` `[C, H]`."""
    candidates = candidate_gates(memory)
    chosen = [candidates[index] for index in errors.argmin(dim=0).tolist()]
    beta, span, penalty = zip(*chosen, strict=True)
    return Gates(torch.tensor(beta), torch.tensor(span), None if penalty[0] is None else torch.tensor(penalty))


# Intervals.


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t; exact for 1 and 2 degrees of freedom, else the expansion around the normal one.

    The expansion (Abramowitz & Stegun 26.7.5) is within 0.5% for 3 degrees and probabilities up to 0.975.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


@dataclass(frozen=True)
class Resampling:
    """How intervals are made: by the bootstrap over groups of windows.

    From `FEW_GROUPS` groups on they are percentiles of the resamples, widened as Hesterberg (2015) proposes. Of fewer groups
    there are too few different resamples for that: those are as many standard errors of the bootstrap as Student's t asks.

    Attributes:
        confidence: of the intervals; resamples: draws of groups with replacement.
    """

    confidence: float = 0.95
    resamples: int = 1000
    seed: int = 0

    def weights(self, groups: int) -> torch.Tensor:
        """How often each of `groups` is drawn, `[resamples + 1, groups]`; the first row is the sample itself."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randint(groups, (self.resamples, groups), generator=generator)
        counts = torch.zeros(self.resamples, groups, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
        return torch.cat((torch.ones(1, groups, dtype=torch.float64), counts))

    def bounds(self, found: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lower and upper bounds for an estimate and its resamples `[resamples + 1, ...]`, the estimate first."""
        # The bootstrap's spread is too narrow by this factor, and known from so many groups alone.
        width = math.sqrt(groups / (groups - 1)) * student_quantile(1 - (1 - self.confidence) / 2, groups - 1)
        if groups < FEW_GROUPS:
            spread = width * found[1:].std(dim=0)
            return found[0] - spread, found[0] + spread
        tail = NormalDist().cdf(-width)
        low, high = torch.quantile(found[1:], torch.tensor([tail, 1 - tail], dtype=found.dtype), dim=0)
        return low, high


@dataclass(frozen=True)
class Estimates:
    """Estimates with the bounds of their intervals, tensors of one shape; bounds are `None` where there is one group."""

    mean: torch.Tensor
    low: torch.Tensor | None
    high: torch.Tensor | None


def bootstrap(statistic: Callable[[Sums], torch.Tensor], sums: Sums, resampling: Resampling) -> Estimates:
    """`statistic` of the sums over all groups, with intervals.

    Args:
        statistic: from sums with a leading axis of resamples `[R, ...]` to `[R, ...]`.
        sums: by group, `[G, ...]`; groups without tokens (`n` 0) are left out.
    """
    held = sums["n"] > 0
    sums = {name: value[held] for name, value in sums.items()}
    groups = int(held.sum())
    weights = resampling.weights(groups) if groups > 1 else torch.ones(1, groups, dtype=torch.float64)
    drawn = {name: (weights @ value.flatten(1)).unflatten(1, value.shape[1:]) for name, value in wide(sums).items()}
    drawn["n"] = weights @ sums["n"]
    found = statistic(drawn)
    if groups < 2:
        return Estimates(found[0], None, None)
    return Estimates(found[0], *resampling.bounds(found, groups))


def wide(sums: Sums) -> Sums:
    """Those of `sums` that have more axes than that of the groups."""
    return {name: value for name, value in sums.items() if value.ndim > 1}


def share_explained(error: torch.Tensor, sums: Sums) -> torch.Tensor:
    """R^2 = 1 - error / (squared distance of y from its mean) for `moments` of y with a leading axis `[R, ...]`.

    Of a y that does not vary there is nothing to explain: R^2 is 1 where it is met, and far below 0 where not.
    """
    spread = sums["squares"] - sums["sum"].square().sum(-1) / sums["n"][:, None]
    return 1 - error / torch.maximum(spread, ROUNDING * sums["squares"]).clamp(min=LEAST)
