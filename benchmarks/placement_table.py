"""Plans of the Newton-Schulz work of GPT-2 XL: balance, straddlers and bytes at every ZeRO stage.

python benchmarks/placement_table.py                    the table of docs/placement.md
python benchmarks/placement_table.py --ranks 96 4096 --seconds
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mars_ds.model.config import GPT2Config, parameter_shapes
from mars_ds.optim.newton_schulz import FORMS
from mars_ds.optim.routing import role_of
from mars_ds.zero.layout import flat_layout, replicated_layout, sharded_layout
from mars_ds.zero.ordering import aligned_order
from mars_ds.zero.placement import ExchangePlan, plan_exchange

XL = GPT2Config(num_layers=48, num_heads=25, width=1600, sequence_length=1024)
ROWS = ("0", "1 and 2, natural", "1 and 2, aligned", "3")


def plan_row(row: str, world_size: int, form: str) -> ExchangePlan:
    """The plan of one row of the table."""
    matrices = [(name, shape) for name, shape in parameter_shapes(XL).items() if role_of(name, shape) == "matrix"]
    if row == "1 and 2, aligned":
        by_name = dict(matrices)
        matrices = [(name, by_name[name]) for name in aligned_order(matrices, world_size, form=form)]
    make = {"0": replicated_layout, "3": sharded_layout}.get(row, flat_layout)
    return plan_exchange(make([matrices], world_size), 0, [name for name, _ in matrices], form=form)


def main() -> None:
    """Prints the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 24, 64, 256], help="world sizes")
    parser.add_argument("--form", choices=FORMS, default="standard", help="Newton-Schulz form, for the FLOPs")
    parser.add_argument("--seconds", action="store_true", help="add a column with the time that planning takes")
    arguments = parser.parse_args()
    columns = ["ranks", "ZeRO stage", "busiest / mean FLOPs", "straddlers", "MB moved, all ranks", "MB, busiest rank"]
    columns += ["seconds to plan"] * arguments.seconds
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for world_size in arguments.ranks:
        for row in ROWS:
            begin = time.perf_counter()
            plan = plan_row(row, world_size, arguments.form)
            seconds = time.perf_counter() - begin
            cells = [str(world_size), row, f"{plan.imbalance():.3f}", str(plan.straddlers())]
            cells += [f"{plan.exchanged_bytes() / 1e6:,.0f}", f"{max(plan.sent_bytes()) / 1e6:,.1f}"]
            cells += [f"{seconds:.2f}"] * arguments.seconds
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
