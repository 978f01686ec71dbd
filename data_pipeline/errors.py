"""The exceptions of this package: one that a person is meant to read, and one for a stop on request."""


class DataError(ValueError):
    """A mistake in the input, the options or the files on disk.

    The message names the file (and row, where there is one), what was expected, and the nearest thing
    that works. The command line prints it without a traceback and exits with status 2.
    """


class Stopped(Exception):
    """The work was told to stop; what was finished is kept, and the same command goes on from there."""
