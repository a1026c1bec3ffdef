"""Patterns of Mooncake's master, as it searches keys with them."""

import pytest

from kvstore.engines.mooncake.patterns import compiled
from kvstore.protocol.errors import InvalidArgument

MATCHES = [
    *(
        ("a1", "xa1y"),
        ("^a", "ab"),
        ("b$", "ab"),
        ("[[:alpha:]]1", "_b1"),
        ("[[:digit:]]$", "a7"),
        ("[^[:alpha:]]", "ab1"),
        ("[[.a.]]", "a"),
    ),
    *(("[[=a=]]", "a"), (r"\d\w\s", "1_ "), (r"(a)(b)?\1", "aa"), (r"(a)(b)?\2c", "ac"), ("a{2}", "aa"), ("a{1,}?", "a"), ("[^]x", "yx")),
    *(
        ("(?:a|b)c", "bc"),
        ("(?=a)a", "a"),
        ("(?!a).", "b"),
        (r"\x61\u0062", "ab"),
        (r"\cA", "A"),
        ("[[=a=]]", "A"),
        (r"[\x61-c]", "b"),
        (r"[\w-]", "-"),
    ),
    *((r"[a\]]", "]"), ("[a-]", "-"), ("[-a]", "-"), ("}", "}"), ("]", "]"), (r"\n", "\n"), (r"\Q", "Q"), (r"[\b]", "\b"), (r"[\D]", "a")),
    *(
        ("[a&&b]", "&"),
        ("é", "é"),
        ("a*?b", "aab"),
        (r"\ba\b", "-a-"),
        ("[^a-c]", "d"),
        (r"[\n]", "\n"),
        ("", "x"),
        (r"\0", "\0"),
        ("~#", "~#"),
    ),
    *(("^a**$", "aaa"), ("^a++$", "aa"), ("^a*??$", "a"), ("^ba{2}{2}$", "baaaa"), ("(|a)b", "b")),
    *((r"(a)(b)(c)(d)(e)(f)(g)(h)(i)(j)\10", "abcdefghijj"), ("[[a]", "["), ("[a-z-9]", "9")),
]
MISSES = [("[]a]", "a]"), (".", "\r"), ("b$", "b\n"), ("^b", "a\nb"), ("[[:upper:]]", "a"), (r"\w", "é"), ("a", "")]
REFUSED = [
    *(
        "(",
        ")",
        "[",
        "[a",
        "[z-a]",
        "*",
        "a|*",
        "(*a)",
        "{",
        "a{",
        "a{,2}",
        "a{2,1}",
        "(?i)a",
        "(?<=a)b",
        "(?P<n>a)",
        "(?#x)",
        "(?",
        "(" * 5000,
    ),
    *(r"\1", r"(a)\2", "\\", "[a\\", r"\x6", r"\u006", r"\c", "[[:bad:]]", "[[.ab.]]", "[[:alpha", "a{99999999999999999999}"),
]


@pytest.mark.parametrize(("pattern", "key"), MATCHES)
def test_pattern_matches_as_in_mooncake(pattern: str, key: str) -> None:
    assert compiled(pattern).search(key.encode())


@pytest.mark.parametrize(("pattern", "key"), MISSES)
def test_pattern_misses_as_in_mooncake(pattern: str, key: str) -> None:
    assert not compiled(pattern).search(key.encode())


@pytest.mark.parametrize("pattern", REFUSED)
def test_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="no regular expression"):
        compiled(pattern)
