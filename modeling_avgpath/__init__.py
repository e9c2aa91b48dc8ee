# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""AvgPath: hybrid language models along the path from softmax attention to TTT, DeltaNet and MesaNet.

Importing the package registers the model type `avgpath` with Transformers' auto classes.
"""

import transformers

from .cache_avgpath import AvgPathCache
from .configuration_avgpath import HEADS, AvgPathConfig
from .modeling_avgpath import (
    AvgPathForCausalLM,
    AvgPathForQuestionAnswering,
    AvgPathForSequenceClassification,
    AvgPathForTokenClassification,
    AvgPathModel,
    AvgPathPreTrainedModel,
)

__version__ = "0.1.0.dev0"

transformers.AutoConfig.register("avgpath", AvgPathConfig, exist_ok=True)
for _auto_class, _head in HEADS.items():
    getattr(transformers, _auto_class).register(AvgPathConfig, globals()[_head], exist_ok=True)

__all__ = [
    "AvgPathCache",
    "AvgPathConfig",
    "AvgPathForCausalLM",
    "AvgPathForQuestionAnswering",
    "AvgPathForSequenceClassification",
    "AvgPathForTokenClassification",
    "AvgPathModel",
    "AvgPathPreTrainedModel",
]
