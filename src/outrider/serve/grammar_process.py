"""The process that tries grammars: `python -P -m outrider.serve.grammar_process FD`, started by grammars.py.

A grammar that crashes the compiler, takes all memory or never ends costs this process, which is started again, and no
other answer. It has a smaller stack than the engine, so what passes here passes there.
"""

from __future__ import annotations

import socket
import sys

from outrider.errors import OutriderError
from outrider.load.child import become_child, limit_memory, limit_time
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
        limit_memory(asked.memory)
        sock.sendall(pack(Tried(missing)))
        while isinstance(grammar := receive_as(to_grammars, sock), Grammar):
            limit_time(grammar.seconds)
            sock.sendall(pack(Tried(missing or _problem(matchers, grammar))))
    return 0


def _problem(matchers: Matchers, asked: Grammar) -> str | None:
    try:
        failure = matchers.failure_in_use(matchers.make(asked.grammar))
        return failure and f"grammar: no answer in its form can be written: {failure}"
    except (OutriderError, MemoryError) as error:
        return str(error) or "grammar: it takes too much memory"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
