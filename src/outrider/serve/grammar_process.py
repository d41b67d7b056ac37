"""The process that tries grammars: `python -P -m outrider.serve.grammar_process FD`, started by grammars.py.

A grammar that crashes the compiler, takes all memory or never ends costs this process, which is started again, and no
answer of anybody else. It has a smaller stack than the engine, so what passes here passes there.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from pathlib import Path

from outrider.errors import OutriderError
from outrider.serve.child import become_child
from outrider.serve.link import Grammar, Tried, Vocabulary, pack, receive_as, to_grammars
from outrider.verify.grammar_source import Matchers


def main(descriptor: int) -> int:
    become_child()
    with socket.socket(fileno=descriptor) as sock:
        asked = receive_as(to_grammars, sock)
        if not isinstance(asked, Vocabulary):
            return 1
        missing = None
        try:
            matchers = Matchers(asked.tokenizer, asked.vocab, asked.eos_ids, asked.deepest, asked.stack)
        except OutriderError as error:
            missing = str(error)
        _limit_memory(asked.memory)
        sock.sendall(pack(Tried(missing)))
        while isinstance(grammar := receive_as(to_grammars, sock), Grammar):
            _limit_time(grammar.seconds)
            sock.sendall(pack(Tried(missing or _problem(matchers, grammar))))
    return 0


def _problem(matchers: Matchers, asked: Grammar) -> str | None:
    try:
        matchers.make(asked.grammar)
    except (OutriderError, MemoryError) as error:
        return str(error) or "grammar: it takes too much memory"
    return None


def _limit_memory(more: int) -> None:
    """Beyond what is taken now."""
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a limit below it already
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def _limit_time(seconds: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
