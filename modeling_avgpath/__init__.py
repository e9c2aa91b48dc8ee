# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""AvgPath: hybrid language models along the path from softmax attention to TTT, DeltaNet and MesaNet.

Importing the package registers the model type `avgpath` with Transformers' auto classes.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from .cache_avgpath import AvgPathCache
from .configuration_avgpath import AvgPathConfig
from .modeling_avgpath import (
    AvgPathForCausalLM,
    AvgPathForSequenceClassification,
    AvgPathModel,
    AvgPathPreTrainedModel,
)

__version__ = "0.1.0.dev0"

AutoConfig.register("avgpath", AvgPathConfig, exist_ok=True)
AutoModel.register(AvgPathConfig, AvgPathModel, exist_ok=True)
AutoModelForCausalLM.register(AvgPathConfig, AvgPathForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(AvgPathConfig, AvgPathForSequenceClassification, exist_ok=True)

__all__ = [
    "AvgPathCache",
    "AvgPathConfig",
    "AvgPathForCausalLM",
    "AvgPathForSequenceClassification",
    "AvgPathModel",
    "AvgPathPreTrainedModel",
]
