"""Which windows a run reads: the same at any world size, batch and division into resumes."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline import WindowHash, open_dataset
from data_pipeline.binformat import BinHeader
from data_pipeline.sampling import make_sampling
from mars_ds.config import DataSection, load_config
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import BatchPlan, plan_batch
from mars_ds.training import data
from mars_ds.training.data import WindowLoader, open_split, run_sampling
from tests.conftest import write_config

T = 16
SEED = 9
# Three parts, 96 + 31 + 65 windows: 192 = 3 x 64 an epoch.
PARTS = [96 * T + 1, 31 * T + 5, 65 * T + 9]
KINDS = ["permutation", "epoch_offset", "random_offsets", "random_part"]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token i of the training split is i, so a window tells where it begins."""
    folder = tmp_path_factory.mktemp("data") / "counting"
    folder.mkdir()
    start = 0
    for number, tokens in enumerate(PARTS):
        body = np.arange(start, start + tokens, dtype="<u2")
        (folder / f"x_train_{number:06d}.bin").write_bytes(BinHeader(tokens, 2).to_bytes() + body.tobytes())
        start += tokens
    return folder


def loaders(
    folder: Path, kind: str, batch: BatchPlan, prefetch_steps: int = 2, group_size: int = 4, **options: Any
) -> list[WindowLoader]:
    """One loader for each rank, as each rank makes its own."""
    result = []
    for rank in range(batch.world_size):
        windows = open_dataset(folder, "train", T)
        sampling = make_sampling(
            "permutation" if kind == "epoch_offset" else kind,
            windows.part_tokens,
            T,
            SEED,
            epoch_offset=kind == "epoch_offset",
            group_size=group_size,
        )
        section = DataSection(path=str(folder), prefetch_steps=prefetch_steps, **options)
        result.append(WindowLoader(windows, sampling, batch, rank, torch.device("cpu"), section))
    return result


def take_step(ranks: list[WindowLoader]) -> np.ndarray:
    """The windows of one step in the order of the run, (global_batch, T + 1)."""
    step = np.stack([[micro.numpy() for micro in loader.next_step()] for loader in ranks])
    return step.swapaxes(0, 1).reshape(-1, T + 1)


def state_of(ranks: list[WindowLoader], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The state that all ranks agree on, as a checkpoint writes it."""

    def gather(values: list[Any], own: int) -> None:
        values[:] = [loader._consumed.value for loader in ranks]

    monkeypatch.setattr(data, "dist", SimpleNamespace(get_world_size=lambda: len(ranks), all_gather_object=gather))
    states = [loader.state() for loader in ranks]
    assert all(state == states[0] for state in states)
    return json.loads(json.dumps(states[0]))


def close(ranks: list[WindowLoader]) -> None:
    for loader in ranks:
        loader.close()


def reference(kind: str, samples: int, group_size: int = 4) -> tuple[list[int], str]:
    """Where samples 0, 1, ... begin, and the hash over them, from the definitions alone."""
    name = "permutation" if kind == "epoch_offset" else kind
    sampling = make_sampling(name, PARTS, T, SEED, epoch_offset=kind == "epoch_offset", group_size=group_size)
    positions = [sampling.locate(index).position for index in range(samples)]
    total = WindowHash()
    for index, position in enumerate(positions):
        total.add(index, np.arange(position, position + T + 1))
    return positions, total.hexdigest()


# World size, micro-batch, global batch: every divisor of 64, and others.
BATCHES = [(w, m, 64) for w, m in [(1, 16), (1, 64), (2, 4), (4, 16), (8, 2), (16, 4), (32, 1), (64, 1)]]
BATCHES += [(3, 8, 48), (5, 2, 40), (7, 1, 21), (12, 2, 24), (48, 1, 96), (63, 1, 63), (64, 3, 192)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_and_the_hash_are_the_same_at_every_world_size(
    counting: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for world_size, micro_batch, global_batch in BATCHES:
        ranks = loaders(counting, kind, plan_batch(global_batch, micro_batch, world_size))
        seen: list[int] = []
        while len(seen) < 200:
            seen += take_step(ranks)[:, 0].tolist()
        positions, digest = reference(kind, len(seen))
        assert seen == positions, (world_size, micro_batch)
        state = state_of(ranks, monkeypatch)
        assert (state["position"], state["window_hash"]) == (len(seen), digest)
        close(ranks)


def test_every_window_comes_exactly_once_an_epoch(counting: Path) -> None:
    ranks = loaders(counting, "permutation", plan_batch(64, 4, 8))
    first = [0, 96 * T + 1, 96 * T + 1 + 31 * T + 5]
    windows = sorted(start + T * w for start, count in zip(first, (96, 31, 65), strict=True) for w in range(count))
    orders = []
    for _epoch in range(3):
        steps = np.concatenate([take_step(ranks) for _ in range(3)])
        assert np.array_equal(steps, steps[:, :1] + np.arange(T + 1))
        orders.append(steps[:, 0].tolist())
        assert sorted(orders[-1]) == windows
    assert orders[0] != orders[1] != orders[2]
    assert ranks[0].epoch() == 3.0
    close(ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_five_resumes_with_other_world_sizes_and_batches_change_nothing(
    counting: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # World size, micro-batch, global batch, steps before the run stops.
    legs = [(4, 2, 16, 3), (3, 1, 9, 5), (64, 1, 64, 1), (1, 8, 8, 4), (2, 5, 10, 2), (8, 2, 32, 3)]
    seen: list[int] = []
    state = None
    for world_size, micro_batch, global_batch, steps in legs:
        # As the trainer does, the group of random_part is first taken from this leg's own micro-batch.
        group = 2 if state is None else micro_batch
        ranks = loaders(counting, kind, plan_batch(global_batch, micro_batch, world_size), group_size=group)
        if state is not None:
            for loader in ranks:
                loader.load_state(state)
        for _ in range(steps):
            seen += take_step(ranks)[:, 0].tolist()
        state = state_of(ranks, monkeypatch)
        close(ranks)
    positions, digest = reference(kind, len(seen), group_size=2)
    assert len(seen) == 48 + 45 + 64 + 32 + 20 + 96 > 192
    assert seen == positions
    assert state is not None
    assert (state["position"], state["window_hash"], state["epoch"]) == (305, digest, 1)


def test_the_state_names_what_determines_the_order(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = loaders(counting, "random_part", plan_batch(8, 4, 2))
    take_step(ranks)
    state = state_of(ranks, monkeypatch)
    assert state == {
        "data set": ranks[0].windows.manifest_sha256,
        "split": "train",
        "sequence length": T,
        "seed": SEED,
        "sampling": "random_part",
        "epoch offset": False,
        "sampling group": 4,
        "epoch": 0,
        "position": 8,
        "window_hash": reference("random_part", 8)[1],
        "tokenizer": "gpt2",
    }
    close(ranks)


def test_a_checkpoint_from_before_these_keys_goes_on(counting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = loaders(counting, "permutation", plan_batch(8, 4, 2))
    take_step(ranks)
    state = state_of(ranks, monkeypatch)
    older = {k: state[k] for k in ("data set", "sequence length", "seed", "position", "window_hash", "tokenizer")}
    resumed = loaders(counting, "permutation", plan_batch(8, 4, 2))
    for loader in resumed:
        loader.load_state(older)
    assert take_step(resumed)[:, 0].tolist() == reference("permutation", 16)[0][8:]
    close([*ranks, *resumed])
    (other,) = loaders(counting, "random_offsets", plan_batch(8, 8, 1))
    with pytest.raises(ConfigError, match="trained with sampling permutation, this run has random_offsets"):
        other.load_state(older)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 5, "seed 5, this run has 9"),
        ("sequence length", 8, "sequence length 8, this run has 16"),
        ("split", "val", "split val, this run has train"),
        ("epoch offset", True, "epoch offset True, this run has False"),
    ],
)
def test_another_order_is_refused(
    counting: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, message: str
) -> None:
    ranks = loaders(counting, "permutation", plan_batch(8, 8, 1))
    state = {**state_of(ranks, monkeypatch), key: value}
    with pytest.raises(ConfigError, match=f"{message}; restore it, or start a new run with run.init_from"):
        ranks[0].load_state(state)
    assert ranks[0].position == 0


def test_a_changed_data_set_is_refused_with_both_hashes_and_the_key_that_accepts_it(
    counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = plan_batch(8, 8, 1)
    ranks = loaders(counting, "permutation", batch)
    take_step(ranks)
    now, before = ranks[0].windows.manifest_sha256, "ab" * 32
    state = {**state_of(ranks, monkeypatch), "data set": before}
    with pytest.raises(ConfigError) as caught:
        ranks[0].load_state(state)
    assert f"trained with data set {before}, this run has {now}" in str(caught.value)
    assert f"data.accept_changed={now}" in str(caught.value)

    for accepted in (now, now[:12]):
        (loader,) = loaders(counting, "permutation", batch, accept_changed=accepted)
        notices: list[str] = []
        loader.printed = notices.append
        loader.load_state(state)
        assert [(before in notice, now in notice) for notice in notices] == [(True, True)]
        assert take_step([loader])[:, 0].tolist() == reference("permutation", 16)[0][8:]
        # The next checkpoint is of the new data set, and going on from it asks for nothing.
        after = state_of([loader], monkeypatch)
        assert after["data set"] == now
        loader.load_state(after)
        assert len(notices) == 1
        close([loader])
    close(ranks)
    with pytest.raises(ConfigError, match=f"data.accept_changed {'cd' * 8} is not the data set in .*{now}"):
        loaders(counting, "permutation", batch, accept_changed="cd" * 8)


@pytest.mark.parametrize("prefetch_steps", [0, 1, 4])
def test_reading_ahead_changes_neither_order_nor_hash(
    counting: Path, monkeypatch: pytest.MonkeyPatch, prefetch_steps: int
) -> None:
    ranks = loaders(counting, "permutation", plan_batch(24, 4, 2), prefetch_steps)
    seen = [start for _ in range(9) for start in take_step(ranks)[:, 0].tolist()]
    positions, digest = reference("permutation", len(seen))
    assert seen == positions
    assert state_of(ranks, monkeypatch)["window_hash"] == digest
    close(ranks)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.mark.parametrize("prefetch_steps", [0, 2])
def test_exact_mode_looks_ahead_and_no_tensor_is_overwritten_while_it_is_held(
    counting: Path, prefetch_steps: int
) -> None:
    """As the trainer does in exact mode: first a look at the next step, then this one; tensors are kept throughout."""
    (loader,) = loaders(counting, "permutation", plan_batch(12, 4, 1), prefetch_steps)
    looked: list[torch.Tensor] = []
    taken: list[torch.Tensor] = []
    for _ in range(20):
        looked += loader.peek_step(1)
        taken += loader.next_step()
        assert loader._steps.num_buffers <= prefetch_steps + 3
    positions, _ = reference("permutation", 21 * 12)
    assert torch.cat(taken)[:, 0].tolist() == positions[: 20 * 12]
    assert torch.cat(looked)[:, 0].tolist() == positions[12:]
    assert torch.equal(torch.cat(taken), torch.cat(taken)[:, :1] + torch.arange(T + 1))
    assert loader.position == 240
    loader.close()


def test_a_step_left_halfway_is_not_consumed(counting: Path) -> None:
    (loader,) = loaders(counting, "permutation", plan_batch(12, 4, 1))
    next(loader.next_step())
    assert loader.position == 0
    loader.close()


def test_an_error_of_the_reading_thread_surfaces_in_its_step(tmp_path: Path) -> None:
    body = np.zeros(40 * T + 1, dtype="<u2")
    file = tmp_path / "x_train_000000.bin"
    file.write_bytes(BinHeader(len(body), 2).to_bytes() + body.tobytes())
    (loader,) = loaders(tmp_path, "permutation", plan_batch(4, 4, 1), prefetch_steps=1)
    list(loader.next_step())
    with open(file, "r+b") as opened:
        opened.truncate(1024)
    with pytest.raises(ValueError, match=r"x_train_000000.bin: truncated since it was opened"):
        for _ in range(3):
            list(loader.next_step())
    loader.close()


def test_a_run_reads_as_its_config_says(dataset: Path, tmp_path: Path) -> None:
    file = write_config(tmp_path / "run.yaml", dataset, tmp_path / "runs")
    for overrides, name, offset, group in [
        ([], "permutation", False, None),
        (["data.epoch_offset=true", "data.access=mmap"], "permutation", True, None),
        (["data.sampling=random_offsets"], "random_offsets", False, None),
        (["data.sampling=random_part"], "random_part", False, 2),
    ]:
        config = load_config(file, overrides)
        windows = open_split(config, "train")
        sampling = run_sampling(config, windows)
        assert (sampling.name, sampling.epoch_offset, sampling.group_size, sampling.seed) == (name, offset, group, 3)
        assert windows.access == config.data.access
    with pytest.raises(ConfigError, match=r"data: epoch_offset is not read by sampling random_part"):
        load_config(file, ["data.sampling=random_part", "data.epoch_offset=true"])
    with pytest.raises(ConfigError, match=r"data.accept_changed"):
        load_config(file, ["data.accept_changed=abc"])
