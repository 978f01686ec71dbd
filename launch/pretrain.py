#!/usr/bin/env python
"""The main job: `deepspeed launch/pretrain.py --config configs/xl_mars_m.yaml`; see --help."""

import os
import sys

from mars_ds.training.entry import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the communication libraries can abort the interpreter's own shutdown after everything is written.
    os._exit(code)
