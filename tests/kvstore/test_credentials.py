from __future__ import annotations

import pytest

from allhands.errors import UserError
from allhands.kvstore.credentials import token_from

LONG = "0123456789abcdef"


def test_the_jobs_secret_has_one_name_and_an_old_one() -> None:
    assert token_from({"ALLHANDS_TOKEN": LONG}) == LONG.encode()
    with pytest.warns(FutureWarning, match="ALLHANDS_KVSTORE_TOKEN is an old spelling.*write ALLH"):
        assert token_from({"ALLHANDS_KVSTORE_TOKEN": LONG, "ALLHANDS_TOKEN": "x"}) == LONG.encode()


@pytest.mark.parametrize(
    ("token", "message"), [("", "is not set"), (LONG[:-1], "has less than 16 characters")]
)
def test_a_secret_that_is_missing_or_short_is_refused(token: str, message: str) -> None:
    with pytest.raises(UserError, match=f"ALLHANDS_TOKEN {message}"):
        token_from({"ALLHANDS_TOKEN": token})
