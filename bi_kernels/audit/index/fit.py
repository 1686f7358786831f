"""Tables that fit a screen: of one that would be wider, the longest words may break, and none is another.

A browser gives a column at least the width of its longest word. A soft hyphen is seen where a word breaks, and nowhere
else; `<wbr>` never is.
"""

import re

SCREEN = 1200  # pixels that a table may take of a screen 1,280 wide
# pixels: of a heading's letter, of a cell's, of one in code, each on average of a word at most; and about a cell
BOLD, LETTER, CODE, PADDING = 10.0, 8.3, 8.2, 27
TABLE = re.compile(r"(?:^\|.*\|[ \t]*\n)+", re.MULTILINE)
CELLS = re.compile(r"(?<!\\)\|")
APART = re.compile(r"(`[^`]*`|\]\([^)]*\)|<[^>]*>|&\w+;)")  # code, a link's address, tags: nothing is put in there
WORDS = "invari-ance", "determi-nism", "accu-racy", "gra-dient", "differ-ing", "con-tract", "to-gether"
HYPHENATED = {word.replace("-", ""): word.replace("-", "&shy;") for word in (*WORDS, "for-ward")}
BREAK = re.compile(r"(?<=[^\W\d_][/.:])(?=\w)|(?<=[^\W_])(?=\\?_\w)")  # after a/ a. a:, before _


def fitted(page: str) -> str:
    """Returns a page of Markdown whose tables fit a screen as far as breaks in their words can make them."""
    return TABLE.sub(lambda found: _broken(found[0]) if width(found[0]) > SCREEN else found[0], page)


def width(table: str) -> float:
    """Returns how many pixels a Markdown table takes at least, about: of each column its longest word."""
    rows = [CELLS.split(line.strip())[1:-1] for line in table.splitlines()]
    rows = [row for i, row in enumerate(rows) if i != 1]
    most = lambda head, *cells: max(_longest(head, BOLD), *(_longest(cell, LETTER) for cell in cells))
    return sum(PADDING + most(*column) for column in zip(*rows, strict=True))


def _longest(cell: str, letter: float) -> float:
    code = re.findall(r"`([^`]*)`", cell)
    shown = re.sub(r"`[^`]*`", " ", re.sub(r"\]\([^)]*\)|[\[*\\]", "", cell))
    words = re.split(r"\s+|&shy;|<wbr>|(?<=\w-)(?=\w)", shown)
    return max([letter * len(word) for word in words] + [CODE * len(word) for text in code for word in text.split()])


def _broken(table: str) -> str:
    head, *body = table.split("\n")
    head = "".join(
        re.sub(r"\w+", _hyphenated, part) if i % 2 == 0 else part for i, part in enumerate(APART.split(head))
    )
    return "\n".join([head, *(_opened(line) for line in body)])


def _hyphenated(word: re.Match) -> str:
    return HYPHENATED.get(word[0], word[0])


def _opened(line: str) -> str:
    return "".join(BREAK.sub("<wbr>", part) if i % 2 == 0 else part for i, part in enumerate(APART.split(line)))
