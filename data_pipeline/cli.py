"""The command line: ``python -m data_pipeline prepare | verify | inspect | corpus``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.build import prepare
from data_pipeline.corpus import CORPUS_NAME, write_corpus
from data_pipeline.errors import DataError
from data_pipeline.inspection import inspect_dataset, summary
from data_pipeline.plan import DEFAULT_PART_TOKENS, BuildOptions
from data_pipeline.split import DEFAULT_VAL_FRACTION
from data_pipeline.verify import verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 (verify found problems), 2 (error), 130 (Ctrl-C)."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline", description="Text to tokens, once and exactly.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_prepare(commands)
    add = _command(commands, "verify", _verify, "hash every file again", "verify data/fineweb")
    add("directory", metavar="DIR", help="a data set")
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
        help="files, directories or patterns: .parquet, .jsonl, .jsonl.gz, .json.gz, .jsonl.zst, or .txt "
        "(one file is one document)",
    )
    add("--output", required=True, metavar="DIR", help="directory of the data set")
    add("--name", default="data", help="parts are NAME_train_000000.bin and so on, default: data")
    add(
        "--tokenizer",
        default="gpt2",
        metavar="SPEC",
        help="gpt2 (default), gpt2:PATH with a copy of its vocabulary, bytes, or a SentencePiece PATH.model",
    )
    add("--workers", type=int, metavar="N", help="processes, default: one per core; no effect on the output")
    add(
        "--val-fraction",
        type=float,
        default=DEFAULT_VAL_FRACTION,
        metavar="F",
        help=f"share of documents for validation, chosen by content; default: {DEFAULT_VAL_FRACTION}",
    )
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


def _prepare(options: argparse.Namespace) -> int:
    result = prepare(
        options.source,
        options.output,
        tokenizer=options.tokenizer,
        options=BuildOptions(
            name=options.name,
            val_fraction=options.val_fraction,
            part_tokens=options.part_tokens,
            text_column=options.text_column,
            text_documents=options.text_documents,
        ),
        workers=options.workers,
    )
    print(f"{options.output}: {'up to date' if result.up_to_date else 'finished'}")
    for line in summary(result.manifest):
        print(line)
    print(f"identity   {result.manifest_sha256}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    manifest, problems = verify(options.directory)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"{options.directory}: all {len(manifest.parts)} parts are what the manifest says")
    return 1 if problems else 0


def _inspect(options: argparse.Namespace) -> int:
    lines = inspect_dataset(
        options.directory, options.split, options.window, options.sequence_length, options.tokenizer
    )
    for line in lines:
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
