"""The printed comparison."""

from __future__ import annotations

from typing import Any


def lines(result: dict[str, Any]) -> list[str]:
    """The table of one problem's record: ratios where there are data, then the averages in other places."""
    plan = result["plan"]
    done = [
        f"{result['title']}: {plan['trials']} retrainings, {plan['examples']} examples, ridge {plan['ridge']:g}",
        f"  {'median of estimate / Monte Carlo':36}{'average [95 %]':>20}{'one draw':>10}{'typical [10-90 %]':>22}"
        f"{'log-correlation':>17}",
    ]
    regions = dict(result["agreement"])
    done += [_line(name, row) for name, row in regions.pop("data").items()]
    for region, rows in regions.items():
        done.append(f"  {region:14}" + ", ".join(f"{name} {row['average']:.2f}" for name, row in rows.items()))
    facts = result["diagnostics"]["full"]
    done.append(
        "  median (largest) over networks:"
        + ";".join(f" {name} {value['median']:.3g} ({value['largest']:.3g})" for name, value in facts.items())
    )
    gradients = sorted(value for log in result["trials"].values() for value in log["gradient"])
    done.append(
        f"  gradient left: median {gradients[len(gradients) // 2]:.2g}, largest {gradients[-1]:.2g}; "
        f"{result['cpu_seconds']:.0f} s of processor time"
    )
    return done


def _line(name: str, row: dict[str, float]) -> str:
    average = f"{row['average']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
    typical = f"{row['typical']:.2f} [{row['draws_low']:.2f}, {row['draws_high']:.2f}]"
    return f"  {name:36}{average:>20}{row['one']:>10.2f}{typical:>22}{row['correlation']:>17.2f}"
