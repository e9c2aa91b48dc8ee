import pytest
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next import modeling_qwen3_next

KERNELS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


@pytest.fixture
def plain_kernels(monkeypatch):
    """The in-tree layers pick flash-linear-attention's kernels wherever they import; on a CPU they must not."""
    for module in (modeling_olmo_hybrid, modeling_qwen3_next):
        for name in KERNELS:
            function = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(function, "__wrapped__", function))
