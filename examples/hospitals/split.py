"""Cut the heart-disease file into one a hospital: python split.py DATA, with ALLHANDS_DATA naming
the folder of the file.

After this, DATA/cleveland/patients.npz and so on are the only files that the hospitals read; each
would lie at its hospital.
"""

import os
import sys
from pathlib import Path

import numpy as np

SHARE = 0.25  # of a hospital's patients, kept for testing


def main(out: Path) -> None:
    if "ALLHANDS_DATA" not in os.environ:
        sys.exit("ALLHANDS_DATA is not set; it names the folder that holds heart_disease_sites.npz")
    with np.load(
        Path(os.environ["ALLHANDS_DATA"], "heart_disease_sites.npz"), allow_pickle=False
    ) as file:
        x, y, site, names = (
            file["x"],
            (file["num"] > 0).astype(np.int64),
            file["site"],
            file["sites"],
        )
    for number, name in enumerate(map(str, names)):
        rows = np.random.default_rng(number).permutation(np.flatnonzero(site == number))
        test, train = np.split(rows, [round(SHARE * len(rows))])
        (out / name).mkdir(parents=True, exist_ok=True)
        np.savez(
            out / name / "patients.npz", x=x[train], y=y[train], x_test=x[test], y_test=y[test]
        )
        print(
            f"{name}: {len(train)} patients to train on, {len(test)} to test, {y[rows].mean():.0%} "
            "with disease"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
