"""What a site keeps between its rounds (control variates, its own layers, residuals), on disk, so
that it survives a restart."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from allhands.atomic_write import atomic_write
from allhands.errors import UserError

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"after_round_(\d+)\.safetensors")


class SiteState:
    """Vectors by name, a file after each round in which the site has trained.

    Which of them counts is the server's to say: it knows whose update it has taken. Kept are that
    one, the one before it (for a server that goes back to its last checkpoint), and the newest.

    Args:
        folder: of all runs; made when something is kept.
        lengths: name to length of each vector.
        dtype: of all of them.
    """

    def __init__(self, folder: Path, lengths: dict[str, int], dtype: torch.dtype) -> None:
        self.folder, self.lengths, self.dtype = folder, lengths, dtype

    def rounds(self, run: str) -> list[int]:
        """After which rounds there is a state of this run, rising."""
        found = (
            _FILE.fullmatch(path.name)
            for path in self._place(run).glob("after_round_*.safetensors")
        )
        return sorted(int(match[1]) for match in found if match)

    def load(
        self, run: str, before: int, since: int | None = None
    ) -> dict[str, torch.Tensor] | None:
        """The vectors with which a site begins a round, on the processor; None for zeros.

        Args:
            run: the run.
            before: the round that begins.
            since: the round of this site's last update that the server has taken; -1: none. None:
                not told, so the newest.

        Raises:
            UserError: the state after that round is not here, or is another training's.
        """
        kept = self.rounds(run)
        if since is None:
            since = max(
                (number for number in kept if number < before), default=None if kept else -1
            )
        if since == -1:
            return None
        if since is None or since not in kept:
            wanted = f"after round {since}" if since is not None else f"before round {before}"
            raise UserError(
                f"this site keeps no state {wanted} of the run {run!r}; it has those after round "
                f"{', '.join(map(str, kept)) or '-'}: start the run anew, or bring the file back"
            )
        path = self._file(run, since)
        try:
            vectors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"the site's {path.name} cannot be read ({type(error).__name__}); start the run "
                "anew, or bring the file back"
            ) from None
        found = {name: (vector.numel(), vector.dtype) for name, vector in vectors.items()}
        if found != {name: (length, self.dtype) for name, length in self.lengths.items()}:
            raise UserError(
                f"the site's {path.name} was written by another training: it keeps "
                f"{', '.join(found) or 'nothing'}; give this run a name of its own"
            )
        return vectors

    def save(
        self, run: str, round_: int, since: int | None, vectors: dict[str, torch.Tensor]
    ) -> None:
        """Keep the vectors after a round, and let go of those that nobody can ask for."""
        place = self._place(run)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = {name: vector.detach().cpu().contiguous() for name, vector in vectors.items()}
        with atomic_write(self._file(run, round_)) as aside:
            save_file(found, aside)
        kept = self.rounds(run)
        taken = [
            number for number in kept if number < round_ and (since is None or number <= since)
        ]
        for number in set(kept) - {round_, *taken[-2:]}:
            self._file(run, number).unlink(missing_ok=True)

    def _place(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise UserError(
                "the run's name must be 1 to 64 letters, digits, dots, hyphens or underscores"
            )
        return self.folder / run

    def _file(self, run: str, round_: int) -> Path:
        return self._place(run) / f"after_round_{round_}.safetensors"
