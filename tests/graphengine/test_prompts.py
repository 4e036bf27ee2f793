"""Prompts as users write them: BOS or none, conversations with tools, and ones to be continued."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain, count, islice, product, repeat
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engines.small_engine import PROMPT, greedy, open_engine
from graphengine import Chat, Engine
from graphengine.speculative import UserProvided
from graphengine.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}"
    "{% for message in messages %}"
    "#{{ message.role }}:{{ message.content if message.content is string"
    " else message.content | map(attribute='text') | join }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}#assistant:{% endif %}"
)
# Templates that treat the last message in other ways.
TRIMMING = TEMPLATE.replace("message.content if", "message.content | trim if")
FORGETTING = "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}end"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def letters() -> tokenizers.Tokenizer:
    """A token a character."""
    names = [BOS, EOS, *map(chr, range(32, 127)), "\n"]
    vocabulary = {name: index for index, name in enumerate(names)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.add_special_tokens([BOS, EOS])
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return library


def both(template: str = TEMPLATE, **options: Any) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    special = {"bos_token": BOS, "eos_token": EOS}
    ours = Tokenizer(
        letters(), special_tokens=special, chat_templates={"default": template}, **options
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=letters(), chat_template=template, **special)
    return ours, theirs


# BOS.


@pytest.mark.parametrize("configured", [None, True, False])
@pytest.mark.parametrize("text", ["a b", "<s>a", "<s><s>a", "", "a<s>"])
def test_add_bos_puts_exactly_one_or_none(configured: bool | None, text: str) -> None:
    """It does what `TextGenerationController.tokenize_prompt` of Megatron does."""
    ours, theirs = both(add_bos=configured)
    plain = theirs.encode(text, add_special_tokens=False)
    while plain[:1] == [0]:
        del plain[0]
    assert ours.encode(text, add_bos=True) == [0, *plain]
    assert ours.encode(text, add_bos=False) == plain
    assert ours.encode(text) == [0] * bool(configured) + theirs.encode(
        text, add_special_tokens=False
    )


def test_add_bos_needs_one(engine: Engine) -> None:
    tokenizer = Tokenizer(letters())
    assert tokenizer.encode("a", add_bos=False) == tokenizer.encode("a")
    with pytest.raises(ValueError, match="add_bos=True, but the tokenizer's bos_token is None"):
        tokenizer.encode("a", add_bos=True)
    with pytest.raises(ValueError, match="add_bos=True, but the tokenizer's bos_token is None"):
        engine.submit(PROMPT, greedy(add_bos=True))


def test_add_bos_is_for_text(engine: Engine) -> None:
    for prompt in ([1, 2], [{"role": "user", "content": "a"}], Chat(messages=[])):
        for wanted in (True, False):
            with pytest.raises(ValueError, match=f"add_bos={wanted} is for a prompt of text"):
                engine.submit(prompt, greedy(add_bos=wanted))
    assert len(engine.generate(PROMPT, greedy(2, add_bos=False)).token_ids) == 2


def test_an_engine_adds_bos(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    was = dict(tokenizer.special_tokens)
    tokenizer.special_tokens["bos_token"] = tokenizer.id_to_token(0) or ""
    try:
        with_bos = engine.generate(PROMPT, greedy(2, add_bos=True))
        assert with_bos.prompt_token_ids == (0, *tokenizer.encode(PROMPT))
    finally:
        tokenizer.special_tokens.clear()
        tokenizer.special_tokens.update(was)


@pytest.mark.parametrize("processor", [None, "<s> $A", "$A <s>", "<s> $A <s>", "$A"])
@pytest.mark.parametrize("flags", [{"add_bos": True}, {"add_eos": True}, {"add_eos": False}])
def test_one_token_may_begin_and_end(processor: str | None, flags: dict[str, bool]) -> None:
    """The token stands where the flags say; where they say nothing, as the post-processor puts it.

    transformers is given both flags, as it takes one that is missing for False.
    """

    def library() -> tokenizers.Tokenizer:
        made = letters()
        if processor is not None:
            made.post_processor = processors.TemplateProcessing(
                single=processor, pair=f"{processor} $B", special_tokens=[(BOS, 0)]
            )
        return made

    special = {"bos_token": BOS, "eos_token": BOS}
    automatic = {
        "add_bos": str(processor).startswith(BOS),
        "add_eos": str(processor).endswith(BOS),
    }
    both_flags = {f"{name}_token": value for name, value in (automatic | flags).items()}
    theirs = PreTrainedTokenizerFast(tokenizer_object=library(), **special, **both_flags)
    ours = Tokenizer(library(), special_tokens=special, **flags)
    for text in ("a b", "b"):
        assert ours.encode(text) == theirs.encode(text)


# Prompts that have no end.


@pytest.mark.parametrize(
    ("endless", "said"),
    [
        (lambda: repeat(1), "more than 127"),
        (lambda: chain([1, 2], count()), "more than 127"),
        (lambda: islice(repeat(1), 128), "more than 127"),
        (lambda: range(10**12), "1000000000000"),
    ],
)
def test_a_prompt_without_an_end_is_refused(engine: Engine, endless: Any, said: str) -> None:
    limit = f"leaves no room for a new one in max_seq_len={engine.memory.max_seq_len}"
    for submit in (engine.submit, engine.generate):
        with pytest.raises(ValueError, match=f"prompt of {said} tokens {limit}"):
            submit(endless(), greedy(2))
    with engine.session() as session:
        session.append([1, 2, 3])
        said = said.replace("127", "124")
        with pytest.raises(ValueError, match=f"{said} tokens after 3 of the session {limit}"):
            session.append(endless())
    shorter: Iterable[int] = iter([1, 2, 3])
    assert engine.generate(shorter, greedy(2)).prompt_token_ids == (1, 2, 3)


def test_drafts_without_an_end_are_refused(device: str) -> None:
    with open_engine(device=device, speculative=UserProvided(2)) as engine:
        request = engine.submit(PROMPT, greedy(4))
        with pytest.raises(ValueError, match="more than 2 drafts for a request, k=2"):
            engine.draft(request, repeat(1))
        with pytest.raises(ValueError, match="1000 drafts for a request, k=2"):
            engine.draft(request, range(1000))


# Conversations.

WORDS = st.text(alphabet="ab .<\n", max_size=8)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": WORDS}),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(messages=MESSAGES, tools=st.sampled_from([None, TOOLS]), generation=st.booleans())
def test_conversations_are_transformers(
    messages: list[dict[str, str]], tools: Any, generation: bool
) -> None:
    ours, theirs = both()
    chat = Chat(messages=messages, tools=tools, add_generation_prompt=generation)
    expected = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=generation, return_dict=False
    )
    assert chat.token_ids(ours) == expected


READING = """\
{% for message in messages %}<{{ message | tojson }}{{ message.content }}|{{ message.thinking }}|
{{- message.reasoning_content }}|{{ message.reasoning }}>{% endfor %}
{%- for key in messages[-1] %}{{ key }} {% endfor %}"""


def test_reasoning_and_missing_content_are_transformers() -> None:
    """A template may read reasoning by another name than the message has."""
    ours, theirs = both(READING)
    optional = {
        "content": [{}, {"content": None}, {"content": ""}, {"content": "so"}],
        "thinking": [{}, {"thinking": None}, {"thinking": "t"}],
        "reasoning": [{}, {"reasoning": ""}, {"reasoning": ["r"]}],
        "reasoning_content": [{}, {"reasoning_content": None}, {"reasoning_content": "c"}],
    }
    for role, parts in product(["user", "assistant"], product(*optional.values())):
        message = {"role": role} | {key: value for part in parts for key, value in part.items()}
        last_first = dict(reversed(message.items()))
        expected = theirs.apply_chat_template([message, last_first], tokenize=False)
        assert ours.render_chat([message, last_first], False) == expected
        assert list(message) == list(reversed(last_first)), "the caller's messages are as they were"
    short = {"role": "assistant", "reasoning": "because"}
    assert "|because|because|because>" in ours.render_chat([short])


@pytest.mark.parametrize(
    ("template", "parts"),
    [(TEMPLATE, False), (TEMPLATE, True), (TRIMMING, False)],
    ids=["as it is", "in parts", "trimmed"],
)
@settings(max_examples=40, deadline=None)
@given(messages=MESSAGES)
def test_a_continued_message_is_transformers(
    template: str, parts: bool, messages: list[dict[str, Any]]
) -> None:
    messages = [dict(message) for message in messages]
    if parts:
        text = messages[-1]["content"]
        messages[-1]["content"] = [{"type": "text", "text": text} for text in ("x ", text)]
    before = str(messages)
    ours, theirs = both(template)
    expected = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    chat = Chat(messages=messages, continue_final_message=True)
    assert ours.render_chat(messages, False, None, True) == expected
    assert chat.token_ids(ours) == theirs.encode(expected, add_special_tokens=False)
    assert str(messages) == before, "the caller's messages are as they were"


THINKING = """\
{% if enable_thinking is defined and not enable_thinking %}<off>{% endif %}
{{- reasoning_effort | default('medium') }}{{ style | tojson if style is defined }}
{%- for key in (style or {}).items() %}{{ key }}{% endfor %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""


def test_template_variables_are_transformers() -> None:
    ours, theirs = both(THINKING)
    messages = [{"role": "user", "content": "go on"}]
    texts = set()
    variables: dict[str, Any]
    for variables in (
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "reasoning_effort": "high"},
        {"enable_thinking": None, "reasoning_effort": None},
        {"style": {"short": [1, 2.5, None]}, "reasoning_effort": 3},
    ):
        text = theirs.apply_chat_template(messages, tokenize=False, **variables)
        assert ours.render_chat(messages, False, template_variables=variables) == text
        ids = theirs.encode(text, add_special_tokens=False)
        chat = Chat(messages=messages, template_variables=variables)
        assert chat.token_ids(ours) == ids
        texts.add(text)
    assert len(texts) == 5


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([1], r"template_variables must map names to values, got \[1\]"),
        ({3: 1}, "template_variables: no template has a variable named 3"),
        ({"a b": 1}, "template_variables: no template has a variable named 'a b'"),
        ({"continue_final_message": True}, "cannot set .*: it is an option of its own"),
        ({"x": {1, 2}}, "template_variables must hold plain JSON values: "),
        ({"x": [math.nan]}, "template_variables must hold plain JSON values: "),
        *(
            ({name: 1}, f"template_variables cannot set '{name}': every template gets it already")
            for name in ("messages", "tools", "add_generation_prompt", "bos_token", "namespace")
        ),
    ],
)
def test_bad_template_variables_are_named(variables: Any, message: str) -> None:
    ours, _ = both()
    chat = Chat(messages=[{"role": "user", "content": "a"}], template_variables=variables)
    with pytest.raises(ValueError, match=message):
        chat.token_ids(ours)


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
def test_what_is_neither_true_nor_false_is_named(name: str) -> None:
    ours, _ = both()
    chat = Chat(messages=[{"role": "user", "content": "a"}], **{name: "no"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"{name}='no' must be True or False"):
        chat.token_ids(ours)


def test_a_message_that_cannot_be_continued_is_named() -> None:
    ours, _ = both()
    user = {"role": "user", "content": "go on"}
    with pytest.raises(ValueError, match="only one of them can be True"):
        Chat(messages=[user], continue_final_message=True, add_generation_prompt=True).token_ids(
            ours
        )
    nothing = {"role": "user", "content": [{"type": "refusal"}]}
    with pytest.raises(ValueError, match=r"the last message has no text: .*refusal"):
        Chat(messages=[user, nothing], continue_final_message=True).token_ids(ours)
    forgetting, _ = both(FORGETTING)
    with pytest.raises(ValueError, match="does not write out the last message: 'go on'"):
        Chat(messages=[user, user], continue_final_message=True).token_ids(forgetting)


def test_engines_take_conversations(chat_checkpoint: Path, device: str) -> None:
    messages = [
        {"role": "user", "content": "A function, please."},
        {"role": "assistant", "content": "def f("},
    ]
    text = "# user: A function, please.\n# assistant: def f("
    with open_engine(chat_checkpoint, device=device) as engine:
        expected = engine.generate(text, greedy(6))
        going_on = Chat(messages=messages, continue_final_message=True)
        assert engine.generate(going_on, greedy(6)).token_ids == expected.token_ids
        batch = engine.generate([going_on, Chat(messages=messages[:1]), messages[:1]], greedy(6))
        assert [result.prompt_token_ids for result in batch] == [
            expected.prompt_token_ids,
            *[tuple(engine.tokenizer.encode(text[: -len(" def f(")]))] * 2,
        ]
        with pytest.raises(ValueError, match="tools must be a list of dicts"):
            engine.submit(Chat(messages=messages, tools="add"))  # type: ignore[arg-type]
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        for prompt in ([messages[0], image], Chat(messages=[messages[0], image])):
            with pytest.raises(
                ValueError, match="message 1 has a part of type 'image_url': only te"
            ):
                engine.submit(prompt)
