"""Text that is safe to print in a terminal.

Model output, file names and file contents may hold control characters: an escape sequence recolours
or clears the screen, changes the title or answers in the user's place, a carriage return overwrites
text, and a change of direction reorders it. Everything printed goes through `plain`. It escapes
single characters, so a sequence is disarmed however a stream divides it.
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
    """The text with every character that a terminal would obey or hide escaped as in Python, such
    as \\x1b. Line feeds and tabs stay."""
    return text if text.isprintable() else "".join(map(_shown, text))


def one_line(text: str) -> str:
    """A `plain` text on one line, with single spaces for white space."""
    return plain(" ".join(text.split()))


def print_to_stderr(line: str) -> None:
    """Print a line on stderr. If its reader, such as `tee`, has gone, print nothing more there and
    let the process continue."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _shown(character: str) -> str:
    if character in KEPT or unicodedata.category(character) not in NOT_SHOWN:
        return character
    return character.encode("unicode_escape").decode()
