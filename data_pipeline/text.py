"""Well-formed text: what every later step may rely on."""


def well_formed(text: str) -> str:
    """Return ``text`` with every lone surrogate replaced by U+FFFD, so that it encodes as UTF-8.

    Only JSON escapes such as ``"\\ud800"`` can carry lone surrogates. A high and a low surrogate that
    stand together become the character that they spell, as in ``tiktoken.Encoding.encode_ordinary``.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
