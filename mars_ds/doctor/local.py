"""What one machine can tell by itself: versions, accelerator, compiler, locks, disks, the data set."""

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from data_pipeline import DataError, open_dataset
from data_pipeline.engines import choose_engine
from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.verify import verify
from mars_ds.config import RunConfig
from mars_ds.doctor.finding import Finding
from mars_ds.errors import LaunchError
from mars_ds.zero.distributed import refuse_unusable_gpu

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_CHECKED_PACKAGES = ("torch", "deepspeed", "numpy", "safetensors", "transformers", "tiktoken", "gigatoken", "fastokens")
_COMPILERS = {"ninja", "nvcc", "cicc", "ptxas", "cc1plus", "c++", "g++", "clang++"}
# A build of one op takes minutes; a lock that nobody touches for so long is nobody's.
_STALE_SECONDS = 600.0
_BYTES_PER_PARAMETER = 16  # of a checkpoint with masters and three buffers of float32


def versions() -> Iterator[Finding]:
    """Versions here against those this project is tested with."""
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", _read(_CONSTRAINTS), flags=re.MULTILINE))
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    for name in _CHECKED_PACKAGES:
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            optional = name in ("gigatoken", "fastokens")
            remedy = f"pip install {name}=={pinned.get(name, '')}".rstrip("=")
            seen = "not installed: tokenising is several times slower" if optional else "not installed"
            yield Finding("note" if optional else "mend", name, seen, remedy)
            continue
        wanted = pinned.get(name)
        if wanted is None or here.split("+")[0] == wanted:
            yield Finding("ok", name, here)
        else:
            yield Finding("note", name, f"{here}; tested with {wanted}", f"pip install {name}=={wanted}")


def accelerator(expected: int | None = None) -> Iterator[Finding]:
    """The devices that torch can use, and whether each of them computes what it should.

    Args:
        expected: Devices that this machine should have; None takes what is there.
    """
    try:
        refuse_unusable_gpu()
    except LaunchError as error:
        yield Finding("mend", "accelerator", str(error).split(";")[0], str(error).split("; ", 1)[-1])
        return
    found = torch.cuda.device_count()
    # A build of torch for the CPU is a choice; a driver that lost its devices is not.
    if expected is not None and found != expected and torch.version.cuda is not None:
        remedy = "nvidia-smi names those that are there; drain this machine, or ask its owners to reset it"
        yield Finding("mend", "accelerator", f"{found} devices, expected {expected}", remedy)
    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0))
        memory = psutil.virtual_memory().total
        yield Finding(
            "ok", "accelerator", f"none: {cores} CPU cores, {memory / 2**30:.1f} GiB; training runs on the CPU"
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = f"cuda:{index}"
        seen = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < 0.9 * total:
            yield Finding("note", name, seen, "another process uses this device: nvidia-smi names it")
        else:
            yield Finding("ok", name, seen)
        yield computes(torch.device("cuda", index))
    if not torch.cuda.is_bf16_supported():
        yield Finding("mend", "bfloat16", "not supported by this device", "precision.dtype: float32")


def computes(device: torch.device, size: int = 2048) -> Finding:
    """A product whose entries are known exactly: a device that computes wrongly, or not at all, shows it here.

    Args:
        device: Where it is computed.
        size: Rows and columns.
    """
    try:
        rows = torch.arange(size, dtype=torch.float32, device=device) % 8
        # Row i of the one is all i % 8, column j of the other all j % 8: small integers, which no rounding touches.
        product = rows[:, None].expand(size, size).contiguous() @ rows[None, :].expand(size, size).contiguous()
        wrong = int((product != size * rows[:, None] * rows[None, :]).sum())
    except RuntimeError as error:
        return Finding("mend", str(device), f"cannot compute: {str(error).splitlines()[0]}", "drain this machine")
    if wrong:
        return Finding("mend", str(device), f"{wrong:,} of {size * size:,} entries are wrong", "drain this machine")
    return Finding("ok", str(device), f"a product of {size} x {size} is exact")


def compiler() -> Finding:
    """What `torch.compile` and DeepSpeed's own ops would need; nothing else does."""
    found = [name for name in ("g++", "clang++", "nvcc") if shutil.which(name)]
    if found:
        return Finding("ok", "compiler", ", ".join(found))
    return Finding("ok", "compiler", "none; only model.compile on a CPU and DeepSpeed's own optional ops need one")


def stale_locks(folder: Path | None = None) -> Iterator[Finding]:
    """Locks that a killed just-in-time build has left: every later start waits for them, for ever."""
    folder = folder or _extensions_folder()
    locks = sorted(folder.glob("**/lock")) if folder.is_dir() else []
    compiling = any((process.info["name"] or "") in _COMPILERS for process in psutil.process_iter(["name"]))
    for lock in locks:
        age = time.time() - lock.stat().st_mtime
        if age > _STALE_SECONDS or not compiling:
            yield Finding(
                "mend",
                "stale build lock",
                f"{lock}, {age:.0f} s old and no compiler is at work: a build was killed, and every start that needs "
                "the op waits for it without a word",
                f"rm {lock}",
            )
        else:
            yield Finding("note", "build lock", f"{lock}, {age:.0f} s old; a compiler is at work", "wait for it")
    if not locks:
        yield Finding("ok", "build locks", f"none in {folder}")


def paths(config: RunConfig | None) -> Iterator[Finding]:
    """Folders that are written, and whether they hold the run's checkpoints."""
    yield _writable("temporary files", Path(tempfile.gettempdir()), 0)
    if config is None:
        return
    from mars_ds.training.model import build_model

    parameters = sum(p.numel() for p in build_model(config, device="meta").module.parameters())
    # One more than are kept exists while the oldest is not deleted yet.
    needed = parameters * _BYTES_PER_PARAMETER * (config.checkpoint.keep_last + 1)
    yield _writable("run folder", Path(config.run.output_dir), needed)


def data(config: RunConfig, full: bool) -> Iterator[Finding]:
    """The data set of a config: headers and manifest, or every byte."""
    path = config.data.path
    try:
        windows = open_dataset(path, "train", config.model.sequence_length)
        seen = (
            f"{path}: {windows.num_windows:,} windows of {config.model.sequence_length}, {windows.manifest_sha256[:16]}"
        )
        if not full:
            yield Finding("ok", "data set", f"{seen}; headers checked (--full hashes every byte)")
            return
        _, problems = verify(path)
    except DataError as error:
        yield Finding("mend", "data set", str(error))
        return
    for problem in problems:
        yield Finding("mend", "data set", problem, "copy the file anew, or prepare the data set again")
    if not problems:
        yield Finding("ok", "data set", f"{seen}; every byte is what the manifest says")


def tokenizer() -> Finding:
    """Whether the GPT-2 vocabulary is there, and which engine passes its self-test."""
    try:
        engine, refused = choose_engine("auto", load_tokenizer("gpt2"))
    except DataError as error:
        return Finding("mend", "tokenizer", str(error))
    if refused:
        return Finding("note", "tokenizer", f"{engine.name}; {'; '.join(refused)}")
    return Finding(
        "ok", "tokenizer", f"gpt2 by {engine.name} {engine.version}, which gives tiktoken's ids on this host"
    )


def _writable(subject: str, folder: Path, needed: int) -> Finding:
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        return Finding(
            "mend", subject, f"{existing} cannot be written: {error.strerror}", "chmod it, or name another folder"
        )
    free = shutil.disk_usage(existing).free
    seen = f"{folder}, {free / 2**30:,.1f} GiB free"
    if needed and free < needed:
        return Finding(
            "mend",
            subject,
            f"{seen}; checkpoints need {needed / 2**30:,.1f}",
            "free some, or lower checkpoint.keep_last",
        )
    return Finding("ok", subject, seen + (f"; checkpoints need {needed / 2**30:,.1f}" if needed else ""))


def _extensions_folder() -> Path:
    """Where torch builds extensions."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
