"""The container image: built for real from the shipped Dockerfile on a small Debian base, and run."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster import images as image_tools
from tests.cluster.images import BASE, BASE_TORCH, BASE_WITH_TORCH, IMAGE, ROOT, Images
from tests.conftest import write_config

PYTHON = "/opt/venv/bin/python"
needs_images = pytest.mark.skipif(image_tools.supported() is not None, reason=str(image_tools.supported()))


@pytest.fixture(scope="module")
def images() -> Images:
    """Images of this session, with `IMAGE` built."""
    return image_tools.built_image()


@pytest.fixture(scope="module")
def configuration(images: Images) -> dict:
    """What the image says of itself."""
    return json.loads(images.podman("image", "inspect", IMAGE).stdout)[0]["Config"]


@needs_images
def test_default_base_is_an_ngc_tag_and_nothing_is_fetched_for_it(images: Images) -> None:
    """Without BASE_IMAGE and with pulling forbidden the build ends at the first FROM."""
    default = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(), flags=re.MULTILINE)[1]
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", default)
    result = images.podman("build", "--pull=never", "--file=docker/Dockerfile", ".", check=False)
    assert result.returncode != 0
    assert f"{default}: image not known" in result.stderr
    assert not images.exists(default)


@needs_images
def test_entry_point_says_what_is_inside_and_passes_the_exit_code_on(images: Images) -> None:
    """75 is the code by which a stopped run asks to be started again."""
    result = images.run(IMAGE, "sh", "-c", "echo from the command; exit 75")
    assert result.returncode == 75
    assert result.stdout == "from the command\n", "the line of the entry point does not mix with a command's output"
    pins = dict(re.findall(r"^(torch|deepspeed)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert re.fullmatch(
        rf"mars-ds \S+, revision (unknown|[0-9a-f]{{40}}(-modified)?); torch {pins['torch']}(\+\S+)? from "
        rf"constraints.txt; cuda \S+; deepspeed {pins['deepspeed']}, ops none; python 3\.\d+\.\d+\n",
        result.stderr,
    )


@needs_images
def test_command_is_process_1_and_is_asked_to_stop(images: Images) -> None:
    """SIGTERM for the container reaches the program, which decides how it ends."""
    program = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(os.getpid(), flush=True)
while True: signal.pause()
"""
    process = images.start(IMAGE, PYTHON, "-c", program)
    try:
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75
    finally:
        process.kill()


@needs_images
@pytest.mark.parametrize(("options", "uid"), [((), 1000), (("--user=1234",), 1234)])
def test_user_is_not_root_and_has_a_home(images: Images, options: tuple[str, ...], uid: int) -> None:
    """Also a user id that the image has never heard of can keep caches."""
    command = 'id -u; touch "$HOME/x" && echo "$HOME" "$USER"; test -w /opt/app || test -w /opt/venv || echo sealed'
    result = images.run(IMAGE, "sh", "-c", command, options=options)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0] == str(uid)
    assert re.fullmatch(r"/\S+ \S+", lines[1])
    assert lines[2] == "sealed"


@needs_images
def test_labels(configuration: dict) -> None:
    """A registry shows what is inside without running it."""
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in configuration["Labels"].items()}
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert labels["title"] == "mars-ds"
    assert labels["licenses"] == "Apache-2.0"
    assert f'version="{labels["version"]}"' in (ROOT / "setup.py").read_text()
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-modified)?", labels["revision"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", labels["created"])
    assert labels["mars-ds.torch.version"] == pins["torch"]
    assert labels["mars-ds.deepspeed.version"] == pins["deepspeed"]


@needs_images
def test_labels_cannot_lie(images: Images) -> None:
    """record.py, the last step of the build, refuses a version that is not the one installed."""
    options = ("--env=TORCH_VERSION=1.0", "--entrypoint=")
    result = images.run(IMAGE, PYTHON, "docker/record.py", "/tmp/image.txt", options=options)
    assert result.returncode == 1
    assert re.search(r"error: TORCH_VERSION=1.0, but torch is \S+: build with --build-arg", result.stderr)


@needs_images
def test_nothing_that_a_site_owns_is_inside(images: Images, configuration: dict) -> None:
    """No network settings, no remote shells, no health check, no ports."""
    variables = {entry.split("=", 1)[0] for entry in configuration["Env"]}
    assert not [name for name in variables if name.startswith(("NCCL_", "UCX_", "FI_", "GLOO_", "MASTER_"))]
    assert "Healthcheck" not in configuration
    assert "ExposedPorts" not in configuration
    found = images.run(IMAGE, "sh", "-c", "command -v sshd ssh pdsh; test -e /etc/ssh && echo /etc/ssh; true")
    assert found.stdout == ""


@needs_images
def test_works_with_an_emptied_environment_and_without_the_entry_point(images: Images) -> None:
    """enroot may drop the image's variables, PATH first, and pyxis its entry point."""
    program = "import mars_ds, deepspeed, torch; print(torch.__version__)"
    options = ("--entrypoint=/usr/bin/env", "--workdir=/")
    result = images.run(IMAGE, "-i", PYTHON, "-c", program, options=options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].split("+")[0] in (ROOT / "constraints.txt").read_text()


@needs_images
def test_default_command_is_the_help_of_the_main_job(images: Images) -> None:
    """A person who runs the image and nothing else learns what it is for."""
    result = images.run(IMAGE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: pretrain.py")


@needs_images
def test_trains_as_an_unknown_user_into_a_mounted_folder(images: Images, dataset: Path, tmp_path: Path) -> None:
    """Data and configuration mounted read-only, results on the host and owned by the user who ran it."""
    for name in ("data", "config", "runs"):
        (tmp_path / name).mkdir()
    shutil.copytree(dataset, tmp_path / "data", dirs_exist_ok=True)
    write_config(tmp_path / "config/tiny.yaml", Path("data"), Path("runs"))
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path)], check=True)
    shutil.chown(tmp_path / "runs", 1234)
    mounts = [f"--volume={tmp_path / 'data'}:/opt/app/data:ro", f"--volume={tmp_path / 'config'}:/config:ro"]
    mounts.append(f"--volume={tmp_path / 'runs'}:/opt/app/runs")
    command = (PYTHON, "launch/pretrain.py", "--config", "/config/tiny.yaml")
    result = images.run(IMAGE, *command, options=("--user=1234", *mounts))
    assert result.returncode == 0, result.stdout + result.stderr
    log = [json.loads(line) for line in (tmp_path / "runs/tiny/log.jsonl").read_text().splitlines()]
    assert max(line.get("step", 0) for line in log) == 12
    assert (tmp_path / "runs/tiny/report.md").stat().st_uid == 1234


@needs_images
def test_another_torch_than_the_recorded_one_stops_the_start(images: Images, tmp_path: Path) -> None:
    """A folder in front of the image's packages, as PYTHONPATH of the submitting shell puts there."""
    info = tmp_path / "torch-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    subprocess.run(["chmod", "-R", "a+rX", str(tmp_path)], check=True)
    options = (f"--volume={tmp_path}:/shadow:ro", "--env=PYTHONPATH=/shadow")
    result = images.run(IMAGE, "echo", "started", options=options)
    assert (result.returncode, result.stdout) == (2, "")
    assert "error: torch 9.9 is found, but this image was built with" in result.stderr


@needs_images
def test_unpacked_image_has_its_variables_where_enroot_puts_them(images: Images) -> None:
    """The cluster tests run in this directory."""
    root = images.image_root(IMAGE)
    assert (root / "opt/app/launch/pretrain.py").is_file()
    variables = (root / "etc/environment").read_text().splitlines()
    assert [line for line in variables if line.startswith("PATH=/opt/venv/bin:")]


# ------------------------------------------------------------------------------------------- a base with its own torch


@pytest.fixture(scope="module")
def base_with_torch(images: Images) -> str:
    """A stand-in for NGC; not a second image, for that would install everything twice."""
    images.build_base_with_torch()
    return BASE_WITH_TORCH


@needs_images
def test_torch_of_the_base_wins(images: Images, base_with_torch: str, tmp_path: Path) -> None:
    """The build's own script, with a pip that resolves everything and reports what it would install, but does not."""
    script = """
bash docker/make_venv.sh /tmp/venv --dry-run --report /out/report.json
test ! -e /tmp/venv/lib/python3*/site-packages/torch
/tmp/venv/bin/python -c 'import torch; print("imported", torch.__version__, torch.__file__)'
/tmp/venv/bin/python -m pip install --dry-run --constraint /tmp/venv/constraints.txt torch==2.13.0 || echo refused
"""
    result = images.run_in_checkout(base_with_torch, script, "--env=DS_OPS=fused_adam", f"--volume={tmp_path}:/out")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"==> torch: from base, torch=={BASE_TORCH}\n" in result.stdout
    assert "DeepSpeed ops: skipped (fused_adam), the base has no nvcc" in result.stdout
    assert f"imported {BASE_TORCH} /usr/lib/python3/dist-packages/torch/__init__.py" in result.stdout
    assert result.stdout.endswith("refused\n"), "pip cannot put another torch in front of the base's"
    report = json.loads((tmp_path / "report.json").read_text())
    installed = {entry["metadata"]["name"].lower(): entry["metadata"]["version"] for entry in report["install"]}
    assert "torch" not in installed
    assert not [name for name in installed if name.startswith(("nvidia-", "triton"))]
    pins = (ROOT / "constraints.txt").read_text()
    for name in ("deepspeed", "numpy", "transformers", "gigatoken"):  # numpy: the base's own constraint is overruled
        assert f"\n{name}=={installed[name]}\n" in pins
    assert not {"pytest", "ruff", "mypy", "pre_commit", "pre-commit"} & set(installed)


@needs_images
def test_a_base_with_a_torch_that_is_too_old_is_refused(images: Images, base_with_torch: str) -> None:
    """Before anything is installed, and with what to do."""
    script = f"""
cd /usr/lib/python3/dist-packages/torch-{BASE_TORCH}.dist-info && sed -i 's/^Version: .*/Version: 2.5.0a0+old/' METADATA
cd /opt/app && python3 docker/requirements.py /tmp/venv
"""
    result = images.run_in_checkout(base_with_torch, script)
    assert result.returncode == 1
    assert "error: the base has torch 2.5.0a0+old, and nothing older than" in result.stderr


# -------------------------------------------------------------------------------------------------- without a container


def test_compose_file_has_what_training_needs() -> None:
    """No Docker engine is here: the keys that have cost people runs, one by one."""
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["ipc"] == "host"
        assert service["ulimits"]["memlock"] == -1
        assert service["ulimits"]["stack"] == 64 * 2**20
        assert service["stop_signal"] == "SIGTERM"
        assert service["stop_grace_period"] == "15m"
        assert service["init"] is False
        assert {volume.split(":")[1] for volume in service["volumes"]} >= {"/opt/app/data", "/opt/app/runs"}
        assert not [name for name in service.get("environment", {}) if name.startswith("NCCL_")]
        assert service["entrypoint"][0] == "/opt/app/docker/entry.sh"
    (device,) = services["train"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in services["train-cpu"]
    assert services["train-cpu"]["profiles"] == ["cpu"]


def test_context_is_what_the_image_needs() -> None:
    """Everything is outside but for the names that the ignore file lets in."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert {"mars_ds", "data_pipeline", "launch", "configs", "docker", "constraints.txt", "setup.py"} <= kept
    assert not {".git", ".venv", "data", "runs", "tests"} & kept
    assert all((ROOT / name).exists() for name in kept)


def test_base_names_are_local() -> None:
    """A name with a registry in front would be looked for there."""
    assert all(name.startswith("localhost/") for name in (BASE, BASE_WITH_TORCH, IMAGE))
