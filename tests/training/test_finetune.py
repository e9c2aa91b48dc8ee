# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The fine-tuning script end to end on a tiny model: what it learns from, what it writes, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from training import finetune
from training.data import train_tokenizer
from training.examples import DEFAULT_CHAT_TEMPLATE, load_examples, sotu_conversations, split_examples
from training.finetune import build_trainer, main
from training.recipe import REPOSITORY, ExampleRecipe, FinetuneRecipe, SetupError, load_recipe, recipe_fields
from training.tracking import read_metrics

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": f"From {WORDS[start % 10]}?"},
            {"role": "assistant", "content": " ".join(WORDS[(start + i) % 10] for i in range(3 + start % 4))},
            {"role": "user", "content": "More?"},
            {"role": "assistant", "content": WORDS[(start * 3) % 10]},
        ]
    }
    for start in range(20)
]
PAIRS = [{"prompt": f"From {WORDS[i % 10]}:", "completion": f" {WORDS[(i + 1) % 10]}."} for i in range(12)]
RECIPE = """
model: {path: base}
data: {path: chats.jsonl, validation_every: 5, max_length: 96}
train: {steps: 6, batch_size: 2, mixed_precision: 'no', log_every: 1}
optimizer: {learning_rate: 5e-3}
schedule: {warmup_steps: 1}
validation: {every_steps: 3, batch_size: 3}
checkpoint: {every_steps: 3, keep_last: 2}
sample: {shown_tokens: 4}
"""


def write_lines(file: Path, records: list[dict]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A model as `pretrain.py` leaves it, but for the training: no chat template."""
    folder = tmp_path_factory.mktemp("finetuning") / "base"
    tokenizer = train_tokenizer([json.dumps(record) for record in (*CHATS, *PAIRS)], 330)
    torch.manual_seed(0)
    config = AvgPathConfig(
        vocab_size=330, hidden_size=24, intermediate_size=32, num_attention_heads=2, num_hidden_layers=3,
        layer_pattern=["gated_delta_net", "mesa_net", "softmax"], bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    AvgPathForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def place(base, tmp_path, monkeypatch) -> Path:
    """A working folder with the tiny model, examples and a recipe."""
    (tmp_path / "base").symlink_to(base)
    write_lines(tmp_path / "chats.jsonl", CHATS)
    write_lines(tmp_path / "pairs.jsonl", PAIRS)
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> int:
    return main(["tiny.yaml", *arguments])


def losses(folder: str) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(Path(folder, "metrics.jsonl"), "train")}


def trainer_of(*overrides: str):
    return build_trainer(load_recipe("tiny.yaml", overrides, FinetuneRecipe))[0]


def learnt_text(trainer) -> list[str]:
    """What the labels of each row hold, `|` where they do not continue each other."""
    texts = []
    for row in trainer.train_dataset:
        pieces, previous = [], False
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            assert label in (-100, token)
            if label != -100:
                if not previous:
                    pieces.append([])
                pieces[-1].append(token)
            previous = label != -100
        texts.append("|".join(trainer.processing_class.decode(piece) for piece in pieces))
    return texts


def test_all_weights_packed_then_gone_on_with(place, capsys):
    """A finished run; one stopped half way; and the latter resumed: the same losses and weights as the former."""
    assert run("output_dir=whole") == 0
    shown = capsys.readouterr().out
    assert "16 training and 4 held-out examples with messages" in shown and "model in whole/final" in shown

    model = AutoModelForCausalLM.from_pretrained("whole/final")
    tokenizer = AutoTokenizer.from_pretrained("whole/final")
    assert isinstance(model, AvgPathForCausalLM) and model.config.use_cache
    card = Path("whole/final/README.md").read_text()
    assert "fine-tuned" in card and "chats.jsonl" in card
    assert tokenizer.chat_template == DEFAULT_CHAT_TEMPLATE
    summary = json.loads(Path("whole/summary.json").read_text())
    assert summary["trained_parameters"] == summary["parameters"]
    assert summary["validation"]["loss"] < summary["validation_before"]["loss"]
    assert Path("whole/sample.txt").read_text().startswith("More?") and Path("whole/loss.png").stat().st_size > 1000

    # The held-out loss, recomputed example by example from the saved folder.
    nats = correct = count = 0
    for example in split_examples(ExampleRecipe(path="chats.jsonl", validation_every=5))[1]:
        written = tokenizer.apply_chat_template(
            example.conversation, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(written["input_ids"]), torch.tensor(written["assistant_masks"]).bool()[1:]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        nats += float(F.cross_entropy(logits[mask], ids[1:][mask], reduction="sum"))
        correct += int((logits.argmax(-1) == ids[1:])[mask].sum())
        count += int(mask.sum())
    assert summary["validation"]["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert summary["validation"]["accuracy"] == pytest.approx(correct / count)

    # Stopped by a signal within the second step, then gone on with.
    assert run("output_dir=halves", "checkpoint.every_steps=0", "train.steps=3") == 0  # no checkpoint to go on from
    assert run("output_dir=halves", "resume=true") == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert run("output_dir=whole") == 2
    assert "whole holds a finished run" in capsys.readouterr().err
    assert stop_after(2, "output_dir=parts") == 128 + signal.SIGTERM
    assert "stopped after step 2 of 6" in (message := capsys.readouterr().err) and "resume=true" in message
    assert run("output_dir=parts") == 2
    assert "unfinished run" in (message := capsys.readouterr().err) and "resume=true" in message
    assert run("output_dir=parts", "resume=true", "optimizer.learning_rate=1") == 2
    assert "'optimizer.learning_rate' was 0.005 when the run began and is 1.0 now" in capsys.readouterr().err
    assert run("output_dir=parts", "resume=true") == 0
    assert losses("parts") == losses("whole") and list(losses("parts")) == [1, 2, 3, 4, 5, 6]
    resumed = AutoModelForCausalLM.from_pretrained("parts/final").state_dict()
    assert all(torch.equal(weight, resumed[name]) for name, weight in model.state_dict().items())


def stop_after(step: int, *arguments: str) -> int:
    """Run the script and send its process SIGTERM while it takes `step`."""

    class Stopping(finetune.RunCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "RunCallback", Stopping)
        return run(*arguments)


def test_lora_is_an_adapter_and_merges_to_a_plain_model(place, capsys):
    assert run("output_dir=lora", "lora.rank=4", "lora.merge=true", "lora.dora=true", "data.packing=false") == 0
    shown = capsys.readouterr().out
    assert "adapter in lora/adapter" in shown and "model in lora/final" in shown
    base = AutoModelForCausalLM.from_pretrained("base")
    ids = torch.tensor([[5, 40, 7, 99, 120, 33]])
    before = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, "lora/adapter").eval()(input_ids=ids).logits
    merged = AutoModelForCausalLM.from_pretrained("lora/final")(input_ids=ids).logits
    assert not torch.allclose(adapted, before, atol=1e-3)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    for folder in ("lora/adapter", "lora/final"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == DEFAULT_CHAT_TEMPLATE
    assert run("output_dir=further", "model.path=lora/adapter") == 2
    assert "is an adapter, not a model" in capsys.readouterr().err
    assert run("output_dir=further", "model.path=lora") == 2
    assert "did you mean lora/final?" in capsys.readouterr().err


def test_what_is_learnt_of_a_conversation(place):
    answers = [[turn["content"] for turn in chat["messages"] if turn["role"] == "assistant"] for chat in CHATS]
    expected = ["|".join(f"{text}<|endoftext|>" for text in pair) for pair in answers]
    trainer = trainer_of("data.packing=false", "data.validation_every=null")
    assert learnt_text(trainer) == expected
    packed = "|".join(learnt_text(trainer_of("data.packing=true", "data.validation_every=null"))).split("|")
    assert sorted(packed) == sorted("|".join(expected).split("|"))
    whole = trainer_of("data.packing=false", "data.loss=all", "data.validation_every=null")
    assert learnt_text(whole)[0].startswith(
        "<|endoftext|><|system|>\nCount.\n<|user|>\nFrom zero?\n<|assistant|>\nzero one"
    )


def test_what_is_learnt_of_pairs_and_texts(place):
    pairs = trainer_of("data.path=pairs.jsonl", "data.packing=false", "data.validation_every=null")
    assert learnt_text(pairs) == [pair["completion"] + "<|endoftext|>" for pair in PAIRS]
    whole = trainer_of("data.path=pairs.jsonl", "data.packing=false", "data.validation_every=null", "data.loss=all")
    assert learnt_text(whole) == [pair["prompt"] + pair["completion"] + "<|endoftext|>" for pair in PAIRS]
    (place / "turns.jsonl").write_text(
        json.dumps({"prompt": CHATS[0]["messages"][:4], "completion": CHATS[0]["messages"][4:]}) + "\n"
    )
    turns = trainer_of("data.path=turns.jsonl", "data.packing=false", "data.validation_every=null")
    assert learnt_text(turns) == ["zero<|endoftext|>"]
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text("one two")
    write_lines(place / "texts" / "b.jsonl", [{"body": "three"}])
    texts = trainer_of("data.path=texts", "data.text_field=body", "data.packing=false", "data.validation_every=null")
    assert learnt_text(texts) == ["one two<|endoftext|>", "three<|endoftext|>"]


def test_the_default_examples_hold_out_whole_years():
    train, held_out = split_examples(ExampleRecipe())
    assert len(train) + len(held_out) == len(sotu_conversations()) > 200
    assert not {example.group for example in train} & {example.group for example in held_out}
    question, answer = (turn["content"] for turn in train[0].conversation)
    assert question == "How did Washington begin the State of the Union message of 1790?"
    assert answer.startswith("Fellow-Citizens of the Senate") and answer.endswith(".")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 2", "not valid JSON"]),
        ("[1]", ["line 2", "expected a JSON object, not list"]),
        ('{"chat": []}', ["line 2", "'messages'", "its fields are chat"]),
        ('{"messages": []}', ["line 2", "one or more turns"]),
        ('{"messages": [{"role": "user"}]}', ["line 2", "turn 1", "'content'"]),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', ["line 2", "no assistant turn", "roles are user"]),
        ('{"prompt": "a", "completion": " "}', ["line 2", "completion is empty"]),
        ('{"prompt": "a", "completion": 3}', ["line 2", "must both be texts"]),
        ('{"text": ""}', ["line 2", "not empty"]),
        ('{"text": "a"}', ["line 2", "text among examples with messages", "line 1"]),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, words):
    file = tmp_path / "examples.jsonl"
    file.write_text(json.dumps(CHATS[0]) + "\n" + line + "\n")
    with pytest.raises(SetupError) as error:
        load_examples("data.path", str(file), "text")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.path=absent"], ["model.path=absent", "no such model folder"]),
        (["model.path=runs/pretrain/final"], ["no such model folder", "python training/pretrain.py makes it"]),
        (["model.path=larger"], ["tokenizer has 332 tokens", "330 rows", "resize_token_embeddings"]),
        (["data.path=absent.jsonl"], ["data.path=absent.jsonl", "no such file"]),
        (["data.validation_path=pairs.jsonl"], ["prompt and completion", "messages"]),
        (["data.chat_template=absent.jinja"], ["absent.jinja", "no such file"]),
        (["data.chat_template=plain.jinja"], ["{% generation %}", "data.loss=all"]),
        (["data.chat_template=picky.jinja"], ["chats.jsonl, line 1", "no system turns"]),
        (["data.max_length=4", "data.packing=false"], ["data.max_length=4", "nothing to learn"]),
        (["lora.rank=2", "lora.target_modules=q_prj"], ["'q_prj'", "did you mean 'q_proj'?", "b_proj"]),
        (["lora.rank=2", "lora.target_modules=[q_proj,q_conv1d]"], ["'q_conv1d' is a ShortConv"]),
        (["lora.rank=2", "lora.target_modules=lm_head"], ["'lm_head' besides its head"]),
        (["train.steps=null", "train.epochs=1", "schedule.warmup_steps=99"], ["at most the run's", "not 99"]),
        (["train.batch_size=3", "train.micro_batch_size=2"], ["train.batch_size=3 is not a multiple"]),
        (["lora.rnk=2"], ["'lora.rnk'", "did you mean 'lora.rank'?"]),
        (["data.loss=answers"], ["'data.loss' must be one of completion, all"]),
    ],
)
def test_mistakes_are_told_in_one_line_before_anything_is_written(arguments, words, place, base, capsys):
    (place / "plain.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (place / "picky.jinja").write_text(
        "{% for m in messages if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endfor %}"
    )
    if "model.path=larger" in arguments:
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens([f"<new{number}>" for number in range(332 - len(tokenizer))])
        AutoModelForCausalLM.from_pretrained(base).save_pretrained("larger")
        tokenizer.save_pretrained("larger")
    assert run("output_dir=mistaken", *arguments) == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message
    assert not (place / "mistaken").exists()


def test_the_recipes_and_the_help(capsys):
    for name in ("finetune", "finetune_lora"):
        recipe = load_recipe(str(REPOSITORY / "configuration" / f"{name}.yaml"), schema=FinetuneRecipe)
        assert recipe.data.path == "sotu" and recipe.model.path == "runs/pretrain/final"
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for key, _, _, meaning in recipe_fields(FinetuneRecipe):
        assert key in shown and meaning in shown


def test_two_processes_take_the_steps_of_one(place):
    """Started by `accelerate launch`; rows of unequal length, so each process has another number of tokens."""
    arguments = ["data.packing=false", "train.batch_size=4", "train.steps=2", "checkpoint.every_steps=0"]
    assert run("output_dir=one", *arguments) == 0
    script = str(REPOSITORY / "training" / "finetune.py")
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", script]
    result = subprocess.run(
        [sys.executable, *launcher, "tiny.yaml", "output_dir=two", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    one, two = (json.loads(Path(folder, "summary.json").read_text()) for folder in ("one", "two"))
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-4)
