"""`allhands predict`: what a trained model gives for every sample, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allhands.cli.run_folder import needed_run_file, read_folder
from allhands.cli.shared_options import Changes, Of, Workers


def predict(
    run: Of,
    overrides: Changes = None,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The file to write: .csv, .parquet (needs pyarrow) or .npz.",
            show_default=False,
        ),
    ],
    loader: Annotated[str, typer.Option("--loader", help="Whose samples.")] = "valid",
    workers: Workers = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if there is one.")
    ] = False,
) -> int:
    """Write a model's outputs into a file, one row a sample, in the order of the data set.

    The columns: sample (its number), target where the data set is a TensorDataset, predicted (the
    class) where the criterion compares classes, and each number of the output.
    """
    from allhands.cli import prediction_files

    prediction_files.check_path(output, force)
    folder = read_folder(run)
    run_file = needed_run_file(folder, overrides)
    from allhands.cli import trained

    checkpoint = trained.checkpoint_of(run, folder.path)
    found = trained.predict(run_file, checkpoint, loader, workers)
    prediction_files.write(output, found)
    arrays = found.arrays()
    print(
        f"{output}: {len(arrays['sample']):,} rows ({', '.join(arrays)}), from {checkpoint}, "
        f"loader {loader}"
    )
    return 0
