"""Where a turn of the assistant ends, as a tokenizer's chat template writes it."""

from typing import Any

USER, ANSWER = "Yak", "Zebra"  # words that no template writes of itself


def turn_ends(tokenizer: Any) -> tuple[set[int], str | None]:
    """The tokens that end an answer in the chat template, whether or not another turn follows it;
    and the text that follows an answer if that text is not a token of its own, so that nothing
    would end an answer written in that template (else None). Without a template, or if it renders
    no conversation of two turns, the result is an empty set and None."""
    if not getattr(tokenizer, "chat_template", None):
        return set(), None
    chat = [("user", USER), ("assistant", ANSWER), ("user", USER)]
    messages = [{"role": role, "content": content} for role, content in chat]
    tokens = {t.content: i for i, t in tokenizer.added_tokens_decoder.items()}
    ends, after = set[int](), None
    for turns in (messages, messages[:2]):
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception:  # a template may raise anything, and refuse what it does not know
            continue
        _, answer, tail = text.rpartition(ANSWER)
        begins = [t for t in tokens if t and tail.lstrip().startswith(t)]
        if begins:
            ends.add(tokens[max(begins, key=len)])
        elif answer and after is None:
            after = tail.split(USER)[0][:20]
    return ends, None if ends else after
