"""Carries out one plan again: `python -m tests.world --seed 5 --seconds 300`."""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import replace

from tests.world import archives, portions, world
from tests.world.faults import Event, Plan, plan_of
from tests.world.world import Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, help="of a plan that `plan_of` makes")
    parser.add_argument("--seconds", type=float, default=300.0, help="its length, default 300")
    parser.add_argument("--portions", action="store_true", help="a world of portions, with --seed")
    parser.add_argument("--archives", action="store_true", help="a world of archives, with --seed")
    parser.add_argument("--evicts", action="store_true", help="one that evicts, with --seed")
    parser.add_argument("--plan", help="a plan as a failure prints it")
    parser.add_argument("--trace", metavar="FILE", help="write all that happened to FILE")
    parser.add_argument("--shrink", action="store_true", help="look for a shorter plan that fails")
    options = parser.parse_args()
    if (options.seed is None) == (options.plan is None):
        parser.error("give --seed or --plan")
    if options.plan:
        plan = _parsed(options.plan)
    else:
        which = {name: getattr(options, name) for name in ("portions", "archives", "evicts")}
        plan = plan_of(options.seed, options.seconds, **which)
    if options.shrink:
        return _shrink(plan)
    try:
        found = _carry_out(plan, options.trace)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        return 1
    _report(found)
    return 0


def _parsed(text: str) -> Plan:
    found = eval(text, {"Plan": Plan, "Event": Event})
    assert isinstance(found, Plan)
    return found


def _carry_out(plan: Plan, trace_file: str | None = None) -> Outcome:
    which = portions if plan.portions else archives if plan.archives else world
    return which.run(plan, trace_file=trace_file)


def _report(found: Outcome) -> None:
    print(
        f"{found.digest}: {found.simulated_seconds:.0f} s in {found.cpu_seconds:.1f} s of CPU, "
        f"{found.cpu_per_hour:.0f} s for an hour; {found.entries} entries, "
        f"{found.acknowledged} operations acknowledged, {found.rollbacks} rollbacks"
    )
    for name, number in sorted([*found.injected.items(), *found.counts.items()]):
        print(f"  {name}: {number}")


def _fails(plan: Plan) -> str:
    """How the plan fails; empty if it does not."""
    try:
        _carry_out(plan)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def _shrink(plan: Plan) -> int:
    """Remove events, halves and quarters of them first, while any failure remains."""
    failure = _fails(plan)
    if not failure:
        print("the plan does not fail")
        return 0
    size = len(plan.events)
    while size := size // 2:
        at = 0
        while at < len(plan.events):
            shorter = replace(plan, events=plan.events[:at] + plan.events[at + size :])
            found = _fails(shorter)
            if found:
                plan, failure = shorter, found
            else:
                at += size
    print(f"{len(plan.events)} events: {failure}\n{plan.command}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
