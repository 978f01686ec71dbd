"""`RunConfig`: the whole YAML of a run as typed sections; every key is documented in configs/reference.yaml."""

import difflib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from mars_ds.config_file import ConfigTree, read_tree, to_yaml, without_nulls
from mars_ds.errors import ConfigError
from mars_ds.optim.config import OptimizerConfig

__all__ = ["OptimizerConfig", "RunConfig", "load_config"]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """Identity of the run and how it starts."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=200)]
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: str = "runs"
    """Where run folders are made."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1337
    """Seeds initialisation, data order and dropout."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto: continue from the newest checkpoint of the run folder, else start. required: refuse to
    start afresh. never: refuse a run folder that already holds a run."""
    init_from: str | None = None
    """Where a new run takes its weights from, and nothing else: a checkpoint folder, or `hf:` and a GPT-2's name."""
    time_limit_minutes: Annotated[float, Field(gt=0.0)] | None = None
    """Save and stop before the process has run so long."""
    stop_file: str | None = None
    """Save and stop when this file appears; default: `stop` in the run folder."""


class ModelSection(Section):
    """GPT-2 shape, or a factory of another causal language model."""

    num_layers: PositiveInt = 12
    num_heads: PositiveInt = 12
    width: PositiveInt = 768
    sequence_length: PositiveInt = 1024
    """Tokens of a training sequence; also the number of learned positions."""
    vocab_size: PositiveInt = 50304
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    bias: bool = False
    """Biases in Linear and LayerNorm."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide attention logits of layer i by i + 1, as the MARS reference runs do."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """full: keep each block's input and recompute the block in the backward pass. selective: keep the outputs of matrix
    products and attention too, and recompute what is cheap."""
    compile: bool = False
    """torch.compile the model."""
    loss_chunk_tokens: NonNegativeInt = 2048
    """Tokens of logits that exist at one time; 0 computes the loss over all at once."""
    factory: str | None = None
    """`package.module:function` returning a model with `forward(input_ids, labels)` in the Hugging Face
    convention (labels are shifted inside); replaces the GPT-2 of this section."""
    factory_arguments: dict[str, Any] = {}
    """Keyword arguments of the factory."""

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """What was a switch before: true is full."""
        return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.factory is None and self.width % self.num_heads:
            divisors = [h for h in range(1, self.width + 1) if self.width % h == 0]
            nearest = sorted(divisors, key=lambda h: (abs(h - self.num_heads), h))[:2]
            raise ValueError(
                f"num_heads {self.num_heads} does not divide width {self.width}; nearest: {sorted(nearest)}"
            )
        return self


class DataSection(Section):
    """Where the tokens are, and in which order they are read."""

    path: str
    """Folder made by `python -m data_pipeline prepare`."""
    sampling: Literal["permutation", "random_offsets", "random_part"] = "permutation"
    """permutation: every window once an epoch. random_offsets: windows that start anywhere, with replacement, as
    the MARS trainers read OpenWebText. random_part: a random part for each micro-batch, then random offsets in it,
    as they read FineWeb-Edu."""
    epoch_offset: bool = False
    """permutation: shift the windows of each epoch by another offset."""
    access: Literal["pread", "mmap"] = "pread"
    """pread: into buffers that are used again. mmap: mapped files."""
    verify_reads: bool = True
    """Hold every page of the data that is read against its sum, about two microseconds a window."""
    prefetch_steps: NonNegativeInt = 2
    """Steps that a thread reads ahead; 0 reads when a step begins."""
    accept_changed: Annotated[str, Field(pattern=r"^[0-9a-f]{12,64}$")] | None = None
    """Hash of a data set, 12 to 64 digits of it, that a resume accepts in place of the checkpoint's."""

    @model_validator(mode="after")
    def _offset_is_read(self) -> Self:
        if self.epoch_offset and self.sampling != "permutation":
            raise ValueError(
                f"epoch_offset is not read by sampling {self.sampling}, whose windows start anywhere already; "
                "switch it off, or use sampling permutation"
            )
        return self


class BatchSection(Section):
    """The batch in sequences or tokens; accumulation follows from it and the number of ranks."""

    global_batch_sequences: PositiveInt | None = None
    """Sequences of one optimizer step over all ranks."""
    global_batch_tokens: PositiveInt | None = None
    """The same in tokens; give one of the two."""
    micro_batch: PositiveInt = 8
    """Sequences of one forward/backward on one rank."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Global norm to which the averaged gradient (times optimizer.gradient_scale) is clipped; 0 is off."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.global_batch_sequences is None) == (self.global_batch_tokens is None):
            raise ValueError("give exactly one of global_batch_sequences and global_batch_tokens")
        return self


class ScheduleSection(Section):
    """Learning rate over the steps."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    steps: PositiveInt
    """Optimizer steps of the run."""
    warmup_steps: NonNegativeInt = 0
    """Linear from 0 (at step 0) to the peak."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate of matrices at the end of the decay."""
    min_lr_1d: NonNegativeFloat | None = None
    """The same for parameters under `optimizer.lr_1d`; default: min_lr * lr_1d / lr."""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """wsd: share of the steps, at the end, in which the lr falls linearly."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        decay = int(self.steps * self.decay_fraction) if self.kind == "wsd" else 0
        if self.warmup_steps + decay > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and the decay of {decay} steps exceed steps {self.steps}"
            )
        return self


class PrecisionSection(Section):
    """Number formats."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Weights and activations; fp32 masters are kept either way."""
    accumulation_dtype: Literal["float32", "bfloat16"] = "float32"
    """Accumulation and reduction of gradients. MARS takes differences of gradients: keep float32."""


class ZeroSection(Section):
    """How DeepSpeed partitions."""

    stage: Literal[0, 1, 2, 3] = 1
    """0: replicated. 1: optimizer state. 2: and gradients. 3: and weights."""
    offload: Literal["none", "optimizer", "optimizer_and_parameters"] = "none"
    """What lives in host memory: masters and optimizer state, or weights too (stage 3)."""
    sub_group_elements: PositiveInt = 1_000_000_000
    """Stage 3: elements that one call of the optimizer updates."""
    parameter_order: Literal["natural", "aligned"] = "natural"
    """Stages 1 and 2: aligned chooses an order of the matrices in which as few as possible are cut between ranks."""
    reduce_bucket_elements: PositiveInt = 200_000_000
    """Elements of one reduction."""


class CheckpointSection(Section):
    """When checkpoints are written and kept."""

    interval_steps: NonNegativeInt = 1000
    """Every so many steps, and at the end; 0 only at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept; the last healthy one is kept besides."""
    keep_every_steps: NonNegativeInt = 0
    """Checkpoints of steps that this divides are kept for good; 0 keeps none."""
    asynchronous: bool = True
    """A thread writes while training goes on, which stops only for a copy in host memory; false writes at once."""
    copy_to: str | None = None
    """Where each checkpoint is copied to in the background: any URL that fsspec knows, such as s3://bucket/run."""

    @model_validator(mode="after")
    def _some_are_for_good(self) -> Self:
        if self.keep_every_steps and self.interval_steps and self.keep_every_steps % self.interval_steps:
            nearest = max(1, round(self.keep_every_steps / self.interval_steps)) * self.interval_steps
            raise ValueError(
                f"keep_every_steps {self.keep_every_steps} is not a multiple of interval_steps {self.interval_steps}: "
                f"not every such step has a checkpoint; nearest: {nearest}"
            )
        return self


class EvaluationSection(Section):
    """Validation loss over a fixed set of windows."""

    interval_steps: NonNegativeInt = 1000
    """Every so many steps, and at step 0 and the end; 0 switches evaluation off."""
    sequences: PositiveInt = 1024
    """Windows of a validation split, the same at every evaluation and world size."""
    sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], str] = {}
    """More sets to evaluate: name -> folder of a data set; its validation split is taken, else its training split."""


class HealthSection(Section):
    """When a step is not applied, and when the run must not go on."""

    max_skipped_in_a_row: PositiveInt = 20
    """Updates in a row that may be skipped; then the run writes a bundle and stops."""
    spike_zscore: NonNegativeFloat = 6.0
    """Standard deviations above its running mean from which a loss counts as a spike; 0 is off."""
    spike_policy: Literal["warn", "skip"] = "warn"
    """warn: say so. skip: do not apply the update of a spike."""
    heartbeat_seconds: NonNegativeFloat = 10.0
    """Each rank renews its heartbeat file so often; 0 writes none."""
    silence_seconds: Annotated[float, Field(gt=0.0)] = 300.0
    """A step that takes longer is reported, with the rank that holds the others up."""


class WandbSection(Section):
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "mars-ds"
    tags: list[str] = []
    deadline_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """What its start, and its end, may take; then the run goes on without it."""


class TelemetrySection(Section):
    """What is logged; the JSONL file is written always."""

    log_interval_steps: PositiveInt = 10
    """Console and JSONL line every so many steps (and each of the first 20)."""
    deepspeed_log: bool = False
    """Show DeepSpeed's own log lines too."""
    garbage_collection_steps: NonNegativeInt = 1000
    """Python's garbage is collected so often, on all ranks at once; 0 leaves it to Python."""
    profile_first_step: PositiveInt = 10
    """First step that is recorded with torch.profiler."""
    profile_steps: NonNegativeInt = 0
    """Steps that are recorded; 0 records nothing."""
    wandb: WandbSection = WandbSection()
    tensorboard: bool = False


class RunConfig(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection = ModelSection()
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerConfig
    schedule: ScheduleSection
    precision: PrecisionSection = PrecisionSection()
    zero: ZeroSection = ZeroSection()
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed keys laid over the generated config."""
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()
    health: HealthSection = HealthSection()
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _batch_is_whole_sequences(self) -> Self:
        tokens, length = self.batch.global_batch_tokens, self.model.sequence_length
        if tokens is not None and tokens % length:
            below = tokens // length * length
            raise ValueError(
                f"batch.global_batch_tokens {tokens} is not a multiple of model.sequence_length {length}; "
                f"nearest: {[v for v in (below, below + length) if v]}"
            )
        return self

    @model_validator(mode="after")
    def _floor_below_peak(self) -> Self:
        peak = self.optimizer.resolved().lr
        if peak is not None and self.schedule.min_lr > peak:
            raise ValueError(f"schedule.min_lr {self.schedule.min_lr} is above optimizer.lr {peak}")
        return self

    @property
    def global_batch(self) -> int:
        """Sequences of one optimizer step."""
        if self.batch.global_batch_sequences is not None:
            return self.batch.global_batch_sequences
        assert self.batch.global_batch_tokens is not None
        return self.batch.global_batch_tokens // self.model.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.global_batch * self.model.sequence_length

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.run.output_dir) / self.run.name

    @property
    def stop_file(self) -> Path:
        """The file whose appearance stops the run."""
        return Path(self.run.stop_file) if self.run.stop_file else self.run_dir / "stop"

    def to_yaml(self) -> str:
        """The resolved config, every key with its value; `load_config` reads it back to an equal one."""
        dump = self.model_dump(mode="json")
        dump["optimizer"] = self.optimizer.resolved().model_dump(mode="json", exclude_none=True)
        return to_yaml(dump)


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads and checks a run's configuration.

    Args:
        path: YAML file; `extends:` in it names a file relative to it.
        overrides: Dotted `section.key=value`, as on the command line.

    Raises:
        ConfigError: Every mistake at once, each with file and line, what was expected, and the nearest
            name or value.
    """
    tree = read_tree(path, overrides)
    unknown = list(_unknown_keys(tree, tree.values, RunConfig, ""))
    try:
        config = RunConfig.model_validate(without_nulls(tree.values))
    except ValidationError as error:
        # A misspelt key is not also a missing one.
        passed_over = {"extra_forbidden", "missing"} if unknown else set()
        wrong = [_explain(tree, item) for item in error.errors() if item["type"] not in passed_over]
        raise ConfigError("\n".join([*unknown, *wrong])) from None
    return config


def _unknown_keys(tree: ConfigTree, values: dict[str, Any], model: type[BaseModel], prefix: str) -> Iterable[str]:
    for key, value in values.items():
        if key not in model.model_fields:
            elsewhere = _sections_with(str(key))
            close = difflib.get_close_matches(str(key), model.model_fields, n=1, cutoff=0.0)
            nearest = elsewhere[0] if elsewhere else prefix + close[0]
            yield f"{tree.origin(prefix + str(key))}: unknown key {prefix}{key}; nearest: {nearest}"
            continue
        inner = _section_type(model.model_fields[key].annotation)
        if inner is not None and isinstance(value, dict):
            yield from _unknown_keys(tree, value, inner, f"{prefix}{key}.")


def _sections_with(key: str) -> list[str]:
    """Dotted names of sections that have `key`: it was probably written in the wrong place."""
    return [
        f"{name}.{key}"
        for name, info in RunConfig.model_fields.items()
        if (section := _section_type(info.annotation)) is not None and key in section.model_fields
    ]


def _section_type(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _explain(tree: ConfigTree, item: Any) -> str:
    dotted = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
    where = tree.origin(dotted) if dotted else "config"
    if item["type"] == "missing":
        return f"{where}: {dotted} is missing"
    message = item["msg"].removeprefix("Value error, ")
    # A check between keys begins its message with the key to change: that key's line, not its section's.
    where = tree.origins.get(f"{dotted}.{message.split()[0]}".removeprefix("."), where)
    given = item["input"]
    shown = f", got {given!r}" if item["type"] != "value_error" and not isinstance(given, dict) else ""
    return f"{where}: {dotted + ': ' if dotted else ''}{message}{shown}"
