#!/usr/bin/env python
"""The report of a run, also while it goes on: `python launch/report.py runs/quickstart`; several are compared."""

import argparse
import sys
from pathlib import Path

from mars_ds.telemetry.report import write_comparison, write_report


def main() -> int:
    """Exit code 0, or 2 for a folder without a readable log."""
    parser = argparse.ArgumentParser(
        prog="report.py",
        description="Writes report.md and its plots into a run folder; for several runs a comparison beside them.",
        epilog="example: python launch/report.py runs/small_mars_m runs/small_adamw --output runs/comparison",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run folders, running or ended")
    parser.add_argument("--output", help="folder of the comparison, default: comparison beside the first run")
    options = parser.parse_args()
    try:
        for run in options.runs:
            print(f"report     {write_report(run)}")
        if len(options.runs) > 1:
            output = options.output or Path(options.runs[0]).resolve().parent / "comparison"
            print(f"comparison {write_comparison(options.runs, output)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
