"""Peaks by the names torch gives, and MFU worked by hand."""

from __future__ import annotations

import pytest

from mars_ds.telemetry.devices import mfu, peak_flops_per_second


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_flops_per_second(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080",
        "Quadro RTX 6000",
    ],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert peak_flops_per_second(name) is None
    assert mfu(1e5, 8.6e8, 1, name) is None


def test_mfu_of_a_published_run() -> None:
    """llm.c's 124M on 8 A100: 524,288 tokens in 300 ms is about 60 %."""
    value = mfu(524_288 / 0.3, 859_488_768, 8, "NVIDIA A100-SXM4-80GB")
    assert value == pytest.approx(0.6018, abs=1e-4)
    with pytest.raises(ValueError, match="num_devices"):
        mfu(1.0, 1.0, 0, "NVIDIA H200")
