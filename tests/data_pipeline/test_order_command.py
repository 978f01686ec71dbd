import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.build import prepare
from data_pipeline.errors import DataError
from data_pipeline.order_command import RunOrder, order_lines, order_of_run, run_order
from data_pipeline.plan import BuildOptions
from data_pipeline.reader import open_dataset
from data_pipeline.sampling import make_sampling
from mars_ds.config import load_config
from tests.conftest import write_config
from tests.corpora import write_jsonl

T = 32


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("order")
    source = write_jsonl(folder / "text.jsonl", 60)
    options = BuildOptions(val_fraction=0.1, part_tokens=6_000)
    prepare([str(source)], folder / "data", tokenizer="bytes", options=options, workers=1)
    return folder / "data"


def rows(order: RunOrder, step: int, **options: object) -> list[list[str]]:
    lines = list(order_lines(order, step, **options))  # type: ignore[arg-type]
    return [line.replace(",", "").split(maxsplit=6) for line in lines[2:]]


@pytest.mark.parametrize("kind", ["permutation", "random_offsets", "random_part"])
def test_the_lines_are_what_a_run_reads(parted: Path, kind: str) -> None:
    order = RunOrder(parted, T, seed=5, global_batch=12, sampling=kind, micro_batch=3)
    windows = open_dataset(parted, "train", T)
    sampling = make_sampling(kind, windows.part_tokens, T, 5, group_size=3)
    bodies = {file: np.fromfile(parted / file, "<u2", offset=1024) for file in windows.part_files}
    whole = np.concatenate(list(bodies.values()))
    seen = rows(order, 200, samples=None)
    assert [int(row[0]) for row in seen] == list(range(199 * 12, 200 * 12))
    for row in seen:
        index, epoch, window, offset, part, document = int(row[0]), int(row[1]), row[2], int(row[3]), row[4], row[5]
        position = int(sampling.positions(index, 1)[0])
        assert epoch == index // windows.num_windows
        tokens = windows.read_at([position])[0]
        assert np.array_equal(bodies[part][offset : offset + T + 1], tokens[: len(bodies[part]) - offset])
        if kind == "permutation":
            assert np.array_equal(windows.read([int(window)])[0], tokens)
        else:
            assert window == "-"
        # Documents count from 0 and begin with their end-of-text.
        assert int(document) == int(np.sum(whole[: position + 1] == 256)) - 1


def test_the_first_lines_and_the_decoded_text(parted: Path) -> None:
    order = RunOrder(parted, T, seed=5, global_batch=12)
    lines = list(order_lines(order, 1, samples=3, decode=True))
    windows = open_dataset(parted, "train", T)
    assert lines[0] == (
        f"step 1: samples 0 to 11, permutation of {windows.num_windows:,} samples an epoch, data set "
        f"{windows.manifest_sha256}"
    )
    assert lines[1].split() == ["sample", "epoch", "window", "token", "offset", "part", "document"]
    assert len(lines) == 5
    for line in lines[2:]:
        window = int(line.split()[2].replace(",", ""))
        tokens = windows.read([window])[0]
        text = bytes(tokens[tokens != 256].astype(np.uint8)).decode()
        assert text.removeprefix(" ")[:20] in line


def test_a_data_set_of_others_has_no_document_numbers(tmp_path: Path) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 500
    (tmp_path / "x_train_000000.bin").write_bytes(header.tobytes() + np.arange(500, dtype="<u2").tobytes())
    seen = rows(RunOrder(tmp_path, T, seed=0, global_batch=4), 1)
    assert [row[5] for row in seen] == ["-"] * 4


def test_a_run_folder_says_it_all(parted: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path / "run.yaml", parted, tmp_path / "runs")
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    config = load_config(file, ["data.sampling=random_part"])
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert order_of_run(folder) == RunOrder(parted, 32, 3, 12, "random_part", False, 2)
    config = load_config(
        file, ["data.epoch_offset=true", "batch.global_batch_tokens=640", "batch.global_batch_sequences=null"]
    )
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert order_of_run(folder) == RunOrder(parted, 32, 3, 20, "permutation", True, 2)
    # The command line is laid over it.
    options = {"path": None, "seed": 4, "split": "val", "global_batch": None}
    assert run_order(options, folder) == RunOrder(parted, 32, 4, 20, "permutation", True, 2, "val")
    # A run that began with another micro-batch kept its groups.
    for step, group in [("step_00000004", 3), ("step_00000012", 6)]:
        (folder / "checkpoints" / step).mkdir(parents=True)
        index = json.dumps({"data": {"sampling": "random_part", "sampling group": group}})
        (folder / "checkpoints" / step / "index.json").write_text(index)
    assert order_of_run(folder).micro_batch == 6
    shutil.rmtree(folder / "checkpoints")
    # A config from before the keys has the defaults.
    (folder / "config.yaml").write_text(
        f"run: {{seed: 1}}\nmodel: {{sequence_length: 8}}\ndata: {{path: {parted}}}\n"
        "batch: {global_batch_sequences: 6, micro_batch: 2}\n"
    )
    assert order_of_run(folder) == RunOrder(parted, 8, 1, 6, "permutation", False, 2)


def test_mistakes_are_told(parted: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config.yaml: missing; --run expects the folder of a run"):
        order_of_run(tmp_path)
    (tmp_path / "config.yaml").write_text("run: {seed: 1}\n")
    with pytest.raises(DataError, match=r"config.yaml: not the config of a run: KeyError\('data'\)"):
        order_of_run(tmp_path)
    (tmp_path / "config.yaml").write_text("run: [\n")
    with pytest.raises(DataError, match=r"config.yaml: not YAML"):
        order_of_run(tmp_path)
    with pytest.raises(DataError, match="missing: DIR, --sequence-length, --global-batch; give them, or --run"):
        run_order({"path": None, "seed": 3})
    order = run_order({"path": str(parted), "sequence_length": T, "seed": 3, "global_batch": 4, "sampling": None})
    assert order == RunOrder(parted, T, 3, 4)
    for step, samples, message in [(0, 8, "--step 0: steps count from 1"), (1, 0, "--samples 0: expected 1 or more")]:
        with pytest.raises(DataError, match=message):
            list(order_lines(order, step, samples))
