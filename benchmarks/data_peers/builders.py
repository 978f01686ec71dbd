"""One build, in the process that this file is started as: ours, and the peers', written from their descriptions.

    python builders.py NAME --source FILE --output DIR --scratch DIR --workers N [--engine E] [--part-tokens N]

Prints one line of JSON: the tokens written, end-of-text included, and for ours its identity and serial stages. The
peers get tiktoken from our vendored vocabulary, so that nobody needs a network; Megatron's own tokenizers are slower.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
EOT = 50_256


@cache
def encoder() -> Any:
    """tiktoken's GPT-2, once a process."""
    from data_pipeline.tokenizer import load_tokenizer

    return load_tokenizer("gpt2")._encoding  # type: ignore[attr-defined]


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """`data_pipeline.build.prepare`, with the CPU seconds of its serial stages."""
    from data_pipeline import build

    seconds: dict[str, float] = {}

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **options)
            finally:
                seconds[stage] = time.process_time() - started

        return call

    for stage in ("find_sources", "hash_sources", "choose_engine", "finish"):
        setattr(build, stage, timed(stage, getattr(build, stage)))
    options = build.BuildOptions(val_fraction=arguments.val_fraction, part_tokens=arguments.part_tokens)
    execution = build.Execution(engine=arguments.engine, rank=arguments.rank, world=arguments.world)
    started = time.process_time()
    result = build.prepare(
        [str(arguments.source)],
        arguments.output,
        options=options,
        workers=arguments.workers,
        execution=execution,
        log=open(arguments.scratch / "log.txt", "w"),  # noqa: SIM115 - ends with the process
    )
    return {
        "tokens": sum(part.tokens for part in result.manifest.parts),
        "identity": result.manifest_sha256,
        "serial_seconds": seconds,
        "parent_seconds": time.process_time() - started,
    }


def nanogpt(arguments: argparse.Namespace) -> dict[str, Any]:
    """nanoGPT's way: `datasets.map`, whose cache holds the ids as int64 lists, and a memmap filled in 1,024 batches."""
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_files=str(arguments.source), cache_dir=str(arguments.scratch))
    splits = rows["train"].train_test_split(test_size=arguments.val_fraction or 1, seed=2_357, shuffle=True)
    encoded = splits.map(_nanogpt_row, remove_columns=["text", "id"], num_proc=arguments.workers)
    total = 0
    for split, each in encoded.items():
        size = int(np.sum(each["len"], dtype=np.uint64))
        out = np.memmap(arguments.output / f"{split}.bin", dtype=np.uint16, mode="w+", shape=(size,))
        shards, at = min(1_024, len(each)), 0
        for index in range(shards):
            batch = each.shard(num_shards=shards, index=index, contiguous=True).with_format("numpy")
            ids = np.concatenate(batch["ids"])
            out[at : at + len(ids)] = ids
            at += len(ids)
        out.flush()
        total += size
    return {"tokens": total}


def _nanogpt_row(row: dict[str, Any]) -> dict[str, Any]:
    ids = encoder().encode_ordinary(row["text"])
    ids.append(EOT)
    return {"ids": ids, "len": len(ids)}


def llmc(arguments: argparse.Namespace) -> dict[str, Any]:
    """llm.c's way: a pool encodes single rows, the parent gathers them in an array and writes it by a list."""
    import multiprocessing

    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    files = str(arguments.source)
    rows = datasets.load_dataset("parquet", data_files=files, cache_dir=str(arguments.scratch), split="train")
    shard_tokens = 100_000_000
    shard, used, number = np.empty((shard_tokens,), dtype=np.uint16), 0, 0
    total = 0
    with multiprocessing.Pool(arguments.workers) as pool:
        for ids in pool.imap(_llmc_row, rows, chunksize=16):
            total += len(ids)
            while len(ids):
                count = min(len(ids), shard_tokens - used)
                shard[used : used + count] = ids[:count]
                used, ids = used + count, ids[count:]
                if used == shard_tokens:
                    _write_llmc(arguments.output / f"train_{number:06d}.bin", shard.tolist())
                    used, number = 0, number + 1
    if used:
        _write_llmc(arguments.output / f"train_{number:06d}.bin", shard[:used].tolist())
    return {"tokens": total}


def _llmc_row(row: dict[str, Any]) -> Any:
    import numpy as np

    ids = np.array([EOT, *encoder().encode_ordinary(row["text"])])
    assert (ids >= 0).all() and (ids < 2**16).all(), "an id is too large for uint16"
    return ids.astype(np.uint16)


def _write_llmc(path: Path, tokens: list[int]) -> None:
    import numpy as np

    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20_240_520, 1, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(np.array(tokens, dtype=np.uint16).tobytes())


def megatron(arguments: argparse.Namespace) -> dict[str, Any]:
    """Megatron's way: JSON lines to a pool, ids to the parent as lists, one item and one document at a time.

    The JSON lines are made before, outside the measurement.
    """
    import multiprocessing
    import warnings

    import numpy as np
    import torch

    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(arguments.output / "data.bin"), dtype=np.uint16)
    total = 0
    jsonl = arguments.source.with_suffix(".jsonl")
    with open(jsonl, encoding="utf-8") as lines, multiprocessing.Pool(arguments.workers) as pool:
        for ids in pool.imap(_megatron_row, lines, 32):
            builder.add_item(torch.IntTensor(ids))
            builder.end_document()
            total += len(ids)
    builder.finalize(str(arguments.output / "data.idx"))
    return {"tokens": total}


def _megatron_row(line: str) -> list[int]:
    ids: list[int] = encoder().encode_ordinary(json.loads(line)["text"])
    ids.append(EOT)
    return ids


def datatrove(arguments: argparse.Namespace) -> dict[str, Any]:
    """datatrove itself. It divides files, not row groups, so one file keeps one core busy."""
    import numpy as np
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    source = arguments.source
    executor = LocalPipelineExecutor(
        [
            ParquetReader(str(source.parent), glob_pattern=source.name, read_metadata=False),
            DocumentTokenizer(
                str(arguments.output),
                str(source.with_name("tokenizer.json")),
                local_working_dir=str(arguments.scratch),
                eos_token="<|endoftext|>",
                shuffle_documents=False,
            ),
        ],
        tasks=1,
        workers=1,
        logging_dir=str(arguments.scratch / "logs"),
    )
    executor.run()
    sizes = [path.stat().st_size for path in arguments.output.glob("*.ds")]
    return {"tokens": sum(sizes) // np.dtype(np.uint16).itemsize}


BUILDERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    function.__name__: function for function in (ours, nanogpt, llmc, megatron, datatrove)
}


def jsonl_lines(parquet: Path) -> Iterator[str]:
    """The rows of a parquet file as JSON lines, for Megatron."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(parquet).iter_batches(1_000):
        for row in batch.to_pylist():
            yield json.dumps(row) + "\n"


def main() -> None:
    """Runs the builder that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(BUILDERS))
    for option in ("--source", "--output", "--scratch"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--part-tokens", type=int, default=100_000_000)
    parser.add_argument("--val-fraction", type=float, default=0.0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    arguments = parser.parse_args()
    answer = BUILDERS[arguments.name](arguments)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    # Last on the path: in datatrove's environment nothing of ours is installed, and nothing of ours is needed.
    sys.path.append(str(REPOSITORY))
    main()
