"""Tables lose nothing however narrow a terminal is; sentences break at words; errors look alike."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console
from rich.text import Text

from homebody import screen

WORDS = ["method", "HR @10", "a long heading of words", "KB down"]


def printed(width: int, terminal: bool, rows: int = 3) -> str:
    drawn = screen.table(WORDS, WORDS[1:2] + WORDS[3:], title="a title")
    for number in range(rows):
        drawn.add_row(f"method-{number}", "0.1234 ± 0.01", "some words in a cell", f"{number}23,456.7")
    out = io.StringIO()
    screen.put(Console(file=out, width=width, force_terminal=terminal, color_system=None), drawn)
    return out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 200])
def test_nothing_is_cut_at_any_width(width: int, terminal: bool) -> None:
    text = printed(width, terminal)
    flat = " ".join(text.split())
    for number in range(3):
        assert f"{number}23,456.7" in flat
        assert f"method-{number}" in flat
    for word in {word for heading in WORDS for word in heading.split()}:
        assert word in flat
    assert flat.count("0.1234 ± 0.01") == 3 or (terminal and flat.count("0.1234") == 3)
    assert "…" not in text
    if terminal:
        assert max(map(len, text.splitlines())) <= width


def test_a_narrow_terminal_gets_rows_as_columns() -> None:
    lines = printed(44, terminal=True).splitlines()
    assert any(re.match(r"^ *KB down +023,456\.7 +123,456\.7", line) for line in lines)


def test_a_file_gets_a_table_as_wide_as_it_needs() -> None:
    lines = [line for line in printed(20, terminal=False).splitlines() if "method-" in line]
    assert len(lines) == 3
    assert all("23,456.7" in line for line in lines)


def test_an_empty_table_is_printed() -> None:
    assert "HR" in printed(80, terminal=True, rows=0)


def test_a_file_gets_no_blanks_at_the_ends_of_lines() -> None:
    assert re.search(" $", printed(200, terminal=True), re.MULTILINE)
    assert not re.search(" $", printed(200, terminal=False), re.MULTILINE)


def test_a_file_has_room_unless_columns_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen.console().width == screen.ROOM
    monkeypatch.setenv("COLUMNS", "70")
    assert screen.console().width == 70
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert screen.console().width == 70


def test_texts_that_are_not_markup_are_measured() -> None:
    drawn = screen.table(["a", "b"], ["b"])
    drawn.add_row(Text("[bold]plain[/bold]"), "1")
    out = io.StringIO()
    screen.put(Console(file=out, width=30), drawn)
    assert "[bold]plain[/bold]" in out.getvalue()


def test_sentences_break_at_words_on_a_terminal_alone() -> None:
    sentence = "one two three four " * 10 + "/a/path/that/is/longer/than/the/terminal/is/wide/and-has-hyphens"
    for terminal in (True, False):
        out = io.StringIO()
        screen.say(Console(file=out, width=30, force_terminal=terminal, color_system=None), sentence)
        lines = out.getvalue().splitlines()
        assert " ".join(lines).split() == sentence.split()
        assert (len(lines) > 1) == terminal
        assert lines[-1].endswith("and-has-hyphens")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printed_first_takes_the_place_of_the_status_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    with screen.loading("loading …"):
        assert err.getvalue() == "loading …"
        print("a result")
        print("more")
    assert out.getvalue() == "a result\nmore\n"
    assert err.getvalue() == "loading …\r\x1b[2K"
    assert (sys.stdout, sys.stderr) == (out, err)


def test_a_status_line_goes_where_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ZeroDivisionError), screen.loading("loading …"):
        _ = 1 / 0
    assert err.getvalue().endswith("\r\x1b[2K")
    assert sys.stderr is err


def test_no_status_line_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with screen.loading("loading …"):
        pass
    assert err.getvalue() == ""


def test_errors_stand_in_a_box_on_a_terminal_and_on_a_line_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    screen.refuse("There is [no] such\x1b[2J thing.")
    assert err.getvalue() == "homebody: There is [no] such\ufffd[2J thing.\n"
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    screen.refuse("There is [no] such thing.", "Usage: homebody run")
    assert "Usage: homebody run" in err.getvalue()
    assert "╭─ Error" in err.getvalue()
    assert "There is [no] such thing." in err.getvalue()
