"""docs/quickstart.md, from top to bottom, as a stranger would run it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Makes `import modeling_avgpath` fail: what follows has the checkpoint's code alone.
WITHOUT_PACKAGE = "import sys\nsys.modules['modeling_avgpath'] = None\n"


def test_every_block_runs(tmp_path):
    """In a folder that holds nothing of the clone but scripts and recipes; Python blocks run without the package unless
    they import it themselves."""
    for name in ("training", "configuration"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    blocks = BLOCK.findall((REPOSITORY / "docs" / "quickstart.md").read_text(encoding="utf-8"))
    assert "pip install" in blocks[0][1]  # done by whoever runs this test
    printed = []
    for language, code in blocks[1:]:
        prefix = WITHOUT_PACKAGE if language == "python" and "modeling_avgpath" not in code else ""
        command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", prefix + code]
        finished = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert finished.returncode == 0, f"{code}\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
        printed.append(finished.stdout)
    runs = tmp_path / "runs" / "quickstart"
    assert "bytes of cache after" in printed[2]
    for folder in ("base/final", "tuned/final", "merged"):
        config = json.loads((runs / folder / "config.json").read_text())
        assert config["mixer_types"] == ["gated_delta_net"] * 3 + ["softmax"]
        assert (runs / folder / "modeling_avgpath.py").exists()
    assert "perplexity" in (runs / "judged" / "evaluation.md").read_text().lower()
