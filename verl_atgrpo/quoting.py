"""Quotes in prompts, by the names that environments import."""

from verl_atgrpo.play.quoting import quoted, shortened

__all__ = ["quoted", "shortened"]
