"""What rank 0 writes of a run, and what it shows on the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from rlk.audit.auditor import Auditor
from rlk.audit.run_directory import RunDirectory
from rlk.audit.seal import make_seal, seal_differences
from rlk.audit.validate import read_metrics
from rlk.config import RunConfig
from rlk.contract import Contract
from rlk.errors import CheckFailed
from rlk.ops.kernel_objects import kernel_objects
from rlk.report.metrics import StepMetrics
from rlk.report.tables import verdict_table


class Evidence:
    """The run directory and the auditor, on rank 0."""

    def __init__(self, config: RunConfig, sources: dict[str, str], contract: Contract) -> None:
        self.config = config
        self.directory = RunDirectory.create(config.run_dir)
        self.path = self.directory.path
        self.auditor = Auditor(self.directory, config.mode)
        self.directory.write_config(asdict(config), sources)
        self.directory.write_contract(contract)
        self.seal = self._make_seal()
        self.directory.write_seal("before", self.seal)
        # disable=None: no bar where stderr is a file, in which every redraw would be a line.
        self.bar = tqdm(total=config.steps, unit="step", dynamic_ncols=True, disable=None)

    def _make_seal(self) -> dict:
        return make_seal(Path(self.config.model), Path(self.config.prompts),
                         kernel_objects(self.config.device))

    def step(self, metrics: StepMetrics, first_reward_error: str = "") -> None:
        self.directory.append_metrics(metrics.as_dict())
        self.bar.write(metrics.console_line(self.config.steps - 1))
        if not metrics.extra["samples_in_loss"]:
            self.bar.write(f"warning: step {metrics.step} trained on no sample: every response was truncated or failed "
                           "its reward; raise --max-response-len or look at the rewards")
        if metrics.extra["reward_errors"]:
            self.bar.write(f"warning: step {metrics.step}: {metrics.extra['reward_errors']} rewards failed and their "
                           f"samples are left out; the first: {first_reward_error}")
        self.bar.update()

    def close(self, readbacks: list[dict], finite_weights: bool) -> None:
        """The second seal, the readbacks, the totals, the picture; COMPLETE only if all of it holds."""
        from rlk.report.plots import plot_run  # here: matplotlib takes a second, and only rank 0 draws

        after = self._make_seal()
        self.directory.write_seal("after", after)
        changed = seal_differences(self.seal, after)
        for line in changed:
            self.bar.write(f"changed during the run: {line}")
        for readback in readbacks:
            self.directory.write_readback(readback)
        in_contract = all(readback["fallbacks"] == 0 for readback in readbacks)
        plot_run(self.path)
        self.conclude({"seal": not changed, "readback": in_contract or self.config.mode == "native",
                       "finite weights": finite_weights}, complete=True)
        print(f"complete: {self.path} (check it again with `bin/rlk validate {self.path}`)", flush=True)

    def conclude(self, gates: dict[str, bool], complete: bool = False) -> None:
        """Write audit.json, and COMPLETE if asked; print the verdict. Raises CheckFailed when COMPLETE is refused."""
        self.bar.close()
        summary = self.auditor.finish(gates)
        try:
            if complete:
                self.directory.complete()
        except CheckFailed as error:
            summary |= {"verdict": "fail", "failures": [*summary["failures"], str(error)]}
            raise
        finally:
            print(verdict_table(str(self.path), summary, read_metrics(self.path)), flush=True)
