"""Tables that fit a screen: of one that would be wider, the longest words may break, and none is another.

A browser gives a column at least the width of its longest word. A soft hyphen is seen where a word breaks, and nowhere
else; `<wbr>` never is.
"""

import re
from collections.abc import Callable
from itertools import zip_longest

SCREEN = 1200  # pixels that a table may take of a screen 1,280 wide
# pixels: of a heading's letter, of a cell's, of one in code, each on average of a word at most; and about a cell
BOLD, LETTER, CODE, PADDING = 10.0, 8.3, 8.2, 27
TABLE = re.compile(r"^\|.*\|[ \t]*\n\|[ \t:|-]*-[ \t:|-]*\|[ \t]*\n(?:\|.*\|[ \t]*\n)*", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CELLS = re.compile(r"(?<!\\)\|")
# code, pictures, a link's address, addresses, formulas, tags: nothing is put in there
APART = re.compile(r"((`+).*?\2|!\[[^]]*\]|\]\(.*?\)(?= |$)|\S+://\S+|\S+@\S+|\$[^$]+\$|<[^>]*>|&\w+;)")
WORDS = ["invari-ance", "determi-nism", "accu-racy", "gra-dient", "differ-ing", "con-tract", "to-gether", "for-ward"]
HYPHENATED = {word.replace("-", ""): word.replace("-", "&shy;") for word in WORDS}
AFTER = re.compile(r"(?<=[^\W\d_][/.:])(?=\w)")  # a/ a. a:
BEFORE = re.compile(r"(?<=[^\W_])\\?_(?=\w)")  # _, which would begin emphasis where a tag comes before it


def fitted(page: str) -> str:
    """Returns a page of Markdown whose tables fit a screen as far as breaks in their words can make them."""
    fences = [found.span() for found in FENCED.finditer(page)]

    def fit(found: re.Match) -> str:
        code = any(begin <= found.start() < end for begin, end in fences)
        return found[0] if code or width(found[0]) <= SCREEN else _broken(found[0])

    return TABLE.sub(fit, page)


def width(table: str) -> float:
    """Returns how many pixels a Markdown table takes at least, about: of each column its longest word."""
    rows = [CELLS.split(line.strip())[1:-1] for line in table.splitlines()]
    head, cells = [_longest(cell, BOLD) for cell in rows[0]], [[_longest(c, LETTER) for c in row] for row in rows[2:]]
    return sum(PADDING + max(column) for column in zip_longest(head, *cells, fillvalue=0.0))


def _longest(cell: str, letter: float) -> float:
    code = re.findall(r"`([^`]*)`", cell)
    shown = re.sub(r"`[^`]*`", " ", re.sub(r"\]\([^)]*\)|[\[*\\]", "", cell))
    words = re.split(r"\s+|&shy;|<wbr>|(?<=\w-)(?=\w)", shown)
    return max([letter * len(word) for word in words] + [CODE * len(word) for text in code for word in text.split()])


def _broken(table: str) -> str:
    head, *body = table.split("\n")
    hyphenated = _outside(head, lambda text: re.sub(r"\w+", lambda word: HYPHENATED.get(word[0], word[0]), text))
    opened = lambda text: BEFORE.sub(r"<wbr>\\_", AFTER.sub("<wbr>", text))
    return "\n".join([hyphenated, *(_outside(line, opened) for line in body)])


def _outside(line: str, change: Callable[[str], str]) -> str:
    """Returns a line, changed but for what stands APART."""
    found, end = [], 0
    for apart in APART.finditer(line):
        found += [change(line[end : apart.start()]), apart[0]]
        end = apart.end()
    return "".join([*found, change(line[end:])])
