"""What the server asks of its own SuperLink: which keys may connect, and the run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allhands.errors import UserError
from allhands.federated.sites import app, flower_compat


class Unanswered(Exception):
    """The SuperLink has not answered, or not with what was asked for."""


class Control:
    """The control interface of a SuperLink on this machine.

    Args:
        address: the SuperLink's, HOST:PORT.
        authority: the file of the authority that signed its certificate; None: no TLS.
    """

    def __init__(self, address: str, authority: Path | None) -> None:
        self._client = flower_compat.ControlHttpClient.from_server_address(
            server_address=address,
            insecure=authority is None,
            root_certificates=None if authority is None else authority.read_bytes(),
            interceptors=[flower_compat.RuntimeVersion(component_name="allhands")],
        )

    def _ask(self, name: str, request: Any) -> Any:
        import httpx

        try:
            return getattr(self._client, name)(request)
        except httpx.HTTPError as error:
            raise Unanswered(f"{name}: {error or type(error).__name__}") from error

    def register(self, keys: Mapping[str, bytes]) -> None:
        """Let exactly these keys connect; by the sites' names.

        Raises:
            UserError: a key was on the list, then off it, and is on it again, which Flower's
                database does not allow.
        """
        requests = flower_compat.control_pb2
        nodes = self._ask("ListNodes", requests.ListNodesRequest()).nodes_info
        let_in = {node.public_key: node.node_id for node in nodes if node.status != "unregistered"}
        gone = {node.public_key for node in nodes} - let_in.keys()
        for key, node_id in let_in.items():
            if key not in keys.values():
                self._ask("UnregisterNode", requests.UnregisterNodeRequest(node_id=node_id))
        for name, key in keys.items():
            if key in gone:
                raise UserError(
                    f"the key of {name} was taken off the list of sites before, and Flower lets no "
                    "such key in again; make a new one, or delete superlink.db in the state folder"
                )
            if key not in let_in:
                self._ask("RegisterNode", requests.RegisterNodeRequest(public_key=key, name=name))

    def start(self, text: str) -> int:
        """Submit the run, after stopping those that an earlier server has left; the run's id.

        Args:
            text: the run file, for whoever looks at the app; nothing of it is read again.
        """
        requests = flower_compat.control_pb2
        for run in self._runs().values():
            if run.status.status != "finished":
                self._ask("StopRun", requests.StopRunRequest(run_id=run.run_id))
        content, _ = flower_compat.build_fab_from_files(app.files(text))
        fab = flower_compat.Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = requests.StartRunRequest(fab=flower_compat.fab_to_proto(fab))
        started = self._ask("StartRun", request)
        if not started.HasField("run_id"):
            raise Unanswered("it has refused the run")
        return int(started.run_id)

    def ended(self, run_id: int) -> tuple[str, str] | None:
        """How the run ended ("completed", "failed" or "stopped") and why, or None while it goes
        on."""
        run = self._runs().get(run_id)
        if run is None or run.status.status != "finished":
            return None
        return run.status.sub_status, run.status.details

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _runs(self) -> Any:
        return self._ask("ListRuns", flower_compat.control_pb2.ListRunsRequest()).run_dict
