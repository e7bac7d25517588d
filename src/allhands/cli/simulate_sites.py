"""`allhands federated simulate`: a run across sites in this place, before it is run at the
sites."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.shared_options import Overrides, RunFiles, root_override
from allhands.config import read_run
from allhands.errors import UserError

if TYPE_CHECKING:
    from allhands.config import RunFile

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
