"""What damage does to a data set: kills, flipped bits and huge documents, in the counts that the suite has no time for.

    python benchmarks/data_faults.py kills --count 200      SIGKILL at random moments; the bytes must be the same
    python benchmarks/data_faults.py flips --count 1000     single flipped bits; each must be found
    python benchmarks/data_faults.py memory                 peak of a worker on huge documents

Each prints what it saw and ends with status 1 where a promise was broken. CPU only; about seven minutes for 200 kills,
two for 1,000 flips and six for the memory on two cores.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.data_pipeline.faults import OUTPUT_KINDS, BitFlips, KilledBuilds
from tests.data_pipeline.test_memory import CASES, LARGE_CASES, baseline, worker_peak


def kills(options: argparse.Namespace, folder: Path) -> bool:
    """Builds that are killed until ``--count`` kills are reached."""
    builds = KilledBuilds(folder / "kills", options.nodes, options.workers, options.seed)
    try:
        report = builds.run(options.count)
    except AssertionError as error:
        print(f"{builds.report.line()}\nBROKEN: {error}")
        return False
    print(report.line())
    return report.repeated <= report.allowed


def flips(options: argparse.Namespace, folder: Path) -> bool:
    """Four in ten flips in sources, the rest in the files of a data set."""
    started = time.monotonic()
    damage = BitFlips(folder / "flips", options.seed)
    num_sources = options.count * 4 // 10
    for number in range(num_sources):
        damage.flip_source(damage.sources[number * 5 % len(damage.sources)])
    for number in range(options.count - num_sources):
        damage.flip_output(OUTPUT_KINDS[number % len(OUTPUT_KINDS)])
    print("\n".join(damage.report.lines()))
    print(f"{time.monotonic() - started:.0f} s")
    return damage.report.found.total() == options.count and not damage.report.silent


def memory(options: argparse.Namespace, folder: Path) -> bool:
    """Every case, with its bound."""
    del options
    kept = True
    for case, (write, engine, bound_mb, rows) in {**CASES, **LARGE_CASES}.items():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            idle = baseline(Path(place), engine)
            started = time.monotonic()
            peak, counted = worker_peak(write(Path(place)), engine)
        above = peak - idle
        well = above <= bound_mb and counted.split(maxsplit=1)[1] == rows
        kept &= well
        print(
            f"{case:50} {above:6,.0f} MB above the {idle:.0f} MB of an idle worker, at most {bound_mb:,} "
            f"promised, {time.monotonic() - started:4.0f} s{'' if well else '  BROKEN: ' + counted}",
            flush=True,
        )
    return kept


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run, count in ((kills, 200), (flips, 1_000), (memory, None)):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        if count:
            command.add_argument("--count", type=int, default=count)
            command.add_argument("--seed", type=int, default=0)
        if run is kills:
            command.add_argument("--workers", type=int, default=2)
            command.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if options.run(options, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
