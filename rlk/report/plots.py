"""The picture of a run: reward, response tokens and unequal log-probs per step."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlk.audit.validate import read_metrics, read_run_config
from rlk.files import atomic_path

BLUE, GREY, GREEN, RED = "#2463a8", "#8a949e", "#2f8f5b", "#c0392b"
SMOOTH = 5  # steps in the trailing mean of the reward


def plot_run(directory: str | Path) -> Path:
    """Draw <directory>/report.png from config.toml and metrics.jsonl, and return its path."""
    directory = Path(directory)
    config, metrics = read_run_config(directory), read_metrics(directory)
    steps = [line["step"] for line in metrics]
    figure = Figure(figsize=(8, 8.2), dpi=130, layout="constrained")
    reward, tokens, unequal = figure.subplots(3, 1, sharex=True)
    _draw_reward(reward, steps, [float("nan") if line["reward"] is None else line["reward"] for line in metrics])
    tokens.bar(steps, [line["response_tokens"] for line in metrics], color=BLUE, width=0.8)
    tokens.set(title="Response tokens per step", ylabel="tokens")
    _draw_unequal(unequal, steps, metrics)
    for axes in (reward, tokens, unequal):
        axes.title.set(size=11, weight="bold", ha="left", position=(0, 1))
        axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.02)
    unequal.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    figure.suptitle(f"{len(steps)} GRPO steps in {config['mode']} mode", size=13)
    path = directory / "report.png"
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))
    return path


def _draw_reward(axes, steps: list[int], rewards: list[float]) -> None:
    windows = [rewards[max(0, end - SMOOTH):end] for end in range(1, len(rewards) + 1)]
    means = [sum(window) / len(window) for window in windows]
    axes.plot(steps, rewards, "o", color=GREY, markersize=3.5, label="step")
    axes.plot(steps, means, color=BLUE, linewidth=2, label=f"mean of {SMOOTH} steps")
    axes.set(title="Mean reward per step", ylabel="reward")
    axes.legend(frameon=False, loc="best")


def _draw_unequal(axes, steps: list[int], metrics: list[dict]) -> None:
    """Unequal log-probs as bars; none at all is the good case, and must not look like an empty panel."""
    counts = [line["unequal"] for line in metrics]
    compared, total = sum(line["compared"] for line in metrics), sum(counts)
    axes.bar(steps, counts, color=RED, width=0.8)
    axes.set(title=f"Unequal log-probs per step: {total:,} of {compared:,}", xlabel="step", ylabel="log-probs")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, max([1, *counts]) * 1.1)
    if not total:
        axes.plot(steps, counts, "o", color=GREEN, markersize=4, clip_on=False)
        axes.text(0.5, 0.5, f"0 of {compared:,} differ in any bit", transform=axes.transAxes, ha="center",
                  color=GREEN, size=13)
