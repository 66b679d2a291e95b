"""Plain-text tables: the verdict that a run ends with."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 1 << 30
ENDS = 5  # steps averaged at either end of a run


def format_table(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Columns aligned on the left, two spaces apart, with a rule under the header if there is one."""
    cells = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    if header:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def verdict_table(run_dir: str, summary: dict, metrics: list[dict]) -> str:
    """The table at the end of a run, from audit.json's content and the lines of metrics.jsonl."""
    seconds = sum(line["step_s"] for line in metrics)
    tokens = sum(line["response_tokens"] for line in metrics)
    rate = tokens / seconds if seconds else 0.0
    rows = [
        ("run", run_dir),
        ("mode", summary["mode"]),
        ("steps", f"{summary['steps']} in {seconds:.1f} s, {rate:,.0f} response tokens/s"),
        ("reward", reward_change(metrics)),
        ("log-probs", f"{summary['compared']:,} compared, {summary['unequal']:,} unequal"),
        ("with replicas", f"{summary['replicas_compared']:,} compared, {summary['replicas_unequal']:,} unequal"),
    ]
    if peak := max((line.get("peak_memory_bytes", 0) for line in metrics), default=0):
        rows.append(("peak memory", f"{peak / GIB:.2f} GiB of tensors, on the fullest GPU"))
    if first := summary["first_unequal"]:
        rows.append(("first unequal", f"step {first['step']}, sample {first['sample']}, position {first['position']}: "
                                      f"rollout {first['rollout_bits']}, train {first['train_bits']}"))
    rows += [("failure", line) for line in summary["failures"]]
    rows.append(("verdict", summary["verdict"].upper()))
    return format_table(rows)


def reward_change(metrics: list[dict]) -> str:
    """Mean reward of the first and the last steps, as text."""
    rewards = [line["reward"] for line in metrics if line["reward"] is not None]
    if not rewards:
        return "none"
    first, last = rewards[:ENDS], rewards[-ENDS:]
    start, end = sum(first) / len(first), sum(last) / len(last)
    return f"{start:.2f} (first {len(first)} steps) -> {end:.2f} (last {len(last)})"
