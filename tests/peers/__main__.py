"""`python -m tests.peers PEER=FOLDER …`: writes the pages of the peers whose source lies there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.peers import catalyst_names, pages

for given in sys.argv[1:]:
    peer, _, folder = given.partition("=")
    if folder:
        write = {"CATALYST": catalyst_names.write, **pages.WRITERS}[peer]
        print(f"written to {write(Path(folder))}")
