"""Every mistake: one clear message on rank 0, exit code 2, nothing overwritten."""

import shutil
from pathlib import Path

import pytest

from mars_ds.training.entry import BAD_INPUT, DONE, main


@pytest.fixture
def refused(config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Calls main and returns the message of its refusal."""

    def call(*overrides: str, path: Path = config_file, **environment: str) -> str:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        assert main(["--config", str(path), *overrides]) == BAD_INPUT
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert captured.err.startswith("error: ")
        return captured.err

    return call


def test_missing_config(refused, config_file: Path) -> None:
    message = refused(path=config_file.with_name("tin.yaml"))
    assert "tin.yaml: cannot be read (No such file or directory)" in message
    assert f"nearest file: {config_file}" in message


def test_unreadable_yaml(refused, config_file: Path) -> None:
    config_file.write_text("run:\n  name: x\n model: {\n")
    assert f"{config_file}:3: not YAML" in refused()


def test_unknown_key(refused, config_file: Path) -> None:
    line = config_file.read_text().splitlines().index("zero: {stage: 1}") + 1
    config_file.write_text(config_file.read_text().replace("zero: {stage: 1}", "zero: {stag: 1}"))
    assert f"{config_file}:{line}: unknown key zero.stag; nearest: zero.stage" in refused()


def test_missing_data_names_the_command(refused) -> None:
    message = refused("data.path=data/nothing_here")
    assert "data/nothing_here" in message
    assert "python -m data_pipeline prepare --source" in message


def test_empty_data(refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "manifest" in refused(f"data.path={tmp_path / 'empty'}")


def test_vocabulary_too_small(refused) -> None:
    message = refused("model.vocab_size=100")
    assert "model.vocab_size 100 is too small" in message
    assert "nearest: 320" in message


def test_a_sequence_longer_than_the_data(refused) -> None:
    assert "sequence" in refused("model.sequence_length=10000000")


def test_a_sequence_longer_than_the_positions_of_a_factory(refused) -> None:
    message = refused(
        "model.factory=tests.training.factories:tiny_llama",
        "model.factory_arguments={vocab_size: 320}",
        "model.sequence_length=65",
    )
    assert "model.sequence_length 65 is above the model's 64 positions" in message


def test_a_factory_that_is_not_there(refused) -> None:
    assert "nearest: tests.training.factories:tiny_llama" in refused("model.factory=tests.training.factories:tiny_lama")


def test_a_world_size_that_does_not_divide_the_batch(refused) -> None:
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "5", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    assert "12 = micro_batch 2 x accumulation x 5 ranks" in refused(**environment)


def test_half_a_launch_environment(refused) -> None:
    assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set" in refused(RANK="0", WORLD_SIZE="2")


def test_unsupported_combination(refused) -> None:
    message = refused("zero.stage=0", "precision.dtype=bfloat16")
    assert "nearest: zero.stage: 1, or precision.accumulation_dtype: bfloat16" in message


def test_a_pattern_that_names_no_parameter(refused) -> None:
    assert "matches no parameter; nearest name" in refused("optimizer.routes={nothing*: matrix}")
    assert "'transformer.h.9.*' matches no parameter" in refused("optimizer.overrides={transformer.h.9.*: {lr: 1.0}}")
    assert "optimizer.overrides" in refused("optimizer.overrides={transformer.h.0.*: {lrr: 1.0}}")


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("deepspeed.gradient_accumulation_steps=3", "batch.global_batch_sequences"),
        ("deepspeed.train_micro_batch_size_per_gpu=1", "batch.micro_batch"),
        ("deepspeed.zero_optimization.stage=3", "zero.stage"),
        ("deepspeed.zero_optimization.offload_optimizer={device: cpu}", "zero.offload"),
        ("deepspeed.bf16.enabled=true", "precision.dtype"),
        ("deepspeed.gradient_clipping=0.5", "batch.gradient_clipping"),
        ("deepspeed.zero_optimization=3", "expected a mapping"),
    ],
)
def test_a_raw_key_that_contradicts_a_section(refused, override: str, ours: str) -> None:
    assert ours in refused(override)


def test_a_folder_in_use_and_one_that_cannot_be_made(config_file: Path) -> None:
    from mars_ds.config import load_config
    from mars_ds.errors import ConfigError
    from mars_ds.training.run_folder import hold, open_run_folder

    folder = open_run_folder(load_config(config_file))
    first = hold(folder)
    with pytest.raises(ConfigError, match=r"in use by process \d+ on "):
        hold(folder)
    first.close()
    hold(folder).close()
    blocked = config_file.parent / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir: .* cannot be written"):
        hold(open_run_folder(load_config(config_file, [f"run.output_dir={blocked}"])))


def test_compile_without_a_compiler(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "apt-get install g++" in refused("model.compile=true")


def test_resume_required_without_a_checkpoint(refused) -> None:
    assert "holds no intact checkpoint" in refused("run.resume=required")


def test_other_ranks_say_nothing(config_file: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["--config", str(config_file), "data.path=nowhere"]) == BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err + captured.out == ""


def files_of(run: Path) -> dict[Path, bytes]:
    """Everything in a run folder but the heartbeats, which say who looked last."""
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in files if path.parent.name != "heartbeats"}


def test_a_checkpoint_of_another_model_and_a_used_folder(refused, config_file: Path, capsys, monkeypatch) -> None:
    """One run, then five ways to misuse its folder; the folder stays as it was."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    # Several runs in one process: DeepSpeed keeps the process groups of the first.
    monkeypatch.setattr("mars_ds.zero.distributed.shut_down", lambda: None)
    assert main(["--config", str(config_file), "schedule.steps=2"]) == DONE
    assert "done: 2 steps" in capsys.readouterr().out
    run = config_file.parent / "runs" / "tiny"
    before = files_of(run)
    assert "h.0.attn.c_attn.weight is (96, 32) there and (192, 64) here" in refused("model.width=64")
    assert "has no exp_avg_sq of" in refused("optimizer.kind=mars-adamw", "optimizer.ns_dtype=null")
    assert "with seed 3, this run has 4" in refused("run.seed=4")
    assert "already holds a run" in refused("run.resume=never")
    # A damaged checkpoint is never a reason to start over and lose the run.
    index = run / "checkpoints" / "step_00000002" / "index.json"
    whole = index.read_bytes()
    index.write_bytes(whole[:-9])
    assert "no checkpoint is intact, and starting over would lose the run" in refused()
    index.write_bytes(whole)
    other = config_file.parent / "other"
    shutil.copytree(config_file.parent / "runs" / "tiny" / "checkpoints" / "step_00000002", other)
    (other / "COMPLETE").unlink()
    assert "no COMPLETE marker" in refused("run.name=new", f"run.init_from={other}")
    assert files_of(run) == before
    assert main(["--config", str(config_file), "schedule.steps=2"]) == DONE
    assert "nothing to do" in capsys.readouterr().out
