"""Markdown of agents and models: what it becomes, and that it can do nothing."""

import time
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from breakwater.kernel.pages.markdown import MAX_BRACKETS, MAX_CELLS, MAX_CHARACTERS, markdown
from tests.services.console.inert import check_markdown
from tests.tables import each_row


@each_row(
    ("text", "html"),
    [
        ("**so** `x`", "<p><strong>so</strong> <code>x</code></p>"),
        ("one\ntwo", "<p>one<br>\ntwo</p>"),
        ("# Top", "<h4>Top</h4>"),
        ("###### Low", "<h6>Low</h6>"),
        ("- a", "<ul>\n<li>a</li>\n</ul>"),
        ("```sql\na < b\n```", '<span class="language">sql</span><pre tabindex="0"><code>a &lt; b\n</code></pre>'),
        ("    a < b", '<pre tabindex="0"><code>a &lt; b\n</code></pre>'),
        (
            "<https://a.example/b>",
            '<p><a href="https://a.example/b" rel="noopener noreferrer nofollow">https://a.example/b</a></p>',
        ),
        # Whoever reads it sees where a link leads.
        (
            "[good.example](https://bad.example/x)",
            '<p><a href="https://bad.example/x" rel="noopener noreferrer nofollow">good.example</a> '
            '<span class="faint small">(bad.example)</span></p>',
        ),
        # What would not be seen stays text.
        ("[a]: https://a.example\n\n[a]", "<p>[a]: https://a.example</p>\n<p>[a]</p>"),
        ("<!-- hidden -->", "<p>&lt;!-- hidden --&gt;</p>"),
        ("![x](https://a.example/b.png)", '<p><span class="media">image: x, not loaded: https://a.example/b.png</span></p>'),
    ],
)  # fmt: skip
def test_what_it_becomes(text: str, html: str):
    shown = markdown(text)
    assert shown is not None
    assert shown.strip() == html


def test_cells_are_aligned_without_styles():
    shown = markdown("| a | b |\n|---|--:|\n| 1 | 2 |")
    assert shown is not None
    assert '<td>1</td>\n<td class="right">2</td>' in shown


ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    '<iframe srcdoc="<script>alert(1)</script>">',
    "<style>*{display:none}</style>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&colon;alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](%6aavascript:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](vbscript:msgbox)",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[x](file:///etc/passwd)",
    "[x](//bad.example)",
    "[x](/sign-out)",
    "[x](sign-out)",
    "[x](#main)",
    "[x](?raw=1)",
    "[x](http:/sign-out)",
    "[x](https:///x)",
    "[x](http://[::1)",
    "<javascript:alert(1)>",
    "<data:text/html,x>",
    "![x](https://bad.example/pixel.png)",
    "![x](data:image/png;base64,AAAA)",
    "![x](/static/icon.svg)",
    "[![x](https://bad.example/a.png)](javascript:alert(1))",
    '[x](https://bad.example/"onmouseover="alert(1))',
    "[x](https://bad.example/ \"' onmouseover='alert(1)\")",
    "[x][y]\n\n[y]: javascript:alert(1)",
    '```"><script>alert(1)</script>\nx\n```',
    "| <script>a</script> |\n|:-:|\n| <img src=x onerror=y> |",
    "</div></article><script>alert(1)</script>",
    "`</code><script>alert(1)</script>`",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
]


@each_row("text", ATTACKS)
def test_an_attack_is_only_text(text: str):
    shown = markdown(text)
    assert shown is not None
    check_markdown(shown)


@given(
    st.lists(st.sampled_from([*ATTACKS, "\n", "\n\n", "> ", "- ", "    ", "`", "[", "](", "|", "*", "<"]), max_size=12)
)
def test_attacks_together_are_only_text(parts: "list[str]"):
    if (shown := markdown("".join(parts))) is not None:
        check_markdown(shown)


@given(st.text(alphabet="ab \n>-*_`[](){}<>!#|&;:/\\\"'=1.~", max_size=200))
def test_whatever_is_written_is_only_text(text: str):
    if (shown := markdown(text)) is not None:
        check_markdown(shown)


def filled(part: str, before: str = "") -> str:
    return (before + part * MAX_CHARACTERS)[:MAX_CHARACTERS]


SLOW: "dict[str, Callable[[], str]]" = {
    "links": lambda: filled("a", "[a](" * MAX_BRACKETS),
    "nested links": lambda: "[" * MAX_BRACKETS + "](http://a.b)" * MAX_BRACKETS,
    "images": lambda: filled("a", "![" * MAX_BRACKETS),
    "emphasis": lambda: filled("*_"),
    "strong": lambda: filled("**_"),
    "struck out": lambda: filled("~~a"),
    "code": lambda: " ".join("`" * (1 + number % 190) for number in range(200)),
    "tags": lambda: filled("<a "),
    "entities": lambda: filled("&a"),
    "lists": lambda: filled("- a\n"),
    "rules": lambda: filled("---\n"),
    "paragraphs": lambda: filled("a\n\n"),
    "wide tables": lambda: "|a" * 40 + "\n" + "|-" * 40 + "\n" + "|b\n" * 48,
}


@each_row("name", SLOW)
def test_nothing_that_is_read_takes_long(name: str):
    text = SLOW[name]()
    began = time.process_time()
    markdown(text)
    assert time.process_time() - began < 2, "a fifth of it on a machine at rest"


@each_row(
    "text",
    [
        "a" * (MAX_CHARACTERS + 1),
        "[" * (MAX_BRACKETS + 1),
        "|a" * 100 + "\n" + "|-" * 100 + "\n" + "|b\n" * (MAX_CELLS // 100),
        ">" * 30 + " hidden",
        "".join("  " * depth + "- a\n" for depth in range(30)) + "  " * 30 + "- hidden",
    ],
)
def test_what_would_take_too_long_or_be_left_out_is_no_markdown(text: str):
    assert markdown(text) is None
