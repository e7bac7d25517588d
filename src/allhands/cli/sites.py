"""What `allhands federated server` and `allhands federated site` do, and what they would do
(`--plan`)."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from allhands.config import RunFile
from allhands.federated.sites import site as sites_site
from allhands.federated.sites import sites_server
from allhands.federated.sites.certificates import check_server
from allhands.federated.sites.display import Display
from allhands.federated.sites.event_log import EventReader
from allhands.federated.sites.run_page import serve_page
from allhands.federated.sites.site import SiteOptions
from allhands.federated.sites.site_keys import (
    fingerprint,
    read_allow_list,
    read_site_key,
    read_tokens,
    site_token,
)
from allhands.federated.sites.sites_server import ServerOptions, SitesServer
from allhands.federated.sites.supervision import Stopped, signals
from allhands.wire.page_server import PageServer

#: What a site sends, for the plan; docs/federated_sites.md says it in full.
LEAVES = (
    "its name, the number of its training and test samples, and a proof that it knows its token",
    "where its training is not the server's: in what (a setting, the shape of a weight, the names "
    "of classes)",
    "after each round: the update of the weights (or what compression and clipping leave of it) "
    "and the integers of BatchNorm",
    "after each round: samples, steps, loss before and after, seconds; after an evaluation: "
    "samples, loss, right answers",
    "when something fails: the last line of the error",
)


def check_files(options: ServerOptions) -> dict[str, bytes]:
    """Read the files that the server needs, and return the sites' keys by name.

    Raises:
        UserError: one of them cannot be used; names it.
    """
    if options.certificate is not None:
        assert options.key is not None
        assert options.authority is not None
        check_server(options.certificate, options.key, options.authority)
    if options.tokens is not None:
        read_tokens(options.tokens)
    return {} if options.sites is None else read_allow_list(options.sites)


def events_of(run_file: RunFile) -> Path:
    """The file of events of a run.

    Raises:
        UserError: the run has no logdir, or is not federated.
    """
    if run_file.config.strategy.name.lower() != "federated":
        raise run_file.error(
            ("strategy", "name"), "sites train by rounds; write strategy: {name: federated, …}"
        )
    if run_file.config.logdir is None:
        raise run_file.error(
            ("logdir",), "a server writes its events and checkpoints there; name a folder"
        )
    return Path(run_file.config.logdir).expanduser() / "events.jsonl"


def serve(options: ServerOptions, run_file: RunFile) -> int:
    """Run the server until the training has ended; the exit code."""
    events, keys = events_of(run_file), check_files(options)
    if options.insecure:
        print("INSECURE: plain text, and whoever reaches the port can take part", flush=True)
    started, news = time.time(), EventReader(events)

    def show(display: Display) -> None:
        for event in news.news():
            if event["time"] >= started:
                display.take(event)

    try:
        with (
            signals(),
            SitesServer(options, run_file.to_yaml(), keys) as server,
            _page_of(options, events, started) as page,
            Display() as display,
        ):
            display.say(
                f"server for {options.host}:{options.port}, {len(keys) or 'any'} sites; its files "
                f"are in {options.state}"
            )
            if page is not None:
                display.say(f"the run's page, for whoever has this address: {page.address}")
            try:
                server.start()
                for _ in server.wait():
                    show(display)
            finally:
                show(display)
    except Stopped as stopped:
        print(
            f"stopped by signal {stopped.number}; write resume=auto to go on after the last "
            "finished round"
        )
        return 128 + stopped.number
    print(
        f"written to {run_file.config.logdir}: metrics.csv, report.html, run.yml, events.jsonl, "
        "checkpoints/, tensorboard/"
    )
    return 0


@contextlib.contextmanager
def _page_of(options: ServerOptions, events: Path, since: float) -> Iterator[PageServer | None]:
    """The page of the run, which ends with it; None where none was asked for."""
    page = None if options.page is None else serve_page(events, since, options.page)
    try:
        yield page
    finally:
        if page is not None:
            page.close()


def server_plan(options: ServerOptions, run_file: RunFile) -> str:
    """What `serve` would run.

    Raises:
        UserError: something that was asked for cannot be honoured.
    """
    events, keys = events_of(run_file), check_files(options)
    _check_training(run_file)
    secure = "plain text, INSECURE" if options.insecure else "TLS; sites prove their keys"
    lines = ["Processes:", *_commands(sites_server.commands(options))]
    lines += [
        "  serverapp (started by Flower's superexec)",
        "    allhands.federated.sites.server_process",
        "Ports:",
    ]
    lines += [
        f"  {options.host}:{options.port}  sites connect here ({secure}); control from this "
        "machine only"
    ]
    if options.page is not None:
        lines += [f"  127.0.0.1:{options.page or 'any'}  the run's page, by a token in its address"]
    lines += ["Sites:"]
    lines += [f"  {name}  {fingerprint(key)}" for name, key in keys.items()] or ["  any"]
    files = {
        "state": options.state,
        "events": events.absolute(),
        "certificate": options.certificate,
        "key": options.key,
        "authority": options.authority,
        "sites": options.sites,
        "tokens": options.tokens,
        "data": options.data,
    }
    lines += ["Files:", *(f"  {name}  {path}" for name, path in files.items() if path is not None)]
    lines += ["A site sends:", *(f"  {line}" for line in LEAVES)]
    return "\n".join(lines) + "\n"


def take_part(options: SiteOptions, run_file: RunFile) -> int:
    """Run a site until it is told to end; the exit code."""
    return sites_site.run(options, run_file.to_yaml())


def site_plan(options: SiteOptions, run_file: RunFile) -> str:
    """What `take_part` would run.

    Raises:
        UserError: something that was asked for cannot be honoured.
    """
    sites_site.check(options)
    _check_training(run_file)
    secure = "plain text, INSECURE" if options.authority is None else "TLS"
    lines = [
        "Processes:",
        *_commands(sites_site.commands(options)),
        "  clientapp (forked by the superexec for each message)",
    ]
    lines += ["    allhands.federated.sites.message_process", "Connections:"]
    lines += [f"  to {options.server} ({secure}); nothing connects to this machine"]
    files = {
        "state": options.state,
        "data": options.data,
        "key": options.key,
        "authority": options.authority,
        "token": options.token_file,
    }
    lines += ["Files:", *(f"  {name}  {path}" for name, path in files.items() if path is not None)]
    if options.key is not None:
        lines += ["Key:", f"  {options.name}  {fingerprint(read_site_key(options.key))}"]
    lines += ["This site sends:", *(f"  {line}" for line in LEAVES)]
    return "\n".join(lines) + "\n"


def try_out(options: SiteOptions, run_file: RunFile) -> str:
    """Try the data and the model of a site, without its server; what would leave it, in words.

    Raises:
        UserError: something would keep the site from taking part.
    """
    from allhands.cli.run_training import definition
    from allhands.federated.sites.dry_run import try_site

    sites_site.check(options)
    token = site_token(options.token_file, os.environ)
    return try_site(definition(run_file), options.name, options.data, token).text


def _check_training(run_file: RunFile) -> None:
    from allhands.cli.run_training import definition

    definition(run_file).validate()


def _commands(commands: dict[str, list[str]]) -> Iterable[str]:
    for name, command in commands.items():
        yield f"  {name}"
        yield f"    {shlex.join(command)}"
