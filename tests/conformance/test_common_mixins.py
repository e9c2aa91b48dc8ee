"""Transformers' own common model tests, held against AvgPath in four layouts.

`archive` fetches the suite, `deviations` says what is skipped or runs in another way, and why.
"""

import gc
import os
import unittest
from unittest import mock

import pytest
import torch
from conformance.archive import Unreachable, load_suite
from conformance.deviations import Overrides, skip_reason
from laws.cases import VOCAB, random_ids, tiny_config
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM, OlmoHybridModel, logging

from modeling_avgpath import (
    AvgPathCache,
    AvgPathConfig,
    AvgPathForCausalLM,
    AvgPathForQuestionAnswering,
    AvgPathForSequenceClassification,
    AvgPathForTokenClassification,
    AvgPathModel,
)

pytest.importorskip("parameterized", reason="Transformers' common tests need the package parameterized")

LAYOUTS = {
    "all_softmax": ["softmax", "softmax"],
    "delta_3_to_1": ["delta_net", "delta_net", "delta_net", "softmax"],
    "mesa_3_to_1": ["mesa_net", "mesa_net", "mesa_net", "softmax"],
    "ttt_mean_field": ["ttt_mlp", "ttt_mlp@mean_field", "softmax"],
}
# Values that differ from the defaults, for fields that every config has.
COMMON_FIELDS = {
    "architectures": ["AvgPathModel"],
    "chunk_size_feed_forward": 5,
    "dtype": "float16",
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
    "tie_word_embeddings": True,
    "bos_token_id": 6,
    "pad_token_id": 7,
    "eos_token_id": 8,
}
# What the suite imports from files that the archive does not have: the tests of export and generation, which are left out
# here, and a table of config fields.
STAND_INS = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": COMMON_FIELDS},
}

try:
    suite = load_suite(STAND_INS)
except Unreachable as error:
    pytest.skip(f"the source archive of Transformers is out of reach: {error}", allow_module_level=True)

# The suite knows by these tables which class is a base model and which labels a head takes.
MODEL_CLASSES = {
    "MODEL_MAPPING_NAMES": AvgPathModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": AvgPathForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": AvgPathForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": AvgPathForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": AvgPathForQuestionAnswering,
}
for table, model_class in MODEL_CLASSES.items():
    names = {**getattr(suite.modeling, table), AvgPathConfig.model_type: model_class.__name__}
    setattr(suite.modeling, table, names)


class ModelTester:
    """What the suite asks of a model's tester: a tiny config, and inputs for it.

    Args:
        layers: mixer specs, one per layer.
    """

    batch_size, seq_length = 4, 7
    hidden_size, num_attention_heads = 24, 4
    is_training = True
    causal_lm_class = AvgPathForCausalLM

    def __init__(self, layers: list[str]):
        self.layers = layers
        self.num_hidden_layers = len(layers)

    def get_config(self) -> AvgPathConfig:
        return tiny_config(self.layers, initializer_range=0.02, max_position_embeddings=256)

    def prepare_config_and_inputs_for_common(self) -> tuple[AvgPathConfig, dict[str, torch.Tensor]]:
        input_ids = random_ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids).tril(3)}


class CommonTests(Overrides, suite.modeling.ModelTesterMixin, suite.training.TrainingTesterMixin):
    """The suite, for the layers that a subclass names."""

    all_model_classes = tuple(MODEL_CLASSES.values())
    model_tester = None
    layers: list[str] = []

    def setUp(self):
        self.model_tester = ModelTester(self.layers)
        suite.modeling.global_rng.seed(0)
        # Two tests read warnings in the log, which another test of the same process may have silenced.
        self.addCleanup(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_warning()

    def test_config(self):
        fields = {
            "hidden_size": 48,
            "vocab_size": VOCAB,
            "num_hidden_layers": len(self.layers),
            "mixer_types": self.layers,
        }
        suite.configuration.ConfigTester(self, config_class=AvgPathConfig, **fields).run_common_tests()


class AllSoftmaxTest(CommonTests, unittest.TestCase):
    layers = LAYOUTS["all_softmax"]


class DeltaTest(CommonTests, unittest.TestCase):
    layers = LAYOUTS["delta_3_to_1"]


class MesaTest(CommonTests, unittest.TestCase):
    layers = LAYOUTS["mesa_3_to_1"]


class TTTMeanFieldTest(CommonTests, unittest.TestCase):
    layers = LAYOUTS["ttt_mean_field"]


class OlmoHybridTester(ModelTester):
    causal_lm_class = OlmoHybridForCausalLM

    def get_config(self) -> OlmoHybridConfig:
        return OlmoHybridConfig(
            vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4,
            linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=6, pad_token_id=0,
        )  # fmt: skip


class OlmoHybrid(suite.modeling.ModelTesterMixin, suite.training.TrainingTesterMixin, unittest.TestCase):
    """The suite as it stands, for the in-tree hybrid; only run by the test below."""

    __test__ = False
    all_model_classes = (OlmoHybridModel, OlmoHybridForCausalLM)

    def setUp(self):
        self.model_tester = OlmoHybridTester(["gated_delta_net", "softmax"])


def test_no_more_skips_than_the_hybrid_in_transformers():
    names = unittest.TestLoader().getTestCaseNames(OlmoHybrid)
    ours = {name for name in unittest.TestLoader().getTestCaseNames(DeltaTest) if skip_reason(name)}
    theirs = set()
    for name in sorted(names, key=lambda name: name not in ours):  # those first that it is likely to skip, too
        if len(theirs) < len(ours):
            result = unittest.TestResult()
            OlmoHybrid(name).run(result)
            theirs |= {name} if result.skipped else set()
    assert len(theirs) >= len(ours), f"skipped here alone: {sorted(ours - theirs)}"


def bytes_of_live_tensors() -> int:
    return sum(thing.nbytes for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


class FreedMemoryTest(suite.memory.MemoryCleanupMixin, unittest.TestCase):
    """Training, caching and generating leave nothing behind once the test's attributes are dropped, as the mixin does.

    The mixin asks the accelerator how much is allocated; here it counts the live tensors, which a CPU has too.
    """

    run_under_no_grad = False

    def setUp(self):
        self.enterContext(mock.patch.object(suite.memory, "_device_memory_allocated", bytes_of_live_tensors))
        tolerance = {"TRANSFORMERS_TEST_MEMORY_LEAK_MIB": "0", "TRANSFORMERS_TEST_MEMORY_LEAK_MODE": "error"}
        self.enterContext(mock.patch.dict(os.environ, tolerance))
        super().setUp()

    def test_nothing_is_left_behind(self):
        for layers in LAYOUTS.values():
            self.model = AvgPathForCausalLM(tiny_config(layers))
            self.cache = AvgPathCache(self.model.config)
            self.cache.activate_past_recording()
            input_ids = random_ids(2, 9)
            self.outputs = self.model(input_ids, labels=input_ids, cache=self.cache)
            self.outputs.loss.backward()
            self.cache.crop(-3)
            self.generated = self.model.generate(input_ids, max_new_tokens=3, do_sample=False)
