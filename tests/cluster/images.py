"""Builds the container image for real, on a machine without Docker, a registry or a GPU.

The base is a small Debian made on the spot, so nothing is pulled. podman builds (its `build` is buildah) and runs; both
keep what they have in one folder, which goes at the end. Images are run by runc in the machine's own network.
"""

import ast
import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
BASE = "localhost/base:test"
BASE_WITH_TORCH = "localhost/base-with-torch:test"
IMAGE = "localhost/mars-ds:test"
PROGRAMS = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "unshare": "util-linux"}

# Of a stand-in for NGC: a torch of its own as system package, and pip constraints that contradict ours.
BASE_TORCH = "2.13.0a0+base"
_STANDIN = f"""
FROM {BASE}
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt
COPY torch /usr/lib/python3/dist-packages/torch
COPY torch.dist-info /usr/lib/python3/dist-packages/torch-{BASE_TORCH}.dist-info
RUN mkdir /etc/pip && echo 'numpy==1.26.4' > /etc/pip/constraint.txt
"""


def supported() -> str | None:
    """Says why images cannot be built on this machine, or None where they can."""
    if os.geteuid() != 0:
        return "building an image needs root here"
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program) is None}
    if missing:
        return f"not installed: {' '.join(sorted(missing))}"
    if not any(path.is_file() for path in _apt_sources()):
        return "no apt sources: the base is made from this machine's Debian mirror"
    probe = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"namespaces are refused: {probe.stderr.strip()}" if probe.returncode else None


class Images:
    """Bases, images and containers in one folder. Use as a context manager: leaving it removes all of them.

    Args:
        folder: For the storage and logs; about 4 GB while in use, on a disk that can carry overlay mounts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._roots: dict[str, Path] = {}

    def __enter__(self) -> "Images":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._configure("overlay")
        # Overlay is refused on some file systems, overlay itself among them; vfs copies whole images instead.
        if self.podman("info", check=False).returncode:
            self._configure("vfs")
        return self

    def __exit__(self, *exception: object) -> None:
        for arguments in (("rm", "--all", "--force", "--time=0"), ("rmi", "--all", "--force")):
            self.podman(*arguments, check=False)
        with contextlib.suppress(OSError):
            mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
            for mount in sorted((m for m in mounts if m.startswith(f"{self.folder}/")), reverse=True):
                subprocess.run(["umount", "--lazy", mount], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def podman(
        self, *arguments: str, check: bool = True, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs podman on this folder's storage.

        Raises:
            RuntimeError: It failed and `check` is set; with what it said.
        """
        return self._call(["podman", *arguments], check, environment)

    def build_base(self) -> None:
        """`BASE`: Debian with Python, as this machine's mirror has it."""
        tar = self.folder / "base.tar"
        sources = [str(path) for path in _apt_sources() if path.is_file()]
        packages = "--include=python3,python3-venv,ca-certificates"
        self._call(["mmdebstrap", "--quiet", "--variant=minbase", packages, _codename(), str(tar), *sources])
        self.podman("import", "--quiet", str(tar), BASE)
        tar.unlink()

    def build_base_with_torch(self) -> None:
        """`BASE_WITH_TORCH`: `BASE` and a torch of which pip sees name and version, and Python little more."""
        context = self.folder / "with-torch"
        for name, content in {
            "Dockerfile": _STANDIN,
            "torch/__init__.py": f"__version__ = '{BASE_TORCH}'\nclass version: cuda = None\n",
            "torch.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {BASE_TORCH}\n",
            "torch.dist-info/INSTALLER": "base\n",
        }.items():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            (context / name).write_text(content, encoding="utf-8")
        self.podman("build", *_OFFLINE, "--tag", BASE_WITH_TORCH, str(context))

    def build(self, base: str = BASE, image: str = IMAGE, *arguments: str) -> str:
        """Builds the shipped Dockerfile by the shipped script; returns what the build said."""
        environment = {"ENGINE": "podman", "BASE_IMAGE": base, "IMAGE": image}
        script = ["bash", str(ROOT / "docker/build.sh"), *_OFFLINE, *self._pip_volumes(), "--layers=false", *arguments]
        result = self._call(script, environment=environment)
        return result.stdout + result.stderr

    def exists(self, image: str) -> bool:
        """Whether the image is in this folder's storage."""
        return self.podman("image", "exists", image, check=False).returncode == 0

    def run(self, image: str, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Runs a command in a new container of the image, through its entry point; never raises for its exit code."""
        return self.podman("run", "--rm", "--pull=never", *options, image, *command, check=False)

    def start(self, image: str, *command: str) -> subprocess.Popen[str]:
        """Starts a command in a new container; signals for the process returned reach the container's process 1."""
        arguments = ["podman", "run", "--rm", "--pull=never", image, *command]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=self._environment(), cwd=ROOT)

    def run_in_checkout(self, image: str, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Runs a shell script as root in an image, with the checkout at /opt/app and this machine's pip settings."""
        mounts = (f"--volume={ROOT}:/opt/app:ro", "--workdir=/opt/app", *self._pip_volumes())
        return self.run(image, "bash", "-ec", script, options=(*mounts, *options))

    def image_root(self, image: str = IMAGE) -> Path:
        """The image as a directory with its root file system, laid out as enroot does: ENV in /etc/environment."""
        if image not in self._roots:
            container = self.podman("create", "--pull=never", image).stdout.strip()
            root = Path(self.podman("mount", container).stdout.strip())
            variables = self.podman("image", "inspect", "--format", "{{range .Config.Env}}{{println .}}{{end}}", image)
            (root / "etc/environment").write_text(variables.stdout.strip() + "\n", encoding="utf-8")
            self._roots[image] = root
        return self._roots[image]

    def _pip_volumes(self) -> list[str]:
        """Lets pip find packages where this machine's pip finds them: shown to the build, never put into the image."""
        settings = pip_settings()
        file = self.folder / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items()), encoding="utf-8")
        volumes = [f"{file}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in local_paths(settings))]
        return [f"--volume={volume}" for volume in volumes]

    def _call(
        self, command: list[str], check: bool = True, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        variables = self._environment() | (environment or {})
        result = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT)
        if check and result.returncode:
            said = (result.stdout + result.stderr)[-4000:]
            raise RuntimeError(f"`{' '.join(command[:3])} ...` ended with {result.returncode}:\n{said}")
        return result

    def _environment(self) -> dict[str, str]:
        own = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf", "TMPDIR": ""}
        return os.environ | {name: str(self.folder / file) for name, file in own.items()}

    def _configure(self, driver: str) -> None:
        """Settings for a machine without systemd and without the right to raise limits; nothing global changes."""
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "{driver}"\ngraphroot = "{self.folder}/storage"\nrunroot = "{self.folder}/running"\n',
            encoding="utf-8",
        )
        (self.folder / "containers.conf").write_text(
            f"""
[containers]
netns = "host"
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{self.folder}/engine"
""",
            encoding="utf-8",
        )


# RUN steps are chroots: no network of their own, no cgroups. Never a registry.
_OFFLINE = ("--isolation=chroot", "--pull=never")


@functools.cache
def building() -> Future[Images]:
    """The building of `IMAGE`, begun by the first call, in the background; the image is gone when this process ends."""

    def build() -> Images:
        images = Images(Path(tempfile.mkdtemp(prefix="images-")))
        atexit.register(images.__exit__)
        images.__enter__()
        images.build_base()
        images.build()
        return images

    return ThreadPoolExecutor(1).submit(build)


def built_image() -> Images:
    """`IMAGE`, built once for all tests of this process.

    Raises:
        RuntimeError: It could not be built.
    """
    return building().result()


def pip_settings() -> dict[str, str]:
    """What this machine's pip is told by files and variables, key to value; a variable beats a file, as for pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    settings = {key: ast.literal_eval(value) for key, _, value in (line.partition("=") for line in listed.splitlines())}
    ordered = sorted(settings.items(), key=lambda item: item[0].startswith(":env:"))
    merged = {
        key.rpartition(".")[2]: value for key, value in ordered if key.startswith(("global.", "install.", ":env:"))
    }
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    return merged if "cert" in merged or not bundle else merged | {"cert": bundle}


def local_paths(settings: dict[str, str]) -> list[str]:
    """Files and folders of this machine that pip settings name, as paths or file: addresses."""
    found = set()
    for key, value in settings.items():
        for word in value.split():
            path = Path(unquote(word.removeprefix("file://")))
            if path.is_absolute() and path.exists():
                # The pages of an index may point to files beside it (`../files/...`).
                found.add(str(path.parent if key.endswith("index-url") else path))
    return sorted(found - {"/"})


def _apt_sources() -> list[Path]:
    return [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))]


def _codename() -> str:
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return release["VERSION_CODENAME"].strip('"')
