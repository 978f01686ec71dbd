"""Time by hand, anchors, and what is not known."""

from pathlib import Path

import pytest

from mars_ds.config import load_config
from mars_ds.errors import ConfigError
from mars_ds.planning.timing import check_device, expected_efficiency, time_plan
from mars_ds.telemetry.devices import device_memory_bytes, known_devices, peak_flops_per_second


def test_efficiency_between_and_beyond_the_anchors() -> None:
    assert [expected_efficiency(n) for n in (10, 124_000_000, 1_558_000_000, 10**12)] == [0.39, 0.39, 0.48, 0.48]
    assert 0.45 < expected_efficiency(500_000_000) < 0.47


def test_hours_by_hand(config_file: Path) -> None:
    config = load_config(config_file, ["precision.dtype=bfloat16"])
    plan = time_plan(config, 10**9, 124_000_000, [10**9, 3 * 10**9], "h100", efficiency=0.5)
    # 384 tokens a step on two ranks: 192e9 FLOPs each, and 3e9 of the busiest rank's Newton-Schulz.
    seconds = (192e9 + 3e9) / (0.5 * 989.4e12)
    assert plan.seconds == pytest.approx(12 * seconds)
    assert plan.tokens_per_second == pytest.approx(384 / seconds)


@pytest.mark.parametrize("device, dtype", [(None, "bfloat16"), ("cpu", "bfloat16"), ("h100", "float32")])
def test_no_number_is_better_than_a_wrong_one(config_file: Path, device: str | None, dtype: str) -> None:
    config = load_config(config_file, [f"precision.dtype={dtype}"])
    plan = time_plan(config, 10**9, 10**8, [0], device)
    assert (plan.seconds, plan.tokens_per_second, plan.efficiency) == (None, None, None)
    assert plan.flops_per_step == 384 * 10**9


def test_exact_mode_computes_every_batch_twice(config_file: Path) -> None:
    config = load_config(config_file, ["optimizer.mode=exact"])
    assert time_plan(config, 10**9, 10**8, [0], None).flops_per_step == 2 * 384 * 10**9


def test_refusals(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="expected a share above 0 and up to 1"):
        time_plan(load_config(config_file), 1, 1, [0], "h100", efficiency=45.0)
    with pytest.raises(ConfigError, match=r"--device x100: unknown device; known: .*h100"):
        check_device("x100")


def test_every_device_of_the_table_has_a_memory() -> None:
    for name in known_devices():
        assert peak_flops_per_second(name) and device_memory_bytes(name)
    sizes = {
        name: round((device_memory_bytes(name) or 0) / 2**30) for name in ("h100", "NVIDIA A100-SXM4-40GB", "h200")
    }
    assert sizes == {"h100": 74, "NVIDIA A100-SXM4-40GB": 37, "h200": 131}
    assert device_memory_bytes("cpu") is None
