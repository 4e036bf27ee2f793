"""What a failing check raises."""


class GraphCheckError(AssertionError):
    """A check found a fault; the message says what happened and where."""
