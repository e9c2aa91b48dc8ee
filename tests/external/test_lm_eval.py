# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""lm-evaluation-harness judges a saved checkpoint by local tasks, offline, with nothing of ours imported."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from laws.cases import tiny_model

from training.data import load_documents, train_tokenizer
from training.harness_data import main, make_continuations
from training.recipe import REPOSITORY, SetupError

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they".split()
)
QUESTIONS = 12


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with texts, a model with its tokenizer, and the tasks' data files, apart from the repository."""
    folder = tmp_path_factory.mktemp("harness")
    texts = folder / "texts"
    texts.mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(6):
        draws = torch.randint(len(WORDS), (120 + 20 * index,), generator=generator)
        (texts / f"{index}.txt").write_text(" ".join(WORDS[draw] for draw in draws), encoding="utf-8")
    tokenizer = train_tokenizer([document.text for document in load_documents(str(texts))], 400)
    tokenizer.save_pretrained(folder / "model")
    model = tiny_model("softmax_middle", vocab_size=400, max_position_embeddings=128)
    model.save_pretrained(folder / "model")
    here = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["data.path=texts", "data.split=all", f"continuations={QUESTIONS}"]) == 0
    finally:
        os.chdir(here)
    return folder, model, tokenizer


def read_lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def nll(model, tokens: list[int]) -> torch.Tensor:
    """Nats of each token but the first, given those before it."""
    return F.cross_entropy(model(torch.tensor([tokens[:-1]])).logits[0], torch.tensor(tokens[1:]), reduction="none")


def test_questions_are_sound(workplace):
    folder, _, _ = workplace
    texts = [record["text"] for record in read_lines(folder / "runs" / "lm_eval" / "documents.jsonl")]
    assert texts == [document.text for document in load_documents(str(folder / "texts"))]
    questions = read_lines(folder / "runs" / "lm_eval" / "continuations.jsonl")
    assert len(questions) == QUESTIONS and len({question["answer"] for question in questions}) > 1
    for question in questions:
        assert len(set(question["choices"])) == 4 and {len(choice.split()) for choice in question["choices"]} == {16}
        follows = [any(f"{question['context']} {choice}" in text for text in texts) for choice in question["choices"]]
        assert follows == [index == question["answer"] for index in range(4)]
        assert all(any(choice in text for text in texts) for choice in question["choices"])
    assert make_continuations(texts, 5, seed=3) == make_continuations(texts, 5, seed=3) != make_continuations(texts, 5)
    with pytest.raises(SetupError, match="too short for 5000 questions"):
        make_continuations(texts, 5000)


def test_the_harness_agrees_with_our_own_figures(workplace):
    pytest.importorskip("lm_eval", reason="the extra `evaluate` is not installed")
    folder, model, tokenizer = workplace
    assert (folder / "model" / "modeling_avgpath.py").is_file()  # the code that the checkpoint carries
    shutil.copytree(REPOSITORY / "configuration" / "lm_eval", folder / "tasks")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    arguments = [
        "--model", "hf", "--model_args", "pretrained=model,trust_remote_code=True,dtype=float32", "--device", "cpu",
        "--include_path", "tasks", "--tasks", "avgpath_held_out_continuation,avgpath_held_out_perplexity",
        "--batch_size", "4", "--output_path", "results", "--log_samples",
    ]  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-P", "-m", "lm_eval", "run", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    (file,) = (folder / "results").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]

    # The harness reads <eos> and the text in windows of the model's 128 positions; the last window is a whole one too, and
    # counts what no window before it has scored.
    texts = [document.text for document in load_documents(str(folder / "texts"))]
    nats = 0.0
    for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        stream = [tokenizer.eos_token_id, *tokens]
        nats += float(nll(model, stream[:129]).sum())
        if len(stream) > 129:
            assert len(stream) <= 257
            nats += float(nll(model, stream[-129:])[129 - len(stream) :].sum())
    bits = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert any(len(tokens) > 128 for tokens in tokenizer(texts)["input_ids"])
    assert results["avgpath_held_out_perplexity"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)

    right = 0
    for question in read_lines(folder / "runs" / "lm_eval" / "continuations.jsonl"):
        scores = []
        for choice in question["choices"]:
            context, whole = (
                tokenizer(text)["input_ids"] for text in (question["context"], f"{question['context']} {choice}")
            )
            scores.append(-nll(model, whole)[len(context) - 1 :].sum())
        right += int(torch.stack(scores).argmax()) == question["answer"]
    assert results["avgpath_held_out_continuation"]["acc,none"] == pytest.approx(right / QUESTIONS)
