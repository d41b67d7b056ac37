"""Chat templates: equal to transformers', refused by name when they raise, unable to hang or reach out."""

from __future__ import annotations

import resource
import threading
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.errors import InvalidRequest, TemplateFailed
from outrider.load import template
from outrider.load.checkpoint import Checkpoint
from outrider.load.template import ChatTemplate, checked_messages

from . import tiny

USER = [{"role": "user", "content": "Hi <b> & \"you\" 'é' 🎉"}]
CHATS: list[list[dict[str, Any]]] = [
    USER,
    [{"role": "system", "content": "Be brief."}, *USER],
    [*USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "  Again\n\n"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "a < b & é",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
TEMPLATES = {
    "turns with trimming": """{{ bos_token }}
{%- for message in messages %}
    {%- set content = '<|head|>' + message['role'] + '<|/head|>\n\n' + message['content'] | trim + '<eot>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\n\n' }}
{%- endif %}
""",
    "strict alternation": """{% if messages[0]['role'] == 'system' %}
    {% set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{% else %}
    {% set system = false %}{% set loop_messages = messages %}
{% endif %}
{{ bos_token }}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
    {% if loop.first and system %}{% set content = system + '\n' + message['content'] %}
    {% else %}{% set content = message['content'] %}{% endif %}
    {% if message['role'] == 'user' %}{{ '[I] ' + content + ' [/I]' }}
    {% else %}{{ content + eos_token }}{% endif %}
{% endfor %}
""",
    "tools and namespace": """
{%- set ns = namespace(last=-1, seen=0) %}
{%- macro line(x) %}{{ x | upper ~ ':' }}{% endmacro %}
{%- if tools %}
    {{- 'TOOLS\n' }}{% for tool in tools %}{{ tool | tojson(indent=2) }}{{ tool.function.name }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if loop.index0 > 100 %}{% break %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- line(message.role) }}{{ message.content.split('\n')[0].strip() }}{{ loop.last }}{{ loop.length }}
    {%- generation %}{{ message.role }}{% endgeneration %}
{%- endfor %}
{{ ns.last }} {{ ns.seen * 2 }} {{ messages[::-1] | map(attribute='role') | join(',') }}
{{ range(3) | list }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 'a%s' % 1 }}
{{ missing is defined }}
{{ messages | length > 1 and messages[-1].role or 'none' }} {{ {'a': [1, none]} | tojson }} {{ flag }}
""",
}


def both(source: str, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    extra = {"flag": True}
    ours = ChatTemplate(source, "<s>", "</s>").render(messages, **options, **extra)
    theirs, _ = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        bos_token="<s>",
        eos_token="</s>",
        tools=options.get("tools"),
        add_generation_prompt=options.get("add_generation_prompt", True),
        **extra,
    )
    return ours, theirs[0]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}], ids=["", "end", "tools"]
)
def test_equals_transformers(name: str, chat: int, options: dict[str, Any]) -> None:
    ours, theirs = both(TEMPLATES[name], CHATS[chat], **options)
    assert ours == theirs
    assert ours


@pytest.mark.model
def test_the_built_in_template_equals_transformers(smollm2_checkpoint: Checkpoint) -> None:
    for chat in CHATS:
        for flag in (True, False):
            ours, theirs = both(smollm2_checkpoint.chat_template or "", chat, add_generation_prompt=flag)
            assert ours == theirs
    assert ours.startswith("<|im_start|>system\nYou are")


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) == time.strftime("%Y")


# ------------------------------------------------------------------------------------------------- messages


def test_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_other_keys_are_kept_and_the_users_list_is_not_changed() -> None:
    calls = [{"function": {"name": "f"}}]
    mine: list[dict[str, Any]] = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert checked_messages(mine) == [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert mine[0]["content"] is None


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ([USER[0], "hi"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", {"type": "text"}]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [4]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages_name_the_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("x").render(messages)
    assert caught.value.param == param
    assert param.split(".")[0] in str(caught.value)


# -------------------------------------------------------------------------------------------- bad templates

FAILS = {
    "raises": ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
    "syntax": ("{% for %}", "Expected an expression"),
    "undefined": ("{{ a.b.c }}", "'a' is undefined"),
    "type error": ("{{ 'a' + 1 }}", "str"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "include": ("{% include 'x' %}", "no loader"),
    "nested source": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recurses"),
    "long source": ("x" * (2 << 20), "longer than"),
}
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__ }}{{ namespace.__init__.__globals__.os }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ (raise_exception | attr('__globals__')).os }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ joiner.__call__.__globals__ }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
]
DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}%s"
BOMBS = {
    "repeat": "{{ 'a' * 10 ** 9 }}",
    "repeat a literal": "{{ 'a' * 1000000000 }}",
    "repeat a list": "{{ [0] * 1000000000 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "power tower": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "squares": DOUBLE % ("2", "ns.x * ns.x", ""),
    "double by +": DOUBLE % ("'aaaa'", "ns.x + ns.x", ""),
    "double by ~": DOUBLE % ("'aaaa'", "ns.x ~ ns.x", ""),
    "double a list": DOUBLE % ("[1]", "ns.x + ns.x", ""),
    "nested list": DOUBLE % ("['a']", "[ns.x, ns.x]", "{{ ns.x }}"),
    "nested list to json": DOUBLE % ("['a']", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    "nested list joined": DOUBLE % ("['a']", "[ns.x, ns.x]", "{{ ns.x ~ '' }}"),
    "nested list to string": DOUBLE % ("['a']", "[ns.x, ns.x]", "{{ ns.x | string }}"),
    "nested list formatted": DOUBLE % ("['a']", "[ns.x, ns.x]", "{{ '%s' % ns.x }}"),
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "indent": "{{ ('\n' * 1000000) | indent(10000, true, true) }}",
    "expandtabs": "{{ 'x\ty'.expandtabs(1000000000) }}",
    "many tabs": "{{ ('\t' * 8000).expandtabs(8000000) }}",
    "translate": "{{ ('a' * 8000000).translate({97: 'b' * 1000}) }}",
    "long texts in a list": "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}"
    "{% set ns.x = ns.x + [('a' * 8000000) ~ ''] %}{% endfor %}",
    "many names": "".join(f"{{% set a{i} = {i} %}}" for i in range(40_000)),
    "urlize": "{{ ('http://a.b ' * 7000000) | urlize }}",
    "title": "{{ ('a ' * 40000000) | title }}",
    "wordwrap": "{{ ('a ' * 40000000) | wordwrap(10) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format by argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace": "{{ ('a' * 8000000).replace('', 'b' * 8000000) }}",
    "replace filter": "{{ ('a' * 8000000) | replace('a', 'b' * 1000) }}",
    "join": "{{ ('b' * 80000).join(['a'] * 10000) }}",
    "join filter": "{{ (['a' * 800000] * 10000) | join }}",
    "range": "{{ range(1000000000) | list }}",
    "endless range": "{% for i in range(10 ** 30) %}{% endfor %}",
    "batch": "{{ [1] | batch(1000000000, 1) | list }}",
    "captured": "{% set x %}{% for i in range(100000) %}" + "x" * 10000 + "{% endfor %}{% endset %}",
    "output": "{% for i in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "lipsum": "{{ lipsum(100000) }}",
}
ENDLESS = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops in a filter": "{% for i in range(100000) %}{{ range(100000) | list | length }}{% endfor %}",
    "macro calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.mark.parametrize("name", FAILS)
def test_failures_say_what_the_template_said(name: str) -> None:
    source, said = FAILS[name]
    broken = ChatTemplate(source)
    for _ in range(2):  # a template that does not compile fails the same way each time
        with pytest.raises(TemplateFailed) as caught:
            broken.render(USER)
        assert said in str(caught.value)


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(source: str) -> None:
    with pytest.raises(TemplateFailed):
        ChatTemplate(source).render(USER)
    assert CHATS[0] == [{"role": "user", "content": "Hi <b> & \"you\" 'é' 🎉"}]


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_do_not_go_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end by their size or by their time, and whatever they take is not taken here."""
    monkeypatch.setattr(template, "MAX_SECONDS", 0.5)
    started, held = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateFailed):
        ChatTemplate(BOMBS[name]).render(USER)
    assert time.monotonic() - started < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 100_000  # KB


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_meets_the_deadline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(TemplateFailed, match="longer than"):
        ChatTemplate(ENDLESS[name]).render(USER)
    assert time.monotonic() - started < 30


def test_a_deadline_is_one_renders_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.2)
    good = ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(TemplateFailed):
        ChatTemplate(ENDLESS["nested loops"]).render(USER)
    time.sleep(0.3)
    assert good.render(USER) == "user"
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(good.render(USER)))
    thread.start()
    thread.join()
    assert found == ["user"]


def test_long_chats_are_fine() -> None:
    """The limits must not make work that grows with the square of the conversation."""
    turn = "{{ m.content }}{{ messages | length }}{{ (messages | last).role }}"
    source = "{% for m in messages %}" + turn + "{% endfor %}"
    chat = [{"role": "user", "content": "x" * 100}] * 3000
    started = time.monotonic()
    assert ChatTemplate(source).render(chat).count("user") == 3000
    assert time.monotonic() - started < 30


def test_every_filter_of_jinja_still_works() -> None:
    source = (
        "{{ 'a b' | title }}{{ [3, 1] | sort | first }}{{ 'x' | center(5) }}|{{ 'a\nb' | indent(2) }}|"
        "{{ 'abc' | replace('b', 'z') }}{{ '%s-%s' | format(1, 2) }}{{ [1, 2] | join('+') }}"
        "{{ 3.7 | round | int }}{{ ['a', 'b'] | batch(1) | list }}{{ 'abcdef' | truncate(3, true, '') }}"
        "{{ {'k': 1} | items | list }}{{ [1, 2] | sum }}{{ ['a', 'b'] | map('upper') | list }}"
    )
    ours, theirs = both(source, CHATS[0])
    assert ours == theirs


def test_tokens_of_the_tiny_vocabulary() -> None:
    assert ChatTemplate("{{ bos_token }}{{ eos_token }}", tiny.SPECIAL[1]).render(USER) == tiny.SPECIAL[1]
