"""The exceptions of a user's mistake: printed without a traceback, exit code 2."""


class ConfigError(ValueError):
    """Bad input of a run: the message names the key or file, what was expected, and what would work."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, incomplete, corrupted, or of another model."""


class LaunchError(RuntimeError):
    """The environment of the launch is incomplete, or does not fit the machine or the job."""
