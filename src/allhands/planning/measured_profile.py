"""The file of `--profile`: what `allhands plan` has measured of operations and steps, and
`allhands doctor` of links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from allhands.errors import UserError
from allhands.planning.machines import Card
from allhands.planning.measured_links import MeasuredLinks, links_of
from allhands.planning.operation_times import OperationTimes, device_name
from allhands.planning.step_correction import StepCorrection


class MeasuredProfile:
    """What such a file says; it is read once.

    Raises:
        UserError: the file is not there, or is none of these.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{path} is not there; `allhands plan --measure --profile {path}` writes it"
            ) from None
        except ValueError:
            self._found = {}
        if not isinstance(self._found, dict):
            self._found = {}
        if not self._found.keys() & {"links", "operations"}:
            raise self._without_operations()

    def operations(self) -> dict[str, float]:
        """Measured seconds by `Operation.key`; none where links alone were measured."""
        try:
            found = self._found.get("operations", {})
            return {str(key): float(value) for key, value in found.items()}
        except (ValueError, TypeError, AttributeError):
            raise self._without_operations() from None

    @property
    def device(self) -> str | None:
        """On which the operations were measured, by PyTorch's name; None where none were."""
        return str(self._found["device"]) if self.operations() and "device" in self._found else None

    def times(self, card: Card, device: torch.device | None = None) -> OperationTimes:
        """Of operations and of steps.

        Args:
            card, device: as for `OperationTimes`.
        """
        correction = {
            str(key): float(one) for key, one in self._found.get("correction", {}).items()
        }
        times = OperationTimes(card, self.operations(), device, StepCorrection(**correction))
        launch = self._found.get("launch")
        times.launch = None if launch is None else float(launch)
        times.own = {str(name): float(one) for name, one in self._found.get("own", {}).items()}
        return times

    def links(self) -> MeasuredLinks | None:
        """None where none were measured.

        Raises:
            UserError: what the file says of them is not what the doctor writes.
        """
        return links_of(self._found.get("links"), self.path)

    def _without_operations(self) -> UserError:
        return UserError(
            f"{self.path} has no measured operations; `allhands plan --measure --profile FILE` "
            "writes such a file"
        )


def write_times(path: Path, times: OperationTimes) -> None:
    """Write down what was measured, for machines without the card, beside links that are there."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= {
        "device": device_name(times.device),
        "torch": torch.__version__,
        "operations": times.known,
    }
    if times.launch is not None:
        found["launch"] = times.launch
    found["own"] = times.own
    found["workspaces"] = {key: size for key, size in times.workspaces.items() if size}
    found["correction"] = vars(times.correction)
    text = json.dumps(found, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
