"""Chat templates are rendered as transformers renders them, and each of them comes to an end.

Run alone: python -m pytest tests/train/data/test_rendering.py (about 10 s)
"""

import threading

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.errors import UserError
from tests.train.data.chats import CHATML, GENERATION, random_talks, talk, tokenizer_of, written
from train.data.conversations import Message, Unusable
from train.data.rendering import STEPS, BoundedTemplate
from train.data.split import split_documents

CHAT = talk("Hi", "a\n{{ b }}", "x" * 50, system="s").messages
THOUGHT = Message("assistant", "yes", {"reasoning_content": "why", "name": "Bo"})
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, None, "é"]}}}]
SNIPPETS = [
    CHATML,
    GENERATION,
    "{% for m in messages %}{{ m.role ~ ': ' ~ (m.content ~ 'x') ~ loop.index }}{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f('q') }}{{ f(1, b='é') }}",
    "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.role %}"
    "{% endfor %}{{ ns.x | upper }}{% if not ns.y is defined %}{{ 7 % 4 }}{% endif %}"
    "{{ '%s!' % 5 }}",
    "{{ messages | tojson(sort_keys=true) }}{{ tools | tojson(indent=2) }}"
    "{{ messages[::-1][0].content[:3] }}",
    "{{ 'a,b'.split(',') | join('-') }}{{ [1] + [2] }}{{ 3 * 'ab' }}{{ 2 ** 5 }}{{ 1 + 2.5 }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% else %}none{% endfor %}",
    "{% for m in messages | selectattr('role', 'equalto', 'user') if m.content %}\n"
    "  {{ m.content }}\n{% endfor %}{{ bos_token }}{{ eos_token }}{{ unknown }}"
    "{{ dict(a=1).items() | list }}",
    "{% set block %}{% for m in messages %}[{{ m.thinking or m.reasoning_content or m.name }}]"
    "{% endfor %}{% endset %}{{ block | trim }}{{ '{}-{:>5}'.format(1, 'x') }}",
    "{% call(x) f() %}{{ x }}{% endcall %}{% macro f() %}{{ caller('c') }}{% endmacro %}",
]


@pytest.mark.parametrize("source", SNIPPETS)
@pytest.mark.parametrize("prompt", [False, True])
def test_a_template_is_rendered_as_transformers_renders_it(source: str, prompt: bool) -> None:
    tokenizer = tokenizer_of(source)
    template = BoundedTemplate(source, tokenizer, None)
    for messages in (CHAT, [*CHAT, THOUGHT]):
        chat = [{"role": m.role, "content": m.content} | dict(m.beside) for m in messages]
        for turn in chat:  # as vLLM does
            if "reasoning_content" in turn:
                turn |= {"reasoning": turn["reasoning_content"]}
        try:
            texts, blocks = render_jinja_template(
                [chat],
                tools=TOOLS,
                chat_template=source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=template.has_blocks,
                **tokenizer.special_tokens_map,
            )
        except Exception as error:
            with pytest.raises(Unusable, match="refused by the chat template") as refused:
                template.render(messages, TOOLS, prompt)
            assert str(error).splitlines()[0][:40] in str(refused.value)
            continue
        text, places = template.render(messages, TOOLS, prompt)
        assert text == texts[0]
        assert not template.has_blocks or places == blocks[0]


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 9999 }}"
    "{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a text": "{{ 'x' * 10**12 }}",
    "a number": "{{ 9**99999999 }}",
    "a width": "{{ 'x'.center(10**12) }}",
    "a filter's width": "{{ 'x' | center(10**12) }}",
    "a format": "{{ '%999999999999d' % 1 }}",
    "a list": "{{ range(10**9) | list }}",
    "doubling by ~": "{% set ns = namespace(x='xy') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='xy') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(x='xy') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling by a method": "{% set ns = namespace(x='xy') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x.replace('x', ns.x) %}{% endfor %}",
}


def test_a_template_that_does_not_end_is_stopped_in_any_thread() -> None:
    for name, source in ENDLESS.items():
        told: list[str] = []

        def render(source: str = source, told: list[str] = told) -> None:
            try:
                BoundedTemplate(source, tokenizer_of(source), None).render(CHAT)
            except (UserError, Unusable) as error:
                told.append(str(error))

        thread = threading.Thread(target=render)
        thread.start()
        thread.join()
        assert len(told) == 1 and "\n" not in told[0], name
        assert "does not end" in told[0], (name, told)


def test_long_chats_are_no_endless_ones() -> None:
    """Some templates look through all turns at each turn."""
    source = "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }}{% endfor %}"
    messages = [Message("user", "0" * 10)] * 1200
    assert STEPS < 1200**2
    assert len(BoundedTemplate(source, tokenizer_of(source), None).render(messages)[0]) == 12_000
    long = [Message("user", "0" * 10_000_000)]
    assert len(BoundedTemplate(source, tokenizer_of(source), None).render(long)[0]) == 10_000_000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in %}", "the chat template is broken in line 1"),
        ("\n{{ x", "the chat template is broken in line 2"),
        ("{{ x | no_such_filter }}", "the chat template is broken in line 1"),
        ("{{ messages.nowhere.deeper }}", "2 refused by the chat template: "),
        ("{{ 1 / 0 }}", "2 refused by the chat template: division by zero"),
        ("{{ messages[0].content + 1 }}", "2 refused by the chat template: "),
        ("{{ raise_exception('one\ntwo') }}", "2 refused by the chat template: one"),
        (ENDLESS["loops"], "the chat template does not end"),
    ],
)
def test_errors_of_a_template_are_one_line(tmp_path: object, source: str, message: str) -> None:
    cfg = written(tmp_path, *random_talks(2))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message) as error:
        split_documents(cfg, tokenizer_of(source))
    assert "\n" not in str(error.value)
