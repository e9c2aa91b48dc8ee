"""Laws 4-6 together: random programs of cache operations, against recomputing every text from scratch."""

import tempfile

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from laws.cases import LAYOUTS, assert_close, random_ids, tiny_model
from transformers import StaticCache

from modeling_avgpath import AvgPathCache
from modeling_avgpath.cache_avgpath import StateKeeper, adopt_cache

DEPTH = 12  # tokens that can be taken back
MAX_CACHES, MAX_ROWS, MAX_TOKENS = 3, 4, 120
PADDING = st.sampled_from(["none", "none", "first", "middle", "one row"])


class CachePrograms(RuleBasedStateMachine):
    """Keeps, beside each cache, the tokens that it should have read, which of them are padding, and how many of them can be
    taken back."""

    case: str
    is_static: bool

    def __init__(self):
        super().__init__()
        self.model = tiny_model(self.case)
        self.caches: list[AvgPathCache] = []
        self.texts: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []
        self.recorded: list[int] = []

    def pick(self, number: int) -> int:
        return number % len(self.caches)

    @initialize(rows=st.integers(1, 2), length=st.integers(1, 20), seed=st.integers(0, 99), padding=PADDING)
    def start(self, rows, length, seed, padding):
        if self.is_static:
            cache = StaticCache(self.model.config, max_cache_len=MAX_TOKENS)
            adopt_cache(cache, self.model.config, rows)
        else:
            cache = AvgPathCache(self.model.config)
        cache.activate_past_recording(DEPTH)
        empty = torch.empty(rows, 0, dtype=torch.long)
        self.caches, self.texts, self.masks, self.recorded = [cache], [empty], [empty], [0]
        self.append(0, length, seed, padding)

    @rule(
        number=st.integers(0, 9),
        length=st.sampled_from([1, 1, 2, 3, 5, 8, 13, 30]),
        seed=st.integers(0, 99),
        padding=PADDING,
    )
    def append(self, number, length, seed, padding):
        index = self.pick(number)
        text, mask = self.texts[index], self.masks[index]
        if text.shape[1] + length > MAX_TOKENS:
            return
        ids = random_ids(len(text), length, seed=seed)
        is_real = torch.ones_like(ids)
        if padding == "one row":
            is_real[seed % len(ids), : length // 2] = 0
        elif padding != "none":  # in all rows alike
            is_real[:, slice(length - 1) if padding == "first" else slice(length // 3, 2 * length // 3)] = 0
        text, mask = torch.cat((text, ids), dim=1), torch.cat((mask, is_real), dim=1)
        with torch.no_grad():
            logits = self.model(ids, attention_mask=mask, cache=self.caches[index]).logits
            expected = self.model(text, attention_mask=mask, use_cache=False).logits[:, -length:]
        assert_close(logits[is_real.bool()], expected[is_real.bool()])
        self.texts[index], self.masks[index] = text, mask
        self.recorded[index] = min(DEPTH, self.recorded[index] + length)

    @rule(number=st.integers(0, 9), removed=st.integers(1, DEPTH))
    def crop(self, number, removed):
        self.take_back(self.pick(number), removed)

    @rule(number=st.integers(0, 9))
    def forget_what_was_recorded(self, number):
        self.take_back(self.pick(number), 0)

    def take_back(self, index, removed):
        removed = min(removed, self.recorded[index])
        self.caches[index].crop(-removed)
        for kept in (self.texts, self.masks):
            kept[index] = kept[index][:, : kept[index].shape[1] - removed]
        self.recorded[index] = self.recorded[index] - removed if removed else 0

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        index = self.pick(number)
        self.caches.append(self.caches[index].fork())
        self.texts.append(self.texts[index])
        self.masks.append(self.masks[index])
        self.recorded.append(self.recorded[index])

    def rearrange(self, number, apply, rows):
        index = self.pick(number)
        if self.texts[index].shape[1]:
            rows = torch.tensor([row % len(self.texts[index]) for row in rows])
            apply(self.caches[index], rows)
            self.texts[index], self.masks[index] = self.texts[index][rows], self.masks[index][rows]

    @rule(number=st.integers(0, 9), rows=st.lists(st.integers(0, 9), min_size=1, max_size=MAX_ROWS))
    def select(self, number, rows):
        self.rearrange(number, StateKeeper.batch_select_indices, rows)

    @rule(number=st.integers(0, 9), rows=st.lists(st.integers(0, 9), min_size=1, max_size=MAX_ROWS))
    def reorder(self, number, rows):
        self.rearrange(number, StateKeeper.reorder_cache, rows)

    @rule(number=st.integers(0, 9))
    def repeat(self, number):
        index = self.pick(number)
        if 2 * len(self.texts[index]) <= MAX_ROWS and self.texts[index].shape[1]:
            self.caches[index].batch_repeat_interleave(2)
            for kept in (self.texts, self.masks):
                kept[index] = kept[index].repeat_interleave(2, dim=0)

    @precondition(lambda self: not self.is_static)
    @rule(number=st.integers(0, 9))
    def save_and_load(self, number):
        index = self.pick(number)
        with tempfile.TemporaryDirectory() as folder:
            self.caches[index].save_pretrained(folder)
            self.caches[index] = AvgPathCache.from_pretrained(folder)
        self.caches[index].activate_past_recording(DEPTH)
        self.recorded[index] = 0

    @invariant()
    def all_go_on_as_if_recomputed(self):
        """A fork of each cache goes on with the logits that its whole text gives."""
        for cache, text, mask in zip(self.caches, self.texts, self.masks, strict=True):
            assert int(cache.get_seq_length()) == text.shape[1]
            if text.shape[1] + 2 <= MAX_TOKENS:
                ids = random_ids(len(text), 2, seed=7)
                text, mask = torch.cat((text, ids), dim=1), torch.cat((mask, torch.ones_like(ids)), dim=1)
                with torch.no_grad():
                    logits = self.model(ids, attention_mask=mask, cache=cache.fork()).logits
                    assert_close(logits, self.model(text, attention_mask=mask, use_cache=False).logits[:, -2:])


@pytest.mark.parametrize("case", [*LAYOUTS, "sinks", "identity@mean_field"])
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_random_programs(case, is_static):
    """20 programs of up to 15 operations for each model and kind of cache, 320 in all."""
    few = settings(max_examples=5, stateful_step_count=15, deadline=None, derandomize=True, database=None)
    for number in range(4):  # few at a time: many are variations of one another
        machine = type(f"Programs{number}", (CachePrograms,), {"case": case, "is_static": is_static})
        run_state_machine_as_test(machine, settings=few)
