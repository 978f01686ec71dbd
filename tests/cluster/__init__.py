"""A real Slurm cluster and a real image builder, for launch/slurm and docker; see run.sh."""
