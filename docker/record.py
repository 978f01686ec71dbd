"""Records in the image what is in it, once everything imports: `python docker/record.py FILE`, by the image's Python.

The entry script shows the file at every start and holds the torch it finds against it, without importing torch.
VERSION and REVISION of the environment are recorded as they are. TORCH_VERSION and DEEPSPEED_VERSION, which become
labels, are refused where they are not what is found: a label cannot be computed during a build, but it can be checked.
"""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import deepspeed  # noqa: F401  (that it imports is part of the record)
import torch
from deepspeed.git_version_info import installed_ops

import mars_ds  # noqa: F401


def main(file: Path) -> None:
    """Writes `key=value` lines."""
    record = {
        "version": os.environ.get("VERSION") or "unknown",
        "revision": os.environ.get("REVISION") or "unknown",
        # As the installer knows it: NGC's torch.__version__ is spelled a little differently.
        "torch": version("torch"),
        "torch_from": "constraints.txt" if Path(torch.__file__).is_relative_to(sys.prefix) else "base",
        "cuda": getattr(torch.version, "cuda", None) or "none",
        "deepspeed": version("deepspeed"),
        "deepspeed_ops": ",".join(sorted(name for name, built in installed_ops.items() if built)) or "none",
        "python": platform.python_version(),
    }
    for key in ("torch", "deepspeed"):
        argument = f"{key.upper()}_VERSION"
        said = os.environ.get(argument)
        if said and said not in (record[key], record[key].split("+")[0]):
            sys.exit(
                f"error: {argument}={said}, but {key} is {record[key]}: build with --build-arg {argument}={record[key]}"
            )
    file.write_text("".join(f"{key}={value}\n" for key, value in record.items()), encoding="utf-8")
    print(file.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
