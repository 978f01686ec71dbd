#!/usr/bin/env python
"""Continues a prompt with a trained model: `python launch/generate.py runs/quickstart --prompt "The function"`."""

import argparse
import sys

from data_pipeline import DataError, load_tokenizer
from mars_ds.errors import ConfigError


def main() -> int:
    """Prints one continuation.

    Returns:
        0, or 2 for bad input.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="run folder (its newest checkpoint is taken) or checkpoint folder")
    parser.add_argument("--prompt", default="The", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--top-k", type=int, default=50, help="draw from so many of the likeliest tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="default: that of the data the model was trained on")
    options = parser.parse_args()
    try:
        from mars_ds.export.checkpoint import load_gpt2
        from mars_ds.export.generate import generate
        from mars_ds.export.huggingface import to_huggingface

        stored = load_gpt2(options.path)
        text = generate(
            to_huggingface(stored.state, stored.config),
            load_tokenizer(options.tokenizer or stored.tokenizer),
            options.prompt,
            options.tokens,
            options.temperature,
            options.top_k,
            options.seed,
        )
    except (ConfigError, DataError, ValueError, IndexError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
