"""Loading a config: extends, nulls, numbers, overrides, and what each mistake is told."""

from pathlib import Path
from textwrap import dedent

import pytest

from mars_ds.config import RunConfig, load_config
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import plan_batch

BASE = """\
run:
  name: base
data:
  path: data/somewhere
batch:
  global_batch_sequences: 32
  micro_batch: 4
optimizer:
  kind: mars-m
  lr: 6e-4
  momentum: 0.9
schedule:
  steps: 100
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name files as they were given, so tests give short names."""
    monkeypatch.chdir(tmp_path)


def _write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text), encoding="utf-8")
    return name


def _load(text: str, *overrides: str) -> RunConfig:
    return load_config(_write("run.yaml", text), overrides)


def _error(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(text, *overrides)
    return str(caught.value)


def test_a_number_without_a_dot_is_a_number() -> None:
    assert _load(BASE).optimizer.lr == 6e-4
    assert _load(BASE.replace("6e-4", "+6E-4")).optimizer.lr == 6e-4
    assert _load(BASE.replace("name: base", "name: 'r6e-4'")).run.name == "r6e-4"


def test_extends_is_relative_to_its_file_and_overlaid_key_by_key() -> None:
    _write("configs/base/shared.yaml", BASE)
    child = _write("configs/child.yaml", "extends: base/shared.yaml\nrun:\n  name: child\noptimizer:\n  lr: 1e-3\n")
    config = load_config(child)
    assert (config.run.name, config.optimizer.lr, config.optimizer.momentum) == ("child", 1e-3, 0.9)
    grandchild = _write("other/run.yaml", "extends: ../configs/child.yaml\nschedule:\n  steps: 7\n")
    assert load_config(grandchild).schedule.steps == 7
    assert load_config(grandchild).optimizer.lr == 1e-3


def test_a_later_file_of_the_list_wins() -> None:
    _write("one.yaml", BASE)
    _write("two.yaml", "batch:\n  micro_batch: 2\nmodel:\n  width: 96\n")
    _write("three.yaml", "batch:\n  micro_batch: 8\n")
    config = _load("extends: [one.yaml, two.yaml, three.yaml]\n")
    assert (config.batch.micro_batch, config.model.width, config.global_batch) == (8, 96, 32)


def test_a_cycle_is_refused() -> None:
    _write("a.yaml", "extends: b.yaml\n")
    _write("b.yaml", "extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"^a\.yaml: extends itself through .*a\.yaml -> .*b\.yaml"):
        load_config("a.yaml")


def test_extends_must_name_files() -> None:
    assert _error("extends: [3]\n") == "run.yaml:1: extends expects a file name or a list of them, got 3"


def test_null_gives_the_default_back() -> None:
    _write("one.yaml", BASE)
    config = _load("extends: one.yaml\noptimizer:\n  momentum: null\nbatch:\n  micro_batch: null\n")
    assert config.optimizer.resolved().momentum == 0.95
    assert config.batch.micro_batch == 8
    assert _load("extends: one.yaml\n", "optimizer.momentum=null").optimizer.resolved().momentum == 0.95


def test_a_null_key_of_another_kind_is_no_mistake() -> None:
    _write("one.yaml", BASE)
    config = _load("extends: one.yaml\noptimizer:\n  kind: adamw\n  momentum: null\n")
    assert config.optimizer.resolved().betas == (0.9, 0.95)


def test_overrides_come_last() -> None:
    config = _load(BASE, "optimizer.lr=2e-3", "telemetry.wandb.mode=offline", "optimizer.betas_1d=[0.8, 0.9]")
    assert (config.optimizer.lr, config.optimizer.betas_1d) == (2e-3, (0.8, 0.9))
    assert (config.telemetry.wandb.mode, config.telemetry.wandb.project) == ("offline", "mars-ds")
    assert _load(BASE, "optimizer.lr=1", "optimizer.lr=2").optimizer.lr == 2.0


def test_bad_overrides() -> None:
    assert _error(BASE, "optimizer.lr") == (
        "command line: 'optimizer.lr' is not an override; expected section.key=value"
    )
    assert _error(BASE, "optimizer.lr=[1").startswith("command line: 'optimizer.lr=[1': the value is not YAML")
    assert _error(BASE, "optimizer.lrr=1") == "command line: unknown key optimizer.lrr; nearest: optimizer.lr"
    message = _error(BASE, "schedule.steps=many")
    assert message.startswith("command line: schedule.steps: ")
    assert message.endswith("got 'many'")


def test_a_duplicate_key_is_refused_with_its_line() -> None:
    text = BASE.replace("  lr: 6e-4\n", "  lr: 6e-4\n  lr: 6e-3\n")
    assert _error(text) == "run.yaml:11: optimizer.lr is written twice; the first is lost"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE.replace("optimizer:", "optimzer:"), "run.yaml:8: unknown key optimzer; nearest: optimizer"),
        (BASE + "model:\n  num_layer: 2\n", "run.yaml:15: unknown key model.num_layer; nearest: model.num_layers"),
        (BASE + "micro_batch: 2\n", "run.yaml:14: unknown key micro_batch; nearest: batch.micro_batch"),
        (
            BASE + "telemetry:\n  wandb:\n    projekt: x\n",
            "run.yaml:16: unknown key telemetry.wandb.projekt; nearest: telemetry.wandb.project",
        ),
    ],
)
def test_an_unknown_key_is_told_its_line_and_the_nearest(text: str, message: str) -> None:
    assert _error(text) == message


def test_the_line_is_that_of_the_file_that_wrote_the_key() -> None:
    _write("parts/one.yaml", BASE.replace("momentum", "momentun"))
    assert _error("extends: parts/one.yaml\n") == (
        "parts/one.yaml:11: unknown key optimizer.momentun; nearest: optimizer.momentum"
    )


def test_raw_deepspeed_keys_are_not_ours_to_name() -> None:
    config = _load(BASE + "deepspeed:\n  zero_optimization:\n    overlap_comm: true\n")
    assert config.deepspeed == {"zero_optimization": {"overlap_comm": True}}


def test_several_mistakes_are_told_together() -> None:
    text = BASE.replace("micro_batch: 4", "micro_batch: 0").replace("  steps: 100", "  kind: cosin")
    lines = _error(text.replace("path: data/somewhere", "path: 3")).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["run.yaml:4", "run.yaml:7", "run.yaml:13", "run.yaml:12"]
    assert lines[0] == "run.yaml:4: data.path: Input should be a valid string, got 3"
    assert lines[1] == "run.yaml:7: batch.micro_batch: Input should be greater than or equal to 1, got 0"
    assert lines[2] == "run.yaml:13: schedule.kind: Input should be 'cosine', 'wsd' or 'constant', got 'cosin'"
    assert lines[3] == "run.yaml:12: schedule.steps is missing"
    assert len(_error(BASE + "wiath: 1\nmodel:\n  widht: 2\n").splitlines()) == 2


def test_a_section_that_is_missing() -> None:
    assert _error(BASE.replace("data:\n  path: data/somewhere\n", "")) == "config: data is missing"


def test_gamma_is_refused_for_moonlight_at_its_line() -> None:
    message = _error(BASE.replace("mars-m", "moonlight").replace("  momentum: 0.9", "  gamma: 0.025"))
    assert message == (
        "run.yaml:11: optimizer: gamma is not used by kind moonlight "
        "(used by mars-adamw, mars-lion, mars-shampoo, mars-m)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BASE + "model:\n  num_heads: 7\n",
            "run.yaml:15: model: num_heads 7 does not divide width 768; nearest: [6, 8]",
        ),
        (
            BASE + "  min_lr: 1e-3\n",
            "run.yaml:14: schedule.min_lr 0.001 is above optimizer.lr 0.0006",
        ),
        (
            BASE.replace("global_batch_sequences: 32", "global_batch_tokens: 5000"),
            "run.yaml:6: batch.global_batch_tokens 5000 is not a multiple of model.sequence_length 1024; "
            "nearest: [4096, 5120]",
        ),
    ],
)
def test_a_mistake_between_keys_is_told_at_the_key(text: str, message: str) -> None:
    assert _error(text) == message


def test_tokens_or_sequences() -> None:
    config = _load(BASE.replace("global_batch_sequences: 32", "global_batch_tokens: 8192"))
    assert (config.global_batch, config.tokens_per_step) == (8, 8192)
    assert "give exactly one of global_batch_sequences and global_batch_tokens" in _error(
        BASE, "batch.global_batch_tokens=8192"
    )


def test_the_batch_that_does_not_divide_is_told_the_equation_and_what_would() -> None:
    assert plan_batch(512, 8, 16).equation() == "512 sequences = 8 micro-batch x 4 accumulation x 16 ranks"
    with pytest.raises(ConfigError) as caught:
        plan_batch(480, 8, 8)
    assert str(caught.value) == (
        "batch: global batch 480 = micro_batch 8 x accumulation x 8 ranks has no whole accumulation "
        "(480 / 64 = 7.500); nearest global batch: 448 or 512; or batch.micro_batch: 6 or 10"
    )
    with pytest.raises(ConfigError, match=r"7 ranks do not divide 480, so no micro_batch does"):
        plan_batch(480, 8, 7)
    with pytest.raises(ConfigError, match=r"nearest global batch: 128;"):
        plan_batch(64, 8, 16)


def test_text_that_is_not_yaml_is_told_its_line() -> None:
    message = _error("run:\n  name: x\n  output_dir: [a\ndata: b\n")
    assert message.startswith("run.yaml:4: not YAML: ")
    assert _error("- a\n- b\n").startswith("run.yaml:1: expected `section:` mappings, found a ")


def test_a_missing_file_is_told_the_nearest() -> None:
    _write("configs/small_mars_m.yaml", BASE)
    with pytest.raises(ConfigError) as caught:
        load_config("configs/small_marsm.yaml")
    assert str(caught.value) == (
        "configs/small_marsm.yaml: cannot be read (No such file or directory); nearest file: configs/small_mars_m.yaml"
    )
    with pytest.raises(ConfigError, match=r"the folder nowhere does not exist"):
        load_config("nowhere/x.yaml")
    assert "gone.yaml: cannot be read" in _error("extends: gone.yaml\n")


def test_what_is_saved_reads_back_equal() -> None:
    text = BASE + 'deepspeed:\n  a: {b: [1, 2.5e-7, "x", true]}\n'
    config = _load(text, "optimizer.routes={'*wte*': matrix}", "optimizer.betas_1d=[0.8, 0.999]")
    again = _load(config.to_yaml())
    assert again.to_yaml() == config.to_yaml()
    assert again.deepspeed == {"a": {"b": [1, 2.5e-7, "x", True]}}
    assert again.optimizer == config.optimizer.resolved()
    assert again.optimizer.routes == {"*wte*": "matrix"}
