#!/usr/bin/env python
"""Runs the step of an unhealthy run's bundle again: `python launch/replay.py RUN/unhealthy/step_00000123`."""

import argparse
import sys
from pathlib import Path

from mars_ds.errors import CheckpointError, ConfigError
from mars_ds.training.replay import replay


def main() -> int:
    """Exit code 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="replay.py", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder that an unhealthy run has written")
    parser.add_argument("--rank", type=int, help="replay the micro-batches of this rank only")
    options = parser.parse_args()
    try:
        for line in replay(options.bundle, options.rank):
            print(line)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
