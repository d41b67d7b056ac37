"""Text as a stream: whole characters, no piece of a stop string, the same however tokens are grouped."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.text import Writer, first_stop, unfinished_stop


class Bytes:
    """Each token is one byte."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, *tokens: int) -> str:
        return self.decoder.decode(bytes(tokens))

    def finish(self) -> str:
        return self.decoder.decode(b"", final=True)


def write(data: bytes, stops: tuple[str, ...], include: bool = False) -> tuple[list[str], bool]:
    writer = Writer(Bytes(), stops, include)
    pieces = []
    for token in data:
        text, stopped = writer.feed([token])
        pieces.append(text)
        if stopped:
            return pieces, True
    return [*pieces, writer.finish()], False


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """What should be shown: the text up to the stop string that completes first."""
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
    if not ends:
        return text, False
    end, begin = ends[0]
    return text[: end if include else begin], True


texts = st.text(alphabet="abé€😀", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé€", min_size=1, max_size=4), max_size=3).map(tuple)


@given(text=texts, stops=stop_lists, include=st.booleans())
def test_what_is_shown_is_the_text_before_the_stop(text, stops, include):
    pieces, stopped = write(text.encode(), stops, include)
    assert ("".join(pieces), stopped) == cut(text, stops, include)


@given(text=texts, stops=stop_lists)
def test_no_piece_ever_shown_begins_a_stop_that_completes(text, stops):
    shown = ""
    final = cut(text, stops, include=False)[0]
    for piece in write(text.encode(), stops)[0]:
        shown += piece
        assert final.startswith(shown)


@given(text=texts, stops=stop_lists, include=st.booleans(), sizes=st.lists(st.integers(1, 5), max_size=40))
def test_any_number_of_tokens_at_a_time_shows_the_same(text, stops, include, sizes):
    writer, data, shown, stopped, at = Writer(Bytes(), stops, include), text.encode(), "", False, 0
    for size in [*sizes, len(data)]:
        piece, count = writer.feed(data[at : at + size])
        shown += piece
        if count:
            assert "".join(write(data[: at + count], stops, include)[0]) == shown
            stopped = True
            break
        at += size
    if not stopped:
        shown += writer.finish()
    assert (shown, stopped) == cut(text, stops, include)


@given(data=st.binary(max_size=24))
def test_broken_bytes_become_whole_characters(data):
    pieces, _ = write(data, ())
    assert "".join(pieces) == data.decode("utf-8", "replace")
    for piece in pieces:
        piece.encode("utf-8")


def test_the_stop_that_completes_first_counts():
    assert first_stop("xabcd", ("abcd", "bc")) == (2, 4)
    assert first_stop("xyz", ("abc",)) is None
    assert unfinished_stop("hello wor", ("world", "or")) == 3
    assert unfinished_stop("hello", ()) == 0


def test_the_stop_that_was_completed_is_known():
    writer = Writer(Bytes(), ("bcd", "cd"), False)
    assert writer.feed(b"abc") == ("a", 0)
    assert writer.matched is None
    assert writer.feed(b"d") == ("", 1)
    assert writer.matched == "bcd"


def test_unarmed_stops_are_not_looked_for():
    writer = Writer(Bytes(), ("a",), False)
    assert writer.feed(b"xa", free=2) == ("xa", 0)
    assert writer.feed(b"xa", free=1) == ("x", 2)
