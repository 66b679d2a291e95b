"""The readback: what each rank really ran. It tells a consistent run from one that fell back to something else."""

from __future__ import annotations

from rlk.ops.registry import Registry


def make_readback(registry: Registry, rank: int, world: int, architecture: str, fingerprint: str,
                  collectives: dict[str, str]) -> dict:
    """One rank's record, for readback/rank-*.json. `fingerprint` is the contract's.

    `collectives` names what carried them, group by group: the bits are the same, the speed is not.

    `calls` has one entry per operator, backend, device and dtype; `fallbacks` counts the calls that ran outside the
    contract (in native mode, all of them). `probes` says for each library call that a probe compared with our own
    kernel's bits whether they were equal: where they were not, our kernel ran.
    """
    calls = registry.readback()
    return {
        "rank": rank,
        "world": world,
        "mode": registry.mode,
        "architecture": architecture,
        "contract_fingerprint": fingerprint,
        "collectives": collectives,
        "fallbacks": sum(row["calls"] for row in calls if not row["contract"]),
        "calls": calls,
        "probes": registry.probes,
    }


def readback_failures(readbacks: list[dict], fingerprint: str, mode: str) -> list[str]:
    """One line per rank that is missing, ran nothing, or ran outside the contract in consistency mode."""
    failures = []
    ranks = [record["rank"] for record in readbacks]
    worlds = {record["world"] for record in readbacks}
    if len(worlds) != 1 or sorted(ranks) != list(range(max(worlds, default=0))):
        failures.append(f"readbacks are of ranks {sorted(ranks)} of worlds {sorted(worlds)}; expected one of each rank")
    for record in readbacks:
        who = f"readback of rank {record['rank']}"
        outside = [row for row in record["calls"] if not row["contract"]]
        if record["contract_fingerprint"] != fingerprint:
            failures.append(f"{who}: contract {record['contract_fingerprint']}, contract.json has {fingerprint}")
        if record["mode"] != mode:
            failures.append(f"{who}: mode {record['mode']}, the run's is {mode}")
        if not record["calls"]:
            failures.append(f"{who}: no operator ran; expected the model's operators")
        if record["fallbacks"] != sum(row["calls"] for row in outside):
            failures.append(f"{who}: {record['fallbacks']} fallbacks are counted, its calls have "
                            f"{sum(row['calls'] for row in outside)}")
        if mode == "consistency" and outside:
            row = outside[0]
            failures.append(f"{who}: {row['op']} ran {row['calls']} times with backend {row['backend']}, "
                            "which is outside the contract")
    return failures
