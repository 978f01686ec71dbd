#!/usr/bin/env python
"""What a run will be, before it starts: `python launch/plan.py --config configs/xl_mars_m.yaml --world-size 64`."""

import argparse
import json
import os
import sys

from data_pipeline import DataError
from mars_ds.config import load_config
from mars_ds.errors import ConfigError


def main() -> int:
    """Exit code 0, or 2 for bad input and for a run that cannot fit on `--device`."""
    parser = argparse.ArgumentParser(
        prog="plan.py",
        description="Memory, traffic, FLOPs, time and disk of a run, from its config alone; needs no accelerator.",
        epilog="example: python launch/plan.py --config configs/xl_mars_m.yaml --world-size 64 --device h100",
    )
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the file")
    parser.add_argument("--world-size", type=int, default=1, help="ranks, default: 1")
    parser.add_argument("--device", help="kind of the accelerators, e.g. h100: time, and whether the run fits")
    parser.add_argument("--efficiency", type=float, help="share of the device's peak; default: by the model's size")
    parser.add_argument("--all-stages", action="store_true", help="memory at every ZeRO stage and offload as well")
    parser.add_argument("--json", action="store_true", help="the plan as one JSON object")
    options = parser.parse_intermixed_args()
    # Deferred, so that --help does not wait for torch.
    from mars_ds.planning.card import plan_card, stage_table
    from mars_ds.planning.fitting import Available, refuse_unfit
    from mars_ds.planning.timing import check_device
    from mars_ds.telemetry.devices import device_memory_bytes
    from mars_ds.training.planning import plan_with_or_without_data
    from mars_ds.zero.support import UnsupportedError

    try:
        if options.device:
            check_device(options.device)
        if options.efficiency is not None and not options.device:
            raise ConfigError("--efficiency: says nothing without --device NAME; nearest: --device h100")
        config = load_config(options.config, options.overrides)
        plan, note = plan_with_or_without_data(config, options.world_size, options.device, options.efficiency)
        if options.json:
            print(json.dumps(plan.to_json(), indent=1))
        else:
            print(plan_card(plan))
            if options.all_stages:
                print(f"\n{stage_table(plan)}")
            if note:
                print(f"note: {note}")
        memory = device_memory_bytes(options.device) if options.device else None
        if memory is not None:
            warning = refuse_unfit(plan, Available(memory, None, False, options.device))
            if warning:
                print(f"note: {warning}", file=sys.stderr)
    except (ConfigError, DataError, UnsupportedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As in pretrain.py: threads of the libraries can abort the interpreter's own shutdown.
    os._exit(code)
