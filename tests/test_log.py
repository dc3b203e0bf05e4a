"""A log line says what happened, then its fields, then the run: so that it can be read and searched."""

from raycheck.log import event


def test_a_line_has_its_fields_after_the_words_and_the_run_last() -> None:
    line = event("committed", step=120, blocked_s=0.01234, left_out=None, run="s3://bucket/run?endpoint_override=x:1")

    assert line == "committed step=120 blocked_s=0.012 run=s3://bucket/run"


def test_a_text_with_spaces_is_quoted_and_percent_signs_stay() -> None:
    assert event("saved 100% of it", why="no room", empty="") == 'saved 100% of it why="no room" empty=""'
