#!/usr/bin/env python
"""The main job: `deepspeed launch/pretrain.py --config configs/xl_mars_m.yaml`; see --help."""

import os

from mars_ds.training.job import log_to_file
from mars_ds.training.signals import SignalWatch, launched_rank

if __name__ == "__main__":
    rank = launched_rank(os.environ)
    signals = SignalWatch(rank)
    signals.install()
    log_to_file(os.environ, rank)
    # After the line above: it takes seconds, and a SIGTERM in them is a request to stop.
    from mars_ds.training.entry import main
    from mars_ds.zero.distributed import leave

    leave(main(signals=signals))
