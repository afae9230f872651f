"""Rules that several settings share."""

from pmae.errors import require


def ratio(parameter: str, value: float | None) -> None:
    """Refuse what is no share."""
    require(value is None or 0 < value < 1, parameter, "a share between 0 and 1, both excluded", value)


def at_least(parameter: str, low: float, value: float | None) -> None:
    """Refuse what is below a bound."""
    require(value is None or value >= low, parameter, f"at least {low:g}", value)
