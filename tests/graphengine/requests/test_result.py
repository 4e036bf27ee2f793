"""How results are shown."""

from __future__ import annotations

from dataclasses import replace

from graphengine.requests.result import Result, Timings

RESULT = Result(
    request_id=7,
    prompt_token_ids=(1, 2, 3),
    token_ids=(4, 5),
    text="if a < b:\n    '",
    finish_reason="length",
    seed=11,
    timings=Timings(submitted=1.0, tokens=[1.0125, 1.5], finished=1.5),
)


def test_a_repr_is_one_short_line() -> None:
    assert repr(RESULT) == (
        "Result(request_id=7, prompt=3, tokens=2, finish_reason='length', "
        'text="if a < b:\\n    \'")'
    )
    long = replace(RESULT, text="x" * 61, prompt_token_ids=(1,) * 5000)
    assert repr(long).endswith(
        f"prompt=5000, tokens=2, finish_reason='length', text='{'x' * 60}...')"
    )


def test_a_notebook_shows_the_whole_text_and_no_markup_of_it() -> None:
    assert RESULT._repr_html_() == (
        "<pre>if a &lt; b:\n    &#x27;</pre><small>request 7, 3 prompt + 2 new tokens, finished by "
        "length, seed 11, first token after 12.5 ms</small>"
    )
    scored = replace(RESULT, token_ids=(), text="", cached_tokens=2, timings=Timings(submitted=1.0))
    assert "3 prompt + 0 new tokens, 2 cached, finished by length, seed 11<" in scored._repr_html_()
