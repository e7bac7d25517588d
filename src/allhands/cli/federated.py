"""`allhands federated`: training across real sites, on Flower."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.certificates import certificates
from allhands.cli.shared_options import Overrides, RunFiles, root_override
from allhands.config import read_run
from allhands.errors import UserError

if TYPE_CHECKING:
    from allhands.config import RunFile
    from allhands.federated.sites.sites_server import ServerOptions

#: The folder in the run file's logdir, so that nothing of a simulation is taken for the run's own.
FOLDER = "simulated"


def simulate(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    data: Annotated[
        Path, typer.Option(help="A folder with a folder for each site, which has the site's name.")
    ],
) -> int:
    """Train what a run file describes here, with each site's data as a client's.

    The run file, the data function, the rounds and the weights are those of `allhands federated
    server` and `site`. History and report lie in `simulated` in the run file's logdir.
    """
    from allhands.cli.run_objects import datasets_of
    from allhands.cli.run_training import train
    from allhands.federated.sites.simulation import data_of_sites, simulated_sites

    given = list(overrides or ())
    run_file = read_run(config or (), given)
    if run_file.config.logdir is not None:
        logdir = Path(run_file.config.logdir) / FOLDER
        run_file = read_run(config or (), [*given, f"logdir={logdir}"])
    names, tested = _sites_of(run_file)
    missing = [name for name in names if not (data / name).is_dir()]
    if missing:
        raise UserError(
            f"--data {data} has no folder {', '.join(missing)}; it must have one with the data of "
            f"each site: {', '.join(names)}"
        )
    section = run_file.config.data
    datasets = {
        "batch_size": section.batch_size,
        "num_workers": section.num_workers,
        "drop_last": section.drop_last,
        "get_datasets_fn": data_of_sites,
        "sites": {
            name: datasets_of(read_run(config or (), [*given, *root_override(data / name)]))
            for name in names
        },
        "run_seed": run_file.config.seed,
        "measured": tested,
    }
    train(run_file, partial(simulated_sites, names=names), datasets=datasets)
    return 0


def _sites_of(run_file: RunFile) -> tuple[list[str], bool]:
    """The names of the sites, and whether they measure on data sets of their own."""
    from allhands.cli.run_objects import strategy_from
    from allhands.federated.strategy import Federated

    strategy = strategy_from(run_file)
    if not isinstance(strategy, Federated):
        raise run_file.error(
            ("strategy", "name"), "sites train by rounds; write strategy: {name: federated, …}"
        )
    if strategy.sites is None or strategy.sites.names is None:
        raise run_file.error(("strategy",), "who are the sites? Write sites: {names: [a, b]}")
    return list(strategy.sites.names), strategy.test_fraction is None


app = typer.Typer(
    help="Train across real sites, on Flower: a server, and at each site a process beside its "
    "data.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_SETTINGS = {"help_option_names": ["-h", "--help"]}

app.command("simulate", context_settings=_SETTINGS)(simulate)
app.command("certificates", context_settings=_SETTINGS)(certificates)

Plan = Annotated[bool, typer.Option("--plan", help="Print what would run, and start nothing.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Plain text, and no key is checked. For a trial on one machine."
    ),
]
Authority = Annotated[
    Path | None, typer.Option(help="The certificate of the authority that signed the server's.")
]
State = Annotated[
    Path | None,
    typer.Option(help="Folder for what outlives a restart. Default: in the run file's logdir."),
]


@app.command(context_settings=_SETTINGS)
def server(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0: all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The one port that sites connect to.", min=1, max=65535)
    ] = 8000,
    state: State = None,
    certificate: Annotated[Path | None, typer.Option(help="The server's certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None,
    authority: Authority = None,
    insecure: Insecure = False,
    sites: Annotated[
        Path | None, typer.Option(help="The allow list: a site's name and public key a line.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="The sites' tokens: a name and a token a line.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The server's own data, to evaluate on.")
    ] = None,
    page: Annotated[
        int | None,
        typer.Option(
            help="Show the run on a page at this port of this machine's loopback; 0: a free one.",
            min=0,
            max=65535,
        ),
    ] = None,
    plan: Plan = False,
) -> int:
    """Train what a run file describes, by clients that are sites.

    The rounds, checkpoints, history and reports are those of `allhands run`, in the run file's
    logdir. Ctrl-C abandons the round; the next start with resume=auto goes on after the last
    finished one.
    """
    from allhands.cli.sites import serve, server_plan
    from allhands.federated.sites import flower
    from allhands.federated.sites.sites_server import ServerOptions

    flower.require()
    run_file = read_run(config or (), [*(overrides or ()), *root_override(data)])
    options = ServerOptions(
        config=[path.absolute() for path in config or ()],
        overrides=overrides or [],
        host=host,
        port=port,
        state=_state(run_file, state, "server"),
        certificate=_path(certificate),
        key=_path(key),
        authority=_path(authority),
        sites=_path(sites),
        tokens=_path(tokens),
        data=_path(data),
        page=page,
    )
    _check_server(options, insecure)
    if plan:
        print(server_plan(options, run_file), end="")
        return 0
    return serve(options, run_file)


@app.command(context_settings=_SETTINGS)
def site(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    server: Annotated[str, typer.Option(help="Where the server is, HOST:PORT.")],
    data: Annotated[
        Path,
        typer.Option(help="The site's own data: takes the place of data.root in the run file."),
    ],
    name: Annotated[str, typer.Option(help="The site's name, as in the server's allow list.")],
    key: Annotated[Path | None, typer.Option(help="The site's private key.")] = None,
    authority: Authority = None,
    insecure: Insecure = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the site's token. Default: the variable ALLHANDS_SITE_TOKEN, if set."
        ),
    ] = None,
    state: State = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="A port of loopback for Flower's processes. Default: one that is free.",
            min=1,
            max=65535,
        ),
    ] = None,
    plan: Plan = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Try data and model here, show what would leave this site, and send nothing.",
        ),
    ] = False,
) -> int:
    """Take part in a federated training with this site's data.

    Only outgoing connections are made. The run file is the server's own: what differs is found out
    before the first round. Nothing but updates, counts and metrics leaves this machine.
    """
    from allhands.federated.sites import flower

    flower.require()
    from allhands.cli.sites import site_plan, take_part, try_out
    from allhands.federated.sites.site import SiteOptions
    from allhands.federated.sites.site_keys import check_name

    run_file = read_run(config or (), [*(overrides or ()), *root_override(data)])
    if insecure and (key is not None or authority is not None):
        raise UserError(
            "--insecure has no use for --key and --authority: leave it out, or leave these out"
        )
    if not insecure and (key is None or authority is None):
        missing = [
            f"--{name}" for name, path in (("key", key), ("authority", authority)) if path is None
        ]
        raise UserError(
            f"{' and '.join(missing)} missing; for plain text, on a machine or in a network of "
            "your own, write --insecure"
        )
    if not data.is_dir():
        raise UserError(f"--data {data} is not a folder")
    options = SiteOptions(
        server=server,
        data=data.expanduser().absolute(),
        name=check_name(name),
        key=_path(key),
        authority=_path(authority),
        token_file=_path(token_file),
        state=_state(run_file, state, f"site-{name}"),
        port=port,
    )
    if plan and dry_run:
        raise UserError("--plan starts nothing, and --dry-run trains a little; write one of them")
    if plan or dry_run:
        print((site_plan if plan else try_out)(options, run_file), end="")
        return 0
    return take_part(options, run_file)


@app.command("app", context_settings=_SETTINGS)
def flower_app(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    out: Annotated[Path, typer.Option(help="A new folder for the app.")],
) -> int:
    """Write a Flower app of the run file, for `flwr run` where SuperLink and SuperNodes run
    already.

    Both sides need allhands[flower] installed; a SuperNode tells where its data are by
    --node-config 'data="PATH" name="NAME"'.
    """
    from allhands.federated.sites import app as generated

    generated.write(out, read_run(config or (), overrides or ()).to_yaml())
    print(f"written to {out}; start it by: flwr run {out}")
    return 0


def _path(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _state(run_file: RunFile, given: Path | None, name: str) -> Path:
    if given is not None:
        return given.expanduser().absolute()
    if run_file.config.logdir is None:
        raise run_file.error(
            ("logdir",),
            "training across sites keeps what it needs after a restart there; name a folder",
        )
    return Path(run_file.config.logdir).expanduser().absolute() / name


def _check_server(options: ServerOptions, insecure: bool) -> None:
    """Raise `UserError` where the options contradict one another, or leave something open."""
    given = {
        "--certificate": options.certificate,
        "--key": options.key,
        "--authority": options.authority,
    }
    missing = [name for name, path in given.items() if path is None]
    if insecure and len(missing) < len(given):
        raise UserError(
            "--insecure has no use for a certificate: leave it out, or --certificate, --key and "
            "--authority"
        )
    if insecure and options.sites is not None:
        raise UserError(
            "--sites checks keys, which Flower does not in plain text (--insecure): name "
            "certificates, or leave it "
            "out and write the sites' names into the run file (strategy.sites.names)"
        )
    if not insecure and missing:
        raise UserError(
            f"{', '.join(missing)} missing: `allhands federated certificates` makes them for a "
            "trial; plain text takes --insecure"
        )
    if not insecure and options.sites is None:
        raise UserError("--sites missing: the file with each site's name and public key")
