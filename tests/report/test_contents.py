"""Names of runs on a page."""

from pmae.report.contents import distinct_names, file_name


def test_names_that_differ_and_names_for_files() -> None:
    assert distinct_names(["x/a", "y/a"]) == ["x/a", "y/a"]
    assert distinct_names(["x/a", "x/b"]) == ["a", "b"]
    assert distinct_names(["x/a", "x/a"]) == ["a (1)", "a (2)"]
    assert file_name("<script>/ö A") == "script-a"
