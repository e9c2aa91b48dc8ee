# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""The fine-tuning script end to end on a tiny model: what it learns from, what it writes, and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hub.server import Hub, metadata_errors
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_avgpath import AvgPathConfig, AvgPathForCausalLM
from training import finetune
from training.checkpoint import find_damage
from training.data import train_tokenizer
from training.examples import DEFAULT_CHAT_TEMPLATE, load_examples, sotu_conversations, split_examples
from training.finetune import Cut, build_trainer, count_learnt, main
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_damaged_checkpoint_is_skipped(place, capsys):
    """Whatever of the newest one is missing or cut short; the run then is the one that was never disturbed."""
    assert run("output_dir=whole") == 0
    newest = place / "whole" / "checkpoints" / "checkpoint-6"
    assert sorted(path.name for path in newest.parent.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert find_damage(newest) is None and find_damage(newest.with_name("checkpoint-3")) is None
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        content = (newest / name).read_bytes()
        (newest / name).write_bytes(content[: len(content) // 2])
        assert find_damage(newest) == f"{name} cannot be read"
        (newest / name).unlink()
        assert find_damage(newest).startswith("no ")
        (newest / name).write_bytes(content)
    (newest / "optimizer.pt").unlink()
    before = weights("whole/final")
    expected = losses("whole")
    capsys.readouterr()
    assert run("output_dir=whole", "resume=true") == 0
    assert "checkpoints/checkpoint-6 is damaged (no optimizer*), so it is skipped" in capsys.readouterr().err
    assert losses("whole") == expected and list(expected) == [1, 2, 3, 4, 5, 6]
    assert all(torch.equal(weight, before[name]) for name, weight in weights("whole/final").items())
    assert find_damage(newest) is None  # written anew
    for step in (3, 6):
        Path("whole/checkpoints", f"checkpoint-{step}", "scheduler.pt").unlink()
    assert run("output_dir=whole", "resume=true") == 2
    assert "holds no whole checkpoint" in capsys.readouterr().err


def test_killed_within_a_checkpoint(place):
    """SIGKILL with weights and optimiser of the second checkpoint written: the first is gone on from, and the rest goes."""
    code = (
        "import os, signal, sys\n"
        "from training import finetune\n"
        "whole = finetune.FineTuner._save_rng_state\n"
        "def save(self, folder):\n"
        "    if self.state.global_step == 6: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    whole(self, folder)\n"
        "finetune.FineTuner._save_rng_state = save\n"
        "finetune.main(['tiny.yaml', 'output_dir=killed', 'train.steps=8'])\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=240)
    assert process.returncode == -signal.SIGKILL, process.stderr
    checkpoints = Path("killed/checkpoints")
    assert sorted(path.name for path in checkpoints.iterdir()) == [".partial", "checkpoint-3"]
    assert (checkpoints / ".partial" / "checkpoint-6" / "optimizer.pt").exists()
    assert run("output_dir=killed", "resume=true", "train.steps=8") == 0
    assert run("output_dir=whole", "train.steps=8") == 0
    assert losses("killed") == losses("whole")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-6", "checkpoint-8"]


def test_no_going_on_with_other_examples(place, capsys):
    assert run("output_dir=changed", "train.steps=3") == 0
    write_lines(place / "chats.jsonl", [*CHATS[1:], CHATS[0]])
    assert run("output_dir=changed", "resume=true") == 2
    assert "the training examples (data.path=chats.jsonl" in (message := capsys.readouterr().err)
    assert "have changed since the run began" in message
    assert Path("changed/summary.json").exists()  # refused before anything was removed


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


def test_what_is_cut_is_told(place, capsys):
    """A pair that loses its end, and one whose prompt alone is too long, in training; packed and padded alike."""
    tokenizer = AutoTokenizer.from_pretrained("base")
    long = " one" * 40
    pairs = [PAIRS[0], {"prompt": "From:", "completion": long}, {"prompt": long, "completion": " two."}]
    write_lines(place / "train.jsonl", pairs)
    write_lines(place / "held_out.jsonl", PAIRS[:2])
    given = ["data.path=train.jsonl", "data.validation_path=held_out.jsonl", "data.max_length=20", "train.steps=2"]
    for packing in ("true", "false"):
        trainer = trainer_of(*given, f"data.packing={packing}")
        assert trainer.cuts == {"train": Cut(shortened=2, dropped=1), "eval": Cut(shortened=0, dropped=0)}
        whole = tokenizer(PAIRS[0]["completion"] + "<|endoftext|>")["input_ids"]
        cut = 20 - len(tokenizer("From:")["input_ids"])
        assert count_learnt(trainer.train_dataset) == len(whole) + cut
    assert run("output_dir=cut", *given) == 0
    sentence = "Cut after 20 tokens: 2 training examples (1 left out, with nothing to learn)."
    assert sentence in capsys.readouterr().out and sentence in Path("cut/final/README.md").read_text()
    summary = json.loads(Path("cut/summary.json").read_text())
    assert summary["cut"] == {"train": {"shortened": 2, "dropped": 1}, "eval": {"shortened": 0, "dropped": 0}}


def test_the_first_token_of_a_packed_text_is_not_learnt(place):
    texts = ["one two three", "four five", "six"]
    write_lines(place / "texts.jsonl", [{"text": text} for text in texts])
    tokenizer = AutoTokenizer.from_pretrained("base")
    lengths = [len(tokenizer(text + "<|endoftext|>")["input_ids"]) for text in texts]
    for packing in ("true", "false"):
        arguments = ["data.path=texts.jsonl", "data.validation_every=null", f"data.packing={packing}"]
        trainer = trainer_of(*arguments, "schedule.warmup_steps=0")
        assert len(trainer.train_dataset) == (1 if packing == "true" else 3)
        batch = trainer.data_collator(list(trainer.train_dataset))
        assert int((batch["labels"][:, 1:] != -100).sum()) == count_learnt(trainer.train_dataset) == sum(lengths) - 3


@pytest.mark.parametrize(
    "template",
    [None, "{% for m in messages %}{% generation %}{{ messages[0]['content'] + eos_token }}{% endgeneration %}{% endfor %}"
           "{% if messages[0]['role'] == 'x' %}{% endif %}{{ raise_exception('none') if not messages else '' }}"],
)  # fmt: skip
def test_a_conversation_that_the_assistant_begins(template, place):
    """There is nothing to answer to, but the run ends with its card and summary."""
    write_lines(place / "chats.jsonl", [{"messages": [{"role": "assistant", "content": word}]} for word in WORDS])
    arguments = ["output_dir=first", "train.steps=2", "data.packing=false", "checkpoint.every_steps=0"]
    if template is not None:
        (place / "strict.jinja").write_text(template)
        arguments.append("data.chat_template=strict.jinja")
    assert run(*arguments) == 0
    assert Path("first/sample.txt").read_text().startswith("\n\n")
    assert Path("first/summary.json").exists() and Path("first/final/README.md").exists()


def test_the_snippet_on_a_card_runs(place, capsys):
    """Of the adapter and of the model, in a directory of their own; both state what was learnt, and no licence of ours."""
    assert run(
        "output_dir=lora", "lora.rank=2", "lora.merge=true", "train.steps=2", "checkpoint.every_steps=0",
        "license=cc-by-4.0", "sample.prompt=From one?",
    ) == 0  # fmt: skip
    summary = json.loads(Path("lora/summary.json").read_text())
    for name, library in (("adapter", "peft"), ("final", "transformers")):
        card = ModelCard.load(f"lora/{name}/README.md")
        assert metadata_errors(card.content) == []
        assert (card.data.library_name, card.data.license, card.data.base_model) == (library, "cc-by-4.0", None)
        assert (
            "Weights: `cc-by-4.0`" in card.text and "chats.jsonl" in card.text and "More Information" not in card.text
        )
        assert {result.metric_type: result.metric_value for result in card.data.eval_results} == {
            metric: summary["validation"][metric] for metric in ("loss", "accuracy")
        }
        (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
        assert "apply_chat_template" in code and "From one?" in code
        scope = {}
        exec(code, scope)
        assert isinstance(scope["model"], PeftModel if name == "adapter" else AvgPathForCausalLM)
        assert "<|user|>\nFrom one?\n<|assistant|>" in scope["tokenizer"].decode(scope["inputs"]["input_ids"][0])
    text = Path("lora/adapter/README.md").read_text()
    assert f"{summary['trained_parameters']:,} parameters for the avgpath model `base`" in text
    assert run("output_dir=plain", "train.steps=1", "checkpoint.every_steps=0", "validation.every_steps=0") == 0
    assert ModelCard.load("plain/final/README.md").data.license is None


@pytest.mark.parametrize(
    ("arguments", "sent", "file"),
    [([], "final", "model.safetensors"), (["lora.rank=2"], "adapter", "adapter_model.safetensors")],
)
def test_sent_to_the_hub(arguments, sent, file, place):
    script = str(REPOSITORY / "training" / "finetune.py")
    options = ["output_dir=run", "hub_model_id=counter", "train.steps=1", "checkpoint.every_steps=0", *arguments]
    with Hub() as hub:
        result = subprocess.run(
            [sys.executable, script, "tiny.yaml", *options],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | hub.environment(place / "home"),
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert result.returncode == 0, result.stderr
    files = hub.repositories["tester/counter"].files
    assert f"sent to {hub.url}/tester/counter" in result.stdout
    assert {name for name in files if name != ".gitattributes"} == {
        path.name for path in Path("run", sent).iterdir()
    } - {"training_state.json"}
    assert file in files and b'name = "tester/counter"' in files["README.md"]


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
        (
            '{"messages": [{"role": "assistant", "content": " "}]}',
            ["line 2", "turn 1 of 'messages' is an empty answer"],
        ),
        (
            '{"prompt": [], "completion": [{"role": "assistant", "content": "a"}]}',
            ["line 2", "'prompt' must be a list"],
        ),
        ('{"text": "a \\ud800"}', ["line 2", "\\ud800 is half of a surrogate pair"]),
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
        (["seed=-1"], ["'seed' must be from 0 to 4294967295, not -1"]),
        (["license=My own"], ["'license' must be an identifier of the Hub", "not 'My own'"]),
        (["lora.dora=true"], ["'lora.dora' is True", "no adapter without 'lora.rank'"]),
        (["lora.merge=true"], ["'lora.merge' is True", "no adapter without 'lora.rank'"]),
        (["lora.rank=2", "lora.target_modules=A_log"], ["'A_log' is a parameter of its own"]),
        (["data.max_length=9999"], ["data.max_length=9999 is longer", "max_position_embeddings=8192"]),
        (["model.path=wordless"], ["model.path=wordless has no tokenizer"]),
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
    if "model.path=wordless" in arguments:
        AutoModelForCausalLM.from_pretrained(base).save_pretrained("wordless")
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
    """Rows of unequal length, so that each process has another number of tokens."""
    arguments = ["data.packing=false", "train.batch_size=4", "train.steps=2", "checkpoint.every_steps=1"]
    assert run("output_dir=one", *arguments) == 0
    script = str(REPOSITORY / "training" / "finetune.py")
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", script]
    result = subprocess.run(
        [sys.executable, *launcher, "tiny.yaml", "output_dir=two", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    one, two = (json.loads(Path(folder, "summary.json").read_text()) for folder in ("one", "two"))
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)
    for step in (1, 2):  # with what each process needs to go on
        checkpoint = Path("two/checkpoints", f"checkpoint-{step}")
        assert find_damage(checkpoint) is None
        assert len(list(checkpoint.glob("rng_state_?.pth"))) == 2
    assert two["validation"]["loss"] == pytest.approx(one["validation"]["loss"], rel=1e-4)
