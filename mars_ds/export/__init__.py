"""Models to and from other libraries, and text out of them."""

from mars_ds.export.generate import TextTokenizer, generate
from mars_ds.export.huggingface import from_huggingface, to_huggingface

__all__ = ["TextTokenizer", "from_huggingface", "generate", "to_huggingface"]
