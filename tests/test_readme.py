"""README stays true: its tree names every file, its commands name files that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in listed.stdout.split()]


def test_the_tree_names_every_file_once() -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    named: set[str] = set()
    folder = ""
    for line in tree.strip().splitlines():
        if not line.startswith(" "):
            folder = line.split("  ")[0].rstrip("/")
        else:
            named.add(f"{folder}/{line.split()[0]}")
    files = {str(path) for path in tracked("mars_ds/*.py", "data_pipeline/*.py", "launch/*") if path.stem[:2] != "__"}
    assert named == files


def test_commands_name_files_that_exist() -> None:
    for script in set(re.findall(r"(?:launch|tests|configs)/[\w/.-]+\.(?:py|sh|sbatch|yaml)", README)):
        assert (ROOT / script).is_file(), script


EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(("index", "shown"), [(0, "equals the reference within"), (1, "loss ")])
def test_the_examples_run_as_they_are(index: int, shown: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[index], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
