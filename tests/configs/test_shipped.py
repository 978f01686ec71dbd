"""Shipped configs: they load, they are what was published, and reference.yaml tells the whole schema."""

import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from mars_ds.config import RunConfig, load_config
from mars_ds.config_file import read_tree
from mars_ds.model.gpt2 import num_parameters
from mars_ds.optim.config import OptimizerConfig
from mars_ds.optim.kinds import KINDS
from mars_ds.optim.routing import role_of
from mars_ds.planning.batch import plan_batch
from mars_ds.training.model import gpt2_config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
ALL = sorted(CONFIGS.rglob("*.yaml"))
RUNS = [path for path in ALL if path.parent.name != "base"]
REPRODUCTIONS = [path for path in RUNS if path.parent.name == "reproduction"]
SINGLE = {"quickstart", "debug", "reference"}
FAMILY = [path for path in RUNS if path.parent == CONFIGS and path.stem not in SINGLE]

PARAMETERS = {"small": 124_373_760, "medium": 354_599_936, "large": 773_582_080, "xl": 1_556_840_000}
FLOORS = {"small": 3e-5, "medium": 6e-5, "large": 1e-5, "xl": 1e-5}
DATA = {"owt": "data/openwebtext", "fineweb_edu": "data/fineweb_edu_100b"}
REPRODUCED_DATA = {
    "owt": ("data/openwebtext_nanogpt", "random_offsets"),
    "fineweb_edu": ("data/fineweb_edu_100b_llmc", "random_part"),
}

# (lr, lr of vectors) by published run.
PUBLISHED_LR = {
    "small_adamw_owt": (6e-4, 6e-4),
    "medium_adamw_owt": (3e-4, 3e-4),
    "large_adamw_owt": (2e-4, 2e-4),
    "small_mars_adamw_owt": (6e-3, 3e-3),
    "medium_mars_adamw_owt": (3e-3, 1.5e-3),
    "large_mars_adamw_owt": (2e-3, 1e-3),
    "small_muon_owt": (2e-2, 3e-3),
    "medium_muon_owt": (1e-2, 1.5e-3),
    "large_muon_owt": (6.67e-3, 1e-3),
    "small_mars_m_owt": (6e-3, 6e-3),
    "medium_mars_m_owt": (5e-3, 5e-3),
    "large_mars_m_owt": (5e-3, 5e-3),
    "small_moonlight_owt": (6e-3, 6e-3),
    "medium_moonlight_owt": (5e-3, 5e-3),
    "large_moonlight_owt": (5e-3, 5e-3),
    "small_adamw_fineweb_edu": (6e-4, 6e-4),
    "xl_adamw_fineweb_edu": (2e-4, 2e-4),
    "small_mars_adamw_fineweb_edu": (6e-3, 3e-3),
    "xl_mars_adamw_fineweb_edu": (2e-3, 1e-3),
    "small_mars_m_fineweb_edu": (6e-3, 6e-3),
    "xl_mars_m_fineweb_edu": (3e-3, 3e-3),
    "small_moonlight_fineweb_edu": (6e-3, 6e-3),
    "xl_moonlight_fineweb_edu": (3e-3, 3e-3),
}
# (matrix, embedding, vector) decay; beta1 or momentum and beta2 of matrices; betas of vectors; gamma.
PUBLISHED_RULE: dict[str, tuple[Any, ...]] = {
    "adamw": ((0.1, 0.0, 0.0), (0.9, 0.95), (0.9, 0.95), None),
    "mars-adamw": ((0.01, 0.0, 0.1), (0.95, 0.99), (0.9, 0.95), 0.025),
    "muon": ((0.0, None, 0.1), (0.95,), (0.9, 0.95), None),
    "mars-m": ((0.01, 0.01, 0.01), (0.95,), (0.9, 0.95), 0.025),
    "moonlight": ((0.1, 0.1, 0.1), (0.95,), (0.9, 0.95), None),
}


def _ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CONFIGS)) for path in paths]


def _size(name: str) -> str:
    return name.removeprefix("repro_").split("_")[0]


def _peak(config: RunConfig, role: str) -> float:
    settings = config.optimizer.group_settings(role)  # type: ignore[arg-type]
    return float(settings["lr"] * settings["lr_factor"])


def test_the_files_are_all_there() -> None:
    sizes, everywhere = ("small", "medium", "large", "xl"), ("mars_m", "mars_adamw", "moonlight", "adamw")
    names = [f"{size}_{kind}" for size in sizes for kind in everywhere]
    names += [f"small_{kind}" for kind in ("mars_lion", "mars_shampoo", "muon", "lion")]
    assert {path.stem for path in FAMILY} == {*names, *(f"{name}_owt" for name in names)}
    assert len(FAMILY) == 40
    assert {path.stem for path in REPRODUCTIONS} == {f"repro_{name}" for name in PUBLISHED_LR}
    assert len(REPRODUCTIONS) == 23
    assert len(RUNS) == 40 + 23 + len(SINGLE)


@pytest.mark.parametrize("path", RUNS, ids=_ids(RUNS))
def test_it_loads_under_its_own_name_and_reads_back_equal(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    saved = tmp_path / "config.yaml"
    saved.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(saved)
    assert again.model_copy(update={"optimizer": config.optimizer}) == config
    assert again.optimizer == config.optimizer.resolved()
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize("path", ALL, ids=_ids(ALL))
def test_it_says_what_it_is_and_holds_no_placeholder(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = re.match(r"(?:#.*\n)+", text)
    assert header is not None
    if path in RUNS:
        assert f"launch/pretrain.py --config {path.relative_to(ROOT)}" in header[0]
    else:
        assert "not a run" in header[0].lower()
    assert not re.search(r"TODO|FIXME|XXX|CHANGE|path/to|\byour|<[a-z_]+>|\$\{|(?<![\w.])/[a-z]+/", text)


@pytest.mark.parametrize("path", [*FAMILY, *REPRODUCTIONS], ids=_ids([*FAMILY, *REPRODUCTIONS]))
def test_model_data_and_formats(path: Path) -> None:
    config, size = load_config(path), _size(path.stem)
    assert num_parameters(gpt2_config(config.model)) == PARAMETERS[size]
    assert (config.model.sequence_length, config.model.bias, config.model.dropout) == (1024, False, 0.0)
    corpus = "owt" if path.stem.endswith("_owt") else "fineweb_edu"
    if path in REPRODUCTIONS:
        assert (config.data.path, config.data.sampling) == REPRODUCED_DATA[corpus]
    else:
        assert (config.data.path, config.data.sampling) == (DATA[corpus], "permutation")
    assert (config.precision.dtype, config.precision.accumulation_dtype) == ("bfloat16", "float32")
    assert (config.zero.stage, config.batch.gradient_clipping) == (1, 1.0)
    assert (config.schedule.kind, config.schedule.warmup_steps) == ("cosine", 2000)
    assert config.run.output_dir == "runs"
    assert config.deepspeed == {}


@pytest.mark.parametrize("path", FAMILY, ids=_ids(FAMILY))
def test_recommended_runs(path: Path) -> None:
    config = load_config(path)
    ranks = {1: 64, 8: 8, 16: 4, 32: 2, 64: 1}
    for world_size, accumulation in ranks.items():
        plan = plan_batch(config.global_batch, config.batch.micro_batch, world_size)
        assert plan.accumulation_steps == accumulation
    assert config.tokens_per_step == 524_288
    assert config.schedule.steps * config.tokens_per_step == 100_000 * 480 * 1024
    assert config.optimizer.resolved().gradient_scale == 1.0
    assert config.model.scale_attn_by_inverse_layer_idx is False
    assert config.model.loss_chunk_tokens == 2048
    assert config.model.activation_checkpointing == ("full" if _size(path.stem) == "xl" else "none")
    assert config.evaluation.sequences == 3072
    published = PUBLISHED_LR.get(path.stem) or PUBLISHED_LR.get(f"{path.stem}_fineweb_edu")
    if published:
        assert (_peak(config, "matrix"), _peak(config, "vector")) == pytest.approx(published)
        assert config.schedule.min_lr == FLOORS[_size(path.stem)]
    if config.optimizer.kind in PUBLISHED_RULE:
        decay, _, _, gamma = PUBLISHED_RULE[config.optimizer.kind]
        groups = [config.optimizer.group_settings(role) for role in ("matrix", "embedding", "vector")]
        assert (groups[0]["weight_decay"], groups[2]["weight_decay"]) == (decay[0], decay[2])
        assert decay[1] is None or groups[1]["weight_decay"] == decay[1]
        assert groups[0]["gamma"] == (0.01 if path.stem in ("xl_mars_m", "xl_mars_m_owt") else gamma)


@pytest.mark.parametrize(
    "name",
    [f"{size}_{kind}" for size in ("medium", "large", "xl") for kind in ("mars_m", "mars_adamw", "moonlight", "adamw")],
)
def test_both_data_sets_take_the_same_hyperparameters(name: str) -> None:
    """What one data set did not publish was taken over from the other, and the file says so."""
    edu, owt = load_config(CONFIGS / f"{name}.yaml"), load_config(CONFIGS / f"{name}_owt.yaml")
    assert edu.optimizer == owt.optimizer
    suffix = "fineweb_edu" if name.startswith("xl") else "owt"
    assert _peak(edu, "matrix") == PUBLISHED_LR[f"{name}_{suffix}"][0]
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    assert "not published, scaled from" in text[: text.index("\n  lr:")]


@pytest.mark.parametrize(
    ("name", "lr", "lr_1d", "decay", "min_lr"),
    [
        ("small_mars_lion", 1e-3, 3e-3, (0.06, 0.0, 0.1), 5e-6),
        ("small_mars_shampoo", 2e-2, 3e-3, (0.003, 0.0, 0.1), 1e-4),
        ("small_muon", 2e-2, 3e-3, (0.0, 0.1, 0.1), 3e-5),
        ("small_lion", 1e-4, 1e-4, (0.6, 0.0, 0.0), 5e-6),
    ],
)
def test_runs_that_nobody_published(
    name: str, lr: float, lr_1d: float, decay: tuple[float, float, float], min_lr: float
) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    groups = [config.optimizer.group_settings(role) for role in ("matrix", "embedding", "vector")]
    assert tuple(group["weight_decay"] for group in groups) == decay
    assert (_peak(config, "matrix"), _peak(config, "vector")) == pytest.approx((lr, lr_1d))
    assert config.schedule.min_lr == min_lr
    assert re.search(r"[Nn]ot published, scaled from", (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


def test_muon_puts_the_embeddings_where_each_family_says() -> None:
    ours = load_config(CONFIGS / "small_muon.yaml")
    theirs = load_config(CONFIGS / "reproduction/repro_small_muon_owt.yaml")
    for name, shape in (("transformer.wte.weight", (50304, 768)), ("transformer.wpe.weight", (1024, 768))):
        assert role_of(name, shape, ours.optimizer.routes) == "embedding"
        assert role_of(name, shape, theirs.optimizer.routes) == "matrix"
    assert (_peak(ours, "matrix"), _peak(ours, "embedding")) == pytest.approx((2e-2, 3e-3))


@pytest.mark.parametrize("path", REPRODUCTIONS, ids=_ids(REPRODUCTIONS))
def test_published_runs(path: Path) -> None:
    config, size, name = load_config(path), _size(path.stem), path.stem.removeprefix("repro_")
    micro_batch, accumulation = (15, 4) if size in ("small", "medium") else (5, 12)
    assert config.global_batch == 480
    assert config.tokens_per_step == 491_520
    assert config.batch.micro_batch == micro_batch
    assert plan_batch(480, micro_batch, 8).accumulation_steps == accumulation
    assert config.optimizer.resolved().gradient_scale == accumulation
    assert config.evaluation.sequences == 200 * micro_batch
    assert (config.schedule.steps, config.run.seed) == (100_000, 5000)
    assert config.model.scale_attn_by_inverse_layer_idx is True

    decay, betas, betas_1d, gamma = PUBLISHED_RULE[config.optimizer.kind]
    matrix, embedding, vector = (config.optimizer.group_settings(r) for r in ("matrix", "embedding", "vector"))
    assert (_peak(config, "matrix"), _peak(config, "vector")) == pytest.approx(PUBLISHED_LR[name])
    assert (matrix["weight_decay"], vector["weight_decay"]) == (decay[0], decay[2])
    assert decay[1] is None or embedding["weight_decay"] == decay[1]
    assert ((matrix["momentum"],) if "momentum" in matrix else matrix["betas"]) == betas
    assert vector["betas"] == betas_1d
    assert matrix["gamma"] == gamma
    assert config.schedule.min_lr == FLOORS[size]
    assert config.schedule.min_lr_1d == (FLOORS[size] if config.optimizer.kind == "muon" else None)


def test_quickstart_and_debug() -> None:
    quickstart, debug = load_config(CONFIGS / "quickstart.yaml"), load_config(CONFIGS / "debug.yaml")
    assert (quickstart.optimizer.kind, quickstart.zero.stage, quickstart.model.vocab_size) == ("mars-m", 2, 50304)
    assert (quickstart.data.path, debug.data.path) == ("data/quickstart", "data/debug")
    assert (debug.model.vocab_size, debug.schedule.steps) == (320, 20)
    for config in (quickstart, debug):
        for world_size in (1, 2):
            plan_batch(config.global_batch, config.batch.micro_batch, world_size)


# reference.yaml ------------------------------------------------------------------------------------------


def _schema(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and field of every key that is not itself a section."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _schema(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


SCHEMA = dict(_schema(RunConfig))


def _reference() -> tuple[dict[str, int], list[str]]:
    """Line (from 0) of each key of reference.yaml, and its lines."""
    lines = (CONFIGS / "reference.yaml").read_text(encoding="utf-8").splitlines()
    found: dict[str, int] = {}

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            dotted = prefix + key.value
            found[dotted] = key.start_mark.line
            if isinstance(value, yaml.MappingNode) and dotted not in SCHEMA:
                walk(value, f"{dotted}.")

    root = yaml.compose("\n".join(lines))
    assert isinstance(root, yaml.MappingNode)
    walk(root, "")
    return found, lines


KEY_LINES, REFERENCE_LINES = _reference()


def _comment(dotted: str) -> str:
    first = last = KEY_LINES[dotted]
    while REFERENCE_LINES[first - 1].lstrip().startswith("# "):
        first -= 1
    return " ".join(line.strip().removeprefix("# ") for line in REFERENCE_LINES[first:last])


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return [choice for option in typing.get_args(annotation) for choice in _literals(option)]
    return []


def _parsed(text: str, tmp_path: Path) -> Any:
    """A value as the config reader sees it."""
    file = tmp_path / "value.yaml"
    file.write_text(f"value: {text}\n", encoding="utf-8")
    value = read_tree(file).values["value"]
    return tuple(value) if isinstance(value, list) and value else value


@pytest.mark.parametrize("dotted", SCHEMA)
def test_reference_has_the_key_with_its_comment(dotted: str, tmp_path: Path) -> None:
    assert dotted in KEY_LINES, f"configs/reference.yaml lacks {dotted}"
    comment, info = _comment(dotted), SCHEMA[dotted]
    for choice in _literals(info.annotation):
        assert re.search(rf"(^|[| ]){re.escape(str(choice))}([|; ]|$)", comment), f"{dotted}: {choice} is not explained"
    if info.is_required():
        assert comment.endswith("required."), comment
    elif not dotted.startswith("optimizer."):
        stated = re.search(r"; default: ([^;]+)", comment)
        assert stated, f"{dotted}: no type and default in {comment!r}"
        assert _parsed(stated[1], tmp_path) == info.default


@pytest.mark.parametrize("key", [key for key in OptimizerConfig.model_fields if key != "kind"])
def test_reference_tells_the_default_of_each_kind(key: str, tmp_path: Path) -> None:
    stated = re.search(r"; default: (.+)$", _comment(f"optimizer.{key}"))
    assert stated
    found: dict[str, Any] = {}
    for value, kinds in re.findall(r"([^;]+?) \(([^)]+)\)(?:; |$)", stated[1]):
        for kind in KINDS if kinds == "all" else kinds.split(", "):
            found[kind] = _parsed(value, tmp_path)
    expected = {kind: row.defaults[key] for kind, row in KINDS.items() if key in row.defaults}
    assert found == expected


def test_reference_has_nothing_else_and_is_the_defaults() -> None:
    sections = {dotted.rpartition(".")[0] for dotted in SCHEMA} - {""}
    assert set(KEY_LINES) == set(SCHEMA) | sections
    reference = load_config(CONFIGS / "reference.yaml")
    required = RunConfig.model_validate(
        {
            "run": {"name": "reference"},
            "data": {"path": "data/debug"},
            "batch": {"global_batch_sequences": 512},
            "optimizer": {"kind": "mars-m"},
            "schedule": {"steps": 100_000},
        }
    )
    assert reference.to_yaml() == required.to_yaml()
