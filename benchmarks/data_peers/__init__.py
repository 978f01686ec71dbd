"""What the benchmarks of the data pipeline compare it with, written from the peers' descriptions, and their text."""
