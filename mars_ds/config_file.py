"""YAML files to one nested dict, with the file and line of every key.

`extends: base.yaml` (or a list) is read first and overlaid; a `null` returns a key to its default;
dotted overrides of the command line come last. Nothing here knows which keys exist.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mars_ds.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `6e-4` as a number (YAML 1.1 asks for a dot and a sign)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass
class ConfigTree:
    """Nested values and where each dotted key was written.

    Attributes:
        values: Nested dicts.
        origins: Dotted key -> "file:line" or "command line".
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def origin(self, dotted: str) -> str:
        """Where `dotted`, or the nearest enclosing key, was written."""
        while dotted and dotted not in self.origins:
            dotted = dotted.rpartition(".")[0]
        return self.origins.get(dotted, "config")

    def overlay(self, other: "ConfigTree") -> None:
        """Lays `other` over this tree, key by key."""
        _overlay(self.values, other.values)
        self.origins.update(other.origins)


def _overlay(under: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            _overlay(under[key], value)
        else:
            under[key] = value


def read_tree(path: str | Path, overrides: Iterable[str] = ()) -> ConfigTree:
    """Reads a config file, what it extends, and the overrides.

    Args:
        path: YAML file.
        overrides: `section.key=value`, the value in YAML.

    Raises:
        ConfigError: Missing or unreadable file, YAML error, duplicate key, cycle of `extends`, or an
            override without `=`; with file and line.
    """
    tree = _read_file(Path(path), ())
    for text in overrides:
        tree.overlay(_parse_override(text))
    return tree


def _read_file(path: Path, chain: tuple[Path, ...]) -> ConfigTree:
    resolved = path.resolve()
    if resolved in chain:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in chain)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({_reason(error)}){_nearest_file(path)}") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    tree = ConfigTree()
    if node is not None:
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{path}:1: expected `section:` mappings, found a {type(node).__name__.removesuffix('Node').lower()}"
            )
        tree.values = _mapping(node, "", str(path), tree.origins)
    parents = tree.values.pop("extends", None) or []
    origin = tree.origins.pop("extends", str(path))
    merged = ConfigTree()
    for parent in [parents] if isinstance(parents, str) else parents:
        if not isinstance(parent, str):
            raise ConfigError(f"{origin}: extends expects a file name or a list of them, got {parent!r}")
        merged.overlay(_read_file(path.parent / parent, (*chain, resolved)))
    merged.overlay(tree)
    return merged


def _mapping(node: yaml.MappingNode, prefix: str, file: str, origins: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in values:
            raise ConfigError(f"{file}:{line}: {prefix}{key} is written twice; the first is lost")
        origins[prefix + key] = f"{file}:{line}"
        if isinstance(value_node, yaml.MappingNode):
            values[key] = _mapping(value_node, f"{prefix}{key}.", file, origins)
        else:
            values[key] = _scalar_or_list(value_node)
    return values


def _scalar_or_list(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _parse_override(text: str) -> ConfigTree:
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise ConfigError(f"command line: {text!r} is not an override; expected section.key=value")
    try:
        parsed = yaml.load(value, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"command line: {text!r}: the value is not YAML") from error
    tree = ConfigTree()
    keys = dotted.split(".")
    for depth in range(len(keys)):
        tree.origins[".".join(keys[: depth + 1])] = "command line"
    inner = tree.values
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = parsed
    return tree


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops keys that are null: null means the default, wherever the key was inherited from."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def _nearest_file(path: Path) -> str:
    import difflib

    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist"
    names = sorted(p.name for p in folder.glob("*.yaml"))
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.3)
    return f"; nearest file: {folder / close[0]}" if close else ""


def to_yaml(values: Mapping[str, Any]) -> str:
    """Writes nested values as YAML that `read_tree` reads back to equal values."""
    return yaml.dump(_plain(values), sort_keys=False, allow_unicode=True, Dumper=yaml.SafeDumper)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"a config value is {value}")
    return value
