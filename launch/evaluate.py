#!/usr/bin/env python
"""Loss of a trained model on fixed sets of windows: `python launch/evaluate.py runs/quickstart`; under any launcher."""

import argparse
import os
import sys

from mars_ds.training.job import log_to_file
from mars_ds.training.signals import launched_rank


def main() -> int:
    """Exit code 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=(
            "Evaluates the newest checkpoint of a run, or a checkpoint, on its validation split and the sets of "
            "evaluation.sets, and writes evaluation.json beside the checkpoints."
        ),
        epilog=(
            "example: torchrun --nproc-per-node 8 launch/evaluate.py runs/small_mars_m evaluation.sequences=4096 "
            "'evaluation.sets={owt: data/openwebtext}'"
        ),
    )
    parser.add_argument("path", help="run folder or checkpoint folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the config of the run")
    parser.add_argument("--output", help="default: evaluation.json in the run folder")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    from data_pipeline import DataError
    from mars_ds.errors import ConfigError, LaunchError
    from mars_ds.training.evaluate_checkpoint import evaluate_run
    from mars_ds.zero.distributed import shut_down

    try:
        evaluate_run(options.path, options.overrides, options.output)
    except (ConfigError, DataError, LaunchError) as error:
        if launched_rank(os.environ) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        shut_down()
    return 0


if __name__ == "__main__":
    log_to_file(os.environ, launched_rank(os.environ))
    code = main()
    from mars_ds.zero.distributed import leave

    leave(code)
