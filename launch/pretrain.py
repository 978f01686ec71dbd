#!/usr/bin/env python
"""The main job: `deepspeed launch/pretrain.py --config configs/xl_mars_m.yaml`; see --help."""

import sys

from mars_ds.training.entry import main

if __name__ == "__main__":
    sys.exit(main())
