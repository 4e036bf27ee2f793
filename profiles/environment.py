"""What figures were measured on and with."""

from graphengine.environment import environment

__all__ = ["environment"]
