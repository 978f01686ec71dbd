"""Fixtures shared by the suite."""

from pathlib import Path

import pytest

from tests.corpora import byte_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level data set, made once."""
    return byte_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.fixture
def config_file(dataset: Path, tmp_path: Path) -> Path:
    """A tiny run on that data set, two layers, in fp32."""
    return write_config(tmp_path / "tiny.yaml", dataset, tmp_path / "runs")


def write_config(path: Path, dataset: Path, runs: Path) -> Path:
    """Writes the tiny run's YAML."""
    path.write_text(
        f"""
run: {{name: tiny, output_dir: {runs}, seed: 3}}
model: {{num_layers: 2, num_heads: 2, width: 32, sequence_length: 32, vocab_size: 320, loss_chunk_tokens: 64}}
data: {{path: {dataset}}}
batch: {{global_batch_sequences: 12, micro_batch: 2}}
optimizer: {{kind: mars-m, lr: 1e-2, weight_decay: 0.01, ns_dtype: float32}}
schedule: {{kind: cosine, steps: 12, warmup_steps: 2, min_lr: 1e-3}}
precision: {{dtype: float32}}
zero: {{stage: 1}}
checkpoint: {{interval_steps: 4, keep_last: 10}}
evaluation: {{interval_steps: 6, sequences: 21}}
telemetry: {{log_interval_steps: 1}}
""",
        encoding="utf-8",
    )
    return path
