"""What the workers and servers of a job share: the store's keys, the token, and TLS where it is
asked for."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from allhands.errors import UserError, warn_renamed
from allhands.wire import TOKEN

_OLD_TOKEN = "ALLHANDS_KVSTORE_TOKEN"
TLS = ("ALLHANDS_KVSTORE_TLS_CERT", "ALLHANDS_KVSTORE_TLS_KEY", "ALLHANDS_KVSTORE_TLS_CA")


def key(number: int) -> str:
    """Under which key of the job's store server `number` makes itself known."""
    return f"allhands/server/{number}"


def servers_of_job() -> int:
    """How many servers the launcher has started for this job."""
    told = os.environ.get("ALLHANDS_NUM_SERVERS") or "0"
    try:
        return int(told)
    except ValueError:
        raise UserError(
            f"ALLHANDS_NUM_SERVERS is {told!r}; it is a whole number, set by the launcher"
        ) from None


def token_from(environ: Mapping[str, str]) -> bytes:
    """The job's token."""
    token = environ.get(TOKEN, "")
    if environ.get(_OLD_TOKEN):
        warn_renamed(_OLD_TOKEN, TOKEN)
        token = environ[_OLD_TOKEN]
    if len(token) < 16:
        told = "has less than 16 characters" if token else "is not set"
        raise UserError(
            f"{TOKEN} {told}: parameter servers talk only to workers of their own job. "
            "`allhands launch -s 1 …` sets it; "
            "with another launcher, set it to the same long random text for all workers and servers"
        )
    return token.encode()


def tls_contexts(environ: Mapping[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Contexts for servers and for clients, from the three variables; None when none of them is
    set.

    Both sides show the certificate and check the other's against the authority; names are not
    checked, because the token already says that both belong to this job.
    """
    paths = {name: environ.get(name, "") for name in TLS}
    if not any(paths.values()):
        return None
    for name, path in paths.items():
        if not path or not Path(path).is_file():
            told = f"{path}, which is no file" if path else "not set"
            raise UserError(
                f"{name} is {told}; TLS needs {', '.join(TLS)}: a certificate, its key, and the "
                "authority that signed it"
            )
    contexts = []
    for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(purpose)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(paths[TLS[0]], paths[TLS[1]])
            context.load_verify_locations(paths[TLS[2]])
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"{', '.join(f'{name}={path}' for name, path in paths.items())}: {error}"
            ) from error
        contexts.append(context)
    return contexts[0], contexts[1]
