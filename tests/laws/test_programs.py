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

from modeling_avgpath import AvgPathCache

DEPTH = 12  # tokens that can be taken back
MAX_CACHES, MAX_ROWS, MAX_TOKENS = 3, 4, 120


class CachePrograms(RuleBasedStateMachine):
    """Keeps, beside each cache, the tokens that it should have read and how many of them can be taken back."""

    layout: str

    def __init__(self):
        super().__init__()
        self.model = tiny_model(self.layout)
        self.caches: list[AvgPathCache] = []
        self.texts: list[torch.Tensor] = []
        self.recorded: list[int] = []

    def pick(self, number: int) -> int:
        return number % len(self.caches)

    @initialize(rows=st.integers(1, 2))
    def start(self, rows):
        cache = AvgPathCache(self.model.config)
        cache.activate_past_recording(DEPTH)
        self.caches, self.texts, self.recorded = [cache], [torch.empty(rows, 0, dtype=torch.long)], [0]

    @rule(number=st.integers(0, 9), length=st.sampled_from([1, 1, 2, 3, 5, 8, 13, 30]), seed=st.integers(0, 99))
    def append(self, number, length, seed):
        index = self.pick(number)
        text = self.texts[index]
        if text.shape[1] + length > MAX_TOKENS:
            return
        ids = random_ids(len(text), length, seed=seed)
        text = torch.cat((text, ids), dim=1)
        with torch.no_grad():
            logits = self.model(ids, cache=self.caches[index]).logits
            assert_close(logits, self.model(text, use_cache=False).logits[:, -length:])
        self.texts[index] = text
        self.recorded[index] = min(DEPTH, self.recorded[index] + length)

    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    def crop(self, number, share):
        index = self.pick(number)
        removed = round(share * self.recorded[index])
        self.caches[index].crop(-removed)
        self.texts[index] = self.texts[index][:, : self.texts[index].shape[1] - removed]
        self.recorded[index] = self.recorded[index] - removed if removed else 0

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        index = self.pick(number)
        self.caches.append(self.caches[index].fork())
        self.texts.append(self.texts[index])
        self.recorded.append(self.recorded[index])

    def rearrange(self, number, apply, rows):
        index = self.pick(number)
        if self.texts[index].shape[1]:
            rows = torch.tensor([row % len(self.texts[index]) for row in rows])
            apply(self.caches[index], rows)
            self.texts[index] = self.texts[index][rows]

    @rule(number=st.integers(0, 9), rows=st.lists(st.integers(0, 9), min_size=1, max_size=MAX_ROWS))
    def select(self, number, rows):
        self.rearrange(number, AvgPathCache.batch_select_indices, rows)

    @rule(number=st.integers(0, 9), rows=st.lists(st.integers(0, 9), min_size=1, max_size=MAX_ROWS))
    def reorder(self, number, rows):
        self.rearrange(number, AvgPathCache.reorder_cache, rows)

    @rule(number=st.integers(0, 9))
    def repeat(self, number):
        index = self.pick(number)
        if 2 * len(self.texts[index]) <= MAX_ROWS and self.texts[index].shape[1]:
            self.caches[index].batch_repeat_interleave(2)
            self.texts[index] = self.texts[index].repeat_interleave(2, dim=0)

    @rule(number=st.integers(0, 9))
    def save_and_load(self, number):
        index = self.pick(number)
        with tempfile.TemporaryDirectory() as folder:
            self.caches[index].save_pretrained(folder)
            self.caches[index] = AvgPathCache.from_pretrained(folder)
        self.caches[index].activate_past_recording(DEPTH)
        self.recorded[index] = 0

    @invariant()
    def lengths_agree(self):
        for cache, text in zip(self.caches, self.texts, strict=True):
            assert cache.get_seq_length() == text.shape[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_programs(layout):
    """40 programs of up to 15 operations for each of the layouts."""
    machine = type("Programs", (CachePrograms,), {"layout": layout})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=15, deadline=None))
