"""Exports and imports that prove themselves by logits, from checkpoints of any stage and world size."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_ds.errors import CheckpointError, ConfigError
from mars_ds.export import folder as folder_module
from mars_ds.export.checkpoint import load_gpt2
from mars_ds.export.folder import export_folder
from mars_ds.export.huggingface import to_huggingface
from mars_ds.export.proof import TOLERANCE, compare_logits
from mars_ds.model.gpt2 import GPT2, GPT2Config
from mars_ds.training.initial_weights import read_huggingface
from tests.conftest import write_config
from tests.ranks import run_on_ranks
from tests.training.test_trainer import evaluations, runs

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def root(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at stage 3 on two ranks, exported, and one at stage 2 that starts from the export."""
    folder = tmp_path_factory.mktemp("export")
    config = write_config(folder / "tiny.yaml", dataset, folder / "runs")
    few = ["schedule.steps=4", "checkpoint.interval_steps=0"]
    run_on_ranks(2, runs, str(config), [("train", ["run.name=trained", "zero.stage=3", *few])])
    export_folder(folder / "runs" / "trained", folder / "exported")
    script = [("train", ["run.name=taken", f"run.init_from=hf:{folder / 'exported'}", "zero.stage=2", *few])]
    run_on_ranks(2, runs, str(config), script)
    return folder


def test_the_export_opens_in_hugging_face_with_our_logits(root: Path) -> None:
    from transformers import AutoModelForCausalLM

    stored = load_gpt2(root / "runs" / "trained")
    ours = GPT2(stored.config, seed=0)
    ours.load_state_dict(stored.state)
    theirs = AutoModelForCausalLM.from_pretrained(root / "exported")
    ids = torch.arange(64).view(2, 32)
    torch.testing.assert_close(theirs(input_ids=ids).logits, ours.eval()(input_ids=ids).logits, rtol=0, atol=1e-5)
    files = {path.name for path in (root / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= files
    card = (root / "exported" / "README.md").read_text()
    assert "Trained for\n4 steps with `mars-m`" in card
    assert "The tokenizer is `bytes`; it is not in this folder" in card


def test_hugging_face_weights_start_a_run_and_come_back(root: Path) -> None:
    """Equal validation loss at step 0 as the trained run's at its end, at another stage."""
    assert evaluations(root / "runs" / "taken")[0] == pytest.approx(evaluations(root / "runs" / "trained")[4], rel=1e-6)


def test_the_commands(root: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True)

    trained = str(root / "runs" / "trained")
    done = run("launch/export.py", trained, "--output", str(tmp_path / "out"), "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "written and read back; logits at" in done.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_layer"] == 2
    again = run("launch/export.py", trained, "--output", str(tmp_path / "out"))
    assert (again.returncode, again.stderr) == (
        2,
        f"error: {tmp_path / 'out'}: exists; name a new folder with --output\n",
    )
    text = run("launch/generate.py", trained, "--prompt", "the ", "--tokens", "9", "--tokenizer", "bytes")
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("the ")


def test_gpt2_tokenizer_files(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from data_pipeline import load_tokenizer
    from mars_ds.export.checkpoint import StoredGPT2

    config = GPT2Config(num_layers=1, num_heads=1, width=8, sequence_length=16, vocab_size=50_304)
    stored = StoredGPT2(config, GPT2(config, seed=0).state_dict(), "gpt2", 1, "mars-m", "0" * 64)
    to_huggingface(stored.state, config).save_pretrained(tmp_path)
    folder_module._write_tokenizer(tmp_path, stored)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer("gpt2")
    text = "Hello  world\n\nnaïve 字 don't <|endoftext|> \U0001f600"
    plain = text.replace("<|endoftext|>", "")
    assert theirs(plain)["input_ids"] == ours.encode(plain).tolist()
    assert 50_256 in theirs(text)["input_ids"]  # here a special token is one
    assert theirs.eos_token_id == 50_256


def test_an_export_whose_logits_differ_is_no_export(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def subtly_wrong(state: dict, config: GPT2Config) -> Any:
        state = {**state, "transformer.h.0.mlp.c_fc.weight": state["transformer.h.0.mlp.c_fc.weight"] * 1.01}
        return to_huggingface(state, config)

    monkeypatch.setattr(folder_module, "to_huggingface", subtly_wrong)
    with pytest.raises(CheckpointError, match="not exported: logits at 64 positions differ"):
        export_folder(root / "runs" / "trained", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_padding_rows_of_an_import_are_improbable(tmp_path: Path) -> None:
    config = GPT2Config(num_layers=1, num_heads=2, width=16, sequence_length=16, vocab_size=300, bias=True)
    to_huggingface(GPT2(config, seed=3).state_dict(), config).save_pretrained(tmp_path / "hf")
    weights, line = read_huggingface(str(tmp_path / "hf"), 320)
    assert "logits at 32 positions differ by" in line
    embedding = weights["transformer.wte.weight"]
    assert embedding.shape == (320, 16)
    torch.testing.assert_close(embedding[300:], embedding[:300].mean(0).expand(20, -1))
    with pytest.raises(ConfigError, match=r"run.init_from: hf:.*nowhere"):
        read_huggingface(str(tmp_path / "nowhere"), None)


def test_the_tolerance_tells_a_wrong_activation_from_another_order_of_sums() -> None:
    config = GPT2Config(num_layers=4, num_heads=2, width=32, sequence_length=32, vocab_size=100)
    one = GPT2(config, seed=0)
    other = GPT2(config, seed=0)
    other.load_state_dict({k: v * (1 + 1e-7) for k, v in one.state_dict().items()})
    assert compare_logits(one, other, 100, 32).difference < TOLERANCE / 10
    with torch.no_grad():
        other.state_dict()["transformer.h.2.attn.c_proj.weight"].mul_(1.02)
    assert not compare_logits(one, other, 100, 32).equal
