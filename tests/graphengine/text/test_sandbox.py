"""What a chat template may do, and what it may take."""

from __future__ import annotations

import resource
import time
from typing import Any

import jinja2.filters
import jinja2.tests
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from graphengine.text import sandbox
from graphengine.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "the fox"}]
LONG = "{% set l = range(99999)|list %}"
TEXT = "{% set s = 'é' * 9000000 %}"
# Lists, and tuples, that hold 2**16 of each other.
NEST = "{% set n = namespace(l=[], m=[]) %}{% for i in range(16) %}{% set n.l = [n.l, n.l] %}"
NEST += "{% set n.m = [n.m, n.m] %}{% endfor %}"
TUPLES = (
    "{% set n = namespace(t=()) %}{% for i in range(16) %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)

SIZE = "characters or items exceed the limit of 16000000"

# Each takes some time. In loops they would take the host's time, or its memory.
REPEATED = [
    "{{ []|slice(10**9)|map('length')|sum }}",
    "{{ []|slice(10**12)|map('length')|sum }}",
    f"{LONG}{{{{ l|sort }}}}",
    f"{LONG}{{{{ l|max }}}}",
    f"{LONG}{{{{ l|groupby('x', default=1) }}}}",
    "{{ ('ab'|list * 999)|sort(attribute='0.' * 9999 ~ '0')|length }}",
    "{{ '{0' ~ '[0]' * 9999 ~ '}' }}{% set x = ('{0' ~ '[0]' * 99999 ~ '}').format('a') %}",
    "{{ {}.fromkeys(range(9999))|dictsort }}",
    f"{TEXT}{{{{ s|title }}}}",
    f"{TEXT}{{{{ s|upper }}}}",
    f"{TEXT}{{{{ s.upper() }}}}",
    f"{TEXT}{{{{ s is upper }}}}",
    f"{TEXT}{{{{ s|escape }}}}{{{{ s|truncate }}}}",
    f"{TEXT}{{{{ s|wordcount }}}}",
    f"{TEXT}{{{{ s|urlencode|length }}}}",
    f"{TEXT}{{{{ s.strip('bcdefgh') }}}}",
    f"{TEXT}{{{{ s|trim('bcdefgh') }}}}",
    f"{TEXT}{{{{ s.rfind('a' * 100) }}}}",
    f"{TEXT}{{{{ s.split() }}}}",
    f"{TEXT}{{{{ s.split('é') }}}}",
    f"{TEXT}{{{{ s|replace('é', '') }}}}",
    f"{TEXT}{{{{ s|int }}}}",
    f"{TEXT}{{{{ 'b' * 9 ~ 'c' in s }}}}",
    f"{TEXT}{{{{ s == s ~ '' }}}}",
    f"{TEXT}{{{{ {{'a': s}}|xmlattr }}}}",
    f"{TEXT}{{{{ s.count('éé') ~ s ~ s.find('éé') }}}}",
    f"{TEXT}{{% set x = s[1:] %}}",
    "{% set s = '9' * 9000000 %}{{ s|float }}",
    "{{ ('a\n' * 30000)|indent }}",
    "{{ ([[1]] * 20000)|tojson }}",
    f"{LONG}{{{{ range(9)|select('in', l)|list }}}}",
    f"{LONG}{{{{ -1 in l }}}}",
    f"{LONG}{{{{ l == range(99999)|list }}}}",
    f"{LONG}{{{{ l.count(-1) }}}}",
    f"{LONG}{{% for i in l %}}{{% set x = l[1:] %}}{{% endfor %}}",
    f"{LONG}{{{{ dict(l[1:]|batch(2)) }}}}",
    "{{ {}.fromkeys(range(99999)) }}",
    f"{LONG}{{% macro f() %}}{{{{ varargs|length }}}}{{% endmacro %}}{{{{ f(*l) }}}}",
    f"{LONG}{{% for i in [1] %}}{{{{ loop.changed(l) }}}}{{% endfor %}}",
    f"{LONG}{{{{ l|unique|list }}}}",
    f"{LONG}{{{{ l|list|list|reverse|join }}}}",
    "{{ range(99999)|list|list|list|list|length }}",
    "{{ range(9999)|reject('number')|list }}",
    "{{ range(9999)|batch(2)|list }}",
    "{% for i in range(99999) if false %}{% endfor %}",
    "{{ ([[1] * 99] * 999)|sum(start=[]) }}",
    "{% set x = {}.fromkeys(range(99999)).keys() - range(99999) %}",
    f"{NEST}{{{{ n.l }}}}",
    f"{NEST}{{{{ n.l ~ '' }}}}",
    f"{NEST}{{{{ n.l|string }}}}",
    f"{NEST}{{{{ n.l|tojson }}}}",
    f"{NEST}{{{{ '%s' % n.l }}}}",
    f"{NEST}{{{{ '{{}}'.format(n.l) }}}}",
    f"{NEST}{{{{ n.l == n.m }}}}",
    f"{NEST}{{{{ n.l is eq(n.m) }}}}",
    f"{NEST}{{% set x = [n.l, n.m]|sort %}}",
    f"{TUPLES}{{% set x = {{n.t: 1}} %}}",
    f"{TUPLES}{{{{ {{}}[n.t] }}}}",
    f"{TUPLES}{{{{ {{}}.get(n.t) }}}}",
    f"{TUPLES}{{{{ n.t in {{}} }}}}",
    f"{TUPLES}{{% set x = [n.t]|unique|list %}}",
    f"{TUPLES}{{% set x = dict([(n.t, 1)]) %}}",
    f"{{% for i in range(9999) %}}{'{% if i %}{% endif %}' * 99}{{% endfor %}}",
]

REFUSED: dict[str, list[str]] = {
    SIZE: [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '%(a)1000000000s' % {'a': 1} }}",
        "{{ ('%%' * 999999) % 1 }}",
        "{% set s = 'a' * 999999 %}{{ ('%(a)s' * 99) % {'a': s} }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ('{}' * 1999999).format(1) }}",
        "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
        "{% set s = 'a' * 999999 %}{{ ('{0}' * 99).format(s) }}",
        "{{ 'a'|indent(10**9) }}",
        "{{ ('a\n' * 99)|indent('x' * 999999) }}",
        "{{ ('a' * 9999)|replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
        "{{ ('a' * 99999).join(['b'] * 999) }}",
        "{{ ('a' * 99999).join(range(999)|map('string')) }}",
        "{{ (['b'] * 999)|join('a' * 99999) }}",
        "{{ ([{'a': 'b' * 99999}] * 999)|join(attribute='a') }}",
        "{{ [1]|batch(10**9, 'x')|list }}",
        "{{ [[1]]|tojson(indent=10**9) }}",
        "{{ ([1] * 99)|tojson(separators=('x' * 999999, 'y')) }}",
        "{% set l = [1] * 9999999 %}{% set m = l + l %}",
        "{% set s = 'a' * 9999999 %}{% set l = [s, s] %}",
        NEST.replace("16", "40"),
        TUPLES.replace("16", "40"),
    ],
    "exceeds the limit of 1024": [
        "{{ 1|round(20000000, 'ceil') is number }}",
        "{{ 1|round(-20000000) is number }}",
        "{{ [1]|map('round', 10**9, 'floor')|list }}",
    ],
    "a pattern of 9000000 characters exceeds the limit of 100": [
        f"{TEXT}{{{{ 'é'.{method}(s) }}}}" for method in ("rfind", "rsplit", "rpartition", "strip")
    ]
    + [f"{TEXT}{{{{ 'é'|trim(s) }}}}", f"{TEXT}{{{{ strftime_now(s) }}}}"],
    "it nests values more than 500 deep": [
        "{% set n = namespace(t=()) %}{% for i in range(999) %}{% set n.t = (n.t,) %}{% endfor %}"
    ],
    "it wrote more than 16000000 characters": [
        "{% set s = 'a' * 9999999 %}{% macro f() %}{% for i in range(9) %}{{ s }}{% endfor %}"
        "{% endmacro %}{% set x = f() %}",
        f"{{% block a %}}{'x' * 99999}{{% endblock %}}"
        "{% for i in range(999) %}{{ self.a() }}{% endfor %}",
        f"{{% set x %}}{{% for i in range(999) %}}{'x' * 99999}{{% endfor %}}{{% endset %}}",
    ],
    "it made more than 1073741824 bytes of text or items": [
        f"{{% set s = 'a' * 9999999 %}}{{% set x = {' ~ '.join(['s'] * 200)} %}}",
        "{% set s = 'a' * 9999999 %}"
        + "".join(f"{{% set x{index} = s[1:] %}}" for index in range(200)),
    ],
    "a format whose width is a field": ["{{ '{:{}}'.format(1, 10**9) }}"],
    "a format whose width is an argument": ["{{ '%*d' % (10**9, 1) }}"],
    "a format whose key has parentheses": [
        "{{ '%((a))1000000000d' % {'(a)': 1} }}",
        "{{ '%((a)).300000000f'|format(**{'(a)': 1}) }}",
    ],
    "must be real number, not str": ["{{ 'ab'|round(9, 'ceil') }}"],
    "access to attribute .* is unsafe": [
        f"{{{{ 'a'.{call} }}}}"
        for call in ("encode('punycode')", "translate({97: 'b'})", "expandtabs(10**9)", "zfill(9)")
    ],
    "object of type 'int' has no len": ["{{ -10**9|_wrote }}"],
}


def test_a_power_of_as_many_bits_as_there_may_be() -> None:
    assert ChatTemplate("{{ (2**4095) // 2**4094 }}").render(MESSAGES) == "2"
    for power, bits in (("2**4096", 4097), ("3**4097", 4098)):
        with pytest.raises(ValueError, match=f"an integer of {bits} bits or more exceeds .* 4096"):
            ChatTemplate(f"{{{{ {power} }}}}").render(MESSAGES)


@pytest.mark.parametrize("expected", REFUSED)
def test_what_would_be_too_large_or_slow_is_refused_before(expected: str) -> None:
    for source in REFUSED[expected]:
        begun = time.thread_time()
        with pytest.raises(ValueError, match=f"the chat template failed: .*{expected}"):
            ChatTemplate(source).render(MESSAGES)
            pytest.fail(f"rendered: {source[:200]}")
        assert time.thread_time() - begun < 2, source[:200]


def test_what_takes_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after the limit, and with little memory."""
    monkeypatch.setattr("graphengine.text.sandbox.MAX_SECONDS", 0.05)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source in REPEATED:
        loops = "{% for outer in range(99999) %}{% for inner in range(99999) %}"
        template = ChatTemplate(f"{loops}{source}{{% endfor %}}{{% endfor %}}")
        begun = time.thread_time()
        with pytest.raises(ValueError, match=f"took more than 0.05|made more|wrote more|{SIZE}"):
            template.render(MESSAGES)
            pytest.fail(f"rendered: {source}")
        assert time.thread_time() - begun < 3, source
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 2 << 20


def test_each_rendering_has_all_of_its_time_and_memory() -> None:
    template = ChatTemplate("{% set s = messages[0].content * 99 %}{{ s.count('a') }}")
    for _ in range(20):
        assert template.render([{"role": "user", "content": "a" * 100_000}]) == "9900000"
    assert template._sandbox.total == 0 and not template._sandbox._measured


def test_a_long_source_is_refused() -> None:
    ChatTemplate(" " * sandbox.MAX_SOURCE).render(MESSAGES)
    with pytest.raises(ValueError, match=r"not compile: 200001 characters exceed .* of 200000"):
        ChatTemplate(" " * (sandbox.MAX_SOURCE + 1)).render(MESSAGES)


def test_every_filter_and_test_of_jinja2_is_reviewed() -> None:
    """A later jinja2 may have more: they are refused until somebody looks at them."""
    refused = {"center", "pprint", "striptags", "urlize", "wordwrap"}
    assert {*sandbox.FILTERS.split()} | refused == jinja2.filters.FILTERS.keys()
    assert {*sandbox.TESTS.split()} == jinja2.tests.TESTS.keys()
    for name in refused:
        with pytest.raises(ValueError, match=f"No filter named '{name}'"):
            ChatTemplate(f"{{{{ 'a'|{name} }}}}").render(MESSAGES)


# Templates like those of models, with room.

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{index}",
            "description": "Looks <something> up & 'says' so.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string", "enum": ["a", "b"], "description": "the place"},
                    "many": {"type": "array", "items": {"type": "number"}},
                    "deep": {"type": "object", "properties": {"x": {"type": ["string", "null"]}}},
                },
                "required": ["where"],
            },
        },
    }
    for index in range(6)
]

# Types of parameters written by macros that call themselves, as of gpt-oss.
TYPED = """\
{%- macro kind(spec) -%}
    {%- if spec.type == "array" -%}{{ kind(spec['items']) }}[]
    {%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(" | ") }}
    {%- elif spec.enum -%}"{{ spec.enum | join('" | "') }}"
    {%- elif spec.type == "object" -%}{
        {%- for name, inner in spec.properties.items() -%}
            {{ name }}{{ "?" if name not in (spec.required or []) }}: {{ kind(inner) }}
            {{- ", " if not loop.last }}
        {%- endfor -%}}
    {%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{%- macro declare(tools) -%}
    {%- for tool in tools %}{% set tool = tool.function %}
// {{ tool.description }}
type {{ tool.name }} = (_: {{ kind(tool.parameters) }}) => any;
    {%- endfor %}
{%- endmacro -%}
{%- set ns = namespace(system="", last_user=-1, calls=[]) -%}
{%- if messages[0].role in ["system", "developer"] -%}
    {%- set ns.system = messages[0].content | trim %}{% set turns = messages[1:] -%}
{%- else %}{% set turns = messages %}{% endif -%}
{%- for message in turns[::-1] -%}
    {%- if ns.last_user < 0 and message.role == "user" -%}
        {%- set ns.last_user = turns | length - 1 - loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
<|start|>system<|message|>{{ ns.system or "Be kind." }}
{%- if tools %}
{{ declare(tools) }}
{%- endif %}<|end|>
{%- for message in turns -%}
    {%- if message.role == "assistant" and message.tool_calls -%}
        {%- for call in message.tool_calls %}{% set call = call.function or call -%}
<|start|>assistant to={{ call.name }}<|message|>{{ call.arguments | tojson }}<|call|>
            {%- set ns.calls = ns.calls + [call.name] -%}
        {%- endfor -%}
    {%- elif message.role == "tool" -%}
<|start|>{{ ns.calls[-1] }}<|message|>{{ message.content | tojson }}<|end|>
    {%- else -%}
        {%- set content = message.content if message.content is string else "" -%}
        {%- if "</think>" in content -%}
            {%- set thought = content.split("</think>")[0].rstrip().split("<think>")[-1] -%}
            {%- set content = content.split("</think>")[-1].lstrip("\\n") -%}
            {%- if loop.index0 > ns.last_user -%}
<|start|>{{ message.role }}<|thought|>{{ thought.strip() }}<|end|>
            {%- endif -%}
        {%- endif -%}
<|start|>{{ message.role }}<|message|>{{ content | replace("<|", "< |") }}<|end|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{% endif -%}
"""

# Roles that have to alternate, headers with dates, tools in the last user's turn, as of Mistral and
# Llama.
HEADED = """\
{{- bos_token }}{% set loop_messages = messages | rejectattr("role", "equalto", "system") | list -%}
{%- if not date is defined %}{% set date = "26 Jul 2024" %}{% endif -%}
{%- set users = messages | selectattr("role", "eq", "user") | map(attribute="content") | list -%}
{%- for message in loop_messages -%}
    {%- if message.role not in ("user", "assistant", "tool") -%}
        {{ raise_exception("a role of " + message.role) }}
    {%- endif -%}
    {{- "<|head|>" + message["role"] + "<|end|>\\n\\n" -}}
    {%- if message.role == "user" and message.content == users | last and tools is not none -%}
        {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor -%}
        [{{ date }}]
    {%- endif -%}
    {%- if message.tool_calls is defined and message.tool_calls | length == 1 -%}
        {%- for name, value in message.tool_calls[0].function.arguments.items() | sort -%}
            {{ name ~ "=" ~ value | string | upper }}{{ ", " if not loop.last }}
        {%- endfor -%}
        {%- for name, value in message.tool_calls[0].function | dictsort %}{{ "%s;" % name }}
        {%- endfor -%}
    {%- else -%}
        {{- message.content | trim | indent(2) | title if loop.first else message.content | trim -}}
    {%- endif -%}
    {{- eos_token if loop.changed(message.role) and loop.cycle(true, false) -}}
{%- endfor -%}
{%- for group in messages | groupby("role") -%}
    {{ group.grouper }}{{ group.list | length }},
{%- endfor -%}
{{- messages | map(attribute="role") | unique | sort(reverse=true) | join("/") -}}
{{- messages | batch(7) | first | length ~ ([1.5, 2] | sum) ~ (([0.1] * 10) | sum) -}}
"""

# Channels, dates and what a template refuses, as of gpt-oss.
CHANNELS = """\
{%- macro header(role, channel=none) -%}
    {{- "<|start|>" + role }}{% if channel %}{{ "<|channel|>" + channel }}{% endif -%}
    {{- "<|message|>" -}}
{%- endmacro -%}
{%- set ns = namespace(tool=none, has_tools=false) -%}
{%- if tools %}{% set ns.has_tools = true %}{% endif -%}
{{- header("system") + "Date: " + strftime_now("%%Y")[:2] + "\\n" -}}
{{- "Reasoning: " + (reasoning_effort | default("medium")) -}}
{{- "\\n# Tools" if ns.has_tools }}<|end|>
{%- for message in messages -%}
    {%- if message.role == "assistant" and "tool_calls" in message and message.tool_calls -%}
        {%- if ns.tool is not none %}{{ raise_exception("two calls") }}{% endif -%}
        {%- set call = message.tool_calls[0].function %}{% set ns.tool = call.name -%}
        {{- header("assistant to=functions." + call.name, "commentary") -}}
        {{- call.arguments | tojson + "<|call|>" -}}
    {%- elif message.role == "tool" -%}
        {%- if ns.tool is none %}{{ raise_exception("no call before a tool") }}{% endif -%}
        {{- header("functions." + ns.tool + " to=assistant", "commentary") -}}
        {{- message.content | tojson + "<|end|>" }}{% set ns.tool = none -%}
    {%- else -%}
        {{- header(message.role, "final" if message.role == "assistant") -}}
        {{- message.content + ("<|return|>" if loop.last else "<|end|>") -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""

CALL = {"function": {"name": "tool_1", "arguments": {"where": "a", "many": [1, 2.5], "n": None}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is <|it|> & 'where'?\nSay so. größe 😀"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "{'x': 1}"},
    {"role": "assistant", "content": "<think>\nLet me see. \n</think>\n\nIt is there."},
]


@pytest.mark.parametrize("template", [TYPED, HEADED, CHANNELS], ids=["typed", "headed", "channels"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_templates_like_those_of_models_render_as_in_transformers(
    template: str, tools: Any
) -> None:
    system = {"role": "system", "content": " Be brief. "}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(template)
    for messages in ([TURNS[0]], [system, *TURNS], TURNS * 50 + TURNS[:1]):
        for generation in (True, False):
            plain = [{k: v for k, v in m.items() if v is not None} for m in messages]
            (theirs,), _ = render_jinja_template(
                [plain],
                tools=tools,
                chat_template=template,
                add_generation_prompt=generation,
                **special,
            )
            begun = time.thread_time()
            text = ours.render(
                messages, tools=tools, add_generation_prompt=generation, special_tokens=special
            )
            assert text == theirs
            # Two hundred turns at most.
            assert time.thread_time() - begun < sandbox.MAX_SECONDS / 10


# Turns as Gemma has them: a system message is the first user's beginning, content may be parts.
TURNED = """\
{{- bos_token }}
{%- set first, rest = ("", messages) %}
{%- if messages[0]["role"] == "system" %}
    {%- set rest = messages[1:] %}
    {%- set text = messages[0]["content"] %}
    {%- set first = (text if text is string else text[0]["text"]) + "\n\n" %}
{%- endif %}
{%- for turn in rest %}
    {%- if (turn["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("user and assistant must alternate") }}
    {%- endif %}
    {{- "<start_of_turn>" ~ ("model" if turn["role"] == "assistant" else turn["role"]) ~ "\n" }}
    {{- first if loop.first else "" }}
    {%- if turn["content"] is string %}
        {{- turn["content"] | trim }}
    {%- elif turn["content"] is iterable %}
        {%- for part in turn["content"] %}
            {{- "<start_of_image>" if part["type"] == "image" else part["text"] | trim }}
        {%- endfor %}
    {%- else %}
        {{- raise_exception("no content") }}
    {%- endif %}
    {{- "<end_of_turn>\n" }}
{%- endfor %}
{{- "<start_of_turn>model\n" if add_generation_prompt }}
"""


def test_a_template_like_gemmas_renders_as_in_transformers() -> None:
    ours, special = ChatTemplate(TURNED), {"bos_token": "<bos>"}
    user = {"role": "user", "content": " Hi. "}
    parts = {"role": "user", "content": [{"type": "text", "text": " So? "}, {"type": "image"}]}
    model = {"role": "assistant", "content": " Well, \n"}
    brief = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    conversations: list[list[dict[str, Any]]] = [
        [user], [parts, model, user], [brief, user, model, parts],
        [{"role": "system", "content": "Be brief."}, user],
    ]  # fmt: skip
    for messages in conversations:
        for generation in (True, False):
            (theirs,), _ = render_jinja_template(
                [messages], chat_template=TURNED, add_generation_prompt=generation, **special
            )
            text = ours.render(messages, add_generation_prompt=generation, special_tokens=special)
            assert text == theirs
            assert text.startswith("<bos><start_of_turn>user\n")
    for messages, message in (([user, user], "must alternate"), ([model], "must alternate")):
        with pytest.raises(ValueError, match=message):
            ours.render(messages, special_tokens=special)


def test_lazy_results_that_read_one_another_take_no_stack() -> None:
    """A chain of generators this long would end the process."""
    chain = (
        "{% set ns = namespace(g=[1]) %}{% for i in range(30000) %}"
        "{% set ns.g = ns.g|map('string') %}{% endfor %}{{ ns.g|list }}"
    )
    assert ChatTemplate(chain).render(MESSAGES) == "['1']"
