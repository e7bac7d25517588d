"""`allhands evaluate`: measure what a run has trained."""

from __future__ import annotations

import json

from allhands.cli.run_folder import needed_run_file, read_folder
from allhands.cli.shared_options import Changes, Json, Loaders, Of, Workers


def evaluate(
    run: Of,
    overrides: Changes = None,
    *,
    loader: Loaders = None,
    workers: Workers = 1,
    as_json: Json = False,
) -> int:
    """Measure the loss and the metrics of a run's weights, each sample counted once.

    Data, metrics and criterion are those of the run.yml in the folder, with the changes that follow
    it: data.root=/other measures on other data.
    """
    folder = read_folder(run)
    run_file = needed_run_file(folder, overrides)
    from allhands.cli import trained

    checkpoint = trained.checkpoint_of(run, folder.path)
    found = trained.evaluate(run_file, checkpoint, loader, workers)
    if as_json:
        print(json.dumps({"checkpoint": str(checkpoint), "measured": found}))
        return 0
    print(f"{checkpoint}:")
    for name, values in found.items():
        print(f"  {name}: " + ", ".join(f"{key} {value:.6g}" for key, value in values.items()))
    return 0
