"""What a person sees of a run: console lines, the log file, trackers, plots and the report."""
