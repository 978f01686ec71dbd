"""Which torch the image has, and what pip is to install: `python3 docker/requirements.py FOLDER`, by the base's Python.

FOLDER/requirements.txt gets the runtime and fast packages of setup.py. FOLDER/constraints.txt gets the pins of
constraints.txt, but the version of the base's torch where it has one: with it pip can never put another torch in front.
Prints where torch comes from: `base` or `constraints.txt`.
"""

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(folder: Path) -> str:
    """Writes both files; returns where torch comes from."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned_torch = re.search(r"^torch==(\S+)$", pins, flags=re.MULTILINE).group(1)
    names = [name for name in packages((ROOT / "setup.py").read_text(encoding="utf-8")) if name != "torch"]
    try:
        base_torch = version("torch")
    except PackageNotFoundError:
        base_torch = None
        names.insert(0, "torch")
    if base_torch is not None:
        if minor(base_torch) < minor(pinned_torch):
            sys.exit(
                f"error: the base has torch {base_torch}, and nothing older than {pinned_torch} is tested; "
                "take a newer BASE_IMAGE, or one without torch"
            )
        pins = pins.replace(f"torch=={pinned_torch}\n", f"torch=={base_torch}\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requirements.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    (folder / "constraints.txt").write_text(pins, encoding="utf-8")
    return "constraints.txt" if base_torch is None else "base"


def packages(setup: str) -> list[str]:
    """The lists RUNTIME and FAST of a setup.py, which is read and not run: the base may have no setuptools."""
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(setup).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    }
    return [*lists["RUNTIME"], *lists["FAST"]]


def minor(text: str) -> tuple[int, ...]:
    """`2.13.0a0+8145d63` -> (2, 13)."""
    return tuple(int(part) for part in text.split(".")[:2])


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
