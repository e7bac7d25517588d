"""Messages survive any bytes and any cutting."""

from __future__ import annotations

from allhands.launch.protocol import bytes_of, text_of
from allhands.wire import LineReader, encode


def test_every_byte_travels() -> None:
    data = bytes(range(256)) * 3 + "é🏖\u2028".encode() + b"\xf0\x9f\xed\xa0\x80"
    (message,) = LineReader().feed(encode({"text": text_of(data)}))
    assert bytes_of(message["text"]) == data


def test_a_surrogate_that_no_bytes_gave() -> None:
    assert bytes_of("a\ud800b") == b"a?b"


def test_messages_in_pieces() -> None:
    stream = encode({"n": 1}) + encode({"n": 2}) + encode({"n": 3})
    inbox, got = LineReader(), []
    for index in range(len(stream)):
        got += inbox.feed(stream[index : index + 1])
    assert [message["n"] for message in got] == [1, 2, 3]
