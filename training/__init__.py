# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Scripts that train AvgPath models, and what only these scripts share.

Imports point one way: the scripts use the helpers of this folder, and both use ``modeling_avgpath``.
"""
