#!/usr/bin/env python
"""What to mend before a run: `python launch/doctor.py --config configs/debug.yaml`, or under the run's launcher."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

from mars_ds.config import RunConfig, load_config
from mars_ds.doctor import local, together
from mars_ds.doctor.finding import Finding
from mars_ds.errors import ConfigError, LaunchError
from mars_ds.zero.distributed import join, launch_environment, leave, shut_down


def main() -> int:
    """Exit code 0, 1 when something must be mended, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description="Looks at this machine and, under a launcher, at the ranks together.",
        epilog="example: torchrun --nproc-per-node 8 launch/doctor.py --config configs/xl_mars_m.yaml",
    )
    parser.add_argument("--config", help="YAML file of the run: its data, folders and disk are looked at too")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the file")
    parser.add_argument("--full", action="store_true", help="hash every byte of the data set")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--mebibytes", type=int, default=16, help="size of the collectives, default: 16")
    parser.add_argument("--expect-devices", type=int, metavar="N", help="accelerators that this machine should have")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    mend = False
    try:
        config = load_config(options.config, options.overrides) if options.config else None
        environment = launch_environment(os.environ)
        for finding in _findings(config, options, int(environment["WORLD_SIZE"])):
            mend = mend or finding.status == "mend"
            if environment["RANK"] == "0":
                print(json.dumps(asdict(finding)) if options.json else finding.line(), flush=True)
    except (ConfigError, LaunchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shut_down()
    return 1 if mend else 0


def _findings(config: RunConfig | None, options: argparse.Namespace, world_size: int) -> Iterator[Finding]:
    yield from local.versions()
    yield from local.accelerator(options.expect_devices)
    yield local.compiler()
    yield from local.stale_locks()
    yield local.tokenizer()
    yield from local.paths(config)
    if config is not None:
        yield from local.data(config, options.full)
    if world_size == 1:
        yield Finding("ok", "ranks", "one: start this under the run's launcher to look at the network")
        return
    import torch
    from deepspeed.accelerator import get_accelerator

    join()
    yield together.ranks()
    yield together.versions_agree()
    yield together.clocks()
    elements = options.mebibytes * 2**18 // world_size * world_size
    yield from together.bandwidth(torch.device(get_accelerator().current_device_name()), elements)


if __name__ == "__main__":
    leave(main())
