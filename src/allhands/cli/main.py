"""The `allhands` command.

Each subcommand lives in a module of its own that is imported only when it is asked for, so that
`allhands --help` and a command that starts workers never wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.errors import AllhandsError, UserError, WorkerError, WorldError, did_you_mean


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand is defined.

    Attributes:
        module: the module to import.
        function: its function, with typer's annotations.
        help: one line for `allhands --help`.
        ends_options: everything after the first argument that is not an option belongs to that
            argument, options included.
        group: `function` names a typer application with subcommands of its own.
    """

    module: str
    function: str
    help: str
    ends_options: bool = False
    group: bool = False


# Of the shell that asks what a line can go on with.
_COMPLETE = "_ALLHANDS_COMPLETE"

SUBCOMMANDS = {
    "launch": Subcommand(
        "allhands.cli.launch",
        "launch",
        "Run a script, module or program in several workers.",
        ends_options=True,
    ),
    "join": Subcommand(
        "allhands.cli.join", "join", "Add workers on this machine to an elastic job that runs."
    ),
    "run": Subcommand("allhands.cli.run", "run", "Train what a run file describes."),
    "evaluate": Subcommand(
        "allhands.cli.evaluate_run", "evaluate", "Measure what a run has trained."
    ),
    "predict": Subcommand(
        "allhands.cli.predict", "predict", "Write a trained model's outputs, one row a sample."
    ),
    "show": Subcommand(
        "allhands.cli.show", "show", "Show the history of a run as a table and curves."
    ),
    "compare": Subcommand(
        "allhands.cli.compare_runs", "compare", "Compare two runs: settings and what was measured."
    ),
    "sweep": Subcommand(
        "allhands.cli.sweep", "sweep", "Train a run file with many values of some keys."
    ),
    "init": Subcommand("allhands.cli.init", "init", "Write a first project for a kind of task."),
    "schema": Subcommand(
        "allhands.cli.schema_file", "schema", "Print the JSON schema of run files, for editors."
    ),
    "plan": Subcommand(
        "allhands.cli.plan", "plan", "Predict memory and speed of a run file on GPUs."
    ),
    "verify": Subcommand(
        "allhands.cli.verify",
        "verify",
        "Check that distributing does not change what a run file or script trains.",
    ),
    "federated": Subcommand(
        "allhands.cli.federated", "app", "Train across real sites, on Flower.", group=True
    ),
    "doctor": Subcommand(
        "allhands.cli.doctor", "doctor", "Check whether this machine, or some hosts, can run a job."
    ),
    "export": Subcommand(
        "allhands.cli.export", "export", "Write a checkpoint's weights into one safetensors file."
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code: 0, a worker's, or 2 for what the user has to
    change."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if argv in (["--version"], ["-V"]):
        import allhands

        print(f"allhands {allhands.__version__}")
        return 0
    wanted = next((word for word in argv if not word.startswith("-")), None)
    if wanted is not None and wanted not in SUBCOMMANDS and argv[0] == wanted:
        return _refuse(f"there is no subcommand {wanted!r}{nearest(wanted, SUBCOMMANDS)}")
    if (
        wanted is not None
        and argv == [wanted]
        and wanted in SUBCOMMANDS
        and SUBCOMMANDS[wanted].group
    ):
        argv = [wanted, "--help"]
    try:
        if completes := _completes(argv):
            wanted = _completed_word()
        app = _app(wanted, completes)
        words = _horovod(app, argv) if wanted == "launch" and "--horovod" in argv else argv
        result = app(
            args=words or ["--help"], prog_name="allhands", standalone_mode=False, obj=argv
        )
    except WorkerError as error:
        return _refuse(str(error), error.exit_code)
    except (UserError, WorldError, AllhandsError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # typer's own errors (an unknown option, a value of the wrong type); where their class lives
        # depends on its version.
        if hasattr(error, "format_message"):
            context = getattr(error, "ctx", None)
            command = (
                context.command_path if context is not None else f"allhands {wanted or ''}".strip()
            )
            return _refuse(f"{error.format_message()}; see `{command} --help`")
        if type(error).__name__ == "Abort":
            return 130
        raise
    return result if isinstance(result, int) else 0


def nearest(word: str, names: Any) -> str:
    """`; did you mean …?` for a name that was probably misspelled, else the names that exist."""
    return did_you_mean(word, names, f"; there are: {', '.join(names)}")


def _completes(argv: list[str]) -> bool:
    """Whether this call is about completion in a shell, which costs others nothing."""
    asked = any(word in ("--install-completion", "--show-completion") for word in argv)
    return asked or _COMPLETE in os.environ


def _completed_word() -> str | None:
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return next((word for word in line.split()[1:] if word in SUBCOMMANDS), None)


def _refuse(message: str, code: int = 2) -> int:
    print(f"allhands: error: {message}", file=sys.stderr)
    return code


def _horovod(app: Any, argv: list[str]) -> list[str]:
    """The command line of a launch with --horovod, whose options are horovodrun's as well."""
    import typer.main

    from allhands.cli import horovodrun

    group: Any = typer.main.get_command(app)
    params = group.commands["launch"].params
    arity = {
        name: 0 if param.is_flag else 1
        for param in params
        if param.opts[0].startswith("-")
        for name in (*param.opts, *param.secondary_opts)
    }
    return [
        "launch",
        *horovodrun.translated(argv[argv.index("launch") + 1 :], {**arity, "-h": 0, "--help": 0}),
    ]


def _unused() -> None:
    """Stands for the subcommands that this call only lists."""


def _app(wanted: str | None, completes: bool) -> Callable[..., Any]:
    """The typer application, with only the wanted subcommand's module imported."""
    import typer
    import typer.core

    # Else the typer that Flower asks for loads rich for plain help too, and writes \[ for [.
    typer.core.HAS_RICH = False
    app = typer.Typer(
        help="Train one PyTorch model with many workers, provably the same training.",
        epilog="allhands --install-completion: let your shell complete commands and keys.",
        add_completion=completes,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", "-V", help="Show the version and exit."),
    ) -> None:
        """Train one PyTorch model with many workers, provably the same training."""

    for name, sub in SUBCOMMANDS.items():
        found: Any = (
            getattr(importlib.import_module(sub.module), sub.function)
            if name == wanted
            else _unused
        )
        settings = {
            "allow_interspersed_args": not sub.ends_options,
            "help_option_names": ["-h", "--help"],
        }
        if sub.group and name == wanted:
            app.add_typer(
                found,
                name=name,
                context_settings={"help_option_names": settings["help_option_names"]},
            )
            continue
        app.command(name, help=sub.help if name != wanted else None, context_settings=settings)(
            found
        )
    return app
