"""Peak arithmetic and memory of accelerators, and the share of the peak that a run uses (MFU)."""

from __future__ import annotations

import re

# Dense (no structured sparsity) peak in TFLOP/s at the advertised boost clock, bf16 with fp32 accumulation
# or, where marked, fp16. Most data sheets since Ampere print the sparse number, which is halved here. Every
# word of a key must be in the device's name; of several keys that fit, the longest counts.
_PEAK_TFLOPS: dict[tuple[str, ...], float] = {
    # NVIDIA Blackwell and GB200 / GB300 NVL72 data sheets (2.25 and 2.5 PFLOP/s a GPU, dense).
    ("b200",): 2250.0,
    ("gb200",): 2500.0,
    ("b300",): 2250.0,
    ("gb300",): 2500.0,
    # NVIDIA RTX Blackwell GPU architecture paper, appendix A.
    ("rtx", "5090"): 209.5,
    # NVIDIA H100, H200 and GH200 data sheets; torch calls the SXM module "NVIDIA H100 80GB HBM3".
    ("h100",): 989.4,
    ("h100", "pcie"): 756.0,
    ("h100", "nvl"): 835.5,
    ("h200",): 989.4,
    ("h200", "nvl"): 835.5,
    ("gh200",): 989.4,
    ("h800",): 989.4,
    ("h800", "pcie"): 756.0,
    ("h20",): 148.0,
    # NVIDIA L40S, L40 and L4 data sheets; Ada GPU architecture paper for RTX.
    ("l40s",): 362.05,
    ("l40",): 181.05,
    ("l4",): 121.0,
    ("rtx", "6000", "ada"): 364.2,
    ("rtx", "4090"): 165.2,
    # NVIDIA A100, A30, A40 and A10 data sheets; Ampere GA102 architecture paper for RTX.
    ("a100",): 312.0,
    ("a800",): 312.0,
    ("a30",): 165.0,
    ("a40",): 149.7,
    ("a10",): 125.0,
    ("a10g",): 70.0,
    ("rtx", "a6000"): 154.8,
    ("rtx", "3090"): 71.0,
    # NVIDIA V100 and T4 data sheets: fp16.
    ("v100",): 125.0,
    ("v100", "pcie"): 112.0,
    ("t4",): 65.0,
    # AMD Instinct data sheets; torch shows each of the two dies of an MI250X as a device.
    ("mi300x",): 1307.4,
    ("mi325x",): 1307.4,
    ("mi250x",): 191.5,
}

# Memory of one device in GiB by the same data sheets, under the same rules; where a card is sold in two sizes, the
# larger, unless the name tells.
_MEMORY_GIB: dict[tuple[str, ...], float] = {
    ("b200",): 180.0,
    ("gb200",): 186.0,
    ("b300",): 268.0,
    ("gb300",): 278.0,
    ("rtx", "5090"): 32.0,
    ("h100",): 80.0,
    ("h100", "nvl"): 94.0,
    ("h200",): 141.0,
    ("gh200",): 96.0,
    ("h800",): 80.0,
    ("h20",): 96.0,
    ("l40s",): 48.0,
    ("l40",): 48.0,
    ("l4",): 24.0,
    ("rtx", "6000", "ada"): 48.0,
    ("rtx", "4090"): 24.0,
    ("a100",): 80.0,
    ("a100", "40gb"): 40.0,
    ("a800",): 80.0,
    ("a30",): 24.0,
    ("a40",): 48.0,
    ("a10",): 24.0,
    ("a10g",): 24.0,
    ("rtx", "a6000"): 48.0,
    ("rtx", "3090"): 24.0,
    ("v100",): 32.0,
    ("v100", "16gb"): 16.0,
    ("t4",): 16.0,
    ("mi300x",): 192.0,
    ("mi325x",): 256.0,
    ("mi250x",): 64.0,
}
# What the driver, the context, error correction and the allocator leave of it.
USABLE_MEMORY = 0.93

# A slice of a card, or a slower card under the same number: the whole card's peak would be wrong.
_OTHER_CARDS = frozenset({"mig", "laptop", "mobile", "max", "d"})


def peak_flops_per_second(device_name: str) -> float | None:
    """Dense bf16 peak of one device (fp16 for V100 and T4), or None for a device that is not in the table.

    Args:
        device_name: As `torch.cuda.get_device_name()` gives it, e.g. "NVIDIA A100-SXM4-80GB".

    Returns:
        FLOP/s. A MIG slice or a laptop variant is unknown, not the full card.
    """
    tflops = _entry(_PEAK_TFLOPS, device_name)
    return None if tflops is None else tflops * 1e12


def device_memory_bytes(device_name: str) -> int | None:
    """Memory of one device that a run can use, or None for a device that is not in the table.

    Args:
        device_name: As for `peak_flops_per_second`; of a card in two sizes the larger is meant, unless the name
            tells ("a100 40gb").
    """
    gib = _entry(_MEMORY_GIB, device_name)
    return None if gib is None else int(gib * USABLE_MEMORY * 2**30)


def known_devices() -> list[str]:
    """Names of the table, as they can be asked for."""
    return sorted(" ".join(key) for key in _PEAK_TFLOPS)


def _entry(table: dict[tuple[str, ...], float], device_name: str) -> float | None:
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHER_CARDS:
        return None
    fitting = [key for key in table if words.issuperset(key)]
    return table[max(fitting, key=len)] if fitting else None


def mfu(tokens_per_second: float, flops_per_token: float, num_devices: int, device_name: str) -> float | None:
    """Model FLOPs utilization: arithmetic the model needs, over what the devices could do.

    Args:
        tokens_per_second: Of all devices together.
        flops_per_token: Forward and backward, as `mars_ds.model.flops_per_token` defines it.
        num_devices: Devices that share the tokens.
        device_name: Name of one of them; all are taken to be alike.

    Returns:
        A fraction (0.45 is 45 %), or None for an unknown device: no number is better than a wrong one.

    Raises:
        ValueError: Fewer than one device.
    """
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    peak = peak_flops_per_second(device_name)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (num_devices * peak)
