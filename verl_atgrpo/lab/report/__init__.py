"""Records of a training, and the HTML report made from them."""


def counted(number: int, noun: str) -> str:
    """Returns "1 turn", "2 turns", "1,000 turns" for the noun "turn"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
