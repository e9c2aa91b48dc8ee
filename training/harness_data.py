# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Write held-out texts as the data files of the lm-evaluation-harness tasks in configuration/lm_eval.

documents.jsonl holds the documents that pretrain.py keeps for validation; continuations.jsonl holds passages of them with
four ways to go on, one of which is the text's own and three come from elsewhere in the same texts. Both are made from
local data alone, the same for the same seed.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started as a file: Python put this folder on the path, the packages are beside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import training  # noqa: F401  (before the libraries, which it keeps quiet while they are imported)

from training.data import load_documents, split_documents
from training.recipe import HarnessRecipe, SetupError
from training.script import parse_recipe, run_script

EXAMPLES = """  python training/harness_data.py
  python training/harness_data.py data.path=texts/ continuations=500 output_dir=runs/lm_eval
"""
NOTES = "Then: lm_eval run --include_path configuration/lm_eval --tasks avgpath_held_out_continuation --model hf ...\n"


def make_continuations(
    texts: Sequence[str], count: int, context_words: int = 48, choice_words: int = 16, choices: int = 4, seed: int = 0
) -> list[dict]:
    """`count` questions {context, choices, answer}: which passage follows the context.

    A question is `context_words` and the next `choice_words` words of one text; the wrong choices are as many words from
    elsewhere, without overlap with the right one.

    Raises:
        SetupError: fewer words than a question takes.
    """
    words = [text.split() for text in texts]
    span = context_words + choice_words
    # Word w of text t can begin a question; every place but the right one can begin a wrong choice.
    places = [(text, start) for text, row in enumerate(words) for start in range(len(row) - span + 1)]
    if len(places) < count + choices * choice_words * 2:
        raise SetupError(
            f"the texts are too short for {count} questions of {span} words: ask for fewer with continuations=..., or give "
            "more text"
        )
    generator = random.Random(seed)
    questions = []
    for text, start in generator.sample(places, count):
        begins = start + context_words
        right = words[text][begins : begins + choice_words]
        others: list[list[str]] = []
        while len(others) < choices - 1:
            other_text, other_start = generator.choice(places)
            passage = words[other_text][other_start : other_start + choice_words]
            near = other_text == text and abs(other_start - begins) < choice_words
            if not near and passage != right and passage not in others:
                others.append(passage)
        answer = generator.randrange(choices)
        others.insert(answer, right)
        questions.append(
            {
                "context": " ".join(words[text][start:begins]),
                "choices": [" ".join(passage) for passage in others],
                "answer": answer,
            }
        )
    return questions


def write_harness_data(recipe: HarnessRecipe) -> list[Path]:
    """Write both files as `recipe` says; returns their paths."""
    data = recipe.data
    documents = load_documents(data.path, data.text_field)
    if data.split == "held_out":
        _, documents = split_documents(documents, data.validation_every)
    texts = [document.text for document in documents[: data.max_documents]]
    questions = make_continuations(texts, recipe.continuations, seed=recipe.seed)
    folder = Path(recipe.output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"output_dir={recipe.output_dir} cannot be written: {error}") from None
    written = []
    for name, records in (("documents", [{"text": text} for text in texts]), ("continuations", questions)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
        print(f"{len(records):,} lines in {file}")
        written.append(file)
    return written


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_script(
        "harness_data",
        lambda: write_harness_data(parse_recipe("harness_data", __doc__, EXAMPLES, arguments, HarnessRecipe, NOTES)),
    )


if __name__ == "__main__":
    sys.exit(main())
