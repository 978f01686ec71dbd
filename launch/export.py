#!/usr/bin/env python
"""Exports a trained model to a Hugging Face folder: `python launch/export.py runs/quickstart --output exported`."""

import argparse
import sys

from mars_ds.errors import CheckpointError, ConfigError
from mars_ds.export.folder import DTYPES, export_folder


def main() -> int:
    """Exit code 0 after equal logits, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__)
    parser.add_argument(
        "path", help="run folder (its newest checkpoint is taken) or checkpoint folder, of any ZeRO stage"
    )
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    parser.add_argument(
        "--dtype", default="float32", choices=list(DTYPES), help="of the stored weights, default: float32"
    )
    options = parser.parse_args()
    try:
        proof = export_folder(options.path, options.output, options.dtype)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: written and read back; {proof.line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
