"""Who a site is: its key pair, the server's list of the sites that may take part, and tokens.

A site proves by its private key who it is, and the server knows the public ones from its allow
list. A token is a further secret that can be taken away at any moment: the server's file of tokens
is read anew for every check. Importing this module imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from allhands.errors import UserError

#: The environment variable that holds a site's token where no file does.
TOKEN = "ALLHANDS_SITE_TOKEN"
_SHORTEST_TOKEN = 16
_EDITED = 0.3  # seconds within which an editor has written a file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_PEM = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo


def check_name(name: str, what: str = "the site's name") -> str:
    """A site's name, or `UserError` where it is none: it names files and stands in lists, separated
    by blanks."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{what} {name!r}: write letters, digits, '.', '_' and '-', the first one a letter or "
            "digit, and at most 63 of them"
        )
    return name


def read_file(path: Path | str, what: str, *, private: bool = False) -> bytes:
    """What lies in a file of keys.

    Args:
        path: the file.
        what: what it is, for a message: "the site's private key".
        private: only its owner may read it.
    """
    path = Path(path).expanduser()
    try:
        with open(path, "rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read()
    except FileNotFoundError:
        raise UserError(f"{what}: there is no file {str(path)!r}") from None
    except OSError as error:
        raise UserError(f"{what}: {str(path)!r} cannot be read: {error.strerror}") from None
    if private and mode & 0o077:
        raise UserError(
            f"{what}: others than its owner may read or change {str(path)!r} (mode "
            f"{mode & 0o777:04o}); write chmod 600 {path}"
        )
    if not data.strip():
        raise UserError(f"{what}: {str(path)!r} is empty; copy it again from where it was made")
    return data


def write_new(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file that does not exist yet. Raises `UserError` where it does."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    except FileExistsError:
        raise UserError(
            f"{str(path)!r} exists already, and keys are never overwritten; move it away first"
        ) from None
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------- key pairs


def make_site_key(path: Path, name: str) -> str:
    """Make a site's key pair: `path` (private, OpenSSH format, mode 0600) and ``path.pub``.

    Returns:
        The site's line of the allow list: its name and its public key.
    """
    public_path = path.with_name(path.name + ".pub")
    if public_path.exists():
        raise UserError(
            f"{str(public_path)!r} exists already, and keys are never overwritten; move it away "
            "first"
        )
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        _PEM[0], serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_new(path, private, private=True)
    public = (
        key.public_key()
        .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        .decode()
    )
    write_new(public_path, f"{public} {name}\n".encode())
    return f"{name} {public}"


def read_site_key(path: Path | str) -> bytes:
    """The public key that belongs to a site's private key, as in `read_allow_list`."""
    what = "the site's private key (--key)"
    data = read_file(path, what)
    make = "make one by `allhands federated certificates --out DIR --site NAME`"
    if data.startswith((b"ecdsa-", b"ssh-", b"-----BEGIN PUBLIC", b"-----BEGIN CERT")):
        raise UserError(
            f"{what}: {str(path)!r} holds a public key; give the private one, which is the file "
            "without .pub"
        )
    data = read_file(path, what, private=True)
    if not data.lstrip().startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----"):
        raise UserError(
            f"{what}: {str(path)!r} is no private key in OpenSSH's format, and Flower takes no "
            f"other; {make}, or bring yours into it: ssh-keygen -p -N '' -f {path}"
        )
    try:
        key = serialization.load_ssh_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if "password" in str(error).lower() or "encrypted" in str(error).lower():
            raise UserError(
                f"{what}: {str(path)!r} is protected by a passphrase, which nobody could enter; "
                f"take it away: ssh-keygen -p -N '' -f {path}"
            ) from None
        raise UserError(
            f"{what}: {str(path)!r} is cut or damaged; copy it again from where it was made, or "
            f"{make}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, _CURVES):
        raise UserError(
            f"{what}: {str(path)!r} is no key on a NIST curve, and Flower takes no other; {make}"
        )
    return key.public_key().public_bytes(*_PEM)


def fingerprint(public: bytes) -> str:
    """A public key in short, as ``ssh-keygen -l`` prints it: ``SHA256:…``; "no key" where the bytes
    are none."""
    try:
        key = serialization.load_pem_public_key(public)
        line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        blob = base64.b64decode(line.split()[1])
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return "no key"
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


# ---------------------------------------------------------------------- the allow list


def read_allow_list(path: Path | str) -> dict[str, bytes]:
    """The sites that may take part, from lines ``name ecdsa-sha2-nistp384 AAAA…``.

    Returns:
        Name to public key, in the order of the file; keys in PEM, as Flower's server has them
        (`NodeInfo.public_key`).
    """
    what = "the list of sites (--sites)"
    allowed: dict[str, bytes] = {}
    for where, words in _lines(path, read_file(path, what), what):
        if len(words) < 3:
            raise UserError(
                f"{where}: write a site's name and its public key: name ecdsa-sha2-nistp384 AAAA…"
            )
        name = check_name(words[0], f"{where}: the name")
        try:
            key = serialization.load_ssh_public_key(" ".join(words[1:3]).encode())
        except (ValueError, UnsupportedAlgorithm):
            raise UserError(
                f"{where}: the key of {name!r} is cut or none; copy the line of its file NAME.pub "
                "again"
            ) from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
            raise UserError(
                f"{where}: the key of {name!r} is of the kind {words[1]}, and Flower takes "
                "ecdsa-sha2-nistp384; make "
                "one by `allhands federated certificates --out DIR --site NAME`"
            )
        public = key.public_bytes(*_PEM)
        if name in allowed:
            raise UserError(f"{where}: there are two keys of {name!r}; leave one of them")
        if public in allowed.values():
            other = next(other for other, known in allowed.items() if known == public)
            raise UserError(
                f"{where}: {name!r} has the key of {other!r}; each site needs a key of its own"
            )
        allowed[name] = public
    if not allowed:
        raise UserError(
            f"{what}: {str(path)!r} names no site; write a line for each: name ecdsa-sha2-nistp384 "
            "AAAA…"
        )
    return allowed


def check_key(allowed: Mapping[str, bytes], public: bytes) -> tuple[str | None, str]:
    """Whose key it is, and where it is nobody's, None and the reason for refusal."""
    for name, known in allowed.items():
        if hmac.compare_digest(known, public):
            return name, ""
    return (
        None,
        f"its key {fingerprint(public)} is not on the list of sites; add its line to the file, if "
        "it may take part",
    )


# ---------------------------------------------------------------------- tokens


def read_tokens(path: Path | str) -> dict[str, str]:
    """The tokens of the sites, from lines ``name token``."""
    what = "the file of tokens (--tokens)"
    tokens: dict[str, str] = {}
    for where, words in _lines(path, read_file(path, what, private=True), what):
        if len(words) != 2:
            raise UserError(f"{where}: write a site's name, a blank and its token")
        name = check_name(words[0], f"{where}: the name")
        _check_token(words[1], f"{where}: the token of {name!r}")
        if name in tokens:
            raise UserError(f"{where}: there are two tokens of {name!r}; leave one of them")
        if words[1] in tokens.values():
            raise UserError(f"{where}: {name!r} has the token of another site; give each its own")
        tokens[name] = words[1]
    return tokens


def prove(token: str, challenge: str, site: str) -> str:
    """What a site sends in place of its token: an HMAC of the server's challenge, of no use for
    another one. So the token itself is in no message, nor in the database where messages wait."""
    return hmac.new(
        token.encode(), f"allhands site {site} {challenge}".encode(), hashlib.sha256
    ).hexdigest()


def check_token(path: Path | str, site: str, proof: str | None, challenge: str) -> str | None:
    """Whether a site knows the token in the server's file, which is read anew, so that a token that
    was taken away is refused at once.

    Args:
        path: the file of tokens.
        site: whose.
        proof: what the site has sent, which should be that of `prove`.
        challenge: what it was sent before.

    Returns:
        None where it does; otherwise the reason for refusal, which holds no token.
    """
    try:
        tokens = _read_while_edited(path)
    except UserError as error:
        return f"its token cannot be checked: {error}"
    given = proof if isinstance(proof, str) else ""
    # Compared also where there is nothing to compare with, so that the time tells nobody which
    # names have a token.
    right = hmac.compare_digest(
        prove(tokens.get(site, ""), challenge, site).encode(), given.encode(errors="replace")
    )
    if site not in tokens:
        return (
            f"there is no token of {site!r} in the server's file (--tokens); add a line to it, "
            "if the site may take part"
        )
    if not given:
        return f"it has no token; start the site with --token-file FILE, or with {TOKEN} set"
    if right:
        return None
    return "its token is not the one in the server's file (--tokens); give the site the right one"


def _read_while_edited(path: Path | str) -> dict[str, str]:
    """`read_tokens`, once more where the file is just being written."""
    try:
        return read_tokens(path)
    except UserError:
        time.sleep(_EDITED)
        return read_tokens(path)


def site_token(file: Path | str | None, environ: Mapping[str, str]) -> str | None:
    """A site's own token, from its file, or from `TOKEN` in the environment; None where there is
    neither.
    """
    given = environ.get(TOKEN)
    if file is None:
        return None if given is None else _check_token(given.strip(), f"the token in {TOKEN}")
    if given is not None:
        raise UserError(
            f"there is a token in --token-file {file} and in {TOKEN}; leave one of them out"
        )
    what = "the site's token (--token-file)"
    words = read_file(file, what, private=True).decode(errors="replace").split()
    if len(words) != 1:
        raise UserError(
            f"{what}: {str(file)!r} holds {len(words)} words; write the token and nothing else, "
            "not even the name"
        )
    return _check_token(words[0], what)


def _check_token(token: str, what: str) -> str:
    if (
        len(token) < _SHORTEST_TOKEN
        or not (token.isascii() and token.isprintable())
        or " " in token
    ):
        raise UserError(
            f"{what} must be at least {_SHORTEST_TOKEN} letters and digits; make one by openssl "
            "rand -hex 24"
        )
    return token


def _lines(path: Path | str, data: bytes, what: str) -> Iterator[tuple[str, list[str]]]:
    """Where each line is, for a message, and its words; without comments and empty lines."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{what}: {str(path)!r} is no text") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield f"{path}, line {number}", words
