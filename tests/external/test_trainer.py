# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Transformers' Trainer: token-weighted accumulation, resuming, evaluation with metrics."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from laws.cases import tiny_model
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def make(model, documents, tokenizer, folder, collator=None, **settings) -> Trainer:
    settings = {"save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 0, **settings}
    extra = {
        name: settings.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in settings
    }
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **settings)
    data = Dataset.from_dict({"input_ids": documents})
    return Trainer(
        model, args, collator or DataCollatorForLanguageModeling(tokenizer, mlm=False), data, data, tokenizer, **extra
    )


def logged_losses(trainer) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def token_nats(model, ids: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(ids[1:], dtype=torch.long), reduction="none")


@pytest.mark.parametrize("case", ["softmax_middle", "three_cache_kinds"])
def test_every_token_counts_alike_under_accumulation(case, documents, tokenizer, tmp_path):
    """Eight documents of 1 to 30 tokens, in one batch, one by one, and packed: one step of SGD to the same weights."""
    model = tiny_model(case).train()
    nats = torch.cat([token_nats(model, ids) for ids in documents])
    nats.mean().backward()
    expected = {name: p.detach() - 1e-2 * p.grad for name, p in model.named_parameters()}
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for batch_size, collator in ((8, None), (1, None), (2, None), (4, flattening)):
        trainer = make(
            tiny_model(case), documents, tokenizer, tmp_path, collator, per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=8 // batch_size, max_steps=1, optim="sgd",
        )  # fmt: skip
        trainer.train()
        assert logged_losses(trainer) == pytest.approx([float(nats.mean().detach())], abs=1e-4)
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=2e-6, msg=name)


def test_a_resumed_run_is_the_uninterrupted_one(documents, tokenizer, tmp_path):
    """Also with dropout, whose random state is part of the checkpoint; stopped in the midst of the second epoch."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 9, "seed": 3, "save_strategy": "steps", "save_steps": 6}

    def new_trainer(seed: int, folder: str) -> Trainer:
        model = tiny_model("softmax_middle", seed, attention_dropout=0.2)
        return make(model, documents, tokenizer, tmp_path / folder, **settings)

    whole = new_trainer(0, "whole")
    whole.train()
    assert not whole.model.config.use_cache
    resumed = new_trainer(5, "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert get_last_checkpoint(str(tmp_path / "resumed")).endswith("checkpoint-9")
    assert logged_losses(resumed) == logged_losses(whole) and len(logged_losses(whole)) == 9
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_evaluate_and_predict(documents, tokenizer, tmp_path):
    """Accuracy and per-token loss from `compute_metrics`, with logits reduced batch by batch on the way."""

    def reduce(logits, labels):
        assert torch.is_tensor(logits)  # no cache, no hidden states among the outputs
        nats = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
        return torch.stack((logits[:, :-1].argmax(-1).float(), nats), dim=-1)

    def metrics(prediction):
        labels = prediction.label_ids[:, 1:]
        counted = labels != -100
        chosen, nats = (prediction.predictions[..., index][counted] for index in (0, 1))
        return {"accuracy": float((chosen == labels[counted]).mean()), "nats": float(nats.mean())}

    model = tiny_model("all_recurrent")
    trainer = make(
        model, documents, tokenizer, tmp_path, per_device_eval_batch_size=3, compute_metrics=metrics,
        preprocess_logits_for_metrics=reduce,
    )  # fmt: skip
    with torch.no_grad():
        nats = torch.cat([token_nats(model, ids) for ids in documents])
        chosen = [model(input_ids=torch.tensor([ids])).logits[0, :-1].argmax(-1).numpy() for ids in documents]
    right = np.concatenate([row == np.array(ids[1:]) for row, ids in zip(chosen, documents, strict=True)])
    found = trainer.evaluate()
    assert found["eval_nats"] == pytest.approx(float(nats.mean()), abs=1e-5)
    assert found["eval_accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.metrics["test_nats"] == pytest.approx(found["eval_nats"])
    assert predicted.predictions.shape == (len(documents), max(map(len, documents)) - 1, 2)
    for row, ids in zip(predicted.predictions, chosen, strict=True):
        assert (row[: len(ids), 0] == ids).all()
