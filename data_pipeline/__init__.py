"""Text to tokens to parts to windows: tokenise once, read exactly, forever.

``prepare`` makes a data set, `open_dataset` reads windows of it, `make_sampling` says which window a sample index
means, `WindowHash` proves which windows a run consumed.
"""

from data_pipeline.errors import DataError
from data_pipeline.order import SampleOrder
from data_pipeline.reader import TokenWindows, open_dataset
from data_pipeline.sampling import SAMPLINGS, make_sampling
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from data_pipeline.window_hash import WindowHash

__all__ = [
    "SAMPLINGS",
    "DataError",
    "SampleOrder",
    "TokenWindows",
    "Tokenizer",
    "WindowHash",
    "load_tokenizer",
    "make_sampling",
    "open_dataset",
]
