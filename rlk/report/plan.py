"""The tables that `rlk plan` prints."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rlk.config import RunConfig, flag
from rlk.plan import MemoryPlan, gib
from rlk.report.tables import format_table
from rlk.topology import Topology


def config_table(profile: str, config: RunConfig, sources: dict[str, str]) -> str:
    """Every option, its value and where that came from, in RunConfig's sections."""
    rows = []
    for entry in fields(config):
        if entry.metadata["section"]:
            rows += [("", "", ""), (f"# {entry.metadata['section']}", "", "")]
        rows.append((flag(entry.name), _shown(getattr(config, entry.name)), sources[entry.name]))
    return f"profile {profile}\n\n" + format_table(rows, ("option", "value", "source"))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) or "-"


def topology_table(topology: Topology) -> str:
    """The derived sizes, and the place of every rank."""
    places = [replace(topology, rank=rank) for rank in range(topology.world)]
    rows = [(p.rank, p.dp_rank, p.cp_rank, p.tp_rank, p.engine, p.rollout_tp_rank) for p in places]
    return (f"\n# Topology\n{topology.world} ranks: training dp {topology.dp} x cp {topology.cp} x tp {topology.tp}; "
            f"rollout {topology.engines} engines x tp {topology.rollout_tp}; {topology.leaves} leaves\n"
            + format_table(rows, ("rank", "dp", "cp", "tp", "engine", "rollout-tp")))


def memory_table(memory: MemoryPlan) -> str:
    """One rank's memory, item by item, and what it has."""
    rows = [*((name, gib(size)) for name, size in memory.items.items()),
            ("sum", gib(memory.total)), ("available", gib(memory.available))]
    return f"\n# Memory of one rank\n{format_table(rows)}\n{memory.kv_pages} KV pages"
