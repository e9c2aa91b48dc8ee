"""Settings of every test: reproducible, offline, and a fair share of the cores for each pytest-xdist worker."""

import os

import hypothesis
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // workers))
os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # for the scripts that tests start

# The same examples on every run; no deadline, since the first call of an op is slower than the next ones.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.load_profile("reproducible")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed torch anew before each test, so that a test gives the same alone, in any order and on any worker."""
    torch.manual_seed(0)
