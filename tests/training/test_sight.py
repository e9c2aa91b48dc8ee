# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""What a run shows: loss by position, states, samples, utilisation, plots and trackers; and that looking changes nothing."""

import json
import math

import pytest
import torch
from matplotlib import image
from safetensors.torch import load_file

from modeling_avgpath import AvgPathCache, AvgPathConfig, AvgPathForCausalLM
from modeling_avgpath.memory_mesa import unpack_triangle
from training import pretrain, trackers
from training.data import IGNORE, collate
from training.recipe import Recipe, SetupError
from training.sampling import undisturbed
from training.tracking import Progress, read_metrics
from training.validation import PositionLosses, state_norms


def tiny(*specs: str) -> AvgPathForCausalLM:
    config = AvgPathConfig(
        vocab_size=40, hidden_size=32, num_attention_heads=2, intermediate_size=48, mixer_types=list(specs),
        num_hidden_layers=len(specs),
    )  # fmt: skip
    return AvgPathForCausalLM(config)


def rows(count: int, length: int) -> list[dict]:
    made = [{"tokens": torch.randint(0, 40, (length + 1,))} for _ in range(count)]
    made[-1]["tokens"][length // 2 :] = IGNORE  # filling
    return made


def run(*arguments: str) -> int:
    return pretrain.main(["tiny.yaml", *arguments])


@pytest.fixture
def here(workplace, monkeypatch):
    monkeypatch.chdir(workplace.folder)
    return workplace.folder


@pytest.fixture(scope="module")
def seen(workplace):
    """A run with samples, per-source losses and TensorBoard, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workplace.folder)
        assert run("output_dir=seen", "sample.training_tokens=6", "tracking.trackers=[tensorboard]") == 0
    return workplace.folder / "seen"


def test_buckets_give_back_the_whole_loss():
    model, losses = tiny("softmax").eval(), PositionLosses(21, sources=2)
    batch = collate(rows(3, 21))
    losses.add(model, batch, [0, 1, 1])
    with torch.no_grad():
        expected = model(**batch, use_cache=False).loss.item()
    buckets = losses.buckets()
    assert [(bucket["from"], bucket["to"]) for bucket in buckets] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 21)]
    total = sum(bucket["tokens"] for bucket in buckets)
    assert total == losses.targets() == int((batch["shift_labels"] != IGNORE).sum())
    assert sum(bucket["loss"] * bucket["tokens"] for bucket in buckets) / total == pytest.approx(
        losses.loss(), rel=1e-12
    )
    assert losses.loss() == pytest.approx(expected, rel=1e-6)
    parts = [losses.loss(source) * losses.targets(source) for source in range(2)]
    assert sum(parts) / total == pytest.approx(losses.loss(), rel=1e-12)


def test_positions_are_those_in_the_document_where_the_batch_has_them():
    model, losses = tiny("softmax").eval(), PositionLosses(12)
    batch = collate(rows(2, 12)[:1])
    batch["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    losses.add(model, batch)
    assert [bucket["tokens"] for bucket in losses.buckets()] == [2, 2, 4, 4]


@pytest.mark.parametrize(
    "spec", ["linear", "gated_delta_net", "mesa_net", "ttt_linear", "ttt_mlp", "gated_delta_net@mean_field"]
)
def test_norms_are_those_of_the_states_in_the_cache(spec):
    model = tiny(spec, "softmax").eval()
    ids = torch.randint(0, 40, (2, 40))
    (record,) = state_norms(model, model, ids)
    cache = AvgPathCache(model.config)
    with torch.no_grad():
        model(ids, cache=cache)
    states, mixer = cache.layers[0].states, model.model.layers[0].mixer
    assert record["layer"] == 0 and record["mixer"] == spec
    assert set(record["norms"]) == {name for name in mixer.state_names if name != "place"}
    for name, norm in record["norms"].items():
        state = states[name]
        if spec == "mesa_net" and name == "H":
            state = unpack_triangle(state, 16)
        if spec.startswith("ttt") and name in ("W1", "b1", "W2", "b2"):
            state = state - getattr(mixer, name).reshape(state.shape[1:])
        assert norm == pytest.approx(state.flatten(2).norm(dim=-1).mean().item(), rel=1e-5)
    assert record["norms"][next(iter(record["norms"]))] > 0
    assert state_norms(tiny("softmax"), tiny("softmax"), ids) == []


def test_ttt_starts_at_a_distance_of_zero():
    model = tiny("ttt_linear").eval()
    norms = state_norms(model, model, torch.randint(0, 40, (1, 3)))[0]["norms"]  # the first mini-batch is unfinished
    assert norms["W1"] == norms["b1"] == 0 and norms["dW1"] > 0


def test_records_of_a_run(seen):
    train, validation = (read_metrics(seen / "metrics.jsonl", kind) for kind in ("train", "validation"))
    summary = json.loads((seen / "summary.json").read_text())
    peak = summary["flops_per_token"] * train[0]["tokens_per_second"] / train[0]["mfu"]
    for record in train:
        assert 0 < record["mfu"] < 1
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * summary["flops_per_token"] / peak)
    for record in validation:
        buckets = record["by_position"]
        assert sum(bucket["tokens"] for bucket in buckets) == record["target_tokens"]
        nats = sum(bucket["loss"] * bucket["tokens"] for bucket in buckets)
        assert nats / record["target_tokens"] == pytest.approx(record["loss"], rel=1e-6)
    states = read_metrics(seen / "metrics.jsonl", "states")
    assert [record["step"] for record in states] == [record["step"] for record in validation] == [0, 6, 12]
    assert [layer["layer"] for layer in states[-1]["layers"]] == [0, 1, 2]  # the fourth is softmax


def test_figures_are_readable_and_small(seen):
    for name in ("training.png", "loss.png"):
        pixels = image.imread(seen / name)
        assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.01
        assert (seen / name).stat().st_size < 300_000


def test_looking_changes_nothing(seen, here):
    """Without samples, and with other ones: the same losses, bit for bit, and the same weights."""
    assert run("output_dir=blind", "sample.training_tokens=0", "tracking.trackers=[]", "sample.temperature=0") == 0
    first, second = (
        [record["loss"] for record in read_metrics(folder / "metrics.jsonl", "train")]
        for folder in (seen, here / "blind")
    )
    assert first == second
    weights = [load_file(folder / "final" / "model.safetensors") for folder in (seen, here / "blind")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not (here / "blind" / "samples.jsonl").exists() and not (here / "blind" / "tracking").exists()


def test_samples_of_a_run(seen):
    samples = [json.loads(line) for line in (seen / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 6]
    assert all(sample["text"].startswith("Count") and len(sample["text"]) > len("Count") for sample in samples)


def test_generators_and_mode_come_back():
    model = tiny("softmax").train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with undisturbed(model, seed=7):
            assert not model.training
            drawn.append(torch.rand(1))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before) and model.training


def tensorboard_scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tracking" / "avgpath"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_what_the_metrics_hold(seen):
    scalars = tensorboard_scalars(seen)
    train = read_metrics(seen / "metrics.jsonl", "train")
    assert scalars["train/loss"] == [(record["step"], pytest.approx(record["loss"])) for record in train]
    assert [step for step, _ in scalars["validation_by_position/0-1"]] == [0, 6, 12]
    assert {"train/mfu", "validation/perplexity", "states/0 W", "train/tokens_per_second"} <= set(scalars)
    (settings,) = (seen / "tracking").rglob("hparams.yml")
    assert "optimizer.learning_rate: 0.01" in settings.read_text()


def test_a_run_that_goes_on_doubles_no_step(here):
    pytest.importorskip("tensorboard")
    options = "output_dir=broken", "sample.training_tokens=4", "tracking.trackers=[tensorboard]"
    assert run(*options) == 0
    # As if killed at the very end: the checkpoint is of step 8, and the trackers know of step 12.
    (here / "broken" / "summary.json").unlink()
    assert run(*options, "resume=true") == 0
    scalars = tensorboard_scalars(here / "broken")
    train = read_metrics(here / "broken" / "metrics.jsonl", "train")
    assert [step for step, _ in scalars["train/loss"]] == [record["step"] for record in train] == [2, 4, 6, 8, 10, 12]
    assert [step for step, _ in scalars["validation/loss"]] == [0, 6, 12]
    samples = [json.loads(line)["step"] for line in (here / "broken" / "samples.jsonl").read_text().splitlines()]
    assert samples == [0, 6]
    assert len(list((here / "broken" / "tracking").rglob("hparams.yml"))) == 1


@pytest.mark.parametrize(
    ("names", "words"),
    [(["tensorbord"], ["unknown tracker 'tensorbord'", "did you mean 'tensorboard'"]),
     (["wandb"], ["wandb is not installed", "pip install wandb"])],
)  # fmt: skip
def test_trackers_that_cannot_be_had(names, words, monkeypatch):
    monkeypatch.setattr(trackers, "is_installed", lambda name: name == "tensorboard")
    with pytest.raises(SetupError) as error:
        trackers.choose_trackers(names)
    assert all(word in str(error.value) for word in words)
    assert trackers.choose_trackers(None) == ["tensorboard"] and trackers.choose_trackers([]) == []
    monkeypatch.setattr(trackers, "is_installed", lambda name: False)
    assert trackers.choose_trackers(None) == []


def test_recipes_become_settings_of_every_tracker():
    import dataclasses

    flat = trackers.flatten_settings(dataclasses.asdict(Recipe()))
    assert (
        flat["train.steps"] == 300
        and flat["tracking.trackers"] == "null"
        and flat["sample.cache_tokens"] == "[100, 2000]"
    )
    assert all(isinstance(value, bool | int | float | str) for value in flat.values())


def test_progress_shows_utilisation_where_it_is_known(capsys):
    progress = Progress(10)
    progress.show(5, 2.0, 1234.0, 0.0312)
    progress.show(6, 2.0, 1234.0)
    first, second = capsys.readouterr().out.splitlines()
    assert "1,234 tokens/s  MFU 3.1%" in first and "left" in first
    assert "MFU" not in second


def test_an_empty_validation_is_not_a_number():
    assert math.isnan(PositionLosses(4).loss()) and PositionLosses(4).buckets() == []
