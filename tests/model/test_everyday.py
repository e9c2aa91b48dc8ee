"""What users of a PreTrainedModel try: heads, pipelines, resized vocabularies, dtypes, offloading, generation configs."""

import json

import pytest
import torch
from laws.cases import CASES, VOCAB, assert_close, random_ids, tiny_config, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

HEADS = AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering
LAYOUT = ["delta_net", "softmax", "ttt_linear", "mesa_net@mean_field"]


@pytest.fixture
def folder(tmp_path):
    """A saved language model of many kinds of layers."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(LAYOUT)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("head", HEADS)
def test_a_head_on_a_language_model(head, folder):
    """The body's weights come along; padding on the left changes nothing; the loss reaches every parameter."""
    model = head.from_pretrained(folder, num_labels=3).eval()
    body = AutoModelForCausalLM.from_pretrained(folder).model
    for mine, theirs in zip(model.model.parameters(), body.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ids = random_ids(2, 9)
    padded = torch.nn.functional.pad(ids, (4, 0))
    with torch.no_grad():
        alone, shifted = model(ids), model(padded, attention_mask=(padded > 0).long())
    for name in ("logits", "start_logits"):
        if hasattr(alone, name):
            logits = getattr(shifted, name)
            if head is not AutoModelForSequenceClassification:
                logits = logits[:, 4:]
            assert_close(logits, getattr(alone, name))
    labels = {
        AutoModelForSequenceClassification: {"labels": torch.tensor([0, 2])},
        AutoModelForTokenClassification: {"labels": torch.randint(3, (2, 9))},
        AutoModelForQuestionAnswering: {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 8])},
    }[head]
    model.train()(ids, **labels).loss.backward()
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert not missing
    model.save_pretrained(folder.parent / "head")
    again = head.from_pretrained(folder.parent / "head").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).to_tuple()[0], alone.to_tuple()[0])


@pytest.mark.parametrize("tied", [True, False])
def test_resized_vocabulary(tied):
    model = AutoModelForCausalLM.from_config(tiny_config(LAYOUT, tie_word_embeddings=tied)).eval()
    ids = random_ids(2, 8)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(VOCAB + 11)
        assert torch.equal(model(ids).logits[..., :VOCAB], before)
        assert model(torch.full((1, 2), VOCAB + 10)).logits.shape[-1] == VOCAB + 11 == model.config.vocab_size
        model.resize_token_embeddings(VOCAB)
        assert torch.equal(model(ids).logits, before)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    with pytest.raises(ValueError, match="input_ids"):
        model(torch.full((1, 2), VOCAB + 10))


@pytest.mark.parametrize("tied", [True, False])
def test_special_tokens_stay_in_a_vocabulary_that_shrinks(tied, tmp_path):
    last = {"pad_token_id": VOCAB - 1, "bos_token_id": VOCAB - 3, "eos_token_id": [2, VOCAB - 2]}
    model = AutoModelForCausalLM.from_config(tiny_config(LAYOUT, tie_word_embeddings=tied, **last)).eval()
    for name in last:
        with pytest.raises(
            ValueError, match=rf"config.{name} is .*{VOCAB - 6}: set model.config.{name} to .* or to None"
        ):
            model.resize_token_embeddings(VOCAB - 5)
        setattr(model.config, name, None)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == VOCAB
    with pytest.raises(ValueError, match=rf"generation_config.pad_token_id is {VOCAB - 1}, beyond"):
        model.resize_token_embeddings(pad_to_multiple_of=8, new_num_tokens=VOCAB - 10)  # 88
    model.generation_config.pad_token_id, model.generation_config.bos_token_id = 0, 1
    model.generation_config.eos_token_id = [2, 87]
    model.resize_token_embeddings(pad_to_multiple_of=8, new_num_tokens=VOCAB - 10)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    output = again.generate(ids := random_ids(2, 4) % 88, attention_mask=torch.ones_like(ids), max_new_tokens=20)
    assert output.max() < 88 == again.config.vocab_size


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float64", torch.bfloat16])
def test_dtypes_by_name(dtype, folder):
    """Parameters take the dtype, but for decays, step sizes and TTT's initial weights, which stay fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    kept = model._keep_in_fp32_modules_strict
    expected = torch.float32 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.rsplit(".", 1)[-1] in kept else expected), name
    logits = model(random_ids(2, 9)).logits
    assert logits.dtype == expected and logits.isfinite().all()


def test_mismatched_sizes(folder):
    wrong = rf"embed_tokens.weight is \({VOCAB}, 24\) instead of \({VOCAB + 3}, 24\)\. Correct.*ignore_mismatched_sizes"
    with pytest.raises(RuntimeError, match=wrong):
        AutoModelForCausalLM.from_pretrained(folder, vocab_size=VOCAB + 3)
    model = AutoModelForCausalLM.from_pretrained(folder, vocab_size=VOCAB + 3, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape[0] == VOCAB + 3
    kept = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mixer.q_proj.weight
    assert torch.equal(model.model.layers[0].mixer.q_proj.weight, kept)


def test_sizes_in_the_config_that_disagree_with_the_weights(folder):
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "intermediate_size": 30}))
    with pytest.raises(RuntimeError) as error:
        AutoModelForCausalLM.from_pretrained(folder)
    for words in (str(folder), "model.layers.0.mlp.down_proj.weight is (24, 40) instead of (24, 30)", "and 8 more",
                  "Correct config.json", "ignore_mismatched_sizes=True"):  # fmt: skip
        assert words in str(error.value)


def test_device_map_auto_with_offload(folder, tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(folder)
    size = sum(parameter.nbytes for parameter in whole.parameters())
    split = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": 2 * size // 3}, offload_folder=tmp_path / "offload"
    )
    assert set(split.hf_device_map.values()) == {"cpu", "disk"}
    ids = random_ids(2, 9)
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(split.generate(ids, **arguments), whole.generate(ids, **arguments))


def test_text_generation_pipeline():
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{index}": index for index in range(3, VOCAB)}}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )
    model = tiny_model("softmax_middle")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2, return_full_text=False)
    prompts = ["w5 w6 w7", "w8"]
    arguments = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    for prompt, result in zip(prompts, generator(prompts, **arguments), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[0, ids.shape[1] :]
        assert result[0]["generated_text"] == tokenizer.decode(alone, skip_special_tokens=True)


def test_generation_config_is_saved_and_used(tmp_path):
    model = tiny_model("all_recurrent")
    model.generation_config = GenerationConfig(
        max_new_tokens=7, min_new_tokens=7, do_sample=True, top_k=5, pad_token_id=0
    )
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.generation_config.max_new_tokens, again.generation_config.top_k) == (7, 5)
    ids = random_ids(1, 4)
    torch.manual_seed(0)
    expected = model.generate(ids)
    torch.manual_seed(0)
    assert torch.equal(again.generate(ids), expected) and expected.shape == (1, 11)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_bitwise(case, tmp_path):
    model = tiny_model(case)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    ids = random_ids(2, 13)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_damaged_checkpoints(tmp_path):
    """A missing shard, one that was cut short and an index that was: all are named."""
    tiny_model("all_recurrent").save_pretrained(tmp_path, max_shard_size="20KB")
    *_, second, last = sorted(tmp_path.glob("*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{last.name} of the checkpoint .*damaged.*Fetch it anew"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    last.write_bytes(content)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=second.name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    second.write_bytes(content)
    index = tmp_path / "model.safetensors.index.json"
    for damage in (index.read_text()[:100], "{}"):
        index.write_text(damage)
        with pytest.raises(ValueError, match=rf"{index.name} of the checkpoint .*damaged.*Fetch it anew"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
