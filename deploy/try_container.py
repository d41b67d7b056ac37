"""Runs the steps of a container file in a Debian tree, without a container engine or a registry, and asks the server in
it for its health and for an answer. Needs root, mmdebstrap, iproute2 and Debian's archive; pip needs a package index:

    python deploy/try_container.py --volume MODEL:/model deploy/docker/cpu.Dockerfile /model

What stands after the file takes the place of CMD. The server listens in a network namespace of its own, so no other
program can reach its port. An instruction that this script does not know is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTED = {"LABEL", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}  # for the image, not for its tree
ASK = """
import json, urllib.request as r
body = json.dumps({"model": %(model)r, "prompt": "Hello", "max_tokens": 8}).encode()
asked = r.Request("http://127.0.0.1:%(port)s/v1/completions", body, {"content-type": "application/json"})
print(json.load(r.urlopen(asked, timeout=120))["usage"])
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a container file in order, each with its arguments on one line."""
    kept = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", "", kept).splitlines()
    return [(word, text.strip()) for word, _, text in (line.partition(" ") for line in lines)]


def assignments(text: str, known: dict[str, str]) -> dict[str, str]:
    """`A=b C=$D` with the variables that are known."""
    filled = re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], ""), text)
    return dict(one.split("=", 1) for one in shlex.split(filled))


def copied(context: Path, name: str, to: Path) -> None:
    """COPY of one file or folder, with what .dockerignore leaves out: `*`, then `!name` and `**/name`."""
    rules = (context / ".dockerignore").read_text().split()
    if rules[0] != "*" or f"!{name}" not in rules:
        raise SystemExit(f"COPY {name}: .dockerignore leaves it out")
    if (context / name).is_dir():
        ignore = shutil.ignore_patterns(*(rule[3:] for rule in rules if rule.startswith("**/")))
        shutil.copytree(context / name, to, ignore=ignore, dirs_exist_ok=True)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(context / name, to)


@dataclass
class Tree:
    """A root folder, and what instructions so far say of processes in it."""

    root: Path
    build_args: dict[str, str]
    volumes: dict[str, str]  # this machine's folder or file, by its place in the tree
    env: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    args: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    noted: dict[str, str] = field(default_factory=dict)

    def place(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def home(self) -> str:
        users = (line.split(":") for line in self.place("/etc/passwd").read_text().splitlines())
        return next((user[5] for user in users if user[2] == self.user.split(":")[0]), "/")

    def chroot(self, command: list[str], extra: dict[str, str]) -> list[str]:
        values = {"HOME": self.home(), **self.env, **extra}
        env = ["env", "-i", f"--chdir={self.folder}", *(f"{name}={value}" for name, value in values.items())]
        return ["chroot", f"--userspec={self.user}", "--groups=", str(self.root), *env, *command]

    def command(self, command: list[str], extra: dict[str, str], *, alone: bool = False) -> list[str]:
        """A process in the tree, in mount and process namespaces of its own, and `alone` on its network."""
        script = [
            shlex.join(["mount", "--rbind", f"/{name}", str(self.place(name))]) for name in ("dev", "sys")
        ]
        for inside, outside in self.volumes.items():
            at = self.place(inside)
            if Path(outside).is_dir():
                at.mkdir(parents=True, exist_ok=True)
            elif not at.exists():
                at.parent.mkdir(parents=True, exist_ok=True)
                at.touch()
            script.append(shlex.join(["mount", "--bind", outside, str(at)]))
        script += ["ip link set lo up"] * alone + ["exec " + shlex.join(self.chroot(command, extra))]
        spaces = ["--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.place('proc')}"]
        return ["unshare", *spaces, *["--net"] * alone, "sh", "-ec", "\n".join(script)]

    def apply(self, word: str, text: str, context: Path) -> None:
        if word == "FROM":
            suite = re.fullmatch(r"debian:(\w+)-slim", text)
            if not suite:
                raise SystemExit(f"FROM {text}: only debian:SUITE-slim can be made here")
            subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", suite[1], self.root], check=True)
        elif word == "ARG":
            name, _, default = text.partition("=")
            if value := self.build_args.get(name, default):
                self.args[name] = value
        elif word == "ENV":
            self.env |= assignments(text, self.env | self.args)
        elif word == "USER":
            self.user = text
        elif word == "WORKDIR":
            self.place(text).mkdir(parents=True, exist_ok=True)
            self.folder = text
        elif word == "COPY":
            *names, to = text.split()
            for name in names:
                copied(context, name, self.place(to) / name if to.endswith("/") else self.place(to))
        elif word == "RUN":
            subprocess.run(self.command(["/bin/sh", "-c", text], self.args), check=True)
        elif word in NOTED:
            self.noted[word] = text
        else:
            raise SystemExit(f"{word}: an instruction that this script does not know")


def children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in file.read_text().split()] if file.exists() else []


def serve(tree: Tree, words: list[str], seconds: float) -> None:
    """Starts the entry point, waits until the file's own health check passes, asks for eight tokens, and ends it."""
    words = words or json.loads(tree.noted["CMD"])
    check = json.loads(tree.noted["HEALTHCHECK"].partition("CMD ")[2])
    server = subprocess.Popen(tree.command(json.loads(tree.noted["ENTRYPOINT"]) + words, {}, alone=True))
    enter = ["nsenter", f"--target={server.pid}", "--net", "--mount"]
    try:
        until, healthy = time.monotonic() + seconds, False
        while not healthy and server.poll() is None and time.monotonic() < until:
            time.sleep(1)
            healthy = not subprocess.run(enter + tree.chroot(check, {}), stderr=subprocess.DEVNULL).returncode
        if not healthy:
            raise SystemExit(f"no health within {seconds:.0f} s; exit status {server.poll()}")
        [first] = children(server.pid)
        status = Path(f"/proc/{first}/status").read_text()
        ids = ", ".join(re.findall(r"(?m)^(?:Uid|Gid|Groups):.*$", status)).replace("\t", " ")
        print(f"healthy after {seconds - until + time.monotonic():.0f} s; {ids}")
        ask = ASK % {"model": words[0], "port": tree.noted["EXPOSE"]}
        subprocess.run(enter + tree.chroot(["python", "-c", ask], {}), check=True)
        os.kill(first, signal.SIGTERM)
        print(f"SIGTERM: exit status {server.wait(60)}")
    finally:
        for first in children(
            server.pid
        ):  # its namespace ends with it; --kill-child does not survive a change of user
            os.kill(first, signal.SIGKILL)
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="container file; its context is the root of this clone")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="what to serve, instead of the file's CMD")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--volume", action="append", default=[], metavar="HERE:INSIDE", help="bind mount")
    parser.add_argument("--seconds", type=float, default=300, help="for the server to become healthy")
    given = parser.parse_args()
    steps = instructions(given.file.read_text())
    build_args = dict(one.split("=", 1) for one in given.build_arg)
    if unknown := build_args.keys() - {text.partition("=")[0] for word, text in steps if word == "ARG"}:
        raise SystemExit(f"--build-arg {', '.join(unknown)}: {given.file} has no such ARG")
    volumes = {inside: here for here, inside in (one.rsplit(":", 1) for one in given.volume)}
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder) / "tree", build_args, volumes)
        for word, text in steps:
            began = time.monotonic()
            tree.apply(word, text, ROOT)
            print(f"{time.monotonic() - began:6.1f} s  {word} {text}", flush=True)
        serve(tree, given.words, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
