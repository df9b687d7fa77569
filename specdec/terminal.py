"""Text that a terminal only shows.

What a model writes, and the name or contents of a file, may hold control characters: an escape
sequence recolours or clears the screen, retitles the window or responses for the user, a carriage
return overwrites what was said before, and a change of direction reorders it. Whatever is printed
goes through `plain`. A sequence is disarmed one character at a time, so it does not matter how a
stream divides it.
"""

import os
import sys
import unicodedata

# control and format characters, lone surrogates, private use, separators of lines and paragraphs
NOT_SHOWN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
KEPT = frozenset(
    "\n\t\u200c\u200d"
)  # joiners only shape the letters or emoji that they stand between


def plain(text: str) -> str:
    """A text with every character that a terminal would obey or hide written as Python escapes it,
    such as \\x1b. Line feeds and tabs stay."""
    return text if text.isprintable() else "".join(map(_shown, text))


def one_line(text: str) -> str:
    """A `plain` text in one line, its white space reduced to single spaces."""
    return plain(" ".join(text.split()))


def print_to_stderr(line: str) -> None:
    """Print a line on stderr, unless its reader, such as `tee`, has gone: then nothing more is
    printed there, and this process goes on."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in NOT_SHOWN:
        return character
    return character.encode("unicode_escape").decode()
