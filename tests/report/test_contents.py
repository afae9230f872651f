"""Names of runs on a page."""

from pmae.report.contents import distinct_names, file_names


def test_names_that_differ_and_names_for_files() -> None:
    assert distinct_names(["x/a", "y/a"]) == ["x/a", "y/a"]
    assert distinct_names(["x/a", "x/b"]) == ["a", "b"]
    assert distinct_names(["x/a", "x/a"]) == ["a (1)", "a (2)"]
    assert file_names(["<script>/ö A", "b"]) == ["script-a", "b"]
    assert file_names(["a_b", "c", "a-b"]) == ["a-b-1", "c", "a-b-3"]
