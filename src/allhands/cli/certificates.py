"""`allhands federated certificates`: an authority, a server's certificate and sites' keys, for a
trial."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def certificates(
    out: Annotated[Path, typer.Option(help="The folder for all files; made where it is missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address by which sites reach the server; may be repeated."),
    ] = None,
    site: Annotated[
        list[str] | None, typer.Option(help="A site that gets a key pair; may be repeated.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.")] = 365,
) -> int:
    """Make what a trial over real sites needs: an authority, the server's certificate, and a key
    pair for each site.

    Nothing is overwritten. A folder that has an authority already signs a new certificate with it,
    and new sites are added to its list.
    """
    from allhands.federated.sites import flower

    flower.require()  # which brings the library that makes keys
    from allhands.federated.sites import trial_keys as trial

    made = trial.make(out, host or [], site or [], days)
    what = {
        trial.AUTHORITY: "the authority's certificate, for the server and every site (--authority)",
        trial.AUTHORITY_KEY: "secret: signs new certificates; keep it elsewhere",
        trial.SERVER: "the server's certificate (--certificate)",
        trial.SERVER_KEY: "secret: the server's private key (--key)",
        trial.ALLOWED: "the list of sites, for the server (--sites)",
    }
    for path in made:
        if path.suffix == ".pub":
            site_key = "the site's public key, as in the list"
        else:
            site_key = "secret: for this site alone (--key)"
        print(f"{path}\n    {what.get(path.name, site_key)}")
    return 0
