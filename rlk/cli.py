"""The command line. Commands only: each calls the module that does the work, imported late so that --help is quick."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import click

from rlk.config import INTERRUPTED, TYPES, RunConfig, flag, profile_names, resolve
from rlk.errors import CheckFailed, UsageError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class SectionedCommand(click.Command):
    """A command that shows its options in RunConfig's sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        titles = {entry.name: entry.metadata["section"] for entry in fields(RunConfig)}
        title = "Options"
        for parameter in self.get_params(ctx):
            title = titles.get(parameter.name, "Options") or title
            if record := parameter.get_help_record(ctx):
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def run_options(command: Callable) -> Callable:
    """Add --profile and one option for every field of RunConfig, in its order."""
    for entry in reversed(fields(RunConfig)):
        command = _option(entry)(command)
    return click.option("--profile", default=os.environ.get("RLK_PROFILE", ""), metavar="NAME",
                        help=f"Start from these values: {', '.join(profile_names())}, or a .toml file. "
                             "Default: the one that fits this machine.")(command)


def _option(entry: Field) -> Callable:
    kind, default = TYPES[entry.name], entry.default
    name = flag(entry.name)
    shown = "" if default == "" else f"  [default: {default:g}]" if kind is float else f"  [default: {default}]"
    if kind is bool:
        shown = f"  [default: {'on' if default else 'off'}]"
        return click.option(f"{name}/--no-{name[2:]}", entry.name, default=None, help=entry.metadata["help"] + shown)
    names = [choice for choice in entry.metadata["choices"] if choice]
    metavar = f"[{'|'.join(names)}]" if names else {int: "N", float: "X", str: "TEXT"}[kind]
    return click.option(name, entry.name, type=kind, default=None, metavar=metavar, help=entry.metadata["help"] + shown)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@click.group(context_settings=CONTEXT, invoke_without_command=True)
@click.pass_context
def rlk(ctx: click.Context) -> None:
    """Train a Qwen3 model with GRPO so that training recomputes every log-probability that rollout sampled with, bit
    for bit.

    \b
    First run, on any machine (creates a tiny model, two minutes on two cores):
        rlk run --profile cpu-tiny
    Then look at what a run would do, and check a finished one:
        rlk plan --profile cpu-tiny
        rlk validate runs/<date>-<time>-cpu-tiny

    \b
    Exit status: 0 good, 1 a check failed, 2 wrong usage or input.
    """
    if ctx.invoked_subcommand is None:
        if "RANK" not in os.environ:
            click.echo(ctx.get_help())
        else:  # torchrun bin/rlk.py
            ctx.exit(ctx.invoke(run))


@rlk.command(cls=SectionedCommand)
@run_options
def run(profile: str, **options: Any) -> int:
    """Train, and audit every log-probability.

    Starts --nproc ranks on this node, or is one rank when torchrun started it. Each value comes from the command line,
    else from the environment (RLK_TP=2 is --tp 2), else from the profile, else from the default; `rlk plan` shows
    which. The run directory gets the resolved configuration, metrics, the audit's raw bits, a plot and, if all checks
    pass, COMPLETE.
    """
    if "RANK" in os.environ:
        from rlk.worker import run_rank

        try:
            return run_rank(profile, _given(options))
        except KeyboardInterrupt:  # before click hears of it, which would print an empty line
            return _interrupted()
    from rlk.launcher import launch

    config, _ = resolve(profile or _default_profile(), _given(options))
    return launch(sys.argv[1:], config.nproc, config.device)


@rlk.command(cls=SectionedCommand)
@run_options
def plan(profile: str, **options: Any) -> int:
    """Show what `run` would do with these options, without doing it.

    Prints every value with its source, which rank does what, and one rank's memory item by item; refuses what `run`
    would refuse, with the same exit status.
    """
    from rlk.preflight import preflight
    from rlk.report.plan import config_table, memory_table, topology_table

    name = profile or _default_profile()
    config, sources = resolve(name, _given(options))
    click.echo(config_table(name, config, sources))
    checked = preflight(config, config.nproc, config.nproc)
    click.echo(topology_table(checked.topology))
    click.echo(memory_table(checked.memory))
    return 0


@rlk.command()
def doctor() -> int:
    """Check this machine: Python, torch, compiler, kernels, shared memory, GPUs, Slurm. Says what to do."""
    from rlk.doctor import diagnose

    findings = diagnose()
    for finding in findings:
        click.echo(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:<14} {finding.text}")
    return 0 if all(finding.ok for finding in findings) else CheckFailed.exit_status


@rlk.command()
@click.argument("directory", type=click.Path())
def validate(directory: str) -> int:
    """Repeat the verdict on a finished run from the files in its DIRECTORY alone.

    Every count is recomputed from the stored bits, every hash from the stored tokens. Exit status 1 when anything
    differs, naming step, sample and position.
    """
    from rlk.audit.validate import validate_run

    verdict = validate_run(directory)
    click.echo(verdict)
    return verdict.exit_status


@rlk.command("init-model")
@click.argument("directory", type=click.Path())
@click.option("--seed", default=0, show_default=True, help="Seed of the weights and of the warm start.")
@click.option("--head-dim", type=int, default=16, show_default=True, metavar="N",
              help="Elements of an attention head: a multiple of 16 up to 128; for a GPU 64 or 128.")
def init_model(directory: str, seed: int, head_dim: int) -> int:
    """Create a tiny Qwen3 and prompts for it: DIRECTORY/model and DIRECTORY/prompts.jsonl.

    Nothing is downloaded. The model gets a short supervised warm start on its task (adding two digits, the sum in
    words), which leaves reinforcement learning something to improve. Takes under a minute.
    """
    from rlk.model.tiny import create_tiny

    create_tiny(directory, seed, head_dim)
    profile = "gpu-tiny" if head_dim in (64, 128) else "cpu-tiny"
    click.echo(f"wrote {directory}/model and {directory}/prompts.jsonl; train with\n"
               f"    rlk run --profile {profile} --model {directory}/model --prompts {directory}/prompts.jsonl")
    return 0


def _default_profile() -> str:
    from rlk.profiles import default_profile

    return default_profile()


def main() -> int:
    """Run a command; errors of the user's become one line on stderr. Returns the exit status."""
    try:
        return rlk(standalone_mode=False) or 0
    except click.ClickException as error:
        return _fail(error.format_message(), UsageError.exit_status)
    except (UsageError, CheckFailed) as error:
        return _fail(str(error), error.exit_status)
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()


def _interrupted() -> int:
    """The status of a command that Ctrl-C ended, and one line of it: our launcher speaks for its ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would end the interpreter on its way out
    launched = "RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if launched or os.environ.get("LOCAL_RANK", "0") != "0":
        return INTERRUPTED
    return _fail("interrupted", INTERRUPTED)


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
