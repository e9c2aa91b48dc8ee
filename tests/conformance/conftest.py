"""The marks of Transformers' suite, which `--strict-markers` wants declared."""

MARKS = (
    "accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "is_training_test", "order", "slow",
    "torch_compile_test",
)  # fmt: skip


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: set by Transformers' common tests")
