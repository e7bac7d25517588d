"""Our Flower `ClientApp`, as it runs in the process that Flower starts for each message: it hands
the message to the site's warm process, and its answer back. Nothing here imports torch.

Where the site was started by `allhands federated site`, the node's configuration names the socket
(``allhands-socket``). In an app that people who operate Flower start themselves, the first message
starts the warm process, which ends when nobody has asked for some minutes; the node's configuration
then says where the data are::

    flower-supernode … --node-config 'data="/data" name="north"'
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from allhands.errors import UserError
from allhands.federated.sites.local_socket import SocketError, ask
from allhands.federated.sites.supervision import write_secretly

#: The variable that names a generated app's run file.
RUN_FILE = "ALLHANDS_SITES_RUN"
#: The key of a node's configuration that names the socket of the site's warm process.
SOCKET = "allhands-socket"
#: In the layer above this one.
DEFINE = "allhands.cli.run_training:definition"
_IDLE = 600.0  # seconds without a message after which a warm process that nobody supervises ends
_START = 600.0  # seconds that it has to load its data

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """What Flower calls for every message."""
    return Message(
        ask(socket_of(context.node_config, context.node_id), message.content), reply_to=message
    )


def socket_of(node_config: Mapping[str, Any], node_id: int) -> Path:
    """The socket of this site's warm process, which is started where no site's command has done so.

    Raises:
        UserError: it is to be started, and the node's configuration does not say where the data
            are.
        SocketError: it ended before it listened.
    """
    if SOCKET in node_config:
        return Path(str(node_config[SOCKET]))
    run_file, data = os.environ.get(RUN_FILE), node_config.get("data")
    if run_file is None or data is None:
        missing = "data" if data is None else RUN_FILE
        raise UserError(
            f"{missing} is not set: start this site by `allhands federated site`, or a generated "
            "app's SuperNode "
            'with --node-config \'data="FOLDER" name="NAME"\''
        )
    name = str(node_config.get("name", node_id))
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    state = (
        Path(str(node_config.get("state", base / "allhands" / "sites" / name)))
        .expanduser()
        .absolute()
    )
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    token_file = node_config.get("token-file")
    settings = settings_of(
        state, name, [run_file], data, None if token_file is None else Path(str(token_file)), _IDLE
    )
    _start(state, settings)
    return Path(settings["socket"])


def settings_of(
    state: Path,
    name: str,
    config: list[str],
    data: Any,
    token_file: Path | None,
    idle: float | None,
    define: str = DEFINE,
) -> dict[str, Any]:
    """What the warm process reads, see `warm_process`; `data` takes the place of the run file's
    data.root, if it is not None."""
    if data is None:
        overrides = []
    else:
        overrides = [f"data.root={json.dumps(str(Path(str(data)).expanduser().absolute()))}"]
    return {
        "define": define,
        "config": config,
        "overrides": overrides,
        "name": name,
        "state": str(state),
        "token_file": None if token_file is None else str(token_file),
        "socket": str(state / "warm.sock"),
        "idle": idle,
    }


def warm_command(state: Path) -> list[str]:
    # -P: a file that lies in the working folder cannot stand for a module.
    return [sys.executable, "-P", "-m", "allhands.federated.sites.warm_process", str(_task(state))]


def write_task(state: Path, settings: Mapping[str, Any]) -> None:
    """Write down what the warm process shall do."""
    write_secretly(_task(state), json.dumps(settings).encode())


def _task(state: Path) -> Path:
    return state / "warm.json"


def _start(state: Path, settings: Mapping[str, Any]) -> None:
    """Start the warm process unless it runs; when several messages come at once, one of them
    does."""
    with open(state / "warm.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _runs(state):
            return
        log = state / "warm.out"
        write_task(state, settings)
        with log.open("wb") as out:
            made = subprocess.Popen(
                warm_command(state),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START
        while not _runs(state):
            if made.poll() is not None or time.monotonic() > deadline:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise SocketError(
                    "the site's warm process did not start: "
                    f"{lines[-1] if lines else 'it said nothing'}"
                )
            time.sleep(0.1)


def _runs(state: Path) -> bool:
    """Whether a warm process of this folder listens; it holds a lock as long as it does."""
    try:
        with open(state / "warm.running", encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
