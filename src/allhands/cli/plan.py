"""`allhands plan`: what a run file would take on GPUs that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allhands.cli.shared_options import Json, Overrides, RunFiles, read_checked
from allhands.errors import UserError

if TYPE_CHECKING:
    from allhands.config import RunFile
    from allhands.planning.candidates import Candidate
    from allhands.planning.federated_plan import FederatedPlan
    from allhands.planning.measured_profile import MeasuredProfile
    from allhands.planning.operation_times import OperationTimes


def plan(
    overrides: Overrides = None,
    *,
    config: RunFiles = None,
    gpus: Annotated[int, typer.Option("--gpus", help="How many GPUs.", min=1)] = 8,
    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            help="Of which kind: h200, h100, a100, l40s, rtx4090, …; default: the one that is "
            "measured, or h100.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", help="Of one GPU, such as 80GB; default: the card's.", show_default=False
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            help="Within a host and between hosts: nvlink+ib400, pcie+eth100, 12.5GB/s; default: "
            "the profile's, or nvlink+ib400.",
            show_default=False,
        ),
    ] = None,
    per_host: Annotated[int, typer.Option("--per-host", help="GPUs of a host.", min=1)] = 8,
    servers: Annotated[
        int | None,
        typer.Option(
            "--servers",
            help="Also look at so many parameter servers; default: the run file's.",
            min=0,
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Time each operation on the device that is here."),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            help="Measured operations: read where the file is there, written with --measure.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Also draw time and memory over 1 to 10,000 GPUs into this file (png, svg, pdf).",
            show_default=False,
        ),
    ] = None,
    download: Annotated[
        str | None,
        typer.Option(
            "--download", help="Of each client of a federated run: 50Mbit/s.", show_default=False
        ),
    ] = None,
    upload: Annotated[
        str | None,
        typer.Option("--upload", help="Likewise, to the server.", show_default=False),
    ] = None,
    client_flops: Annotated[
        float | None,
        typer.Option(
            "--client-flops",
            help="Floating point operations a second of each client's device.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Predict the memory, traffic and speed of a training by each strategy.

    Nothing is trained: one rank takes its steps on tensors without data. Prints a table, the
    fastest that fits first, and its lines for the run file.
    """
    run_file = read_checked(config, list(overrides or ()))
    if plot is not None:
        from allhands.report.figures import require_matplotlib

        require_matplotlib("--plot")
    of_clients = {"--download": download, "--upload": upload, "--client-flops": client_flops}
    strategy = run_file.config.strategy
    if strategy is not None and strategy.name == "federated":
        of_gpus = {
            "--gpus": gpus != 8,
            "--card": card is not None,
            "--memory": memory is not None,
            "--link": link is not None,
            "--per-host": per_host != 8,
            "--servers": servers is not None,
            "--measure": measure,
            "--profile": profile is not None,
            "--plot": plot is not None,
        }
        for name in (name for name, given in of_gpus.items() if given):
            raise UserError(
                f"{name} is for workers of one training, and this run file is federated; what "
                f"clients have is said with {', '.join(of_clients)}"
            )
        rounds = _of_clients(run_file, download, upload, client_flops)
        print(json.dumps(rounds.to_dict()) if as_json else rounds)
        return 0
    for name in (name for name, given in of_clients.items() if given is not None):
        raise UserError(
            f"{name} is of the clients of a federated run, and this run file has none; write "
            "strategy=federated, or leave it out"
        )
    from allhands.planning.measured_profile import MeasuredProfile, write_times
    from allhands.planning.plan import plan as plan_training
    from allhands.world.cores import cores

    read = None
    if profile is not None and (profile.exists() or not measure):
        read = MeasuredProfile(profile)
    times = _times(card, measure, read)
    found = plan_training(
        **_definition(run_file),
        gpus=gpus,
        card=times.card.name,
        memory=memory,
        link=link or (read and read.links()) or "nvlink+ib400",
        per_host=per_host,
        servers=getattr(strategy, "servers", None) or 0 if servers is None else servers,
        own=_own(run_file),
        times=times,
        processes=cores(),
    )
    if measure and profile is not None:
        write_times(profile, times)
    print(json.dumps(found.to_dict()) if as_json else found, flush=True)
    if plot is not None:
        found.plot(plot)
    return 0


def _own(run_file: RunFile) -> Candidate | None:
    """The run file's own way of training; None where it says nothing of it."""
    from allhands.cli.run_objects import strategy_from
    from allhands.planning.candidates import Candidate

    given = run_file.config
    if not given.model_fields_set & {"strategy", "mesh", "activation_checkpointing"}:
        return None
    lines = {"name": given.strategy.name, **given.strategy.options}
    if given.mesh is not None:
        parts = {"strategy": lines} if given.strategy.options else {}
        lines = {"name": "mesh", **parts, **given.mesh.model_dump(exclude_unset=True)}
    return Candidate(strategy_from(run_file), lines, given.activation_checkpointing)


def _of_clients(
    run_file: RunFile, download: str | None, upload: str | None, client_flops: float | None
) -> FederatedPlan:
    from allhands.cli.run_data import entry_of
    from allhands.cli.run_objects import datasets_of, model_of, strategy_from
    from allhands.planning.federated_plan import plan_federated
    from allhands.planning.machines import bandwidth_of

    _check_files(run_file)
    strategy: Any = strategy_from(run_file)
    return plan_federated(
        **_objects(run_file, model_of(run_file, entry_of(run_file))),
        datasets=datasets_of(run_file),
        strategy=strategy,
        seed=run_file.config.seed,
        download=None if download is None else bandwidth_of(download),
        upload=None if upload is None else bandwidth_of(upload),
        flops=client_flops,
    )


def _check_files(run_file: RunFile) -> None:
    from allhands.cli.named import raise_all
    from allhands.cli.run_objects import problems

    raise_all(problems(run_file, files=True))


def _objects(run_file: RunFile, model: Any) -> dict[str, Any]:
    """What every plan takes of a run file."""
    from allhands.cli.run_objects import criterion_of, optimizer_of, runner_of

    return {
        "model": model,
        "criterion": criterion_of(run_file),
        "optimizer": optimizer_of(run_file, model),
        "precision": run_file.config.precision,
        "clip_norm": run_file.config.clip_norm,
        "runner": runner_of(run_file),
    }


def _times(card: str | None, measure: bool, profile: MeasuredProfile | None) -> OperationTimes:
    import torch

    from allhands.planning.machines import card_for
    from allhands.planning.operation_times import OperationTimes, device_name

    device = None
    if measure:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    devices = [device_name(device), None if profile is None else profile.device]
    chosen = card_for(card, *(one for one in devices if one is not None))
    if profile is None:
        return OperationTimes(chosen, device=device)
    return profile.times(chosen, device)


def _definition(run_file: RunFile) -> dict[str, Any]:
    import torch

    from allhands.cli.run_data import entry_of
    from allhands.cli.run_objects import datasets_of, model_of
    from allhands.data import build_feeds
    from allhands.loop.settings import Data
    from allhands.world import World

    _check_files(run_file)
    given = run_file.config
    if given.loop is not None:
        raise UserError(
            "a plan is for steps of a model and a criterion, and this run file has a loop of its "
            "own; call allhands.plan(model=…, criterion=…, optimizer=…, batch=…) with what it does"
        )
    entry = entry_of(run_file)
    try:
        with torch.device("meta"):
            model = model_of(run_file, entry)
    except (RuntimeError, NotImplementedError):  # it computes as it is made
        model = model_of(run_file, entry)
    world = World(0, 0, 0, 1, 1, torch.device("cpu"), "none", "plan")
    sources = Data(None, datasets_of(run_file)).sources(given.seed)
    trained = {name: one for name, one in sources.items() if name.startswith("train")}
    feed = next(iter(build_feeds(trained, world, given.seed).values()))
    return _objects(run_file, model) | {
        "batch": feed.example(given.data.batch_size),
        "accumulate": given.accumulate,
        "step": given.step,
        "keeps_outputs": bool(given.metrics),
    }
