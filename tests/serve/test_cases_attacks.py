"""Attacks that other servers fell for, by class, each as a test of its own, named after its case."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import pickle
import re
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
from safetensors.torch import save_file

from outrider import LLM, Settings
from outrider.draft.lookup import LookupDrafter
from outrider.engine.build import load_model
from outrider.errors import OutriderError, TemplateFailed
from outrider.load import template as templates
from outrider.load.checkpoint import open_checkpoint
from outrider.load.template import ChatTemplate
from outrider.load.tokenizer import Tokenizer
from outrider.serve import link
from outrider.serve.app import PATHS, ROUTES, App
from outrider.serve.backend import Backend
from outrider.serve.errors import ApiError
from outrider.serve.keys import Keyring
from outrider.serve.log import JsonLines, TextLines
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel
from outrider.serve.model_service import ModelService
from outrider.serve.model_spec import ModelSpec
from outrider.serve.model_table import ModelTable
from outrider.serve.service import Service
from outrider.serve.settings import ServeSettings
from outrider.types import DraftPlan, SamplingParams
from tests.load.tiny import byte_level_backend, hf_config, hf_weights, vocabulary, write_folder
from tests.serve.conftest import TEMPLATE, Served, start_server
from tests.serve.test_probes import BODY, CHAT, CLOSE, GOOD, PLAIN, RESPONSES, exchange, post, told
from tests.tiny import prompt_of, random_tensors, sequence, tiny_config

SOURCE = Path(__file__).resolve().parents[2] / "src" / "outrider"
KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
MESSAGES = GOOD[CHAT]["messages"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30) as shared:
        yield shared


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path) -> Iterator[Served]:
    """A server with keys that waits for nobody long."""
    flags = [
        "--header-timeout",
        "0.5",
        "--body-timeout",
        "0.5",
        "--stream-padding",
        "--cors-origin",
        "https://good.example",
    ]
    server = start_server(tiny_folder, *flags, *(f"--api-key={key}" for key in KEYS))
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def keyed(guarded: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, timeout=30) as shared:
        yield shared


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refused(client: httpx.Client, path: str, asked: Any, **options: Any) -> dict[str, Any]:
    reply = client.post(path, json=asked, **options)
    return told(reply.status_code, reply.content)


# ------------------------------------------------------------------------------ pickle, remote code, templates


MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "yaml",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"torch.load", "torch.jit", "torch.hub", "np.load", "numpy.load", "os.system", "os.popen"}
SWITCHES = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}


def offences(code: str) -> Iterator[str]:
    """Whatever in a file could run what it reads."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                yield node.func.id
            for word in node.keywords:
                if word.arg in SWITCHES and ast.unparse(word.value) != str(SWITCHES[word.arg]):
                    yield ast.unparse(word)


def test_pickle_and_code_are_nowhere_read() -> None:
    found = {str(f.relative_to(SOURCE)): list(offences(f.read_text())) for f in SOURCE.rglob("*.py")}
    assert len(found) > 50 and not {file: names for file, names in found.items() if names}


@pytest.mark.parametrize(
    "code",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "def f():\n    import marshal",
            "import os.path, shelve",
        ),
        *("eval(x)", "exec('a')", "compile(x, '', 'exec')", "__import__(x)", "torch.load(f)", "np.load(f)"),
        *(
            "f(trust_remote_code=True)",
            "f(trust_remote_code=asked)",
            "run(x, shell=True)",
            "load(f, weights_only=False)",
        ),
    ],
)
def test_what_would_be_read_is_seen(code: str) -> None:
    assert list(offences(code))


class Mine:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    "payload", [pickle.dumps(Mine()), b"", b"\x80", b"\xc1" * 50, b"\x81\xa4type\xa6Submit"]
)
def test_rpc_messages_that_are_no_messages(payload: bytes) -> None:
    """What runs between the two processes is data: a pickle is refused, not opened."""
    for decoder in (link.to_engine, link.from_engine):
        with pytest.raises(msgspec.MsgspecError):
            decoder.decode(payload)


def test_rpc_is_out_of_reach(served: Served) -> None:
    """One socket listens, on loopback; the engine's is a pair that nobody else can open."""
    processes = [psutil.Process(served.process.pid), served.engine()]
    listening = [
        c for p in processes for c in p.net_connections(kind="all") if c.status == psutil.CONN_LISTEN
    ]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]
    assert not [c.laddr for p in processes for c in p.net_connections(kind="unix") if c.laddr]


CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.mark.parametrize("kind", ["llama", "made_up", "gpt2"])
def test_remote_code_is_never_run(tmp_path: Path, kind: str) -> None:
    """A config may name a file of the repository to be run for it. It is not asked whether it may."""
    names = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", None],
    }
    write_folder(
        tmp_path, model_type=kind, auto_map=names, custom_pipelines={"text-generation": {"impl": "evil.P"}}
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": names}))
    for name in ("evil.py", "modeling_made_up.py", "configuration_made_up.py"):
        (tmp_path / name).write_text(CODE)
    try:
        load_model(open_checkpoint(tmp_path), Settings(kernels="torch"))
    except OutriderError:
        assert kind != "llama"
    assert not (tmp_path / "ran").exists()


def test_weights_in_pickles_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "gone")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (tmp_path / name).write_bytes(pickle.dumps(Mine()))
    with pytest.raises(OutriderError):
        open_checkpoint(tmp_path)


INJECTED = "{{ 7*7 }}{% for i in range(10) %}x{% endfor %}{{ messages }}{% set a = cycler.__init__ %}{#"


def test_template_injection_by_message(client: httpx.Client) -> None:
    """What users say is never part of the template, whatever it looks like."""
    turns = [{"role": INJECTED, "content": INJECTED}]
    ids = client.post("/tokenize", json={"messages": turns}).json()["tokens"]
    text = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text == f"[{INJECTED}]{INJECTED}[assistant]"


def test_template_of_a_request(client: httpx.Client) -> None:
    for path in (CHAT, PLAIN, RESPONSES, "/tokenize"):
        error = refused(client, path, {**GOOD[path], "chat_template": "{{ 1 }}"})
        assert error["param"] == "chat_template"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.__class__.__base__ }}",
    "{{ (messages|attr('__class__')).__mro__ }}",
    "{{ ('{0.__class__.__mro__}').format('') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{% set _ = messages.append(1) %}{{ messages.pop() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]
BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ range(10**9)|list }}",
    "{{ 'a' * 10**9 }}",
    "{{ ('a' * 10**6) ~ ('a' * 10**7) }}",
    "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ (('ab' * 10)|replace('', 'x' * 10**6)) }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 'a'|center(10**9) }}",
]


@pytest.mark.parametrize("source", ESCAPES, ids=range(len(ESCAPES)))
def test_template_injection_by_model(source: str) -> None:
    """A template comes with the model and is not trusted either: what it reaches for is not there."""
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    except TemplateFailed as failed:
        text = "" if "root:" not in str(failed) and "uid=" not in str(failed) else str(failed)
    assert text == ""


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_template_bombs(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.5)
    begun = time.perf_counter()
    with pytest.raises(TemplateFailed):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert time.perf_counter() - begun < 20


OWN = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "tokenize",
    "self",
)


@pytest.mark.parametrize("name", [*OWN, "chat_template"])
def test_template_kwargs_that_are_the_servers_own(client: httpx.Client, name: str) -> None:
    for value in (True, "x", [], {"a": 1}):
        if name == "chat_template":
            refused(client, CHAT, {**GOOD[CHAT], name: value})
        else:
            error = refused(client, CHAT, {**GOOD[CHAT], "chat_template_kwargs": {name: value}})
            assert error["param"] == "chat_template_kwargs" and repr(name) in error["message"]


@pytest.mark.parametrize(
    "name", ["enable_thinking", "a b", "", "context", "environment", "range", "loop", "args"]
)
def test_template_kwargs_of_any_other_name_do_no_harm(client: httpx.Client, name: str) -> None:
    plain = client.post(CHAT, json={**GOOD[CHAT], "seed": 1}).json()
    reply = client.post(CHAT, json={**GOOD[CHAT], "seed": 1, "chat_template_kwargs": {name: "{{ 1 }}"}})
    assert reply.json()["choices"] == plain["choices"]
    assert reply.json()["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


# ------------------------------------------------------------------------------------ within the API process


def model_of(template: str = TEMPLATE, vocab: int = 0) -> ServedModel:
    ready = link.Ready(
        tokenizer=byte_level_backend().to_str(), bos_id=None, eos_ids=[0], add_bos=None, template=template,
        family="llama", vocab=vocab or len(vocabulary()), context=256, cache_tokens=1000, cache_block=16,
        drafter="lookup", plan={},
    )  # fmt: skip
    return ServedModel("tiny", ready)


def app_of(model: Any, open_: Callable[..., Any] | None = None, **settings: Any) -> App:
    """The application over an engine that is not there."""

    async def nothing(*args: Any) -> Any:
        raise ApiError(503, "no engine")

    start = link.Start("tiny", "none", {}, ("text", "info"))
    backend: Any = SimpleNamespace(
        start=start, model=model, state="ready", well=True, open=open_ or nothing, progress=None, problem=""
    )
    serve = ServeSettings(**settings)
    served = ModelService(ModelSpec("tiny", "tiny", serve=serve), backend, Metrics())
    return App(Service(ModelTable([served]), serve, Keyring()))


def asked(app: App, *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    """Answers to requests made at the same time."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as client:
            return await asyncio.gather(*(client.request(m, path, json=body) for m, path, body in requests))

    return asyncio.run(run())


def test_template_that_takes_long_holds_nobody_up() -> None:
    """It is rendered on a thread: while one conversation waits for its template, others are answered."""
    model, others = model_of(), threading.Event()

    def slow(*args: Any, **options: Any) -> list[int]:
        assert others.wait(10), "nobody else was answered"
        return [5]

    model.chat_ids = slow  # type: ignore[method-assign]
    [route] = [route for route in ROUTES if route.path == "/v1/models"]
    answered = route.handler

    async def models(request: Any) -> Any:
        others.set()
        return await answered(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "handler", models)
        chat, listed = asked(app_of(model), ("POST", CHAT, GOOD[CHAT]), ("GET", "/v1/models", None))
    assert chat.status_code == 503 and listed.status_code == 200


def test_tokenizing_lets_other_threads_run() -> None:
    """Eight megabytes of text take seconds to tokenize; other requests must be answered meanwhile."""
    tokenizer = Tokenizer(byte_level_backend())
    done = threading.Event()
    worker = threading.Thread(target=lambda: (tokenizer.encode("hello world " * 40_000), done.set()))
    worker.start()
    ticks = 0
    while not done.wait(0.001):
        ticks += 1
    worker.join()
    assert ticks > 10


class Leaky(RuntimeError):
    pass


SECRET = "/srv/models/secret.bin line 12 at 0x7f00c0ffee00"


def test_error_hygiene_of_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    """What nobody foresaw is a 500 that says nothing; the log says everything."""

    async def broken(*args: Any) -> Any:
        raise Leaky(SECRET)

    [reply] = asked(app_of(model_of(), broken), ("POST", CHAT, GOOD[CHAT]))
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert error == {**error, "type": "server_error", "param": None, "code": "internal_error"}
    assert not re.search(r"secret|srv|0x|Leaky|line|Traceback|\.py", reply.text)
    [record] = [r for r in caplog.records if r.message == "a request failed"]
    assert record.exc_info and record.exc_info[0] is Leaky


def test_error_hygiene_of_a_fault_within_a_stream() -> None:
    class Stream:
        jobs = (SimpleNamespace(id="a", params=SamplingParams(), prompt=[1], seed=1),)

        async def follow(self, *args: Any) -> Any:
            raise Leaky(SECRET)

        def close(self) -> None: ...

    async def broken(*args: Any) -> Any:
        return Stream()

    sent: list[Any] = []
    body = {"type": "http.request", "body": json.dumps({**GOOD[PLAIN], "stream": True}).encode()}
    scope = {"type": "http", "method": "POST", "path": PLAIN, "headers": [(b"host", b"localhost")]}
    scope["state"] = {"connection": None}

    async def run() -> None:
        waiting = [body]

        async def receive() -> Any:
            return waiting.pop() if waiting else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await app_of(model_of(), broken)(scope, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 200 and all(
        message.get("more_body", True) for message in sent
    )  # cut, not ended
    assert not re.search(r"secret|srv|0x|Leaky|DONE", str(sent))


def test_error_hygiene_of_faults_elsewhere() -> None:
    told_ = ApiError(500, f"the engine stopped: {SECRET!r} in <object at 0x7f0012345678>").body()["error"][
        "message"
    ]
    assert "secret" not in told_ and "0x" not in told_ and "the engine stopped" in told_


LEAKS = re.compile(
    r"0x[0-9a-f]{4,}|/(home|root|usr|tmp|work|srv|var|opt)/|site-packages|Traceback|\w\.py\b|File \""
)


def test_error_hygiene_of_refusals(client: httpx.Client) -> None:
    bad: list[tuple[str, Any]] = [
        *((path, body) for path in GOOD for body in ({}, [], {"model": "/etc/passwd", **GOOD[path]})),
        (CHAT, {**GOOD[CHAT], "structured_outputs": {"regex": "(("}}),
        (CHAT, {**GOOD[CHAT], "structured_outputs": {"grammar": "start: <<"}}),
        (
            CHAT,
            {
                **GOOD[CHAT],
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}},
            },
        ),
        (CHAT, {**GOOD[CHAT], "speculative_decoding": {"drafter": "../../etc/passwd"}}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"path": "/etc/passwd"}}]}]},
        ),
        (PLAIN, {"prompt": [10**6]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/nowhere", {}),
    ]
    for path, body in bad:
        reply = client.post(path, json=body)
        told(reply.status_code, reply.content)
        assert not LEAKS.search(reply.text.replace("/etc/passwd", "")), reply.text
        assert not LEAKS.search(str(dict(reply.headers)))


@pytest.mark.parametrize("form", [TextLines(), JsonLines()])
def test_log_lines_cannot_be_forged(form: Any) -> None:
    """A path is the client's to choose: it must not begin a line of its own, or colour the operator's screen."""
    import logging

    record = logging.LogRecord("outrider", logging.INFO, "", 0, "request", (), None)
    record.facts = {"path": "/a\n2026-01-01 info all is well status=200 \x1b[31m\x9b31m\u2028", "status": 404}
    line = form.format(record)
    assert len(line.splitlines()) == 1 and "\x1b" not in line and "\n" not in line
    assert " status=200 " not in line.replace("all is well status=200", "") and "404" in line


# -------------------------------------------------------------------------------------------------- grammars


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def objects(count: int) -> list[dict[str, Any]]:
    return [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(count)]


SCHEMAS: dict[str, Any] = {
    **{f"nested {n}": nested(n) for n in (20, 100, 200, 300)},
    **{
        f"optional {n}": {"properties": {f"p{i}": {"type": "string"} for i in range(n)}}
        for n in (500, 1000, 2000, 20_000)
    },
    **{f"enum {n}": {"enum": [f"value {i}" for i in range(n)]} for n in (3000, 10_000, 100_000)},
    "any of 3000": {"anyOf": objects(3000)},
    "any of 600": {"anyOf": objects(600)},
    "all of any of": {"allOf": [{"anyOf": objects(4)} for _ in range(12)]},
    "itself": {"$ref": "#"},
    "cyclic": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "endless": {
        "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}},
        "$ref": "#/$defs/a",
    },
    "no such type": {"type": "no such type"},
    "a list of types": {"type": [1, 2]},
    "no pattern": {"type": "string", "pattern": "(["},
    "a long pattern": {"type": "string", "pattern": "^(.{0,1000}x){0,1000}$"},
    "a long text": {"type": "string", "minLength": 10**9},
    "a long list": {"type": "array", "items": {}, "minItems": 10**6},
    "a large number": {"type": "integer", "maximum": 10**30},
    "large multiples": {"type": "integer", "multipleOf": 100_000_007},
    "many multiples": {"anyOf": [{"type": "integer", "multipleOf": m} for m in (9973, 9967, 9949, 9941)]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "regex of 1000 times 1000": {"regex": "(.{0,1000}x){0,1000}"},
    "regex of brackets": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "regex of stars": {"regex": "(a|b|ab)*" * 3000},
    "regex too long": {"regex": "a" * 100_000},
    "no regex": {"regex": "(["},
    "looking ahead": {"regex": "(?=a)b"},
    "choices": {"choice": [f"c{i}" for i in range(9000)]},
    "the same choice": {"choice": ["a"] * 60_000},
    "a deep grammar": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "an endless grammar": {"grammar": "start: start"},
    "an ambiguous grammar": {"grammar": "start: a*\na: " + " | ".join(['"x"'] * 9000)},
    "a growing grammar": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "z"'
    },
    "no grammar": {"grammar": "%%%"},
    "the other kind": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    "multiples behind a word": {
        "grammar": 'start: /%json "/ | %json {"type": "integer", "multipleOf": 100000007}'
    },
    "multiples in a grammar": {"grammar": 'start: %json {"type": "integer", "multiple\\u004ff": 100000007}'},
}


@pytest.mark.parametrize("name", [*SCHEMAS, *OTHERS])
def test_grammar_dos(client: httpx.Client, name: str) -> None:
    """Compiled or refused, in time; and whoever comes next is served."""
    extra = {"structured_outputs": OTHERS[name]} if name in OTHERS else formed(SCHEMAS[name])
    begun = time.perf_counter()
    reply = client.post(PLAIN, json={"prompt": "a", "max_tokens": 3, **extra})
    assert time.perf_counter() - begun < 20
    if reply.status_code != 200:
        told(reply.status_code, reply.content)
    assert "longer than" not in reply.text or "compile" not in reply.text  # nothing was left running
    assert (
        client.post(PLAIN, json={"prompt": "a", "max_tokens": 3, **formed({"type": "boolean"})}).status_code
        == 200
    )


def formed(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


BLAMED = {"nested 100": None, "optional 20000": "tools.f.parameters", "enum 10000": "tools.f.parameters"}


@pytest.mark.parametrize("name", [*BLAMED, "large multiples", "no such type"])
def test_grammar_dos_by_tools(client: httpx.Client, name: str) -> None:
    """What a strict function takes is compiled too: it has the same limits."""
    parameters = {"type": "object", "properties": {"a": SCHEMAS[name]}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    for choice in ("auto", "required"):
        begun = time.perf_counter()
        error = refused(client, CHAT, {**GOOD[CHAT], "tools": [tool], "tool_choice": choice})
        assert error["param"] == BLAMED.get(name, "tools") and time.perf_counter() - begun < 20


def test_grammar_dos_by_many_tools(client: httpx.Client) -> None:
    """Each within the limit, together beyond it."""
    parameters = {"type": "object", "properties": {"a": {"enum": [f"value {i}" for i in range(300)]}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(40)]
    assert (
        refused(client, CHAT, {**GOOD[CHAT], "tools": tools, "tool_choice": "required"})["param"] == "tools"
    )


# -------------------------------------------------------------------------------------------- resource limits


TOO_MUCH: dict[str, tuple[str, dict[str, Any]]] = {
    "n": (CHAT, {"n": 33}),
    "n without end": (PLAIN, {"n": 2**31 - 1}),
    "n times prompts": (PLAIN, {"prompt": ["a"] * 64, "n": 32}),
    "prompts": (PLAIN, {"prompt": ["a"] * 257}),
    "prompts of ids": (PLAIN, {"prompt": [[5]] * 257}),
    "stop": (CHAT, {"stop": ["a"] * 17}),
    "stop, long": (CHAT, {"stop": ["a" * 100_000]}),
    "stop_token_ids": (CHAT, {"stop_token_ids": list(range(17))}),
    "logit_bias": (CHAT, {"logit_bias": {str(i): 1 for i in range(1025)}}),
    "bad_words": (CHAT, {"bad_words": ["a"] * 1025}),
    "bad_words, long": (CHAT, {"bad_words": ["a" * 100_000]}),
    "messages": (CHAT, {"messages": MESSAGES * 4097}),
    "input": (RESPONSES, {"input": MESSAGES * 4097}),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}),
    "top_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 21}),
    "logprobs": (PLAIN, {"logprobs": 21}),
    "logprobs of everything": (PLAIN, {"prompt": ["ab" * 900] * 64, "echo": True, "logprobs": 20}),
    "max_tokens": (CHAT, {"max_tokens": 2**31 - 1}),
    "the context": (PLAIN, {"prompt": [5] * 5000}),
    "prediction": (CHAT, {"prediction": {"type": "content", "content": "ab" * 5000}}),
    "depth": (CHAT, {"metadata": json.loads("[" * 70 + "]" * 70)}),
    "nodes": (CHAT, {"speculative_decoding": {"nodes": 64}}),
    "tree": (CHAT, {"speculative_decoding": {"tree": [64, 64]}}),
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_resource_limits_of_a_request(client: httpx.Client, what: str) -> None:
    path, extra = TOO_MUCH[what]
    begun = time.perf_counter()
    refused(client, path, {**GOOD[path], **extra})
    assert time.perf_counter() - begun < 20


def memory(served: Served) -> int:
    return psutil.Process(served.process.pid).memory_info().rss


def test_resource_limits_header_of_20_mb(guarded: Served) -> None:
    before = memory(guarded)
    line = b"X-Long: " + b"a" * (20 * MIB) + b"\r\n"
    received = exchange(guarded, b"GET /health HTTP/1.1\r\nHost: localhost\r\n", line, b"\r\n")
    assert b" 200 " not in received and memory(guarded) - before < 16 * MIB


def test_resource_limits_20000_headers(guarded: Served) -> None:
    lines = b"".join(b"X-%d: a\r\n" % i for i in range(20_000))
    received = exchange(guarded, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
    assert received == b"" or received.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


@pytest.mark.parametrize("announced", [True, False])
def test_resource_limits_body_of_100_mb(guarded: Served, announced: bool) -> None:
    before, size = memory(guarded), 100 * MIB
    piece = b"[" * MIB if announced else b"%x\r\n" % MIB + b"[" * MIB + b"\r\n"
    how = f"Content-Length: {size}" if announced else "Transfer-Encoding: chunked"
    received = exchange(guarded, post(b"", how, f"Authorization: Bearer {KEYS[0]}", CLOSE), *[piece] * 100)
    assert received == b"" or received.startswith(b"HTTP/1.1 413 ")
    assert memory(guarded) - before < 40 * MIB


def test_resource_limits_slow_header(guarded: Served) -> None:
    for begun in (b"", b"GET", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "):
        assert exchange(guarded, begun, seconds=5) == b""  # closed before we lost patience


@pytest.mark.parametrize("drip", [b"GET /health HTTP/1.1\r\nHost: ", b"\r\n"])
def test_resource_limits_slow_header_of_a_second_request(guarded: Served, drip: bytes) -> None:
    where = urlsplit(guarded.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        connection.sendall(drip)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):  # until it is closed, before we lose patience
                pass


def test_resource_limits_slow_body(guarded: Served) -> None:
    long = ("Content-Length: 5000", f"Authorization: Bearer {KEYS[0]}")
    received = exchange(guarded, post(b'{"prompt": ', *long), seconds=5)
    assert received.startswith(b"HTTP/1.1 408 ") and b'"code":"body_timeout"' in received


# ------------------------------------------------------------------------------------------------- token ids


OUTSIDE = [
    len(vocabulary()),
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -1,
    -(2**63),
    -(2**64),
]


@pytest.mark.parametrize("token", OUTSIDE)
def test_ids_out_of_range(client: httpx.Client, token: int) -> None:
    for path in (CHAT, PLAIN):
        error = refused(client, path, {**GOOD[path], "logit_bias": {str(token): 5}})
        assert error["param"] == "logit_bias"
        assert (
            "stop_token_ids" in refused(client, path, {**GOOD[path], "stop_token_ids": [5, token]})["param"]
        )
    for prompt in ([token], [5, token], [[5], [5, token]]):
        assert "prompt" in refused(client, PLAIN, {**GOOD[PLAIN], "prompt": prompt, "echo": True})["param"]
    assert "tokens" in refused(client, "/detokenize", {"tokens": [5, token]})["param"]


@pytest.mark.parametrize("name", ["", "a", "1.5", "0x5", "1e3", " 5", "5 ", "+5", "1_0", "٣", "9" * 5000])
def test_ids_that_are_none(client: httpx.Client, name: str) -> None:
    assert refused(client, PLAIN, {**GOOD[PLAIN], "logit_bias": {name: 5}})["param"] == "logit_bias"


def test_ids_that_were_refused_leave_nothing_behind(served: Served, client: httpx.Client) -> None:
    for token in OUTSIDE:
        client.post(PLAIN, json={**GOOD[PLAIN], "logit_bias": {str(token): 5}})
        client.post(PLAIN, json={**GOOD[PLAIN], **formed({"maximum": token})})
    served.wait_idle()


def test_what_cannot_be_sent_to_the_engine_leaves_nothing_behind() -> None:
    """Should a value slip through that no message can carry, its request fails and its place in the queue is free."""

    async def run() -> Backend:
        start = link.Start("tiny", "none", {}, ("text", "info"))
        backend = Backend(start, ServeSettings(), Metrics())
        writer: Any = SimpleNamespace(is_closing=lambda: False, write=lambda data: None)
        backend.state, backend._writer = "ready", writer
        odd = SamplingParams(grammar={"json_schema": {"maximum": 10**30}})
        with pytest.raises(OverflowError):
            await backend.open([([1], odd)], "", "", asyncio.get_running_loop().time() + 5)
        return backend

    backend = asyncio.run(run())
    assert not backend.jobs and (backend.queued, backend.queued_tokens) == (0, 0)


def padded(folder: Path, vocab: int) -> Path:
    """A model with more ids than its tokenizer knows, as many have for the sake of their kernels."""
    folder.mkdir()
    config = tiny_config(vocab=vocab)
    shape = {
        "hidden_size": config.hidden,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
    }
    (folder / "config.json").write_text(json.dumps(hf_config(vocab_size=vocab, **shape)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    byte_level_backend().save(str(folder / "tokenizer.json"))
    read = random_tensors(config)
    save_file({name: read(name) for name in hf_weights()}, folder / "model.safetensors")
    return folder


def test_ids_that_the_model_has_and_its_tokenizer_has_not(tmp_path: Path) -> None:
    """A client can make the model write them; they stand for nothing, and nothing breaks."""
    last = 299
    with LLM(padded(tmp_path / "padded", last + 1), settings=Settings(cache_bytes=1 << 22)) as llm:
        [found] = llm.generate("hello", temperature=0, max_tokens=5, logit_bias={last: 100}, logprobs=20)
        assert found.token_ids == [last] * 5 and found.text == ""
        assert llm.generate("hello", temperature=0, max_tokens=5)[0].token_ids
    assert model_of(vocab=last + 1).token_text(last) == ("", [])


def test_words_that_the_tokenizer_has_and_the_model_has_not(tmp_path: Path) -> None:
    """The other way round: words and predictions of ids the model lacks are nothing to it."""
    with LLM(
        padded(tmp_path / "short", len(vocabulary()) - 1), settings=Settings(cache_bytes=1 << 22)
    ) as llm:
        options = {
            "bad_words": ["<tool>"],
            "prediction": "hello <tool> hello",
            "temperature": 0,
            "max_tokens": 20,
        }
        [found] = llm.generate("hello", **options)
        assert found.token_ids == llm.generate("hello", temperature=0, max_tokens=20)[0].token_ids
        assert not llm.engine.drafters.faults


# ------------------------------------------------------------------------------------------------------ keys


BAD_KEYS: tuple[dict[str, str], ...] = (
    {},
    *(bearer(key) for key in ("x", KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper(), KEYS[0] * 2, "*", "null")),
    {"authorization": f"Basic {KEYS[0]}"},
    {"authorization": KEYS[0]},
    {"authorization": "Bearer"},
    {"authorization": f"Bearer{KEYS[0]}"},
    {"authorization": f"Bearer {KEYS[0]}, Bearer {KEYS[1]}"},
    {"x-api-key": f"{KEYS[0]}x"},
    {"api-key": KEYS[0]},
    {"cookie": f"key={KEYS[0]}"},
)


@pytest.mark.parametrize(
    "path", [*sorted(PATHS), "/v1/models/tiny", "/v1/models/x", "/nowhere", "/v1/..%2fhealth"]
)
def test_auth_on_every_route_but_health(keyed: httpx.Client, path: str) -> None:
    for headers in BAD_KEYS:
        for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
            reply = keyed.request(method, path, headers=headers)
            if path in ("/health", "/ping"):
                assert reply.status_code == (200 if method in ("GET", "HEAD") else 405)
                continue
            assert reply.status_code == 401, (method, headers)
            if method != "HEAD" and not path.startswith("/v1/messages"):  # whose errors are Anthropic's
                assert told(401, reply.content)["code"] == "invalid_api_key"


def test_auth_lets_in_who_has_a_key(keyed: httpx.Client) -> None:
    for key in KEYS:
        assert keyed.post(PLAIN, json=GOOD[PLAIN], headers=bearer(key)).status_code == 200
        assert keyed.get("/metrics", headers={"authorization": f"bearer  {key}"}).status_code == 200
    assert keyed.get(f"/v1/models?key={KEYS[0]}").status_code == 401


def test_auth_comes_before_anything_is_read(keyed: httpx.Client) -> None:
    assert keyed.post(PLAIN, content=b"{" * 1000).status_code == 401


def test_auth_compares_every_key_in_constant_time() -> None:
    """By structure: no comparison but that of whole digests, and no leaving once one has matched."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Keyring.check)))
    [loop] = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    assert "hmac.compare_digest(" in ast.unparse(loop)
    assert not [n for n in ast.walk(loop) if isinstance(n, (ast.Compare, ast.Return, ast.Break))]


def test_auth_keeps_keys_out_of_what_it_prints(guarded: Served, keyed: httpx.Client) -> None:
    keyed.post(PLAIN, json=GOOD[PLAIN], headers=bearer(KEYS[0]))
    refused = keyed.post(PLAIN, json=GOOD[PLAIN], headers=bearer("a-key-that-is-wrong-01"))
    log = guarded.printed(refused.headers["x-request-id"])
    assert "key=key-1" in log
    assert KEYS[0] not in log and "a-key-that-is-wrong" not in log


# ---------------------------------------------------------------------------------------------------- fetching


def test_ssrf_nothing_is_fetched(client: httpx.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        images: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url},
            {"type": "input_audio", "input_audio": {"url": url}},
            {"type": "file", "file": {"file_id": url}},
            {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        ]
        for part in images:
            turns = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
            assert "only text" in refused(client, CHAT, {"messages": turns, "max_tokens": 1})["message"]
            assert (
                "only text" in refused(client, RESPONSES, {"input": turns, "max_output_tokens": 1})["message"]
            )
        for reference in (
            {"$ref": url},
            {"properties": {"a": {"$ref": url}}},
            {"$ref": "file:///etc/passwd"},
        ):
            remote = {"type": "object", **reference}
            assert "$ref" in refused(client, CHAT, {**GOOD[CHAT], **formed(remote)})["message"]
            refused(client, CHAT, {**GOOD[CHAT], "structured_outputs": {"json": remote}})
            refused(
                client,
                CHAT,
                {**GOOD[CHAT], "structured_outputs": {"grammar": f"start: %json {json.dumps(remote)}"}},
            )
            tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": remote}}
            refused(client, CHAT, {**GOOD[CHAT], "tools": [tool]})
        refused(client, CHAT, {**GOOD[CHAT], "web_search_options": {}})
        search = {"type": "web_search", "url": url}
        refused(client, RESPONSES, {**GOOD[RESPONSES], "tools": [search]})
        refused(client, CHAT, {**GOOD[CHAT], "speculative_decoding": {"drafter": url}})
        refused(client, CHAT, {**GOOD[CHAT], "model": url})
        with pytest.raises(TimeoutError):
            trap.accept()


# ------------------------------------------------------------------------------------------ between two keys


def cached(client: httpx.Client, key: str, prompt: list[int], **extra: Any) -> int:
    asked = {"prompt": prompt, "max_tokens": 2, **extra}
    reply = client.post(PLAIN, json=asked, headers=bearer(key))
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefix_isolation_between_keys_and_salts(keyed: httpx.Client) -> None:
    """Whether somebody else has sent a text before must not be found out, by numbers or by time."""
    mine, yours = KEYS
    prompt = prompt_of(100, 1)
    assert cached(keyed, mine, prompt) == 0 and cached(keyed, mine, prompt) == 96
    assert cached(keyed, yours, prompt) == 0 and cached(keyed, yours, prompt) == 96
    assert (
        cached(keyed, mine, prompt, cache_salt="a") == 0 and cached(keyed, mine, prompt, cache_salt="a") == 96
    )
    assert cached(keyed, mine, prompt, cache_salt="b") == 0
    assert cached(keyed, yours, prompt, cache_salt="a") == 0


def test_prefix_isolation_from_guesses_at_owners(keyed: httpx.Client) -> None:
    """A salt cannot be chosen so that it makes somebody else's name."""
    prompt = prompt_of(100, 2)
    assert cached(keyed, KEYS[0], prompt) == 0
    for salt in ("", ":", Keyring.of(ServeSettings(api_keys=(KEYS[0],))).check(f"Bearer {KEYS[0]}").owner):  # type: ignore[union-attr]
        assert cached(keyed, KEYS[1], prompt_of(100, 3), cache_salt=salt) in (0, 96)
        assert cached(keyed, KEYS[1], prompt, cache_salt=salt or "x") == 0


def test_lookup_isolation_between_keys(keyed: httpx.Client) -> None:
    """Past answers are guessed from for their own key alone: a second key has as few guesses as the first had."""
    asked = {"prompt": prompt_of(9, 4), "max_tokens": 60, "temperature": 0.9, "seed": 5, "ignore_eos": True,
             "speculative_decoding": {"depth": 6}}  # fmt: skip

    def accepted(key: str) -> tuple[int, str]:
        body = keyed.post(PLAIN, json=asked, headers=bearer(key)).json()
        return body["timings"]["draft_n_accepted"], body["choices"][0]["text"]

    first, again, other = accepted(KEYS[0]), accepted(KEYS[0]), accepted(KEYS[1])
    assert first[1] == again[1] == other[1]
    assert again[0] > first[0] + 20 and other[0] == first[0]


def test_lookup_isolation_in_the_drafter() -> None:
    drafter, answer = LookupDrafter(), prompt_of(30, 5)
    past = sequence([*prompt_of(5), *answer], prompt=5, owner="a")
    drafter.start(past)
    drafter.stop(past)
    for owner, found in (("a", 8), ("b", 0), ("", 0), ("a:", 0)):
        asker = sequence([*prompt_of(4, 6), *answer[:10]], prompt=4, owner=owner)
        drafter.start(asker)
        [draft] = drafter.propose([asker], [DraftPlan("lookup", 8, 8)])
        assert len(draft) == found


# ------------------------------------------------------------------------------------------------ side channels


def sizes(client: httpx.Client, prompt: str, **extra: Any) -> list[int]:
    """Of every event's data, as an eavesdropper sees them."""
    asked = {
        "prompt": prompt,
        "max_tokens": 25,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **extra,
    }
    with client.stream("POST", PLAIN, json=asked, headers=bearer(KEYS[0])) as reply:
        return [len(line.encode()) - 6 for line in reply.iter_lines() if line.startswith("data: {")]


def test_stream_padding_hides_how_long_tokens_are(client: httpx.Client, keyed: httpx.Client) -> None:
    bare = sizes(client, "hello")
    assert len(set(bare)) > 2
    for found in (
        sizes(keyed, "hello"),
        sizes(client, "hello", stream_options={"include_obfuscation": True}),
    ):
        # A busy server puts several tokens into an event, which may take 512 bytes; the last event has the totals.
        assert len(found) > 3 and set(found[:-1]) <= {256, 512} and found[-1] % 256 == 0
    assert len(set(sizes(keyed, "hello", stream_options={"include_obfuscation": False}))) > 2


def test_stream_padding_of_every_dialect(keyed: httpx.Client) -> None:
    for path in (CHAT, RESPONSES):
        # Greedy: an end token drawn by chance has no text to show.
        asked = {**GOOD[path], "temperature": 0, "stream": True}
        with keyed.stream("POST", path, json=asked, headers=bearer(KEYS[0])) as reply:
            found = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        assert len(found) > 2 and all(len(data.encode()) % 256 == 0 for data in found)
        paddings = [json.loads(data)["obfuscation"] for data in found]
        assert len(set(paddings)) == len(paddings)


# --------------------------------------------------------------------------------------------------- browsers


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0"),
        *(
            "[::2]",
            "localhost@evil.example",
            "evil.example#localhost",
            "10.0.0.1",
            "localhost:80:80",
            "",
        ),
    ],
)
def test_dns_rebinding(client: httpx.Client, host: str) -> None:
    for path in ("/health", "/v1/models", "/metrics"):
        reply = client.get(path, headers={"host": host})
        assert told(reply.status_code, reply.content)["code"] in ("host_not_allowed", "bad_http")
    reply = client.post(PLAIN, json=GOOD[PLAIN], headers={"host": host})
    assert reply.status_code in (400, 403)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1234", "LOCALHOST", "127.0.0.1", "127.0.0.1:80", "[::1]:9"]
)
def test_local_names_are_served(client: httpx.Client, host: str) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 200


ORIGINS = (
    "https://evil.example",
    "null",
    "http://127.0.0.1.evil.example",
    "https://good.example.evil.example",
    "file://",
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_cors_pages_of_others_can_neither_read_nor_set_to_work(
    client: httpx.Client, keyed: httpx.Client, origin: str
) -> None:
    """Also without asking first, as a form or a plain text can be sent by any page."""
    for each in (client, keyed):
        preflight = each.options(PLAIN, headers={"origin": origin, "access-control-request-method": "POST"})
        assert not [name for name in preflight.headers if name.startswith("access-control")]
        read = each.get("/health", headers={"origin": origin})
        assert not [name for name in read.headers if name.startswith("access-control")]
    for media in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
        reply = client.post(PLAIN, content=BODY, headers={"origin": origin, "content-type": media})
        assert reply.status_code == 403 and told(403, reply.content)["code"] == "origin_not_allowed"


def test_cors_for_whom_the_operator_named(keyed: httpx.Client) -> None:
    page = {"origin": "https://good.example"}
    preflight = keyed.options(PLAIN, headers={**page, "access-control-request-method": "POST"})
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == page["origin"]
    reply = keyed.post(PLAIN, json=GOOD[PLAIN], headers={**page, **bearer(KEYS[0])})
    assert reply.status_code == 200 and reply.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in {*preflight.headers, *reply.headers}


def test_cors_for_anyone_is_without_credentials() -> None:
    app = app_of(model_of(), cors_origins=("*",))
    [reply] = asked(app, ("GET", "/v1/models", None))
    assert reply.status_code == 200

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/v1/models", headers={"origin": "https://any.example"})

    reply = asyncio.run(run())
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in reply.headers


def test_answers_are_not_taken_for_pages(client: httpx.Client) -> None:
    """Names that clients choose come back in messages: never as anything a browser would render."""
    for path in ("/<script>alert(1)</script>", "/v1/models/<img src=x>", "/health"):
        reply = client.get(path)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("temperature", [1e-46, 1e-45, 1e-38, 1e-30, 1e-9])
def test_nan_by_a_temperature_of_next_to_nothing(client: httpx.Client, temperature: float) -> None:
    """Logits divided by it would be infinite, and their differences no numbers: it is greedy, as it should be."""
    asked = {"prompt": "hello", "max_tokens": 12, "seed": 1, "top_p": 0.9, "min_p": 0.01}
    cold, greedy = (client.post(PLAIN, json={**asked, "temperature": t}).json() for t in (temperature, 0))
    assert cold["choices"] == greedy["choices"]


def test_penalties_of_absurd_size_write_tokens_of_the_model(client: httpx.Client) -> None:
    for law in ({"repetition_penalty": 1e-46}, {"repetition_penalty": 100}, {"frequency_penalty": -100}):
        asked = {
            "prompt": "hello hello",
            "max_tokens": 12,
            "temperature": 1.5,
            "top_p": 0.9,
            "return_token_ids": True,
        }
        for how in (False, {"depth": 4}):
            reply = client.post(PLAIN, json={**asked, **law, "speculative_decoding": how})
            assert reply.status_code == 200
            assert all(0 <= token < len(vocabulary()) for token in reply.json()["choices"][0]["token_ids"])
