# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""TRL's SFTTrainer: packed and padded batches give the loss and gradient of the documents taken one by one."""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from laws.cases import LAYOUTS, SPECS, tiny_model
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
FORMS = {
    "packed": {"packing": True, "max_length": 40},
    "padding_free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": None},
}


def sft(model, documents, tokenizer, folder, labels=None, peft_config=None, **settings) -> SFTTrainer:
    settings = {"per_device_train_batch_size": len(documents), "gradient_checkpointing": False, **settings}
    args = SFTConfig(
        output_dir=str(folder),
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        **settings,
    )
    columns = {"input_ids": documents, "labels": labels or documents}
    return SFTTrainer(
        model, args, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer, peft_config=peft_config
    )


def one_by_one(model, documents, labels=None) -> torch.Tensor:
    """Mean loss over all learnt tokens, each document in a forward pass of its own."""
    nats, count = 0.0, 0
    for ids, targets in zip(documents, labels or documents, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        targets = torch.tensor(targets)[1:]
        if len(targets):
            nats = nats + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
    return nats / count


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("case", [*SPECS, *LAYOUTS])
def test_packed_and_padded_equal_one_by_one(case, documents, tokenizer, tmp_path):
    model = tiny_model(case).train()
    expected = one_by_one(model, documents)
    expected.backward()
    expected_gradient = gradients(model)
    for name, settings in FORMS.items():
        trainer = sft(tiny_model(case), documents, tokenizer, tmp_path, **settings)
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        assert abs(float(loss.detach() - expected.detach())) < 1e-5, name
        difference = (gradients(trainer.model) - expected_gradient).norm() / expected_gradient.norm()
        assert difference < 1e-4, name
        if name != "padded":
            assert batch["input_ids"].shape == (1, sum(map(len, documents))) and "attention_mask" not in batch


def test_the_fused_head_gives_the_models_own_loss(documents, tokenizer, tmp_path):
    """TRL calls the base model and multiplies by the head's weight itself: what the head's forward adds would be lost."""
    learnt = [[-100] * (len(ids) // 2) + ids[len(ids) // 2 :] for ids in documents]
    for settings in FORMS.values():
        trainer = sft(tiny_model("three_cache_kinds"), documents, tokenizer, tmp_path, learnt, **settings)
        batch = next(iter(trainer.get_train_dataloader()))
        with torch.no_grad():
            own = trainer.model(**batch).loss
            fused = trainer.compute_loss(trainer.model, dict(batch))
        torch.testing.assert_close(fused, own, rtol=0, atol=1e-5)
        torch.testing.assert_close(fused, one_by_one(trainer.model, documents, learnt).detach(), rtol=0, atol=1e-5)


def taken_steps(trainer: SFTTrainer) -> torch.Tensor:
    """By how much three steps move each trained weight."""
    weights = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    before = [weight.detach().clone() for weight in weights]
    trainer.train()
    return torch.cat([(new.detach() - old).flatten() for new, old in zip(weights, before, strict=True)])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("case", ["all_recurrent", "three_cache_kinds"])
def test_training_packed_equals_training_padded(case, lora, documents, tokenizer, tmp_path):
    """The same with activation checkpointing; with all weights trained, and with LoRA."""
    settings = {"max_steps": 3, "learning_rate": 1e-2, "optim": "sgd", "lr_scheduler_type": "constant"}
    adapters = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")} if lora else {}
    padded = sft(tiny_model(case), documents, tokenizer, tmp_path, **settings, **adapters, **FORMS["padded"])
    expected = taken_steps(padded)
    assert expected.norm() > 0 and not padded.model.config.use_cache
    for checkpointing in (False, True):
        settings["gradient_checkpointing"] = checkpointing
        packed = sft(tiny_model(case), documents, tokenizer, tmp_path, **settings, **adapters, **FORMS["packed"])
        assert (taken_steps(packed) - expected).norm() / expected.norm() < 1e-3
        assert any(getattr(m, "gradient_checkpointing", False) for m in packed.model.modules()) == checkpointing


def test_evaluation_and_metrics(documents, tokenizer, tmp_path):
    """`evaluate` on a plain dataset, with accuracy from `compute_metrics` over ids that `preprocess_logits` chose."""

    def accuracy(prediction):
        right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
        counted = prediction.label_ids[:, 1:] != -100
        return {"accuracy": float(right[counted].mean())}

    model = tiny_model("softmax_last")
    data = Dataset.from_dict({"input_ids": documents, "labels": documents})
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, max_length=None,
            per_device_eval_batch_size=len(documents),
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    found = trainer.evaluate()
    with torch.no_grad():
        expected = float(one_by_one(model, documents))
        logits = [model(input_ids=torch.tensor([ids])).logits[0, :-1].argmax(-1) for ids in documents]
    right = torch.cat([chosen == torch.tensor(ids[1:]) for chosen, ids in zip(logits, documents, strict=True)])
    assert found["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert found["eval_accuracy"] == pytest.approx(float(right.float().mean()), abs=1e-6)
    assert found["eval_mean_token_accuracy"] == pytest.approx(found["eval_accuracy"], abs=1e-6)
