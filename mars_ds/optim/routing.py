"""Which parameter is a matrix, an embedding or a vector, decided by its name and true shape."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from mars_ds.optim.kinds import Role

# GPT-2, Llama, NeoX, OPT and BERT spell their (tied) embeddings and heads with one of these.
EMBEDDING_MARKS = ("embed", "wte", "wpe", "lm_head")


def role_of(name: str, shape: Sequence[int], routes: Mapping[str, Role] | None = None) -> Role:
    """Classifies one parameter.

    Args:
        name: Dotted parameter name.
        shape: True shape, never that of a ZeRO shard (which is always flat).
        routes: Glob pattern -> role, tried in order before the built-in rule; lets a user send an
            embedding to the matrix rule or a badly named head to the embedding rule.

    Returns:
        `vector` for fewer than two dimensions, `embedding` for a known embedding name, else `matrix`.

    Raises:
        ValueError: A route sends a parameter of fewer than two dimensions to `matrix` or `embedding`.
    """
    for pattern, role in (routes or {}).items():
        if fnmatchcase(name, pattern):
            if len(shape) < 2 and role != "vector":
                raise ValueError(
                    f"optimizer.routes: {pattern!r} sends {name} of shape {tuple(shape)} to {role!r}, "
                    "which needs two dimensions; narrow the pattern or use 'vector'"
                )
            return role
    if len(shape) < 2:
        return "vector"
    return "embedding" if any(mark in name.lower() for mark in EMBEDDING_MARKS) else "matrix"


def check_patterns(key: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Refuses a pattern that matches nothing: it would be ignored without a word.

    Raises:
        ValueError: The pattern, and the nearest parameter name.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(f"optimizer.{key}: {pattern!r} matches no parameter; nearest name: {nearest[0]}")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns under which a parameter of two or more dimensions is orthogonalized.

    A convolution (out, in, *kernel) is flattened to (out, in * prod(kernel)): one matrix, one norm.
    """
    rows, columns = shape[0], 1
    for size in shape[1:]:
        columns *= size
    return rows, columns
