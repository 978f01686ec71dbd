"""`run.init_from`: the weights, and nothing else, of something that was trained before."""

from typing import Any

from mars_ds.checkpoint.api import load_checkpoint


def load_initial_weights(engine: Any, source: str) -> str:
    """Puts the weights of `source` into an engine; all ranks call it together.

    Args:
        engine: Made by `mars_ds.initialize`, freshly.
        source: A checkpoint folder, or a folder of checkpoints.

    Returns:
        A line for the console.

    Raises:
        CheckpointError: Nothing there, damaged, or of another model.
    """
    reader = load_checkpoint(engine, source, weights_only=True)
    return f"weights of {source} (step {reader.step}); the optimizer starts anew"
