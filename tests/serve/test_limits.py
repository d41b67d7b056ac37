"""Bodies, schemas and messages from strangers: what is let through, and that nothing else ever happens."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidRequest
from outrider.serve.limits import (
    MAX_DIGITS,
    MAX_FIELDS,
    MAX_MESSAGE,
    SLICE,
    StringScan,
    check_schema,
    clean_error,
    read_json,
)

DEPTH = 64

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**39), 10**39)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.text('"\\[]{}:,')
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\[{a'), inner), max_leaves=30
)


def refused(body: bytes, says: str = "", depth: int = DEPTH) -> None:
    with pytest.raises(InvalidRequest, match=r"^We could not parse the JSON body of your request: ") as told:
        read_json(body, depth)
    assert says in str(told.value) and told.value.param is None


# -------------------------------------------------------------------------------------------------- bodies


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_agrees_with_json_on_what_is_valid(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    read = read_json(text.encode(), 100)
    assert read == value and json.dumps(read) == json.dumps(value)


@given(VALUES, st.lists(st.integers(1, 7), min_size=1))
def test_a_body_in_pieces_has_the_strings_of_the_whole(value: Any, sizes: list[int]) -> None:
    """Piece by piece or at once: the same quotes, the same open string, and nothing is read twice."""
    body = json.dumps(value).encode()[:-1]
    whole, pieces, plain = StringScan(), StringScan(), []
    for size in sizes * len(body):
        if not body:
            break
        plain.append(pieces.feed(body[:size]))
        body = body[size:]
    body = json.dumps(value).encode()[:-1]
    assert b"".join(plain) == whole.feed(body)
    assert (pieces.inside, pieces.open_bytes) == (whole.inside, whole.open_bytes)


@pytest.mark.parametrize("before", range(SLICE - 45, SLICE + 3, 4))
def test_what_lies_across_two_slices_is_found(before: int) -> None:
    """Bodies are looked at in slices; what is refused may begin in one and end in the next."""
    padding = b" " * (before - 5)
    refused(b'{"a":' + padding + b"7" * (MAX_DIGITS + 1) + b"}", "digits")
    refused(b'{"a":' + padding + b'"\\ud83d' + b" " * 99 + b'"}', "surrogate pair")
    refused(b'{"a":' + padding + b"[" * 70 + b"]" * 70 + b"}", "nested")
    long = b"7" * MAX_DIGITS
    for fine in (long, long + b"7.5", b'"' + b"[" * 70 + b'"', b'"\\\\"', b'"\\""', b'"\\ud83d\\ude00"'):
        assert read_json(b'{"a":' + padding + fine + b"}", DEPTH) == json.loads(b'{"a":' + fine + b"}")


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"a":0}'])
def test_many_lists_objects_and_fields_are_refused_before_they_are_made(item: bytes) -> None:
    refused(b"[" + b",".join([item] * MAX_FIELDS) + b"]", "lists, objects and fields")
    assert len(read_json(b"[" + b",".join([item] * (MAX_FIELDS // 3)) + b"]", DEPTH)) == MAX_FIELDS // 3
    text = b",".join([item] * MAX_FIELDS).replace(b'"', b"'")
    assert read_json(b'{"a":"' + text + b'"}', DEPTH) == {"a": text.decode()}


PIECES = rb'" \ [ ] { } , : 1 - e9 . NaN true "a": \ud83d \ude00'.split()
ODD = [b" ", b"\n", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"9" * 50]
NEAR_JSON = st.lists(st.sampled_from([*PIECES, *ODD]), max_size=40).map(b"".join)


@given(st.binary(max_size=200) | NEAR_JSON | VALUES.map(lambda v: json.dumps(v).encode()[:-1]))
@example(b"")
@example(b"[" * 5000)
@example(b'{"a":' * 5000)
@example(b'"\\')
@settings(max_examples=150)
def test_arbitrary_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        value = read_json(body, DEPTH)
    except InvalidRequest:
        return
    assert value == json.loads(body.decode("utf-8"))  # whatever is let through, others read the same way
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # and it can be written and tokenized


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "nan", '{"temperature": NaN}', "[1e400]", "-1e999"]
)
def test_numbers_that_are_none(text: str) -> None:
    refused(text.encode())


HALVES = [r'"\ud800"', r'"\udc00"', r'"\ude00\ud83d"', r'"\ud83d\ud83d"', r'"\ud83dA"', r'"\uD83D\u0041"']
WITHIN = [r'{"content": "cut \ud83d"}', r'{"\ud800": 1}', r'["\ud83d", "more text behind it"]']


@pytest.mark.parametrize("text", HALVES + WITHIN)
def test_half_a_surrogate_pair(text: str) -> None:
    refused(text.encode(), "half of a surrogate pair")


def test_whole_surrogate_pairs() -> None:
    assert read_json(rb'"\ud83d\ude00 \\ud83d \u0000"', DEPTH) == "\U0001f600 \\ud83d \x00"


@pytest.mark.parametrize(
    "body",
    [
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\xc0\xaf"',
        b'"\xf4\x90\x80\x80"',
        b'{"\xe2\x82": 1}',
        b'["ok", "\xc3"]',
    ],
)
def test_what_is_not_utf8(body: bytes) -> None:
    refused(body, "not UTF-8")


@pytest.mark.parametrize("body", ['{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"\x00", b"", b"  "])
def test_other_encodings_and_nothing(body: bytes) -> None:
    refused(body)


@pytest.mark.parametrize(
    "text", ["{} x", "[1,]", "{'a': 1}", '{"a": 1', "01", "+1", "// c\n1", '"\n"', '"\\x"', "tru"]
)
def test_what_is_nearly_json(text: str) -> None:
    refused(text.encode())


@pytest.mark.parametrize("digits", [MAX_DIGITS + 1, 309, 4300, 4301, 100_000])
@pytest.mark.parametrize("where", ["%s", "-%s", '{"seed": %s}', '[["%s"], {"a": [1, %s]}]'])
def test_integers_of_absurd_length(digits: int, where: str) -> None:
    refused((where.replace("%s", "9" * digits)).encode())


def test_digits_that_are_no_long_integer() -> None:
    fine = ["9" * MAX_DIGITS, '"' + "9" * 500 + '"', "0." + "1" * 500, "9" * 60 + "e-50", "9" * 60 + ".5"]
    fine += ["1e-" + "0" * 50 + "1", "1E+" + "0" * 50, "1e" + "0" * 50, "0.5e1", str(-(2**64))]
    for text in fine:
        assert read_json(text.encode(), DEPTH) == json.loads(text)


def test_of_a_name_given_twice_the_last_counts() -> None:
    assert read_json(b'{"a": 1, "a": 2}', DEPTH) == {"a": 2}


@pytest.mark.parametrize(
    ("opens", "closes", "levels"), [("[", "]", 1), ('{"a":', "}", 1), ('[{"b":', "}]", 2)]
)
def test_nesting_up_to_the_limit_and_no_deeper(opens: str, closes: str, levels: int) -> None:
    def nested(times: int) -> bytes:
        return f"{opens * times}1{closes * times}".encode()

    read_json(nested(6 // levels), 6)
    refused(nested(6 // levels + 1), "nested deeper than 6 levels", depth=6)


def test_brackets_in_strings_are_not_nesting() -> None:
    for text in ["[" * 100, '\\"' + "{" * 100, "\\\\\\" + "[" * 100, '"[{"' * 50]:
        body = json.dumps([text, [text]]).encode()
        assert read_json(body, 2) == [text, [text]]
        refused(body, "nested deeper than 1 levels", depth=1)
    refused(rb'["\\",' + b"[" * 70, "nested deeper")  # the quote after an escaped backslash closes


def test_many_shallow_values_are_not_deep() -> None:
    assert len(read_json(json.dumps([[{}]] * 500).encode(), 3)) == 500


ADVERSARIES = {
    "deep lists": b"[",
    "deep objects": b'{"":',
    "pairs": b"[],",
    "strings": b'"[",',
    "escaped quotes": b'\\"',
    "backslashes": b"\\",
    "digits": b"9",
    "runs of digits": b"9" * 39 + b",",
    "half pairs": b"\\ud83d",
    "closers": b"]",
}


@pytest.mark.parametrize("opening", [b"", b'"', b"["])
@pytest.mark.parametrize("piece", ADVERSARIES.values(), ids=ADVERSARIES)
def test_time_is_linear_whatever_comes(opening: bytes, piece: bytes) -> None:
    body = opening + piece * ((1 << 20) // len(piece))  # quadratic would be hours
    begin = time.thread_time()
    refused(body)
    assert time.thread_time() - begin < 5


def test_a_parser_that_gives_up_on_depth_is_no_crash() -> None:
    refused(b"[" * 2000 + b"]" * 2000, depth=5000)


# ------------------------------------------------------------------------------------------------- schemas


def check(schema: Any, max_bytes: int = 65536, max_depth: int = 16) -> None:
    check_schema(schema, max_bytes, "response_format", max_depth)


GOOD_SCHEMAS: list[Any] = [
    {},
    True,
    {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://x.org/s", "type": "object"},
    {"$defs": {"a": {"type": "string"}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
    {"$ref": "#"},
    {"properties": {"$ref": {"type": "string"}}},
]


@pytest.mark.parametrize("schema", GOOD_SCHEMAS)
def test_good_schemas(schema: Any) -> None:
    check(schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ([], "must be a JSON schema"),
        ("{}", "must be a JSON schema"),
        (None, "must be a JSON schema"),
        ({"enum": ["x" * 70000]}, "at most 65536 are allowed"),
        ({"$ref": "http://127.0.0.1/s.json"}, "only references within the schema"),
        ({"anyOf": [{"items": {"$ref": "file:///etc/passwd"}}]}, "only references within the schema"),
        ({"$ref": "other.json#/a"}, "only references within the schema"),
        ({"$ref": ""}, "only references within the schema"),
        ({"not": {"$dynamicRef": "https://x.org/#a"}}, r"\$dynamicRef"),
        ({"a": object()}, "not JSON"),
    ],
)
def test_bad_schemas(schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as told:
        check(schema)
    assert told.value.param == "response_format" and "response_format" in str(told.value)


def test_schema_nesting() -> None:
    schema: dict[str, Any] = {}
    for _ in range(15):
        schema = {"items": schema}
    check(schema)  # 16 levels
    with pytest.raises(InvalidRequest, match="nested deeper than 16 levels"):
        check({"items": schema})
    for _ in range(100_000):
        schema = {"items": [schema]}
    with pytest.raises(InvalidRequest, match="nested deeper than 16 levels"):
        check(schema)
    while schema.get("items"):  # freeing it all at once would recurse
        schema = schema["items"][0] if isinstance(schema["items"], list) else schema["items"]


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (
            "cannot read <_io.BytesIO object at 0x7a95e299e750>",
            "cannot read <_io.BytesIO object at <address>>",
        ),
        ("no such file: /home/me/models/x.gguf", "no such file: <path>"),
        ("No such file or directory: '/home/my user/a b.bin'", "No such file or directory: '<path>'"),
        ('File "/usr/lib/python3.11/json/decoder.py", line 3', 'File "<path>", line 3'),
        ("in (/srv/app/x.py:12) and /opt/y/z, too", "in (<path>:12) and <path>, too"),
        ("at error:/etc/outrider/keys.toml", "at error:<path>"),
        ("from ~/secret/place and file:///etc/passwd", "from <path> and <path>"),
        (r"C:\Users\me\model.bin is bad", "<path> is bad"),
        ("one\ntwo\r\n  three\tfour\x1b[31m", "one two three four [31m"),
        ("\ud800 lone", "? lone"),
        ("  plain  ", "plain"),
        ("", ""),
    ],
)
def test_what_clients_must_not_see(text: str, cleaned: str) -> None:
    assert clean_error(text) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "temperature must be in [0, 100], got 101",
        "POST /v1/chat/completions and '/v1/models' and/or 3/4 tokens/s",
        "see https://example.org/docs/errors and #/properties/a/b",
        "unknown model 'org/name'; did you mean 'org/other-name'?",
        "token id 0 is not 0x",
        "JSON is malformed: invalid character (byte 12)",
    ],
)
def test_what_clients_may_see(text: str) -> None:
    assert clean_error(text) == text


@given(st.text(max_size=300) | st.text("/ax0'\" ~:\\\n\ud800.v1#", max_size=300))
def test_any_message_becomes_one_short_line(text: str) -> None:
    cleaned = clean_error(text)
    assert len(cleaned) <= MAX_MESSAGE and len(cleaned.splitlines()) <= 1
    cleaned.encode()


@pytest.mark.parametrize("piece", ["/a", "'/a", "0x", " /", "~/a/", "\\", "a:\\", "x "])
def test_long_messages_are_cut_in_linear_time(piece: str) -> None:
    begin = time.thread_time()
    assert len(clean_error(piece * 1_000_000)) <= MAX_MESSAGE
    assert time.thread_time() - begin < 1
