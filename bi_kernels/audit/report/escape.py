"""Puts what comes from outside, as names, paths and errors, into Markdown and on a terminal as the text that it is."""

import html
import re
from urllib.parse import quote

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
MARKED = re.compile(r"[`*\\~]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])")


def line(text: object) -> str:
    """Returns one line without control characters, as of a terminal."""
    return CONTROL.sub(" ", str(text)).strip()


def text(text: object) -> str:
    """Returns Markdown that shows a text in one line: no tag, link, code or emphasis comes of it."""
    entities = html.escape(line(text), quote=False)
    return MARKED.sub(lambda m: f"&#{ord(m[0])};", entities)


def link(name: object, target: str) -> str:
    """Returns a link to a relative path."""
    return f"[{text(name)}]({quote(target)})"


def code(text: object) -> str:
    """Returns a code span that holds a text in one line, backticks included."""
    said = line(text)
    fence = "`" * (max(map(len, re.findall("`+", said)), default=0) + 1)
    space = " " if said[:1] == "`" or said[-1:] == "`" else ""
    return f"{fence}{space}{said}{space}{fence}"
