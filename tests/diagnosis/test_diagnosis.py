# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The diagnosis of whole models: against direct computation, with planted truths, interrupted, and refused."""

import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from diagnosis.softmax_cases import CASES, make_model
from laws.cases import assert_close, random_ids, tiny_config, tiny_model

from modeling_avgpath import AvgPathForCausalLM
from modeling_avgpath import diagnosis as module
from modeling_avgpath.diagnosis import DiagnosisRun, DiagnosisSettings, diagnose
from modeling_avgpath.diagnosis_report import STATISTICS, Diagnosis, Estimate, LayerDiagnosis, rank_correlation
from modeling_avgpath.diagnosis_statistics import apply_map, random_features
from modeling_avgpath.norms import l2_norm
from modeling_avgpath.ops import gated_delta_rule_oracle, mesa_oracle
from modeling_avgpath.softmax_models import softmax_layers, watch

LENGTH = 26
UNCLIPPED = 1e9
QUICK = {"memories": (), "resamples": 40, "clip": UNCLIPPED}


def make_windows(count: int = 6, seed: int = 3) -> torch.Tensor:
    windows = random_ids(count, LENGTH, seed=seed)
    windows[:, 0] = 1
    return windows


@torch.no_grad()
def see(model, windows, index: int) -> list[dict[str, torch.Tensor]]:
    """q, k, v of all heads and the attention weights of one layer, window by window, written out in float64."""
    found = []

    def visit(seen):
        layer = seen.layer
        q, k, v = (x[0].double() for x in seen.projections)
        rotated = [layer.rotate(x[None], seen.position_embeddings)[0] for x in (q, k)]
        repeated = [x.repeat_interleave(layer.groups, dim=1) for x in (rotated[1], k, v)]
        scores = torch.einsum("thd,shd->hts", rotated[0], repeated[0]) * layer.scaling
        weights = scores.masked_fill(~layer.visible(len(q)), -math.inf).softmax(dim=-1)
        found.append({"q": q, "k": k, "v": v, "all_k": repeated[1], "weights": weights})

    with watch([layer for layer in softmax_layers(model) if layer.index == index], visit):
        for window in windows:
            model(input_ids=window[None], use_cache=False)
    return found


def explained(y: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """R^2 by heads, of `[N, H, D]`."""
    return 1 - (y - predicted).square().sum((0, 2)) / (y - y.mean(0)).square().sum((0, 2))


def means(estimates: list[Estimate]) -> torch.Tensor:
    return torch.tensor([estimate.mean for estimate in estimates])


def beside_sink(seen: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sink mass `[T - 1, H]`, weights without it `[H, T - 1, T - 1]`, and mean keys `[T - 1, H, D]`."""
    sink = seen["weights"][:, 1:, 0]
    weights = seen["weights"][:, 1:, 1:] / (1 - sink)[..., None]
    return sink.T, weights, torch.einsum("hts,shd->thd", weights, seen["all_k"][1:])


@pytest.mark.parametrize("case", CASES)
def test_figures_are_those_of_direct_computation(case):
    model, windows = make_model(case), make_windows()
    layer = softmax_layers(model)[-1]
    run = DiagnosisRun(model, windows, DiagnosisSettings(layers=[layer.index], **QUICK))
    run.run()
    result = run.result()
    figures, maps = (
        result.layers[0].heads,
        {name.split(".", 1)[1]: value.double() for name, value in result.maps.items()},
    )
    assert result.windows == {"scales": 3, "fit": 3, "reads": 0, "measure": 3, "losses": 0}
    fit, measured = (see(model, part, layer.index) for part in (windows[:3], windows[3:]))
    groups = layer.groups

    def joined(parts, name):
        return torch.cat([part[name][1:] for part in parts])

    # Values from keys.
    k, v, q = (joined(measured, name) for name in ("k", "v", "q"))
    assert_close(means(figures["v_static"]), explained(v, apply_map(k, maps["value_map"])), 1e-3)
    features = run._features(k.float() - run.scales[layer.index]["k"].centre, layer).double()
    mu = apply_map(features, run.maps[layer.index].nonlinear) + run.scales[layer.index]["v"].centre
    assert_close(means(figures["v_nonlinear"]), explained(v, mu), 1e-3)

    # Mean keys from queries.
    mean_keys = torch.cat([beside_sink(part)[2] for part in measured])
    fitted_keys, fitted_q = torch.cat([beside_sink(part)[2] for part in fit]), joined(fit, "q")
    factor = (fitted_q * fitted_keys).sum((0, 2)) / fitted_q.square().sum((0, 2))
    fitted_k = joined(fit, "k")
    key_mean = fitted_k.mean(0)
    covariance = torch.einsum("thd,the->hde", fitted_k - key_mean, fitted_k - key_mean) / len(fitted_k)
    assert_close(maps["key_mean"], key_mean, 1e-4)
    assert_close(maps["key_covariance"], covariance, 1e-4)
    gaussian = key_mean.repeat_interleave(groups, dim=0) + layer.scaling * torch.einsum(
        "hde,the->thd", covariance.repeat_interleave(groups, dim=0), q
    )
    for name, predicted in (
        ("query", factor[:, None] * q), ("gaussian", gaussian), ("affine", apply_map(q, maps["query_map"]))
    ):  # fmt: skip
        assert_close(means(figures[f"mean_key_{name}"]), explained(mean_keys, predicted), 1e-3)
    sink = torch.cat([beside_sink(part)[0] for part in measured])
    first = torch.cat([part["all_k"][:1].expand(LENGTH - 1, -1, -1) for part in measured])
    whole = sink[..., None] * first + (1 - sink)[..., None] * mean_keys
    predicted = sink[..., None] * first + (1 - sink)[..., None] * gaussian
    assert_close(means(figures["mean_key_with_sink_gaussian"]), explained(whole, predicted), 1e-3)
    assert_close(means(figures["sink_mass"]), sink.mean(0), 1e-4)

    # Mean field.
    scale = run.scales[layer.index]["k"]
    radius = scale.radius.repeat_interleave(groups)[:, None]
    centred = (mean_keys.float() - scale.centre.repeat_interleave(groups, dim=0)) * layer.head_dim**0.5 / radius
    nonlinear = run.maps[layer.index].nonlinear.repeat_interleave(groups, dim=0)
    at_mean = apply_map(random_features(centred, run.frequencies, run.phases).double(), nonlinear)
    inside = (mu - run.scales[layer.index]["v"].centre).repeat_interleave(groups, dim=1).split(LENGTH - 1)
    mean_mu = torch.cat(
        [torch.einsum("hts,shd->thd", beside_sink(part)[1], x) for part, x in zip(measured, inside, strict=True)]
    )
    gap = (mean_mu - at_mean).square().sum((0, 2)) / (mean_mu - mean_mu.mean(0)).square().sum((0, 2))
    assert_close(means(figures["mean_field_gap"]), gap, 1e-3)

    # Attention.
    places = torch.arange(LENGTH, dtype=torch.float64)
    weights = torch.cat([part["weights"][:, 1:] for part in measured], dim=1)
    entropy = torch.special.entr(weights).sum(-1).mean(1)
    whole_distance = (places[1:].repeat(3) - weights @ places).mean(1)
    rest = torch.cat([beside_sink(part)[1] for part in measured], dim=1)
    distance = (places[1:].repeat(3) - rest @ places[1:]).mean(1)
    assert_close(means(figures["entropy"]), entropy, 1e-4)
    assert_close(means(figures["distance_with_sink"]), whole_distance, 1e-4)
    assert_close(means(figures["distance"]), distance, 1e-4)
    assert result.layers[0].mean["distance"].mean == pytest.approx(distance.mean().item(), rel=1e-4)
    assert not any(estimate.mean for estimate in figures["clipped"])


@pytest.mark.parametrize(("memory", "case"), [("gated_delta_net", "qwen3"), ("mesa_net", "avgpath_gated")])
@torch.no_grad()
def test_loss_changes_are_those_of_the_replaced_layer(memory, case):
    model, windows = make_model(case), make_windows(4)
    result = diagnose(model, windows, memories=[memory], loss_windows=1, resamples=10, clip=UNCLIPPED)
    read = windows[2][None]
    exact = F.cross_entropy(model(input_ids=read).logits[0, :-1], read[0, 1:]).item()
    assert result.loss.mean == pytest.approx(exact, rel=1e-5)
    assert result.loss.low is None  # one window has no spread
    for layer, figures in zip(softmax_layers(model), result.layers, strict=True):
        gates = {
            name: torch.tensor([math.inf if value is None else value for value in values])
            for name, values in figures.gates[memory].items()
        }
        gates = {name: value.repeat_interleave(layer.groups) for name, value in gates.items()}

        def replace(seen, step, layer=layer, gates=gates):
            q, k, v = (x.double() for x in seen.projections)
            mapped = apply_map(q, result.maps[f"{layer.index}.query_map"])
            query = {"mean_field": seen.average(l2_norm(k)), "query": l2_norm(q), "mapped_query": l2_norm(mapped)}[step]
            k, v = (x.repeat_interleave(layer.groups, dim=2) for x in (l2_norm(k), v))
            g, beta = ((-1 / gates["span"]).expand(k.shape[:3]), gates["beta"].expand(k.shape[:3]))
            if memory == "mesa_net":
                reads, _ = mesa_oracle(query, k, v, g, beta, gates["ridge"][:, None].expand(-1, k.shape[-1]))
            else:
                reads, _ = gated_delta_rule_oracle(query, k, v, g, beta, scale=1.0)
            averages = apply_map(reads, result.maps[f"{layer.index}.read_map.{memory}.{step}"])
            return seen.layer.project_output(averages.float(), seen.hidden_states)

        for step in ("mean_field", "query", "mapped_query"):
            with watch([layer], lambda seen, step=step: replace(seen, step)):
                loss = F.cross_entropy(model(input_ids=read).logits[0, :-1], read[0, 1:]).item()
            assert figures.loss_change[memory][step].mean == pytest.approx(loss - exact, abs=2e-3)
        assert figures.loss_change[memory]["expectation"] == figures.loss_change[memory]["mean_field"]


# Planted truths.


@torch.no_grad()
def test_values_that_are_linear_in_keys_are_found_so():
    model = make_model("llama")
    for block in model.model.layers:
        attention = block.self_attn
        maps = torch.randn(2, 8, 8) / 8**0.5
        keys = attention.k_proj.weight.unflatten(0, (2, 8))
        attention.v_proj.weight.copy_((maps @ keys).flatten(0, 1))
        attention.v_proj.bias.copy_(
            torch.einsum("hde,he->hd", maps, attention.k_proj.bias.unflatten(0, (2, 8))).flatten()
        )
    result = diagnose(model, make_windows(12), memories=(), resamples=40)
    other = diagnose(make_model("llama"), make_windows(12), memories=(), resamples=40)
    for layer, plain in zip(result.layers, other.layers, strict=True):
        assert layer.mean["v_static"].mean > 0.999 > 0.9 > plain.mean["v_static"].mean
        assert layer.mean["v_nonlinear"].mean > 0.99
        assert layer.mean["mean_field_gap"].mean < 0.01 < plain.mean["mean_field_gap"].mean
        assert layer.mean["v_mesa_net"].mean > plain.mean["v_mesa_net"].mean


@torch.no_grad()
def test_a_planted_sink_is_found():
    model = make_model("avgpath_post_norm")
    attention = model.model.layers[1].mixer  # without rotation: a query that is constant prefers one key everywhere
    windows = make_windows()
    keys = torch.cat([seen["k"] for seen in see(model, windows, 1)])
    first = keys[::LENGTH].mean(0)
    attention.q_norm.weight.copy_(20 * first.repeat_interleave(2, dim=0).flatten())
    attention.q_proj.weight.zero_()
    attention.q_proj.register_parameter("bias", torch.nn.Parameter(torch.ones(32)))
    planted = diagnose(model, windows, **QUICK).layers[0]
    plain = diagnose(make_model("avgpath_post_norm"), windows, **QUICK).layers[0]
    assert planted.mean["sink_mass"].mean > 0.8 > 0.4 > plain.mean["sink_mass"].mean
    assert planted.mean["entropy"].mean < plain.mean["entropy"].mean
    assert planted.mean["distance_with_sink"].mean > planted.mean["distance"].mean


@torch.no_grad()
def test_a_huge_sink_key_hides_nothing():
    """A sink that holds all but 1e-5 of the attention, with a key 1e5 long that no query sees."""
    torch.manual_seed(0)
    model = AvgPathForCausalLM(tiny_config(["softmax"], use_rope=False, attention_bias=True)).eval()
    attention = model.model.layers[1].mixer
    attention.q_proj.weight.zero_()
    attention.q_proj.bias.copy_(torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1]).repeat(4))
    attention.k_proj.weight *= 0.1

    def enlarge(module, args, output):
        output[:, 0] = torch.tensor([1e5, 6, 6, 6, 6, 6, 6, 6]).repeat(2)
        return output

    attention.k_proj.register_forward_hook(enlarge)
    windows = make_windows()
    run = DiagnosisRun(model, windows, DiagnosisSettings(layers=[1], **QUICK))
    run.run()
    parts = see(model, windows[3:], 1)
    rest = torch.cat([part["weights"][:, 1:, 1:].sum(-1).T for part in parts])[..., None]
    from_sink = [beside_sink(part)[2] - part["all_k"][0] for part in parts]  # the sink's key is one and the same
    whole = rest * torch.cat(from_sink)
    spread = (whole - whole.mean(0)).square().sum((0, 2))
    assert 0 < rest.max() < 1e-4
    found = {name: value.sum(0) for name, value in run._taken("1.mean_key_with_sink").items()}
    assert_close(found["squares"] - found["sum"].square().sum(-1) / found["n"], spread, 1e-3)
    assert all(
        0.9 < estimate.low <= estimate.high <= 1
        for estimate in run.result().layers[0].heads["mean_key_with_sink_affine"]
    )


@pytest.mark.parametrize("window", [1, 4], ids=["fitted", "measured"])
def test_one_corrupted_token_does_not_change_the_picture(window):
    model, windows = make_model("llama"), make_windows(8)
    number = 0

    def corrupt(factor, module, args, output):
        if number == window:
            output[0, LENGTH - 2] *= factor
        return output

    def measure(clip):
        nonlocal number
        number = -1
        seen = 0

        def count(*_):
            nonlocal number, seen
            number, seen = ORDER[seen], seen + 1

        handles = [model.model.embed_tokens.register_forward_pre_hook(count)]
        attention = model.model.layers[1].self_attn
        for projection, factor in ((attention.k_proj, 10), (attention.v_proj, 1e3)):
            handles.append(projection.register_forward_hook(partial(corrupt, factor)))
        result = diagnose(model, windows, layers=[1], memories=(), resamples=10, clip=clip)
        for handle in handles:
            handle.remove()
        return result.layers[0].mean

    clean = diagnose(model, windows, layers=[1], memories=(), resamples=10).layers[0].mean
    robust, plain = measure(3.0), measure(UNCLIPPED)
    for name in (
        "v_static",
        "v_nonlinear",
        "mean_key_affine",
        "mean_key_query",
        "mean_field_gap",
        "distance",
        "sink_mass",
    ):
        assert robust[name].mean == pytest.approx(clean[name].mean, abs=0.1 * max(1.0, abs(clean[name].mean))), name
    assert abs(plain["v_static"].mean - clean["v_static"].mean) > 0.2
    assert robust["clipped"].mean > 0 if window == 4 else True


ORDER = [*range(4), *range(4), *range(4, 8)]  # windows as the passes scales, fit and measure read them


# Data, memory, files.


def test_data_comes_in_many_forms():
    model, windows = make_model("qwen2"), make_windows()
    padded = F.pad(windows, (3, 2))
    mask = F.pad(torch.ones_like(windows), (3, 2))
    expected = diagnose(model, windows, **QUICK).to_dict()
    for data in (
        list(windows),
        iter(windows.split(2)),
        windows.tolist(),
        [{"input_ids": row, "attention_mask": real} for row, real in zip(padded, mask, strict=True)],
        {"input_ids": padded, "attention_mask": mask},
    ):
        assert diagnose(model, data, **QUICK).to_dict() == expected
    ragged = [windows[0], windows[1, :9], windows[2, :3], windows[3, :20]]
    assert diagnose(model, ragged, **QUICK).tokens == {"fitted": 35, "measured": 23, "losses": 0}


def test_memory_does_not_depend_on_the_number_of_tokens():
    model, sizes = make_model("llama"), []
    for count in (4, 12):
        settings = DiagnosisSettings(groups=2, memories=["delta_net"], loss_windows=1)
        run = DiagnosisRun(model, make_windows(count), settings)
        run.run()
        sizes.append(sum(value.nbytes for name, value in run.sums.items() if ".scales." not in name))
        assert run.nbytes == sum(value.nbytes for value in run.sums.values())
    assert sizes[0] == sizes[1]


def test_the_model_is_left_as_it_was():
    model, windows = make_model("llama").train(), make_windows(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    diagnose(model, windows, resamples=10)
    assert model.training and not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bfloat16_models_are_measured_in_fp32():
    windows = make_windows()
    wide, narrow = (
        diagnose(make_model("llama").to(dtype), windows, **QUICK) for dtype in (torch.float32, torch.bfloat16)
    )
    for name in ("sink_mass", "entropy", "v_static"):
        assert narrow.layers[0].mean[name].mean == pytest.approx(wide.layers[0].mean[name].mean, abs=0.05)


@torch.no_grad()
def test_dead_heads_have_finite_figures():
    model = make_model("llama")
    for projection in ("q_proj", "k_proj", "v_proj"):
        getattr(model.model.layers[1].self_attn, projection).weight.zero_()
        getattr(model.model.layers[1].self_attn, projection).bias.zero_()
    result = diagnose(model, make_windows(), resamples=20)
    json.dumps(result.to_dict(), allow_nan=False)
    figures = result.layers[1].mean
    assert figures["v_static"].mean == figures["mean_key_affine"].mean == 1 and figures["mean_field_gap"].mean == 0
    assert figures["sink_mass"].mean == pytest.approx(sum(1 / t for t in range(2, LENGTH + 1)) / (LENGTH - 1), rel=1e-4)


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [("fit", 2), ("reads", 1), ("measure", 1), ("losses", 2)])
def test_an_interrupted_diagnosis_goes_on_to_the_same_end(at, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_SAVES", 0.0)
    model, windows, file = make_model("llama"), make_windows(), tmp_path / "state.pt"
    options = {"resamples": 10, "layers": [1], "memories": ["delta_net"]}
    told = []

    def stop(*progress):
        if progress[:2] == at:
            raise Stop

    with pytest.raises(Stop):
        diagnose(model, windows, checkpoint=file, progress=stop, **options)
    with pytest.raises(ValueError, match=r"was left by a diagnosis of clip=3.0 \(now 2.0\)"):
        diagnose(model, windows, checkpoint=file, clip=2.0, **options)
    with pytest.raises(ValueError, match="another model or other data"):
        diagnose(model, windows.flip(0), checkpoint=file, **options)
    resumed = diagnose(model, windows, checkpoint=file, progress=lambda *args: told.append(args), **options)
    whole = diagnose(model, windows, **options)
    assert resumed.to_dict() == whole.to_dict()
    assert all(torch.equal(value, whole.maps[name]) for name, value in resumed.maps.items())
    assert told[0] != ("scales", 1, 3) and not file.exists()
    file.write_text("nonsense")
    with pytest.raises(ValueError, match="no checkpoint of a diagnosis"):
        diagnose(model, windows, checkpoint=file, **options)


def test_results_can_be_saved_read_and_ranked(tmp_path):
    model = make_model("qwen3")
    result = diagnose(model, make_windows(), memories=["delta_net", "gated_delta_net"], resamples=20)
    result.save(tmp_path / "found")
    again = Diagnosis.load(tmp_path / "found")
    assert again == result and again.to_dict() == result.to_dict()
    assert all(torch.equal(value, again.maps[name]) for name, value in result.maps.items())
    json.dumps(result.to_dict(), allow_nan=False)
    with pytest.raises(FileNotFoundError, match="holds no diagnosis"):
        Diagnosis.load(tmp_path)
    text, summary = result.markdown(), result.summary()
    for layer in result.layers:
        assert set(layer.heads) == set(STATISTICS) - {"isotropy"} and set(layer.mean) == set(STATISTICS)
        for name, estimates in layer.heads.items():
            assert len(estimates) == {"key": 2, "query": 4}[STATISTICS[name].heads]
            assert STATISTICS[name].title in text
            if name not in ("key_isotropy", "key_mean_share"):
                assert all(estimate.low <= estimate.high for estimate in estimates)
        assert set(layer.loss_change) == {"delta_net", "gated_delta_net"}
    assert "### gated_delta_net" in text and "layers to keep as softmax first" in summary
    with pytest.raises(ValueError, match="Unknown score 'beauty'"):
        result.rank("beauty")
    with pytest.raises(ValueError, match="No losses were measured"):
        diagnose(model, make_windows(), **QUICK).rank("loss_change")


def test_ranks_go_from_hard_to_easy():
    def layer(index, isotropy, change):
        steps = {"mapped_query": Estimate(change)}
        return LayerDiagnosis(index, {}, {"isotropy": Estimate(isotropy)}, {}, {"mesa_net": steps})

    layers = [layer(0, 0.5, 0.1), layer(2, 0.1, 0.4), layer(4, 0.7, 0.1), layer(5, 0.3, 0.2)]
    result = Diagnosis("m", "llama", layers, Estimate(3.0), {}, {}, {"memories": ["mesa_net"]})
    assert result.rank() == [2, 5, 0, 4]
    assert result.rank("loss_change") == [2, 5, 0, 4]
    assert result.rank_correlation().mean == pytest.approx(-0.9487, abs=1e-3)


def test_rank_correlation():
    x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    found = rank_correlation(x, [value**3 for value in x])
    assert found.mean == pytest.approx(1) and 0.99 < found.low <= found.high <= 1
    found = rank_correlation(x, [2.0, 1.0, 4.0, 3.0, 6.0, 5.0, 8.0, 7.0])
    assert found.mean == pytest.approx(1 - 6 * 8 / (8 * 63))  # 1 - 6 sum d^2 / (n (n^2 - 1))
    assert found.low < found.mean < found.high
    assert rank_correlation(x[:3], x[:3]).low is None


# Refusals.


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([], {}, ValueError, "data is empty"),
        (make_windows(1), {}, ValueError, "There is 1 window, and 2 are the least"),
        (
            torch.ones(2, 129, dtype=torch.long),
            {},
            ValueError,
            "has 129 tokens, more than .*max_position_embeddings=128",
        ),
        (torch.ones(2, 2, dtype=torch.long), {}, ValueError, "has 2 tokens, and 3 are the least"),
        (torch.full((2, 9), 97), {}, ValueError, r"token id 97, outside the vocabulary 0 \.\.\. 96"),
        (torch.full((2, 9), -1), {}, ValueError, "token id -1"),
        (torch.ones(2, 9), {}, TypeError, "torch.float32 of shape"),
        ([{"labels": make_windows(2)}], {}, ValueError, "no input_ids"),
        (
            [{"input_ids": make_windows(2), "attention_mask": torch.ones(2, 3)}],
            {},
            ValueError,
            r"\(2, 3\) does not fit input_ids \(2, 26\)",
        ),
        (make_windows(4), {"fit_windows": 4}, ValueError, "fit_windows=4 must leave some of the 4 windows"),
        (make_windows(4), {"groups": 0}, ValueError, "groups=0 must be at least 1"),
        (make_windows(4), {"resamples": 1}, ValueError, "resamples=1 must be at least 2"),
        (make_windows(4), {"clip": 1.0}, ValueError, "clip=1.0 must be greater than 1"),
        (make_windows(4), {"confidence": 1.0}, ValueError, "confidence=1.0"),
        (make_windows(4), {"memories": ["ttt_mlp"]}, ValueError, "Unknown memory 'ttt_mlp'.*mesa_net"),
        (make_windows(4), {"layers": [1, 7]}, ValueError, r"layers=\[7\]: no softmax layers; those .* are \[0, 1\]"),
        (make_windows(4), {"layers": []}, ValueError, "layers is empty"),
        (make_windows(4), {"layers": 1}, TypeError, r"layers=1 must be a list, such as \[0\]"),
        (make_windows(4), {"groups": 1.5}, TypeError, "groups=1.5 must be an integer"),
        (make_windows(4), {"loss_windows": 1.5}, TypeError, "loss_windows=1.5 must be an integer or None"),
        (make_windows(4), {"clip": "3"}, TypeError, "clip='3' must be a number"),
        (make_windows(4), {"memories": None}, TypeError, "memories=None must be a list"),
        (make_windows(4), {"checkpoint": "/none/such/file"}, ValueError, "the folder /none/such does not exist"),
        (make_windows(4)[0], {}, TypeError, r"an iterable of them; got a tensor of shape \(26,\)"),
        (3, {}, TypeError, "got 3"),
        (["hello"], {}, TypeError, "got 'hello'"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(data, options, error, message):
    model = make_model("llama")
    model.forward = model.model.forward = None  # calling either would raise a TypeError of another kind
    with pytest.raises(error, match=message):
        diagnose(model, data, **options)


def test_models_that_cannot_be_diagnosed():
    with pytest.raises(ValueError, match="no softmax layer"):
        diagnose(tiny_model("all_recurrent"), make_windows())
    with pytest.raises(ValueError, match="no language-model head"):
        diagnose(make_model("llama").model, make_windows())
    assert diagnose(make_model("llama").model, make_windows(), **QUICK).loss is None
    model = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="layer 0 are not finite"):
        diagnose(model, make_windows())


@pytest.mark.parametrize("place", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_what_is_not_finite_behind_the_last_attention_is_noticed(place):
    model = make_model("llama")
    with torch.no_grad():
        model.get_submodule(place).weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="(last hidden states|logits) are not finite"):
        diagnose(model, make_windows(), memories=["delta_net"])


def test_a_memory_named_twice_counts_once():
    model = make_model("llama")
    once, twice = (diagnose(model, make_windows(), memories=["delta_net"] * count) for count in (1, 2))
    assert once == twice


def test_the_maps_are_for_vectors_as_they_are():
    model, windows = make_model("qwen2"), make_windows(24)
    result = diagnose(model, windows, fit_windows=12, **QUICK)
    parts = see(model, windows[:12], 0)
    k, v = (torch.cat([part[name][1:] for part in parts]) for name in ("k", "v"))
    fitted = explained(v, apply_map(k, result.maps["0.value_map"].double()))
    for head in range(2):
        x = torch.cat((torch.ones(len(k), 1), k[:, head]), dim=1)
        least_squares = explained(v[:, head : head + 1], (x @ torch.linalg.lstsq(x, v[:, head]).solution)[:, None])
        assert 0 <= least_squares - fitted[head] < 0.02
