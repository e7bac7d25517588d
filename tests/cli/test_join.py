"""`allhands join`: where the job's token comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from allhands.cli.join import read_token
from allhands.errors import UserError


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "join.token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_token_is_that_of_the_file_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLHANDS_TOKEN", "from-the-environment")
    assert read_token(None) == "from-the-environment"
    assert read_token(token_file(tmp_path, "from-the-file\n")) == "from-the-file"
    monkeypatch.delenv("ALLHANDS_TOKEN")
    with pytest.raises(UserError, match="write --token-file FILE"):
        read_token(None)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("secret", 0o644, r"others than its owner may read it \(mode 644\); write chmod 600"),
        ("\n", 0o600, "is empty"),
        ("sécret", 0o600, "cannot be read"),
    ],
    ids=["open", "empty", "no-ascii"],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_token(token_file(tmp_path, text, mode))
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "absent")
