# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Speed and memory against peers: `python -m benchmarks COMMAND`, one table a command."""
