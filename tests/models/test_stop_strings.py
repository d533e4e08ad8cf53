"""Stop strings: what is passed on, and where it ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import InputError
from ostinato.models.stop_strings import StopMatcher, checked_stops

LETTERS = st.text("ab\n", max_size=12)


@given(st.lists(LETTERS, max_size=12), st.lists(LETTERS.filter(bool), max_size=4))
def test_pieces_end_where_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    matcher, text = StopMatcher(checked_stops(stops)), "".join(pieces)
    ends = [text.find(stop) for stop in stops if stop in text]
    out = []
    for count, piece in enumerate(pieces, 1):
        passed, ended = matcher.push(piece)
        out.append(passed)
        so_far = "".join(pieces[:count])
        assert ended == any(stop in so_far for stop in stops), "it ends as soon as it can"
        if ended:
            break
        held = so_far[len("".join(out)) :]
        assert not held or any(s.startswith(held) for s in stops), "nothing is held for nothing"
    else:
        out.append(matcher.finish())
    # The first stop string that is complete ends it, so none that is longer and begins earlier.
    result = "".join(out)
    assert text.startswith(result)
    assert not any(stop in result for stop in stops)
    assert (result == text) == (not ends)


@given(st.lists(LETTERS, max_size=12), st.lists(LETTERS.filter(bool), max_size=4))
def test_how_the_text_is_cut_into_pieces_does_not_matter(
    pieces: list[str], stops: list[str]
) -> None:
    def passed(cut: list[str]) -> str:
        matcher, out = StopMatcher(checked_stops(stops)), ""
        for piece in cut:
            text, ended = matcher.push(piece)
            out += text
            if ended:
                return out
        return out + matcher.finish()

    assert passed(pieces) == passed([*"".join(pieces)])


def test_a_longer_stop_string_that_is_not_complete_ends_nothing() -> None:
    assert StopMatcher(("abc", "b")).push("xabc") == ("xa", True)
    assert StopMatcher(("ab", "b")).push("xab") == ("x", True)


def test_a_stop_string_over_many_pieces() -> None:
    matcher = StopMatcher(("</end>", "<x>"))
    passed = [matcher.push(piece) for piece in ("say <", "/e", "n", "d <", "/end", "> more")]
    assert passed == [("say ", False), ("", False), ("", False), ("</end ", False), ("", False),
                      ("", True)]  # fmt: skip
    assert StopMatcher(()).push("a") == ("a", False)


@pytest.mark.parametrize("wrong", ["", [""], [1], [["a"]], b"a", b"", 3, None])
def test_what_is_no_stop_string(wrong: Any) -> None:
    with pytest.raises(InputError, match="stop"):
        checked_stops(wrong)


def test_one_or_several() -> None:
    assert checked_stops("ab") == ("ab",)
    assert checked_stops(iter(["a", "b", "a"])) == ("a", "b")
    assert checked_stops(()) == ()
