"""``python -m data_pipeline``."""

import sys

from data_pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
