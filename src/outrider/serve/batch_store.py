"""Files and batch jobs of a server, in one folder that outlives it: a SQLite database, and one file for each content.

    DIR/                mode 700
        .lock           held by the process that uses the folder
        batches.db      files, batches, and the lines of batches that have not ended
        file-...        contents

A line's answer is written once, in one transaction; what was not written when the server died is done again. Each file
and batch belongs to an owner, the API key's, and no other owner finds it. For one thread at a
time.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from outrider.errors import InvalidRequest, OutriderError
from outrider.serve.errors import ApiError
from outrider.serve.limits import clean_line, read_json
from outrider.serve.private_folder import hold, make_private
from outrider.serve.wire import read_request

MAX_LINES = 50_000  # of a batch, as at OpenAI
MAX_LINE_BYTES = 8 << 20
MAX_BATCHES = 1_000  # of an owner; the oldest that have ended are forgotten
MAX_ERRORS = 100  # shown of a file that is no batch
LONGEST_ID = 512  # characters of a custom_id
FILE_BYTES = 4096  # that a file takes at least
WINDOW = 86_400  # seconds until a batch expires
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files

SCHEMA = """
CREATE TABLE IF NOT EXISTS files(
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, name TEXT, purpose TEXT,
    bytes INT, created INT);
CREATE TABLE IF NOT EXISTS batches(
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, status TEXT, body TEXT);
CREATE TABLE IF NOT EXISTS lines(
    batch TEXT, number INT, custom_id TEXT, start INT, size INT, status INT, result BLOB,
    PRIMARY KEY(batch, number)) WITHOUT ROWID;
"""


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Line(NamedTuple):
    number: int
    custom_id: str
    start: int
    size: int


class BatchStore:
    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        make_private(folder, "batches")
        self._lock = hold(folder)
        try:
            self._db = sqlite3.connect(folder / "batches.db", check_same_thread=False)
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + SCHEMA)
            self._drop_strays()
        except (sqlite3.Error, OSError) as problem:
            os.close(self._lock)
            raise OutriderError(f"batches cannot be kept in {folder}: {problem}") from None
        self.used = self._one("SELECT coalesce(sum(max(bytes, ?)), 0) FROM files", FILE_BYTES)
        self.used += self._one("SELECT coalesce(sum(length(result)), 0) FROM lines")

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def _drop_strays(self) -> None:
        """Contents that no file names: of an upload, or of results, that the server died over."""
        known = {name for (name,) in self._db.execute("SELECT id FROM files")}
        for path in self.folder.glob("file-*"):
            if path.name not in known:
                path.unlink()

    def _one(self, query: str, *values: Any) -> Any:
        found = self._db.execute(query, values).fetchone()
        return None if found is None else found[0]

    # ------------------------------------------------------------------------------------------ files

    def open_file(self) -> tuple[str, BinaryIO]:
        """The id of a new file, and where to write its content. It is there once `keep_file` was called."""
        name = f"file-{secrets.token_hex(12)}"
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        return name, os.fdopen(descriptor, "wb")

    def drop_content(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def keep_file(self, name: str, owner: str, shown: str, purpose: str) -> dict[str, Any]:
        with self._db:
            self._insert_file(name, owner, shown, purpose)
        return self.file(name, owner)

    def _insert_file(self, name: str, owner: str, shown: str, purpose: str) -> None:
        size = (self.folder / name).stat().st_size
        self._db.execute(
            "INSERT INTO files(id, owner, name, purpose, bytes, created) VALUES(?, ?, ?, ?, ?, ?)",
            (name, owner, clean_line(shown)[:200], purpose, size, int(time.time())),
        )
        self.used += max(size, FILE_BYTES)

    def file(self, name: str, owner: str) -> dict[str, Any]:
        found = next(self._files("id = ? AND owner = ?", name, owner), None)
        if found is None:
            raise ApiError(404, f"there is no file {name[:80]!r}", param="file_id", code="not_found")
        return found

    def files(self, owner: str, purpose: str | None, after: str | None, limit: int, up: bool) -> list[Any]:
        where, values = _page(self._number("files", after, owner), up)
        return [
            *self._files(
                f"owner = ? AND coalesce(?, purpose) = purpose {where}", owner, purpose, *values, limit
            )
        ]

    def _files(self, where: str, *values: Any) -> Iterator[dict[str, Any]]:
        query = f"SELECT id, bytes, created, name, purpose FROM files WHERE {where}"
        for name, size, created, shown, purpose in self._db.execute(query, values):
            yield {
                "id": name,
                "object": "file",
                "bytes": size,
                "created_at": created,
                "filename": shown,
                "purpose": purpose,
                "status": "processed",
                "expires_at": None,
            }

    def delete_file(self, name: str, owner: str) -> None:
        found = self.file(name, owner)
        for _, _, batch in self.active():
            if batch["input_file_id"] == name:
                raise ApiError(
                    400, f"{batch['id']} still reads this file; cancel it first", code="file_in_use"
                )
        with self._db:
            self._db.execute("DELETE FROM files WHERE id = ?", (name,))
        self.used -= max(found["bytes"], FILE_BYTES)
        self.drop_content(name)

    def _number(self, table: str, name: str | None, owner: str) -> int | None:
        if name is None:
            return None
        number = self._one(f"SELECT number FROM {table} WHERE id = ? AND owner = ?", name, owner)
        if number is None:
            raise ApiError(404, f"there is no {name[:80]!r}", param="after", code="not_found")
        return int(number)

    # ------------------------------------------------------------------------------------------ batches

    def create(
        self, owner: str, file: str, endpoint: str, metadata: dict[str, str] | None, window: int = WINDOW
    ) -> dict[str, Any]:
        if self.file(file, owner)["purpose"] != INPUT:
            raise InvalidRequest("this file was not uploaded with purpose 'batch'", "input_file_id")
        now, name = int(time.time()), f"batch_{secrets.token_hex(12)}"
        times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        body = {
            "id": name,
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + window,
            **{f"{state}_at": None for state in times},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        with self._db:
            self._forget_oldest(owner)
            self._db.execute(
                "INSERT INTO batches(id, owner, status, body) VALUES(?, ?, ?, ?)",
                (name, owner, "validating", json.dumps(body)),
            )
        return body

    def _forget_oldest(self, owner: str) -> None:
        if self._one("SELECT count(*) FROM batches WHERE owner = ?", owner) < MAX_BATCHES:
            return
        query = f"SELECT min(number) FROM batches WHERE owner = ? AND status NOT IN {ACTIVE}"
        if (oldest := self._one(query, owner)) is None:
            raise ApiError(
                429, f"{MAX_BATCHES} batches have not ended yet", code="too_many_batches", after=60
            )
        self._db.execute("DELETE FROM batches WHERE number = ?", (oldest,))

    def batch(self, name: str, owner: str) -> dict[str, Any]:
        body = self._one("SELECT body FROM batches WHERE id = ? AND owner = ?", name, owner)
        if body is None:
            raise ApiError(404, f"there is no batch {name[:80]!r}", param="batch_id", code="not_found")
        return self._counted(json.loads(body))

    def batches(self, owner: str, after: str | None, limit: int) -> list[Any]:
        where, values = _page(self._number("batches", after, owner), False)
        query = f"SELECT body FROM batches WHERE owner = ? {where}"
        rows = self._db.execute(query, (owner, *values, limit)).fetchall()
        return [self._counted(json.loads(body)) for (body,) in rows]

    def _counted(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["status"] in ACTIVE:
            query = "SELECT count(*), sum(status = 200), sum(status != 200) FROM lines WHERE batch = ?"
            counts = self._db.execute(query, (body["id"],)).fetchone()
            names = ("total", "completed", "failed")
            body["request_counts"] = {n: count or 0 for n, count in zip(names, counts, strict=True)}
        return body

    def active(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Id, owner and body of batches that have not ended, the oldest first."""
        query = f"SELECT id, owner, body FROM batches WHERE status IN {ACTIVE} ORDER BY number"
        return [(name, owner, json.loads(body)) for name, owner, body in self._db.execute(query)]

    def _move(self, body: dict[str, Any], status: str, **changes: Any) -> None:
        body |= {"status": status, f"{status}_at": int(time.time()), **changes}
        self._db.execute(
            "UPDATE batches SET status = ?, body = ? WHERE id = ?", (status, json.dumps(body), body["id"])
        )

    def cancel(self, name: str, owner: str) -> dict[str, Any]:
        body = self.batch(name, owner)
        if body["status"] not in ("validating", "in_progress", "cancelling"):
            raise ApiError(400, f"the batch is {body['status']} already", code="batch_ended")
        with self._db:
            if body["status"] != "cancelling":
                self._move(body, "cancelling")
        return body

    # ------------------------------------------------------------------------------------------ lines

    def validate(self, body: dict[str, Any]) -> None:
        """Reads the input file. A file that is no batch fails as a whole, with an error for each wrong line."""
        errors, lines, seen, start = [], list[tuple[Any, ...]](), set[str](), 0
        with (self.folder / body["input_file_id"]).open("rb") as file:
            for number, data in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(data) > MAX_LINE_BYTES:
                    errors.append(_error(f"it is longer than {MAX_LINE_BYTES} bytes", number, None))
                    break
                if data.strip():
                    try:
                        line = _line(data, body["endpoint"], seen)
                        lines.append((body["id"], number, line.custom_id, start, len(data)))
                    except InvalidRequest as problem:
                        errors.append(_error(str(problem), number, problem.param))
                start += len(data)
                if len(errors) >= MAX_ERRORS or len(lines) > MAX_LINES:
                    break
        if not (lines or errors) or len(lines) > MAX_LINES:
            errors.append(_error(f"a batch has 1 to {MAX_LINES} lines, each a request as JSON", None, None))
        with self._db:
            if errors:
                self._move(body, "failed", errors={"object": "list", "data": errors})
            else:
                query = "INSERT INTO lines(batch, number, custom_id, start, size) VALUES(?, ?, ?, ?, ?)"
                self._db.executemany(query, lines)
                self._move(body, "in_progress")

    def pending(self, batch: str, after: int, limit: int) -> list[Line]:
        query = "SELECT number, custom_id, start, size FROM lines WHERE batch = ? AND number > ? AND status IS NULL"
        rows = self._db.execute(f"{query} ORDER BY number LIMIT ?", (batch, after, limit))
        return [Line(*row) for row in rows]

    def read_body(self, file: str, line: Line) -> bytes:
        """The body of a line's request."""
        with (self.folder / file).open("rb") as content:
            content.seek(line.start)
            return msgspec.json.encode(read_json(content.read(line.size))["body"])

    def record(self, batch: str, number: int, status: int, result: bytes) -> None:
        """Keeps a line's answer. The first one counts: no line has two."""
        query = "UPDATE lines SET status = ?, result = ? WHERE batch = ? AND number = ? AND status IS NULL"
        with self._db:
            if self._db.execute(query, (status, result, batch, number)).rowcount:
                self.used += len(result)

    @property
    def full(self) -> bool:
        return self.used >= self.most_bytes

    def refuse_pending(self, batch: str, code: str, message: str) -> None:
        """Answers every line that has no answer with this error."""
        for line in self.pending(batch, -1, MAX_LINES):
            error = {"code": code, "message": message}
            self.record(batch, line.number, 0, result_line(line.custom_id, None, error))

    def finalize(self, body: dict[str, Any]) -> None:
        """All lines have an answer, or none will: answers and errors become files, and the batch ends."""
        status = {"cancelling": "cancelled"}.get(body["status"], "completed")
        status = "expired" if body["expires_at"] <= time.time() and status == "completed" else status
        counted = self._counted(dict(body))["request_counts"]
        owner = self._one("SELECT owner FROM batches WHERE id = ?", body["id"])
        if status != "cancelled":
            with self._db:
                self._move(body, "finalizing")
        with self._db:
            files = {
                "output_file_id": self._results(body["id"], owner, "output", "status = 200"),
                "error_file_id": self._results(body["id"], owner, "errors", "status != 200"),
            }
            self._move(body, status, **files, request_counts=counted)
            freed = self._one(
                "SELECT coalesce(sum(length(result)), 0) FROM lines WHERE batch = ?", body["id"]
            )
            self._db.execute("DELETE FROM lines WHERE batch = ?", (body["id"],))
        self.used -= freed

    def _results(self, batch: str, owner: str, kind: str, where: str) -> str | None:
        rows = self._db.execute(
            f"SELECT result FROM lines WHERE batch = ? AND {where} ORDER BY number", (batch,)
        )
        first = rows.fetchone()
        if first is None:
            return None
        name, file = self.open_file()
        with file:
            file.write(first[0])
            file.writelines(result for (result,) in rows)
            file.flush()
            os.fsync(file.fileno())
        self._insert_file(name, owner, f"{batch}_{kind}.jsonl", OUTPUT)
        return name


def result_line(
    custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None = None
) -> bytes:
    """A line of an output or error file."""
    name = f"batch_req_{secrets.token_hex(12)}"
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _line(data: bytes, endpoint: str, seen: set[str]) -> BatchLine:
    line = read_request(read_json(data), BatchLine)
    if not 0 < len(line.custom_id) <= LONGEST_ID or line.custom_id in seen:
        raise InvalidRequest(
            f"custom_id must be new in its file, with 1 to {LONGEST_ID} characters", "custom_id"
        )
    if line.method != "POST" or line.url != endpoint:
        raise InvalidRequest(f"the method must be POST and the url {endpoint}, as the batch has it", "url")
    seen.add(line.custom_id)
    return line


def _error(message: str, line: int | None, param: str | None) -> dict[str, Any]:
    return {"code": "invalid_line", "message": message, "line": line, "param": param}


def _page(after: int | None, up: bool) -> tuple[str, tuple[int, ...]]:
    """The end of a query for a page of a list: newest first unless `up`."""
    where = "" if after is None else f"AND number {'>' if up else '<'} ?"
    return f"{where} ORDER BY number {'ASC' if up else 'DESC'} LIMIT ?", () if after is None else (after,)
