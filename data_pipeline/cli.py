"""The command line: ``python -m data_pipeline COMMAND``."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.build import DEFAULT_MAX_QUARANTINED, Execution, prepare
from data_pipeline.corpus import CORPUS_NAME, write_corpus
from data_pipeline.engines import AUTO, FAST_ENGINES, REFERENCE
from data_pipeline.errors import DataError
from data_pipeline.export import export_nanogpt, export_single
from data_pipeline.inspection import inspect_dataset, summary
from data_pipeline.order_command import order_lines, run_order
from data_pipeline.plan import DEFAULT_PART_TOKENS, BuildOptions
from data_pipeline.sampling import SAMPLINGS
from data_pipeline.split import DEFAULT_VAL_FRACTION, DEFAULT_VAL_TOKENS
from data_pipeline.verify import verify
from data_pipeline.vocabulary import export_vocabulary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 (verify found problems), 2 (error), 130 (Ctrl-C) or 143 (SIGTERM).
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        with _terminate_like_interrupt():
            return run(options)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


@contextmanager
def _terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM, a scheduler's way of pressing Ctrl-C, raises KeyboardInterrupt too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline", description="Text to tokens, once and exactly.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_prepare(commands)
    add = _command(commands, "verify", _verify, "hash every file again", "verify data/fineweb --deep")
    add("directory", metavar="DIR", help="a data set")
    add("--source", nargs="+", default=[], metavar="S", help="hash the files that it was made from, too")
    add("--deep", action="store_true", help="also decode every document and encode its text again")
    add("--tokenizer", metavar="SPEC", help="--deep, for data sets of a SentencePiece model: its path")
    add = _command(
        commands,
        "inspect",
        _inspect,
        "counts, document lengths and a decoded window",
        "inspect data/fineweb --split val --window 3",
    )
    add("directory", metavar="DIR", help="a data set")
    add("--split", choices=("train", "val"), default="train", help="default: train")
    add("--window", type=int, default=0, metavar="N", help="window to decode, default: 0")
    add("--sequence-length", type=int, default=128, metavar="T", help="its length, default: 128")
    add("--tokenizer", metavar="SPEC", help="for data sets of a SentencePiece model: its path")
    _add_export(commands)
    _add_order(commands)
    _add_vocab(commands)
    add = _command(
        commands,
        "corpus",
        _corpus,
        f"write the corpus {CORPUS_NAME!r}: documentation of the installed Python packages",
        "corpus --output data/installed-documentation.jsonl",
    )
    add("--output", required=True, metavar="FILE.jsonl", help="the file to write")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    description: str,
    example: str,
) -> Callable[..., argparse.Action]:
    """Add a command; returns its ``add_argument``."""
    parser = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        epilog=f"example:\n  python -m data_pipeline {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser.add_argument


def _add_prepare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    add = _command(
        commands,
        "prepare",
        _prepare,
        "tokenise files into a data set; run again, it resumes",
        "prepare --source data/*.parquet --output data/fineweb --workers 8",
    )
    add(
        "--source",
        required=True,
        nargs="+",
        metavar="S",
        help="files, directories or patterns: .parquet, .jsonl, .jsonl.gz, .json.gz, .jsonl.zst, .arrow (folders of "
        "datasets), .txt; or from the Hugging Face hub: fineweb-edu-100b, fineweb-edu-10b, openwebtext, "
        "hf://datasets/OWNER/NAME[@REVISION]/PATTERN",
    )
    add("--output", required=True, metavar="DIR", help="directory of the data set")
    add(
        "--name",
        help="parts are NAME_train_000000.bin and so on; default: fineweb or openwebtext for these hub sources (the "
        "names that the MARS trainers look for), else data",
    )
    add(
        "--tokenizer",
        default="gpt2",
        metavar="SPEC",
        help="gpt2 (default), gpt2:PATH with a copy of its vocabulary, bytes, or a SentencePiece PATH.model",
    )
    add("--workers", type=int, metavar="N", help="processes, default: one per core; no effect on the output")
    add(
        "--engine",
        default=AUTO,
        choices=[AUTO, *FAST_ENGINES, REFERENCE],
        help="what encodes; auto (default): the fastest that gives tiktoken's ids here; no effect on the output",
    )
    add(
        "--verify",
        default="sample",
        choices=["sample", "full"],
        help="encode a sample of the documents again with tiktoken (default), or all with a second engine",
    )
    add(
        "--val-split",
        default="content",
        choices=["content", "llmc", "nanogpt"],
        help="validation by the hash of the text (default), llm.c's first tokens, or nanoGPT's permutation",
    )
    add(
        "--val-fraction",
        type=float,
        default=DEFAULT_VAL_FRACTION,
        metavar="F",
        help=f"share of documents for validation, default: {DEFAULT_VAL_FRACTION}; 0 for none",
    )
    add(
        "--val-tokens",
        type=int,
        default=DEFAULT_VAL_TOKENS,
        metavar="N",
        help=f"validation tokens of --val-split llmc, default: {DEFAULT_VAL_TOKENS}",
    )
    add(
        "--max-quarantined",
        type=float,
        default=DEFAULT_MAX_QUARANTINED,
        metavar="F",
        help=f"share of rows with problems beyond which the build fails, default: {DEFAULT_MAX_QUARANTINED}",
    )
    add(
        "--rank",
        type=int,
        metavar="R",
        help="number of this node, default: SLURM_PROCID; nodes that share the output divide the work among them",
    )
    add("--world", type=int, metavar="W", help="how many nodes there are, default: SLURM_NTASKS")
    add("--download-dir", type=Path, metavar="DIR", help="where files of the hub go, default: OUTPUT-downloads")
    add("--delete-downloads", action="store_true", help="delete files of the hub once they are tokenised")
    add(
        "--part-tokens",
        type=int,
        default=DEFAULT_PART_TOKENS,
        metavar="N",
        help=f"tokens per part, default: {DEFAULT_PART_TOKENS}",
    )
    add("--text-column", default="text", metavar="NAME", help="column or key of the text, default: text")
    add(
        "--text-documents",
        choices=["file", "paragraph"],
        default="file",
        help="what a document of a .txt file is, default: the file; paragraphs are parted by blank lines",
    )


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    add = _command(
        commands,
        "export",
        _export,
        "write a data set in the layout of another program",
        "export data/openwebtext --layout nanogpt --output nanoGPT/data/openwebtext",
    )
    add("directory", metavar="DIR", help="a data set")
    add("--output", required=True, metavar="DIR", help="directory for the files")
    add(
        "--layout",
        default="nanogpt",
        choices=["nanogpt", "single"],
        help="nanogpt (default): headerless train.bin and val.bin; single: one llm.c .bin and Megatron .idx per split",
    )
    add("--eot", choices=["after", "before", "none"], help="nanogpt: where end-of-text stands, default: after")


def _add_order(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    add = _command(
        commands,
        "order",
        _order,
        "the samples of any step of a run, past or future",
        "order --run runs/small_mars_m --step 1200 --decode",
    )
    add("directory", nargs="?", metavar="DIR", help="a data set; not needed with --run")
    add(
        "--run",
        dest="run_folder",
        metavar="FOLDER",
        help="take everything from a run's config.yaml; other options are laid over it",
    )
    add("--step", type=int, required=True, metavar="K", help="counts from 1, as in a run's log")
    add("--samples", type=int, default=8, metavar="N", help="how many to show, default: 8")
    add("--sequence-length", type=int, metavar="T", help="tokens of a sample")
    add("--seed", type=int, metavar="S", help="of the run")
    add("--global-batch", type=int, metavar="G", help="samples of one step over all ranks")
    add("--split", choices=["train", "val"], help="default: train")
    add("--sampling", choices=list(SAMPLINGS), help="default: permutation")
    add("--epoch-offset", action="store_true", default=None, help="the run has data.epoch_offset")
    add("--micro-batch", type=int, metavar="M", help="random_part: samples that share a part")
    add("--decode", action="store_true", help="show the start of each sample's text")
    add("--tokenizer", metavar="SPEC", help="for data sets of a SentencePiece model: its path")


def _add_vocab(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("vocab", help="the GPT-2 vocabulary for machines without a network")
    add = _command(
        parser.add_subparsers(required=True, metavar="COMMAND"),
        "export",
        _export_vocabulary,
        "write the vocabulary files under the names that tiktoken's cache looks for",
        "vocab export /shared/tiktoken",
    )
    add("directory", type=Path, metavar="DIR", help="the cache directory to write")
    add(
        "--from",
        dest="location",
        type=Path,
        metavar="PATH",
        help="r50k_base.tiktoken, encoder.json or a folder with one; default: what is installed",
    )


def _prepare(options: argparse.Namespace) -> int:
    result = prepare(
        options.source,
        options.output,
        tokenizer=options.tokenizer,
        options=BuildOptions(
            name=options.name or _default_name(options.source),
            val_split=options.val_split,
            val_fraction=options.val_fraction,
            val_tokens=options.val_tokens,
            part_tokens=options.part_tokens,
            text_column=options.text_column,
            text_documents=options.text_documents,
        ),
        workers=options.workers,
        execution=Execution(
            engine=options.engine,
            verify=options.verify,
            max_quarantined=options.max_quarantined,
            rank=_given_or_slurm(options.rank, "SLURM_PROCID", 0),
            world=_given_or_slurm(options.world, "SLURM_NTASKS", 1),
            download_dir=options.download_dir,
            delete_downloads=options.delete_downloads,
        ),
    )
    print(f"{options.output}: {'up to date' if result.up_to_date else 'finished'}")
    for line in summary(result.manifest):
        print(line)
    print(f"identity   {result.manifest_sha256}")
    return 0


def _default_name(sources: Sequence[str]) -> str:
    if all(source.startswith("fineweb-edu-") for source in sources):
        return "fineweb"
    return "openwebtext" if list(sources) == ["openwebtext"] else "data"


def _given_or_slurm(given: int | None, variable: str, default: int) -> int:
    return given if given is not None else int(os.environ.get(variable, default))


def _verify(options: argparse.Namespace) -> int:
    manifest, problems = verify(
        options.directory, sources=options.source, deep=options.deep, tokenizer=options.tokenizer
    )
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{options.directory}: all {len(manifest.parts)} parts are what the manifest says")
        if options.source:
            print(f"all {len(manifest.sources)} sources are those that it was made from")
        if options.deep:
            print(f"the text of all {manifest.accounting.documents:,} documents encodes to the stored ids")
    return 1 if problems else 0


def _inspect(options: argparse.Namespace) -> int:
    lines = inspect_dataset(
        options.directory, options.split, options.window, options.sequence_length, options.tokenizer
    )
    for line in lines:
        print(line)
    return 0


def _export(options: argparse.Namespace) -> int:
    if options.layout == "single":
        if options.eot:
            raise DataError("--eot is for --layout nanogpt; llm.c's layout has end-of-text before each document")
        export = export_single(options.directory, options.output)
    else:
        export = export_nanogpt(options.directory, options.output, options.eot or "after")
    for line in export.lines():
        print(line)
    return 0


def _order(options: argparse.Namespace) -> int:
    names = ("sequence_length", "seed", "global_batch", "sampling", "epoch_offset", "micro_batch", "split")
    given = {"path": options.directory, **{name: getattr(options, name) for name in names}}
    order = run_order(given, options.run_folder)
    for line in order_lines(order, options.step, options.samples, options.decode, options.tokenizer):
        print(line)
    return 0


def _export_vocabulary(options: argparse.Namespace) -> int:
    for line in export_vocabulary(options.directory, options.location):
        print(line)
    return 0


def _corpus(options: argparse.Namespace) -> int:
    report = write_corpus(options.output)
    if report.missing:
        print(f"not installed, so not in the corpus: {', '.join(report.missing)}", file=sys.stderr)
    print(
        f"{options.output}: {report.documents:,} documents, {report.text_bytes / 1e6:.1f} MB of text from "
        f"Python {report.packages['python']} and {len(report.packages) - 1} packages; versions are in "
        f"{Path(options.output).name}.sources.json"
    )
    return 0
