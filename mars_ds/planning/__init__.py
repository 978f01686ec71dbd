"""Pure planning: batch arithmetic and what a run will be, from the config and a world size alone."""
