#!/usr/bin/env python
"""What storing `last_grad` in bf16 does to the correction and to a loss curve.

    python benchmarks/last_grad_dtype.py [--steps 200] [--kind mars-adamw]

Two runs of one small GPT-2 on the same generated text, one with fp32 and one with bf16 `last_grad`. In the fp32 run
the corrected gradient is also formed with a rounded last_grad, which gives the error of the correction alone.
"""

import argparse
import random

import torch

from mars_ds.model.gpt2 import GPT2, GPT2Config
from mars_ds.optim import OptimizerConfig, build_optimizer

SENTENCE = "the gradient of each batch is a noisy view of one slope and the last view tells how much of it was noise"
LENGTH = 64


def batches(steps: int, batch: int = 8) -> list[torch.Tensor]:
    """Byte windows of sentences drawn from a Markov-like word source."""
    generator, words = random.Random(0), SENTENCE.split()
    text = " ".join(generator.choice(words) for _ in range(steps * batch * LENGTH // 4)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = [generator.randrange(len(data) - LENGTH - 1) for _ in range(steps * batch)]
    windows = torch.stack([data[s : s + LENGTH + 1] for s in starts])
    return list(windows.view(steps, batch, LENGTH + 1))


def train(kind: str, dtype: str, data: list[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Returns the loss of each step, and (fp32 run) the relative error that bf16 storage puts on the correction."""
    model = GPT2(GPT2Config(num_layers=2, num_heads=4, width=64, sequence_length=LENGTH, vocab_size=256), seed=0)
    config = OptimizerConfig(kind=kind, lr=3e-3, last_grad_dtype=dtype)
    optimizer = build_optimizer(model.named_parameters(), config)
    losses, errors = [], []
    for windows in data:
        optimizer.zero_grad()
        loss = model(windows[:, :-1], labels=windows[:, 1:]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if dtype == "float32":
            errors.append(correction_error(optimizer))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, errors


def correction_error(optimizer: torch.optim.Optimizer) -> float:
    """|rounded - exact| / |exact| of g - last_grad over all corrected parameters."""
    difference, exact = 0.0, 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            last = optimizer.state[p].get("last_grad")
            if last is not None and p.grad is not None:
                term = p.grad.flatten() - last
                difference += float((last - last.bfloat16().float()).square().sum())
                exact += float(term.square().sum())
    return (difference / exact) ** 0.5 if exact else 0.0


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kind", default="mars-adamw", choices=["mars-adamw", "mars-lion", "mars-shampoo", "mars-m"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = batches(options.steps)
    full, errors = train(options.kind, "float32", data)
    half, _ = train(options.kind, "bfloat16", data)
    tail = max(1, options.steps // 10)
    means = [sum(losses[-tail:]) / tail for losses in (full, half)]
    error = sum(errors[1:]) / len(errors[1:])
    print(f"{options.kind}, {options.steps} steps of a 2-layer GPT-2")
    print(f"error of g - last_grad from bf16 storage, mean over steps: {100 * error:.3f} % of its norm")
    print(f"loss, mean of the last {tail} steps: fp32 {means[0]:.5f}, bf16 {means[1]:.5f}, {means[1] - means[0]:+.5f}")
    print(f"largest difference of any step's loss: {max(abs(a - b) for a, b in zip(full, half, strict=True)):.5f}")


if __name__ == "__main__":
    main()
