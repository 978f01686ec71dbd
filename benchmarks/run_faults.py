#!/usr/bin/env python
"""Kills a training run at random moments and proves every resume: `python benchmarks/run_faults.py --kills 30`.

Each life has another number of ranks (4, 2, 1, 3) and ZeRO stage. At the end the hash of all windows consumed must be
that of an undisturbed run, and every loss equal within what another order of float32 sums explains.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.corpora import byte_dataset
from tests.training.kills import TOLERANCE, survive


def main() -> int:
    """Exit code 0 when the run survived, 1 when not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="default: 30")
    parser.add_argument("--seed", type=int, default=0, help="of the moments; default: 0")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dataset = byte_dataset(Path(folder))
        fate = survive(Path(folder), dataset, options.kills, options.seed, print)
    print(
        f"{fate.kills} kills, {fate.resumes} certified resumes, {fate.repeated_steps} steps lost and done again, "
        f"largest relative difference of a loss {fate.worst_difference:.1e} (allowed {TOLERANCE:.0e}), windows hash "
        f"{'equal' if fate.same_hash else 'DIFFERENT'}, {time.perf_counter() - started:.0f} s"
    )
    return 0 if fate.same_hash and fate.worst_difference < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
