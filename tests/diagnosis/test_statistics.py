# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The statistics of a diagnosis against direct computations, planted truths and tables."""

import math

import pytest
import torch
from laws.cases import assert_close

from modeling_avgpath import diagnosis_statistics as statistics
from modeling_avgpath.diagnosis import gaussian_map, scaled_query_map, uncentre
from modeling_avgpath.diagnosis_statistics import (
    ONLINE_MEMORIES,
    Gates,
    Resampling,
    apply_map,
    attention_moments,
    bootstrap,
    candidate_gates,
    choose_gates,
    moments,
    online_errors,
    predict_online,
    products,
    ridge,
    robust_scale,
    share_explained,
    squared_error,
    student_quantile,
    winsorise,
)


def add(sums, more):
    return {name: sums[name] + more[name] for name in more} if sums else more


# Least squares.


def test_ridge_finds_a_planted_map_from_sums_of_any_pieces():
    x = torch.randn(90, 3, 6) * torch.tensor([1.0, 5.0, 0.2, 1.0, 1.0, 3.0]) + 2
    planted = torch.randn(3, 7, 4)
    y = apply_map(x, planted)
    sums = {}
    for piece in (slice(0, 1), slice(1, 50), slice(50, 90)):
        sums = add(sums, products(x[piece], y[piece]))
    assert sums["n"] == 90
    assert_close(ridge(sums), planted, 1e-4)
    assert_close(ridge(products(x, y[..., :1], torch.rand(90, 3))), planted[..., :1], 1e-4)


def test_ridge_is_least_squares_where_there_is_plenty_and_shrinks_where_there_is_little():
    x, noise = torch.randn(4000, 1, 5), torch.randn(4000, 1, 2)
    y = x[..., :2] + noise
    direct = torch.linalg.lstsq(torch.cat((torch.ones(4000, 1), x[:, 0]), dim=1), y[:, 0]).solution
    assert_close(ridge(products(x, y))[0], direct, 5e-3)
    x, y = torch.randn(20, 1, 10), torch.randn(20, 1, 2)  # nothing to learn
    direct = torch.linalg.lstsq(torch.cat((torch.ones(20, 1), x[:, 0]), dim=1), y[:, 0]).solution
    assert ridge(products(x, y))[0, 1:].norm() < 0.5 * direct[1:].norm()


def test_ridge_on_the_first_channels_and_on_constant_ones():
    x = torch.randn(60, 2, 5)
    y = torch.randn(60, 2, 3)
    assert_close(ridge(products(x, y), 2), ridge(products(x[..., :2], y)), 1e-6)
    constant = ridge(products(torch.ones(60, 2, 5), y))
    assert_close(apply_map(torch.ones(1, 2, 5), constant)[0], y.mean(0), 1e-4)
    assert ridge(products(x, y, torch.zeros(60, 2))).isfinite().all()
    assert ridge(products(x[:2], y[:2]))[:, 1:].norm() < 0.5  # two tokens tell next to nothing of a slope


def test_maps_between_centred_and_plain_vectors():
    q, q_centre, k_centre = torch.randn(7, 4, 3), torch.randn(4, 3), torch.randn(2, 3)
    factor, mean, root = torch.randn(4), torch.randn(2, 3), torch.randn(2, 3, 3)
    covariance = root @ root.mT
    repeated = k_centre.repeat_interleave(2, dim=0)
    scaled = uncentre(scaled_query_map(factor, q_centre, k_centre), q_centre, repeated)
    assert_close(apply_map(q, scaled), factor[:, None] * q)
    gaussian = uncentre(gaussian_map(mean, covariance, q_centre, 0.3), q_centre, repeated)
    wanted = (mean + k_centre).repeat_interleave(2, dim=0)
    wanted = wanted + 0.3 * torch.einsum("hde,the->thd", covariance.repeat_interleave(2, dim=0), q)
    assert_close(apply_map(q, gaussian), wanted)


# Robustness.


def test_one_huge_vector_counts_as_one():
    x = torch.randn(101, 2, 16)
    centre, radius = robust_scale(x)
    assert_close(radius, torch.full((2,), 4.0), 0.1)
    kept, far = winsorise(x, centre, radius, 3.0)
    assert_close(kept, x - centre)
    assert not far.any()
    x[5, 1] = 1e6
    changed, changed_radius = robust_scale(x)
    assert (changed - centre).abs().max() < 0.3 and (changed_radius - radius).abs().max() < 0.1
    kept, far = winsorise(x, centre, radius, 3.0)
    assert far.nonzero().tolist() == [[5, 1]]
    assert kept[5, 1].norm() == pytest.approx(3 * radius[1].item(), rel=1e-4)


# Attention.


@pytest.mark.parametrize("window", [None, 4])
def test_attention_moments_are_those_of_the_written_out_attention(window, monkeypatch):
    monkeypatch.setattr(statistics, "QUERY_BLOCK", 5)
    length, groups = 13, 2
    q, k = torch.randn(length, 4, 6) * 2, torch.randn(length, 2, 6) * 2
    vectors = torch.randn(length - 1, 2, 3)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if window:
        visible &= ~visible.tril(-window)
    found = attention_moments(q, k, vectors, visible, 0.4)
    for t in range(1, length):
        for head in range(4):
            seen = [i for i in range(length) if visible[t, i]]
            weights = (q[t, head].double() @ k[seen, head // groups].double().T * 0.4).softmax(dim=-1).tolist()
            sink = weights[0] if seen[0] == 0 else 0.0
            rest = [(i, weight / (1 - sink)) for i, weight in zip(seen, weights, strict=True) if i > 0]
            at = (t - 1, head)
            assert found.sink[at].item() == pytest.approx(sink, abs=1e-6)
            assert found.rest[at].item() == pytest.approx(
                sum(w for i, w in zip(seen, weights, strict=True) if i), rel=1e-4
            )
            assert found.entropy[at].item() == pytest.approx(-sum(w * math.log(w) for w in weights), abs=1e-5)
            assert found.distance[at].item() == pytest.approx(sum(w * (t - i) for i, w in rest), abs=1e-4)
            mean = sum(w * vectors[i - 1, head // groups] for i, w in rest)
            assert torch.allclose(found.means[at], mean, atol=1e-5)


@pytest.mark.parametrize("mean", [0.0, 1.5])
def test_gaussian_keys_average_to_their_mean_and_covariance_times_the_query(mean):
    """Step 3 of the path: lambda q explains the mean key of isotropic, centred keys as there are more and more of them."""
    dim, shares = 4, {}
    for length in (20, 200, 2000):
        k, q = torch.randn(length, 1, dim) + mean, torch.randn(length, 1, dim)
        visible = torch.ones(length, length, dtype=torch.bool)
        mean_key = attention_moments(q, k, k[1:], visible, dim**-0.5).means
        q = q[1:]
        target = {name: value[None] for name, value in moments(mean_key).items()}
        factor = (q * mean_key).sum() / q.square().sum()
        gaussian = gaussian_map(torch.full((1, dim), mean), torch.eye(dim)[None], torch.zeros(1, dim), dim**-0.5)
        for name, predicted in (("query", factor * q), ("gaussian", apply_map(q, gaussian))):
            error = squared_error(mean_key - predicted)[None]
            shares[name, length] = share_explained(error, target).item()
    assert shares["gaussian", 20] < shares["gaussian", 200] < shares["gaussian", 2000]
    assert shares["gaussian", 2000] > 0.97
    if mean:
        assert shares["query", 2000] < 0  # a multiple of q has no room for the mean
    else:
        assert shares["query", 2000] > 0.97


# Memories.


def test_online_predictions_use_the_pairs_before_alone():
    length, dim = 9, 4
    k, v = torch.randn(1, length, 2, dim), torch.randn(1, length, 2, dim)
    beta, span, penalty = torch.tensor([0.3, 0.9]), torch.tensor([5.0, math.inf]), torch.tensor([0.5, 2.0])
    unit = k / k.norm(dim=-1, keepdim=True)
    delta, mesa = predict_online(k, v, Gates(beta, span)), predict_online(k, v, Gates(torch.ones(2), span, penalty))
    for head in range(2):
        decay = math.exp(-1 / span[head].item())
        state, gram = torch.zeros(dim, dim), torch.zeros(dim, dim)
        cross = torch.zeros(dim, dim)
        for t in range(length):
            key, value = unit[0, t, head], v[0, t, head]
            state = decay * state
            if t:
                assert torch.allclose(delta[0, t - 1, head], key @ state, atol=1e-5)
                read = torch.linalg.solve(gram + penalty[head] * torch.eye(dim), key) @ cross
                assert torch.allclose(mesa[0, t - 1, head], read, atol=1e-3)
            state = state + beta[head] * torch.outer(key, value - key @ state)
            gram, cross = decay * gram + torch.outer(key, key), decay * cross + torch.outer(key, value)


@pytest.mark.parametrize("memory", ONLINE_MEMORIES)
def test_gates_are_those_of_the_least_error(memory):
    k = torch.randn(40, 2, 4)
    v = torch.cat((k[:, :1] @ torch.randn(4, 4), torch.randn(40, 1, 4)), dim=1)  # head 0 is learnable, head 1 is noise
    errors = online_errors(k, v, memory)
    assert errors.shape == (len(candidate_gates(memory)), 2)
    gates = choose_gates(errors, memory)
    error = squared_error(predict_online(k[None], v[None], gates)[0] - v[1:])
    assert_close(error, errors.min(dim=0).values, 1e-5)
    assert error[0] < 0.5 * v[1:, 0].square().sum()
    if memory == "delta_net":
        assert gates.span.isinf().all() and gates.beta[1] < gates.beta[0]


# Intervals.


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (15, 2.131), (1000, 1.962)]
)
def test_student_quantiles_are_those_of_the_tables(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=2e-3)
    assert student_quantile(0.5, freedom) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("groups", [2, 4, 8, 16])
def test_intervals_cover_the_truth_as_often_as_they_say(groups):
    """R^2 of a known relation, measured on groups that differ from one another."""
    truth, hits, runs = 0.5, 0, 300
    for run in range(runs):
        generator = torch.Generator().manual_seed(run)
        x, noise = torch.randn(2, groups, 200, 1, 1, generator=generator, dtype=torch.float64)
        sums = {}
        for group in range(groups):
            found = moments(x[group] + noise[group]) | {"error": squared_error(noise[group])}
            sums = {name: [*sums.get(name, []), value] for name, value in found.items()}
        sums = {name: torch.stack(values) for name, values in sums.items()}
        estimate = bootstrap(lambda s: share_explained(s["error"], s), sums, Resampling(0.9, 300, run))
        hits += bool(estimate.low[0] <= truth <= estimate.high[0])
        assert estimate.low[0] <= estimate.mean[0] <= estimate.high[0]
    assert 0.84 <= hits / runs <= 0.96


def test_one_group_has_no_interval_and_empty_groups_do_not_count():
    sums = {"n": torch.tensor([4.0, 0.0]).double(), "value": torch.tensor([[8.0], [0.0]]).double()}
    estimate = bootstrap(lambda s: s["value"] / s["n"][:, None], sums, Resampling())
    assert estimate.mean.tolist() == [2.0] and estimate.low is None and estimate.high is None
