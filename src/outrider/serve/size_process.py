"""`python -m outrider.serve.size_process`: measures models from their files, in a process that ends after it, so that
the API process imports no torch. A `SizeRequest` comes on stdin, `Sizes` or `SizeProblem` goes to stdout.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from outrider.errors import OutriderError


class SizeRequest(msgspec.Struct):
    models: list[tuple[str, str, dict[str, Any]]]  # source, draft and fields of Settings


class Sizes(msgspec.Struct):
    models: list[tuple[str, int, int]]  # device, bytes of weights and of cache
    free: dict[str, int]  # bytes, by device


class SizeProblem(msgspec.Struct):
    model: int  # its position
    message: str


def ask_sizes(asked: SizeRequest) -> Sizes:
    """Runs the process. Raises what is wrong with a model."""
    command = [sys.executable, "-P", "-m", __name__]
    ran = subprocess.run(command, input=msgspec.json.encode(asked), stdout=subprocess.PIPE, check=False)
    if ran.returncode:
        raise OutriderError(f"the sizes of the models could not be read (exit {ran.returncode})")
    try:
        return msgspec.json.decode(ran.stdout, type=Sizes)
    except msgspec.ValidationError:
        problem = msgspec.json.decode(ran.stdout, type=SizeProblem)
        raise OutriderError(f"{asked.models[problem.model][0]}: {problem.message}") from None


def main() -> int:
    from outrider.serve.model_size import free_by_device, model_size  # torch comes with it
    from outrider.settings import Settings

    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=SizeRequest)
    found = []
    for position, (model, draft, settings) in enumerate(asked.models):
        try:
            found.append(model_size(model, draft, Settings.of(settings)))
        except OutriderError as problem:
            sys.stdout.buffer.write(msgspec.json.encode(SizeProblem(position, str(problem))))
            return 0
    free = free_by_device({size.device for size in found})
    sizes = Sizes([(size.device, size.weights, size.cache) for size in found], free)
    sys.stdout.buffer.write(msgspec.json.encode(sizes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
