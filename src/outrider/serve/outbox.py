"""What the engine process sends to the API process: at once, from the thread that has something to say.

A thread of its own would want the interpreter in every step, and hold up the thread that runs the steps. There is one
only for what the socket has no room for.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from outrider.serve import link


class Outbox:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = threading.Condition()  # also the lock of what follows
        self._left: deque[bytes] = deque()  # in order; the first is being sent
        self._closed = False  # or the API process hung up; the thread that receives sees that, too
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)
        self._writer.start()

    def put(self, message: link.FromEngine) -> None:
        data = link.pack(message)
        with self._changed:
            if self._closed:
                return
            if not self._left:
                data = data[self._send_now(data) :]
            if data:
                self._left.append(data)
                self._changed.notify()

    def close(self) -> None:
        """Nothing more is taken. What was, is sent."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _send_now(self, data: bytes) -> int:
        """How many bytes the socket has room for."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._closed = True
            return len(data)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._left or self._closed)
                if not self._left:
                    return
                data = self._left[0]
            try:
                self._sock.sendall(data)
            except OSError:
                with self._changed:
                    self._closed = True
                    self._left.clear()
                return
            with self._changed:
                self._left.popleft()
