"""What `launch/checkpoints.py` does: lists, verifies and copies checkpoints, here or on object storage."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mars_ds.checkpoint.copying import Place, copy_checkpoint, find
from mars_ds.checkpoint.layout import LATEST, MARKER, STEP_PATTERN
from mars_ds.checkpoint.reader import CheckpointReader, find_checkpoints
from mars_ds.errors import CheckpointError, ConfigError

DONE, DAMAGED, BAD_INPUT = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """Arguments of checkpoints.py."""
    result = argparse.ArgumentParser(
        prog="checkpoints.py",
        description="Lists, verifies and copies checkpoints.",
        epilog=(
            "examples: python launch/checkpoints.py copy runs/small s3://bucket/small --all | python "
            "launch/checkpoints.py copy s3://bucket/small runs/small/checkpoints"
        ),
    )
    actions = result.add_subparsers(dest="action", required=True)
    for action, words in (
        ("list", "what is there, without hashing"),
        ("verify", "hash every file; exit code 1: damage"),
    ):
        one = actions.add_parser(action, help=words, description=words)
        one.add_argument("path", help="run, folder of checkpoints, or checkpoint")
    copy = actions.add_parser("copy", help="copy, read back, and commit", description="Copies the newest checkpoint.")
    copy.add_argument("source", help="run, folder of checkpoints, or checkpoint: a path, or any URL that fsspec knows")
    copy.add_argument("destination", help="folder of checkpoints to copy into: a path or a URL")
    copy.add_argument("--all", action="store_true", help="copy all checkpoints of the run")
    copy.add_argument("--replace", action="store_true", help="also replace another checkpoint of the same step")
    return result


def main(arguments: Sequence[str] | None = None, printed: Callable[[str], None] = print) -> int:
    """Runs one action.

    Returns:
        0, or 1 where `verify` has found damage.

    Raises:
        ConfigError: Bad input, with the nearest that works.
        OSError: A file system's.
    """
    options = parser().parse_args(arguments)
    if options.action == "copy":
        return _copy(options, printed)
    folders = _folders(Path(options.path))
    if options.action == "verify":
        return _verify(folders, printed)
    for folder in folders:
        printed(_line(folder))
    return DONE


def _folders(path: Path) -> list[Path]:
    """Checkpoints at a path, committed or not, oldest first."""
    if (path / MARKER).exists():
        return [path]
    for root in (path / "checkpoints", path):
        found = {*root.glob(STEP_PATTERN), *find_checkpoints(root)}
        if found:
            return sorted(found, key=lambda folder: folder.name.rsplit("_", 1)[-1])
    raise CheckpointError(
        f"{path}: no checkpoint; expected a checkpoint folder, a folder with step_NNNNNNNN in it, or a run"
    )


def _line(folder: Path) -> str:
    try:
        reader = CheckpointReader(folder)
    except CheckpointError as error:
        return f"{folder.name}  {error}"
    index = reader.index
    size = sum(facts["bytes"] for facts in index["files"].values())
    latest = folder.parent / LATEST
    marks = ["healthy" if index.get("healthy", True) else "not healthy"]
    if latest.is_file() and latest.read_text(encoding="utf-8").strip() == folder.name:
        marks.append("latest")
    return (
        f"{folder.name}  {size / 1e6:10,.1f} MB  {index.get('world_size', '?')} ranks, ZeRO stage "
        f"{index.get('zero_stage', '?')}, {index.get('optimizer', {}).get('kind', '?')}  {', '.join(marks)}"
    )


def _verify(folders: list[Path], printed: Callable[[str], None]) -> int:
    code = DONE
    for folder in folders:
        try:
            reader = CheckpointReader(folder, verify=True)
            printed(f"{folder.name}  intact, {len(reader.index['files'])} files hashed")
        except (CheckpointError, OSError, json.JSONDecodeError) as error:
            printed(f"{folder.name}  {error}")
            code = DAMAGED
    return code


def _copy(options: argparse.Namespace, printed: Callable[[str], None]) -> int:
    source, destination = Place.open(options.source), Place.open(options.destination)
    if destination.is_local and (Path(destination.path) / "checkpoints").is_dir():
        raise ConfigError(f"{options.destination}: is a run; its checkpoints lie in {options.destination}/checkpoints")
    for checkpoint in find(source, options.all):
        copied = copy_checkpoint(checkpoint, destination, options.replace, printed)
        printed(f"{copied.url}: committed")
    return DONE
