"""SIGKILL at random moments, and 4 -> 2 -> 1 -> 3 ranks; `benchmarks/run_faults.py --kills 30` is the full count."""

from pathlib import Path

from tests.training.kills import TOLERANCE, survive


def test_three_kills_and_four_world_sizes(dataset: Path, tmp_path: Path) -> None:
    fate = survive(tmp_path, dataset, kills=3, seed=1)
    assert fate.same_hash
    assert fate.worst_difference < TOLERANCE
    assert fate.resumes >= 2
    # A checkpoint every third step: a kill costs the steps after it.
    assert fate.repeated_steps <= 3 * 4
