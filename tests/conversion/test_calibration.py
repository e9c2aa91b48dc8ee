# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The calibrated start: its statistics are those of the attention, and it begins nearer to the teacher."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from laws.cases import relative_error
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from modeling_avgpath.conversion import calibrate, from_softmax
from modeling_avgpath.conversion_calibration import LARGEST_LOGIT, fit_output, ridge
from modeling_avgpath.conversion_start import HeadSettings, best_factor, explained, power, start_mixer
from modeling_avgpath.softmax_models import softmax_layers
from training.data import load_documents, pack


@pytest.fixture(scope="module")
def texts(workplace, teacher) -> torch.Tensor:
    """Rows of the texts that the teacher was trained on, `[N, 32]`."""
    tokenizer = AutoTokenizer.from_pretrained(workplace / "teacher" / "final")
    documents = [tokenizer(document.text)["input_ids"] for document in load_documents(str(workplace / "texts"))]
    return torch.tensor(pack(documents, tokenizer.eos_token_id, 32, fill=False).tokens).long()[:, :32]


@torch.no_grad()
def loss(model, ids: torch.Tensor) -> float:
    return F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


@torch.no_grad()
def test_statistics_are_those_of_the_attention(teacher, texts):
    """Distance, sink, moments and regressions written out from the weights that eager attention returns."""
    ids = texts[:6]
    found = calibrate(teacher, [ids[:2], ids[2:]])
    assert found.tokens == ids.numel() and torch.equal(found.texts, ids)
    teacher.set_attn_implementation("eager")
    output = teacher(ids, output_attentions=True, output_hidden_states=True)
    teacher.set_attn_implementation("sdpa")
    for index, layer in enumerate(softmax_layers(teacher)):
        weights = output.attentions[index].double()
        x = layer.block.input_layernorm(output.hidden_states[index])
        statistics = found.layers[index]
        torch.testing.assert_close(statistics.sink_mass, weights[..., 0].mean((0, 2)).float())
        rest = weights.clone()
        rest[..., 0] = 0
        steps = torch.arange(32)
        lag = (rest * (steps[:, None] - steps)).sum((0, 2, 3)) / rest.sum((0, 2, 3))
        torch.testing.assert_close(statistics.distance, lag.clamp(min=1).float(), rtol=1e-4, atol=1e-4)
        moments = statistics.moments
        torch.testing.assert_close(
            moments.second, (x.flatten(0, 1).T @ x.flatten(0, 1)) / x[..., 0].numel(), rtol=1e-3, atol=1e-4
        )
        q, k, _ = layer.project(x)
        k = k.repeat_interleave(2, dim=2)
        for head in range(4):
            mass = rest[:, head].sum(-1)  # [B, T]
            mean_key = (rest[:, head] @ k[:, :, head].double())[mass > 0] / mass[mass > 0][:, None]
            features = F.pad(q[:, :, head].double(), (0, 1), value=1.0)[mass > 0]
            root = mass[mass > 0].sqrt()[:, None]
            a, b = features * root, mean_key * root
            solution = ridge(a.T @ a, a.T @ b, 1e-2).T.float()
            torch.testing.assert_close(statistics.fit.weight[head], solution[:, :-1], rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(statistics.fit.bias[head], solution[:, -1], rtol=1e-2, atol=1e-3)
        assert ((x @ statistics.fit.constant) - 1).abs().mean() < 0.5
        assert (x @ statistics.fit.gate.T).abs().max() < 4 * LARGEST_LOGIT


def test_sums_do_not_depend_on_the_batches(teacher, texts):
    whole, parts = calibrate(teacher, [texts[:8]]), calibrate(teacher, [{"input_ids": row[None]} for row in texts[:8]])
    for index, layer in whole.layers.items():
        other = parts.layers[index]
        assert relative_error(other.fit.weight, layer.fit.weight) < 1e-3
        torch.testing.assert_close(other.distance, layer.distance, rtol=1e-4, atol=1e-4)
    assert len(calibrate(teacher, [texts[:8]], fit_tokens=96).texts) == 3


@pytest.mark.parametrize(
    "spec",
    ["gated_delta_net", "delta_net", "linear", "mesa_net", "ttt_linear", "mesa_net@mean_field", "identity@mean_field"],
)
def test_calibrated_is_nearer_than_copied(teacher, texts, spec):
    """On texts that the calibration has not seen; all layers but one converted."""
    specs = [spec] * 3 + ["softmax"]
    calibration = calibrate(teacher, texts[:64].split(16))
    plain, calibrated = from_softmax(teacher, specs), from_softmax(teacher, specs, calibration=calibration)
    held_out = texts[64:96]
    reference = loss(teacher, held_out)
    excess = [loss(model, held_out) - reference for model in (plain, calibrated)]
    assert excess[1] < 0.6 * excess[0], (reference, excess)


def test_gates_and_rates_say_what_the_calibration_found(teacher, texts):
    """Settings written into each memory come out of it again, text after text the same."""
    calibration = calibrate(teacher, [texts[:32]])
    layer = softmax_layers(teacher)[1]
    statistics = calibration.layers[1]
    settings = HeadSettings(torch.zeros(4), torch.tensor([2.0, 5.0, 30.0, 400.0]), torch.tensor([0.1, 0.4, 0.6, 0.9]))
    x = torch.randn(1, 5, 48)
    for spec in ("linear", "mesa_net", "gated_delta_net", "delta_net"):
        mixer = from_softmax(teacher, mixer=spec, hybrid_ratio="1:0").model.layers[1].mixer
        start_mixer(mixer, layer, statistics.moments, settings, statistics.fit)
        gates = mixer.gates(x)
        if "g" in gates:
            torch.testing.assert_close(gates["g"], (-1 / settings.span).expand(1, 5, 4), rtol=1e-4, atol=1e-6)
        if mixer.b_proj.bias is not None:
            torch.testing.assert_close(gates["beta"], settings.strength.expand(1, 5, 4))
        else:  # through the direction of the input that is nearly one
            constant = x @ statistics.fit.constant
            expected = torch.sigmoid(constant[..., None] * torch.logit(settings.strength))
            torch.testing.assert_close(gates["beta"], expected, rtol=1e-4, atol=1e-5)


def test_conditioning_of_keys():
    """Whitening makes the second moment the identity, exponent 0 leaves it; singular ones stay finite."""
    keys = torch.randn(2, 500, 6) @ torch.randn(2, 6, 6)
    second = keys.mT @ keys / 500
    whitened = keys @ power(second, torch.tensor([1.0, 0.0]))
    moment = whitened.mT @ whitened / 500
    moment = moment / moment.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    torch.testing.assert_close(moment[0], torch.eye(6), atol=2e-2, rtol=0)
    torch.testing.assert_close(power(second, torch.tensor([0.0, 0.0])), torch.eye(6).expand(2, 6, 6), atol=1e-5, rtol=0)
    assert power(torch.zeros(1, 6, 6), torch.ones(1)).isfinite().all()


def test_the_output_fit():
    """Recovers a linear map from enough reads, and stays near the inherited one where reads say nothing."""
    true, inherited = torch.randn(7, 12), torch.randn(7, 12)
    reads = torch.randn(8, 200, 12) * torch.logspace(-4, 2, 12)
    assert relative_error(reads @ fit_output(reads, reads @ true.T, inherited).T, reads @ true.T) < 1e-2
    silent = reads.clone()
    silent[..., 3:] = 0
    fitted = fit_output(silent, silent @ true.T, inherited)
    torch.testing.assert_close(fitted[:, 3:], inherited[:, 3:])
    noise = torch.randn(8, 4, 7)
    reads = torch.randn(8, 4, 12)
    kept = fit_output(reads, reads @ inherited.T + noise, inherited)
    assert relative_error(kept, inherited) < 0.8


def test_factors():
    reads = torch.randn(3, 10, 4, 6)
    targets = reads * torch.tensor([2.0, -0.5, 0.0, 1.0])[:, None]
    torch.testing.assert_close(best_factor(reads, targets), torch.tensor([2.0, -0.5, 0.0, 1.0]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(explained(reads, targets)[[0, 1, 3]], torch.ones(3))
    orthogonal = torch.randn(3, 2000, 4, 6)
    assert explained(orthogonal, torch.randn(3, 2000, 4, 6)).max() < 0.01


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
def test_low_precision_and_biases(config):
    """A bf16 source, and one with biases, calibrate and give a student in their dtype."""
    model_class = LlamaForCausalLM if config is LlamaConfig else Qwen2ForCausalLM
    fields = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    source = model_class(config(**fields)).to(torch.bfloat16)
    ids = torch.randint(50, (4, 24))
    student = from_softmax(source, mixer="gated_delta_net", hybrid_ratio="1:1", calibration=calibrate(source, [ids]))
    assert student.dtype == torch.bfloat16 and student.model.layers[0].mixer.A_log.dtype == torch.float32
    assert math.isfinite(loss(student, ids))


def test_a_calibration_reads_no_other_text(teacher, texts):
    """The same texts give the same student, bit for bit."""
    students = [
        from_softmax(teacher, mixer="delta_net", calibration=calibrate(teacher, [texts[:16]])).state_dict()
        for _ in "ab"
    ]
    assert all(torch.equal(weight, students[1][name]) for name, weight in students[0].items())
    assert json.dumps(sorted(students[0])) == json.dumps(sorted(students[1]))
