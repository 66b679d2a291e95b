"""The tables that `rlk plan` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from rlk.config import RunConfig, flag
from rlk.plan import MemoryPlan, gib
from rlk.topology import Topology


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of left-aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def config_table(profile: str, config: RunConfig, sources: dict[str, str]) -> str:
    rows = [("option", "value", "source")]
    for entry in fields(config):
        if entry.metadata["section"]:
            rows += [("", "", ""), (f"# {entry.metadata['section']}", "", "")]
        value = getattr(config, entry.name)
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
        rows.append((flag(entry.name), shown or "-", sources[entry.name]))
    return f"profile {profile}\n" + table(rows)


def topology_table(topology: Topology) -> str:
    """The derived sizes, and the place of every rank."""
    places = [replace(topology, rank=rank) for rank in range(topology.world)]
    rows = [("rank", "dp", "cp", "tp", "engine", "rollout-tp")]
    rows += [tuple(map(str, (p.rank, p.dp_rank, p.cp_rank, p.tp_rank, p.engine, p.rollout_tp_rank))) for p in places]
    return (f"\n# Topology\n{topology.world} ranks: training dp {topology.dp} x cp {topology.cp} x tp {topology.tp}; "
            f"rollout {topology.engines} engines x tp {topology.rollout_tp}; {topology.leaves} leaves\n" + table(rows))


def memory_table(memory: MemoryPlan) -> str:
    rows = [("memory of one rank", "size"), *((name, gib(size)) for name, size in memory.items.items()),
            ("sum", gib(memory.total)), ("available", gib(memory.available))]
    return f"\n# Memory\n{table(rows)}\n{memory.kv_pages} KV pages"
