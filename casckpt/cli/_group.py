"""The group of all commands: found by name, imported when used, and the one place where errors become messages.

A command is a row of `COMMANDS`: where it is and what it does in a line, so that help needs no import. Further commands
come from entry points of the group `casckpt.commands`; one that cannot be loaded is an error of that command alone.

Whatever a command raises ends here: one message on standard error and an exit code (`_exits`). A traceback is shown
only with `--debug` or CASCKPT_DEBUG. Warnings of the library are lines on standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import click

from casckpt.cli import _exits
from casckpt.cli._screen import let_go_of
from casckpt.cli._text import shown
from casckpt.errors import CasckptError

PLUGIN_GROUP = "casckpt.commands"


class Row(NamedTuple):
    """A built-in command: its section in the help, `module:attribute`, and one line about it."""

    section: str
    target: str
    help: str


COMMANDS = {
    "log": Row("Look", "casckpt.cli.log:log", "List runs, branches and steps, with metrics, sizes and state."),
    "show": Row("Look", "casckpt.cli.show:show", "Show one snapshot: components, sizes, config, metrics."),
    "diff": Row("Look", "casckpt.cli.diff:diff", "Compare two snapshots by component and leaf."),
    "bisect": Row("Look", "casckpt.cli.bisect:bisect", "Find the first step at which lines differ or a check fails."),
    "runs": Row("Look", "casckpt.cli.names:runs", "List the runs of a store."),
    "branches": Row("Look", "casckpt.cli.names:branches", "List the branches of a run."),
    "du": Row("Look", "casckpt.cli.du:du", "Say where the bytes are."),
    "export": Row("Take out", "casckpt.cli.export:export", "Write a snapshot as safetensors and JSON files."),
    "replay": Row("Take out", "casckpt.cli.replay:replay", "Show rings; write their rows as Arrow or Parquet."),
    "dump": Row("Take out", "casckpt.cli.dump:dump", "Print any record of a store as text."),
    "verify": Row("Check", "casckpt.cli.verify:verify", "Look for damage, and name each step that has it."),
    "doctor": Row("Check", "casckpt.cli.doctor:doctor", "Say what is wrong with a store or machine, and what to do."),
    "audit": Row("Check", "casckpt.cli.audit:audit", "List leaves that are stored as pickles."),
    "plan": Row("Check", "casckpt.cli.plan:plan", "Say what a recovery of a run would do, and why."),
    "coverage": Row("Check", "casckpt.cli.coverage:coverage", "Say what a snapshot lacks for a training to go on."),
    "tag": Row("Write", "casckpt.cli.write:tag", "Give a snapshot a name, or list the names."),
    "untag": Row("Write", "casckpt.cli.write:untag", "Take a name away."),
    "annotate": Row("Write", "casckpt.cli.write:annotate", "Add metrics and labels to a snapshot."),
    "retire": Row("Write", "casckpt.cli.write:retire", "Hide a snapshot from listings. Deletes nothing."),
    "run": Row("Recover", "casckpt.cli.run:run", "Run a command, and start it again when it fails or hangs."),
    "drill": Row("Recover", "casckpt.cli.drill:drill", "Inject faults into a training, and see what becomes of it."),
    "demo": Row("Try", "casckpt.demo.command:demo", "Train a real PPO, kill it, resume it, prove nothing was lost."),
}


class CommandGroup(click.Group):
    """The commands by name; see the module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *_plugins()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name].target.partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            return command
        plugin = _plugins().get(cmd_name)
        return None if plugin is None else _load_plugin(plugin)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Sections of commands, without importing one of them."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, row in COMMANDS.items():
            sections.setdefault(row.section, []).append((name, row.help))
        plugins = [(name, f"Comes from {plugin.value.partition(':')[0]}.") for name, plugin in _plugins().items()]
        if plugins:
            sections["More"] = plugins
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whatever it raises becomes a message and an exit code."""
        is_debug = bool(ctx.params.get("debug")) or bool(os.environ.get("CASCKPT_DEBUG"))
        _make_encodable()
        try:
            with _warnings_as_lines():
                result = super().invoke(ctx)
                sys.stdout.flush()  # a closed pipe must show here, not when the interpreter ends
                return result
        except (click.ClickException, click.exceptions.Exit, SystemExit):
            raise
        except BrokenPipeError:
            let_go_of(sys.stdout)
            code = _exits.PIPE_CLOSED
        except (KeyboardInterrupt, click.Abort):
            click.echo("casckpt: stopped.", err=True)
            code = _exits.INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the last place before a user: every error becomes one message
            if is_debug:
                traceback.print_exc()
            message, code = _message(error)
            click.echo(f"casckpt: {shown(message)}", err=True)
        ctx.exit(code)


def _message(error: Exception) -> tuple[str, int]:
    if isinstance(error, CasckptError):
        return error.message, _exits.code_of(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}", _exits.STORAGE
    return (
        f"unexpected {type(error).__name__}: {error}. This is a defect of casckpt: run again with --debug and report "
        "what it prints.",
        _exits.DEFECT,
    )


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"casckpt: warning: {shown(str(message))}", err=True)


def _make_encodable() -> None:
    """Characters that a terminal's encoding lacks are written escaped instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _plugins() -> dict[str, EntryPoint]:
    found = {plugin.name: plugin for plugin in entry_points(group=PLUGIN_GROUP)}
    return {name: found[name] for name in sorted(found) if name not in COMMANDS}


def _load_plugin(plugin: EntryPoint) -> click.Command:
    try:
        command = plugin.load()
    except Exception as error:  # a plug-in's import may raise anything; the other commands still work
        raise click.ClickException(
            f"command {plugin.name!r} comes from {plugin.value} and cannot be loaded: {type(error).__name__}: {error}. "
            "Reinstall or remove that package."
        ) from error
    if not isinstance(command, click.Command):
        raise click.ClickException(f"command {plugin.name!r}: {plugin.value} is no click command.")
    return command


def _print_version(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        from casckpt import __version__

        click.echo(f"casckpt {__version__}")
        ctx.exit()


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks. [env: CASCKPT_DEBUG]")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
def casckpt(debug: bool) -> None:
    """Content-addressed snapshots of training state.

    A REF is a step, "latest", a tag, a branch, branch@step, or 8 and more digits of a snapshot id.
    """
