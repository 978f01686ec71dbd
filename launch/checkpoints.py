#!/usr/bin/env python
"""Lists, verifies and copies checkpoints: `python launch/checkpoints.py copy runs/small s3://bucket/small --all`."""

import sys

from mars_ds.checkpoint.command import BAD_INPUT, main
from mars_ds.errors import ConfigError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
