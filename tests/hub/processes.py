# Copyright 2026 The AvgPath authors. Licensed under the Apache License, Version 2.0.
"""Code run as other people's: in a process of its own, with or without the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HIDDEN = ["modeling_avgpath", "fla", "triton", "accelerate", "datasets"]

# None in sys.modules: neither found nor imported.
STRANGER = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN}))\n"
# What a test sees of an error.
TELL = """
def tell(function, *arguments, **keywords):
    try:
        return repr(function(*arguments, **keywords))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


def run_python(code: str, folder: Path, environment: dict[str, str], knows_package: bool) -> dict:
    """Run `code` in `folder`; returns what it has put into the dictionary `result`."""
    lines = [
        "" if knows_package else STRANGER,
        "import json\nresult = {}\n",
        TELL,
        code,
        "\nprint(json.dumps(result))",
    ]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "".join(lines)],
        cwd=folder,
        env=os.environ
        | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": ""}
        | ({"PYTHONPATH": str(REPOSITORY)} if knows_package else {})
        | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])
