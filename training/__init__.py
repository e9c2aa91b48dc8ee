# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Scripts that train AvgPath models, and what only these scripts share.

Imports point one way: the scripts use the helpers of this folder, and both use ``modeling_avgpath``.
"""

import logging

# Transformers imports torchao where it is installed, which then logs what it does without, whether or not it is used.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
