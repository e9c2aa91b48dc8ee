# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Texts that a model writes while it is trained, which leave its training as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.recipe import SampleRecipe


def generation_style(temperature: float, top_p: float) -> dict:
    """Arguments of `generate`: greedy at temperature 0, else sampled from the most likely tokens."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


@contextmanager
def undisturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside; afterwards the generators and the model's mode are as before.

    Python's and NumPy's generators, which `generate` does not use, are not touched.
    """
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        devices = [] if device.type == "cpu" else [device]
        # Compiled, a model would be compiled anew for every length of a growing text.
        stance = torch.compiler.set_stance("force_eager")
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad(), stance:
            torch.manual_seed(seed)
            yield
    finally:
        model.train(was_training)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The prompt's ids; an empty prompt begins a document."""
    return tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]


def write_sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: SampleRecipe, tokens: int, seed: int
) -> str:
    """A text of `tokens` new tokens after the recipe's prompt, without special tokens.

    The same for the same weights, and it leaves the model's mode and all random generators as they were.
    """
    prompt = torch.tensor([prompt_tokens(tokenizer, recipe.prompt)], device=model.device)
    with undisturbed(model, seed):
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,  # so that all processes of a sharded model take as many steps
            **generation_style(recipe.temperature, recipe.top_p),
        )
    return tokenizer.decode(output[0], skip_special_tokens=True)
