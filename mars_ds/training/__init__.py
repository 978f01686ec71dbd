"""The trainer around the optimizer."""
