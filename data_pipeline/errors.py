"""The one exception of this package that a person is meant to read."""


class DataError(ValueError):
    """A mistake in the input, the options or the files on disk.

    The message names the file (and row, where there is one), what was expected, and the nearest thing
    that works. The command line prints it without a traceback and exits with status 2.
    """
