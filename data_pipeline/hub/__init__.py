"""Sources on the Hugging Face hub: listed, checked, fetched ahead of the workers, and deleted after use when asked."""
