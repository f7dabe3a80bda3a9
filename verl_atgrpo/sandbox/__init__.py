"""Running programs that models wrote."""
