"""Where AvgPath's run of Transformers' common tests differs from the suite as it stands, and why: all of it, in one place.

`SKIPPED` explains every test that is skipped; a skip that it does not explain fails. `Overrides` holds the tests that run
in another way, each with its reason; they call the suite's own.
"""

import contextlib
import inspect
import typing
from unittest import mock

import torch

from modeling_avgpath import (
    AvgPathCache,
    AvgPathForQuestionAnswering,
    AvgPathForSequenceClassification,
    AvgPathForTokenClassification,
)
from modeling_avgpath.cache_avgpath import layer_tensors
from modeling_avgpath.configuration_avgpath import MEMORIES

# Heads whose output, as Transformers defines it, has no place for a cache.
WITHOUT_CACHE = AvgPathForTokenClassification, AvgPathForQuestionAnswering

# Reason -> beginnings of the names of the tests skipped for it.
SKIPPED = {
    "Needs an accelerator, or a library that runs on one only; the suite skips it elsewhere.": (
        "test_can_load_with_device_context_manager",
        "test_can_load_with_global_device_set",
        "test_cpu_offload",
        "test_disk_offload",
        "test_flash_attn",
        "test_flex_attention_with_grads",
        "test_kernels_can_load_without_crashing",
        "test_model_parallelism",
        "test_resize_embeddings_untied_with_deepspeed",
        "test_resize_tokens_embeddings_with_deepspeed",
        "test_sdpa_can_compile_dynamic",
        "test_sdpa_can_dispatch_on_flash",
        "test_torch_compile_for_training",
    ),
    "Of models with several parts or modalities; AvgPath is one language model.": (
        "test_attn_implementation_composite_models",
        "test_can_set_attention_dynamically_composite_model",
        "test_encoder_decoder_loss_no_double_shift",
        "test_internal_model_config_and_subconfig_are_same",
        "test_sdpa_can_dispatch_composite_models",
        "test_vision_axial_rope",
    ),
    "Of mixtures of experts; AvgPath's MLPs are dense.": (
        "test_eager_matches_batched_and_grouped_inference",
        "test_moe_models_record_router_logits",
        "test_output_router_logits_from_config",
    ),
    "AvgPath has no learned position embeddings to resize: its positions are rotary.": (
        "test_resize_position_vector_embeddings",
    ),
    "AvgPath rotates whole heads.": ("test_model_rope_with_partial_rotation",),
    "Of a switch `use_sliding_window`; in AvgPath a sliding window is a mixer, `sliding_softmax`.": (
        "test_sliding_window_mask",
    ),
    "AvgPath loads its checkpoints as they are, without renaming weights.": (
        "test_can_load_from_already_mapped_keys",
        "test_reverse_loading_mapping",
    ),
    "Transformers' generation tests are not in its source archive; tests/laws and tests/model test generation.": (
        "test_generation_tester_mixin_inheritance",
    ),
}


def skip_reason(test_name: str) -> str | None:
    """Why a test is skipped, `None` if it should not be."""
    return next((reason for reason, names in SKIPPED.items() if test_name.startswith(names)), None)


class Overrides:
    """Tests of the suite that run in another way; stands before the suite's classes among the bases."""

    def skipTest(self, reason: str):
        """A test that comes to skip itself unforeseen no longer tests what it did: that is a failure."""
        explained = skip_reason(self._testMethodName)
        if explained is None:
            self.fail(f"unexplained skip: {reason}")
        super().skipTest(f"{explained} ({reason})")

    @contextlib.contextmanager
    def subTest(self, message: str = "", **parameters):
        """Subtests, one per parameter in places, are part of their test: to report each costs more than to run it."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in the subtest {message} {parameters or ''}")
            raise

    def test_skips_are_explained(self):
        """The same for tests that are skipped before they start."""
        skipped = [name for name in dir(self) if getattr(getattr(self, name, None), "__unittest_skip__", False)]
        self.assertEqual([name for name in skipped if skip_reason(name) is None], [])

    def test_generation_tester_mixin_inheritance(self):
        self.skipTest("not in the archive")

    def test_num_layers_is_small(self):
        """The suite allows two layers; one group of a 3:1 hybrid has four."""
        self.assertLessEqual(self.model_tester.num_hidden_layers, 4)

    def test_attention_outputs(self):
        """The suite awaits weights of every layer; only softmax layers have them."""
        self.model_tester.num_hidden_layers = self.layers.count("softmax")
        super().test_attention_outputs()

    def test_keep_in_fp32_modules_exist(self):
        """The list serves all memories: each name must occur in the model that has a layer of every memory."""
        self.model_tester.layers = list(MEMORIES)
        super().test_keep_in_fp32_modules_exist()

    def test_bc_cache_name_forward(self):
        """The suite tests this for DynamicCache only, and leaves off at the first head that returns none; a model builds an
        AvgPathCache."""
        self.all_model_classes = [model for model in self.all_model_classes if model not in WITHOUT_CACHE]
        with mock.patch("transformers.cache_utils.DynamicCache", AvgPathCache):
            super().test_bc_cache_name_forward()

    def _check_caches_are_equal(self, first: AvgPathCache, second: AvgPathCache):
        """The suite calls this where it compares caches; its own version knows keys and values only."""
        self.assertGreater(first.get_seq_length(), 0)
        self.assertEqual(first.get_seq_length(), second.get_seq_length())
        for mine, other in zip(first.layers, second.layers, strict=True):
            self.assertIs(type(mine), type(other))
            self.assertTrue(layer_tensors(mine))
            for tensor, expected in zip(layer_tensors(mine), layer_tensors(other), strict=True):
                torch.testing.assert_close(tensor, expected, rtol=0, atol=0)

    def test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions(self):
        """The suite asks the annotations whether a head can return attentions, and cannot read those of these heads, which
        Transformers writes as strings."""
        with contextlib.ExitStack() as stack:
            for head in (AvgPathForSequenceClassification, *WITHOUT_CACHE):
                forward = inspect.unwrap(head.forward)
                stack.enter_context(mock.patch.dict(forward.__annotations__, typing.get_type_hints(forward)))
            super().test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions()
